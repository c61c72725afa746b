/* test_concurrent.c - sessions used from several threads at once while another cancels now and
 * then: the bits of a quiet run, and nothing for the thread sanitizer to find. */
#include <pthread.h>

#include "blocks.h"

enum { THREADS = 3, ROUNDS = 12 };

typedef struct worker {
    const world *w;
    const char *dir;
    int id;
    bool quiet;         /* alone: nothing may fail */
    mc_session *shared; /* wanted by all, held by one at a time */
    float last[ROUNDS][H];
} worker;

static atomic_int finished, cancelled, stop; /* runs; the workers are done */

#define OK(call) CHECK((call) == MC_OK, "%s", err.message)

/* A run that is repeated until nobody cancels it. */
static void run_on(worker *k, mc_step *st, mc_session *s, int64_t n, float *last) {
    mc_error err = {0};
    int64_t pos = mc_session_position(s);
    int rc;
    while ((rc = run(k->w, st, s, (uint64_t)k->id, n, 4, last, &err)) == MC_ECANCEL) {
        CHECK(mc_session_position(s) == pos && !k->quiet, "moved by a cancelled step");
        cancelled++;
    }
    CHECK(rc == MC_OK, "%s", err.message);
    finished++;
}

static void *work(void *arg) {
    worker *k = arg;
    const world *w = k->w;
    mc_session *s = NULL, *f = NULL, *l = NULL;
    mc_step *st = NULL;
    mc_error err = {0};
    mc_stats q;
    char path[4200];
    uint8_t id[32] = {9}, meta[4];
    snprintf(path, sizeof path, "%s/session%d%d", k->dir, k->id, k->quiet);
    OK(mc_session_create(w->kv, &s, &err));
    OK(mc_step_create(w->e, &st, &err));
    for (int i = 0; i < ROUNDS; i++) {
        run_on(k, st, s, 1 + i % 5 * 3, k->last[i]);
        OK(mc_session_snapshot(s, &err));
        OK(mc_session_fork(s, &f, &err));
        run_on(k, st, f, 2, k->last[i]);
        if (i % 3 == 1) { /* go on from a file */
            OK(mc_session_save(f, path, id, "abc", 3, &err));
            CHECK(mc_session_load(w->kv, path, id, meta, 4, &l, &err) == 3, "%s", err.message);
            mc_session_free(s);
            s = l;
        }
        if (i % 3 == 2) OK(mc_session_rewind(s, mc_session_position(s), &err));
        if (i == 7) OK(mc_session_rewind(s, 0, &err));
        mc_session_free(f);
        int rc = mc_step_begin(st, &k->shared, 1, &err);
        CHECK(rc == MC_OK || rc == MC_EBUSY, "%s", err.message);
        if (rc == MC_OK) {
            int64_t one = 1;
            OK(mc_step_chunk(st, &one, &err));
            mc_step_abort(st);
        }
        OK(mc_engine_stats(w->e, &q, &err));
        CHECK(mc_session_position(k->shared) == 0, "the shared session moved");
    }
    mc_session_free(s);
    mc_step_free(st);
    unlink(path);
    return NULL;
}

/* Whenever some runs have finished, cancels until one is hit. */
static void *cancel(void *arg) {
    const world *w = arg;
    while (!stop) {
        int runs = finished, hits = cancelled;
        while (!stop && finished < runs + 3) usleep(50);
        mc_engine_cancel(w->e, 1);
        while (!stop && cancelled == hits) usleep(50);
        mc_engine_cancel(w->e, 0);
    }
    return NULL;
}

static void check_threads(const model *m, const char *dir, int pool) {
    setting set = PLAIN;
    set.threads = pool;
    set.pages = 60;
    set.slots = TOP_K + 2;
    world w = open_world(m, set);
    mc_session *shared = new_session(&w);
    worker *quiet = test_alloc(THREADS * sizeof *quiet), *loud = test_alloc(THREADS * sizeof *loud);
    pthread_t t[THREADS + 1];
    for (int i = 0; i < THREADS; i++) {
        quiet[i] = loud[i] = (worker){.w = &w, .dir = dir, .id = i, .shared = shared};
        quiet[i].quiet = true;
        work(&quiet[i]);
    }
    finished = cancelled = stop = 0;
    for (int i = 0; i < THREADS; i++) pthread_create(&t[i], NULL, work, &loud[i]);
    pthread_create(&t[THREADS], NULL, cancel, &w);
    for (int i = 0; i < THREADS; i++) pthread_join(t[i], NULL);
    stop = 1;
    pthread_join(t[THREADS], NULL);
    for (int i = 0; i < THREADS; i++)
        for (int k = 0; k < ROUNDS; k++)
            CHECK(same_bits(quiet[i].last[k], loud[i].last[k], H), "thread %d, round %d", i, k);
    CHECK(cancelled > 0, "nothing was cancelled");
    mc_session_free(shared);
    CHECK(w.kv->n_free == w.kv->n_page, "pages lost");
    free(quiet);
    free(loud);
    close_world(&w);
}

/* Each thread drops one of the last handles: the one that comes last takes the engine with it. */
static void *free_session(void *s) {
    mc_session_free(s);
    return NULL;
}

static void check_last_free(const model *m) {
    for (int round = 0; round < 10; round++) {
        world w = open_world(m, PLAIN);
        mc_session *s[THREADS];
        pthread_t t[THREADS];
        for (int i = 0; i < THREADS; i++) s[i] = new_session(&w);
        close_world(&w);
        for (int i = 0; i < THREADS; i++) pthread_create(&t[i], NULL, free_session, s[i]);
        for (int i = 0; i < THREADS; i++) pthread_join(t[i], NULL);
    }
}

int main(int argc, char **argv) {
    char dir[4096];
    make_dir(argc, argv, dir, sizeof dir);
    alarm(300);
    model *m = make_model(dir);
    check_threads(m, dir, 1);
    check_threads(m, dir, 2);
    check_last_free(m);
    free_model(m);
    CHECK(rmdir(dir) == 0, "files left behind");
    return test_end();
}
