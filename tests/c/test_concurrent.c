/* test_concurrent.c - sessions used from several threads at once while another cancels now and
 * then: the bits of a quiet run, and nothing for the thread sanitizer to find. Threads that end and
 * children that are forked while reads are on their way: the same bits. */
#include <pthread.h>
#include <sys/wait.h>

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

/* ---- a thread for each block ---- */

typedef struct turn {
    const world *w;
    int block, rc;
    float x[H];
    mc_error err;
} turn;

static void *take_turn(void *arg) {
    turn *t = arg;
    t->rc = block_forward(t->w, t->w->st, t->block, t->x, NULL, &t->err);
    return NULL;
}

/* The parent's reads and its ring are no business of a child, whatever that does before it ends. */
static void fork_once(const world *w, bool close) {
    pid_t pid = fork();
    if (pid == 0) {
        world mine = *w;
        alarm(20);
        if (close) close_world(&mine);
        _exit(0);
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0, "a child ended with %d",
          status);
}

/* A thread computes one block and ends; reads ahead that it began are on their way then, and the
 * kernel may give up those of a ring. The next one goes on. */
static void check_turns(const model *m, int io) {
    enum { TOKENS = 16 }; /* with both sessions the first trial of reading ahead */
    setting set = PLAIN;
    set.io = io;
    set.ahead = TOP_K;
    world w = open_world(m, set);
    mc_session *a = new_session(&w), *b = new_session(&w);
    int64_t one = 1;
    mc_error err = {0};
    mc_stats st;
    turn t = {.w = &w};
    for (int i = 0; i < TOKENS; i++) {
        float want[H];
        OK(run(&w, w.st, a, 1, 1, 1, want, &err));
        embed(1, i, 1, t.x);
        OK(mc_step_begin(w.st, &b, 1, &err));
        OK(mc_step_chunk(w.st, &one, &err));
        for (t.block = 0; t.block < N_BLOCK; t.block++) {
            pthread_t id;
            pthread_create(&id, NULL, take_turn, &t);
            pthread_join(id, NULL);
            CHECK(t.rc == MC_OK, "%s", t.err.message);
            if (t.block == 1) fork_once(&w, i % 4 > 1); /* where reads ahead begin */
        }
        OK(mc_step_commit(w.st, &err));
        CHECK(same_bits(want, t.x, H), "mode %d, token %d", io, i);
    }
    OK(mc_engine_stats(w.e, &st, &err));
    CHECK(st.ahead_reads > 0, "nothing was read ahead");
    mc_session_free(a);
    mc_session_free(b);
    close_world(&w);
}

int main(int argc, char **argv) {
    char dir[4096];
    make_dir(argc, argv, dir, sizeof dir);
    alarm(300);
    model *m = make_model(dir);
    check_threads(m, dir, 1);
    check_threads(m, dir, 2);
    check_last_free(m);
    check_turns(m, MC_IO_DIRECT);
    if (mc_io_mode(MC_IO_URING, NULL) == MC_OK)
        check_turns(m, MC_IO_URING);
    else
        printf("note: no io_uring here; it is not checked\n");
    free_model(m);
    CHECK(rmdir(dir) == 0, "files left behind");
    return test_end();
}
