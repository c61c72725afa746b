/* test_faults.c - a whole run from an engine to a saved session while the system fails: every
 * allocation and every thread refused once, reads that fail, end early, are interrupted or stall,
 * files that shrink or are removed. Each fault is an error of the call that met it, with its
 * reason; what was counted before is counted after; the same call then works, and the run ends with
 * the bits of an undisturbed one. Nothing is left: blocks, mappings, threads, files. */
#include "blocks.h"
#include "faults.h"

#define OK(call) CHECK((call) == MC_OK, "%s", err.message)

enum { PROMPT = 21, MORE = 3 };

static char saved[4200];
static const uint8_t id[32] = {7};
static mc_error err;

/* ---- a whole run, stage by stage ------------------------------------------------------------- */

enum {
    ENGINE,
    FILES,
    STATE,
    STORE,
    MIXERS,
    LAYERS = MIXERS + 4,
    OPEN = LAYERS + 3,
    OUT,
    TABLE,
    HEAD,
    STEP,
    SESSION,
    PREFILL,
    SNAPSHOT,
    FORK,
    DECODE,
    RESIZE,
    SAVE,
    LOAD,
    AGAIN,
    STAGES
};

typedef struct story {
    world w;
    mc_session *s, *fork, *loaded;
    float last[3][H]; /* of the prefill, of the fork, of the session that came from a file */
} story;

/* As run of blocks.h, but no allocation of its own could be refused. */
static int forward(const world *w, mc_session *s, int64_t n, float *last) {
    static float x[CHUNK * H];
    int64_t pos = mc_session_position(s);
    int rc = mc_step_begin(w->st, &s, 1, &err);
    embed(1, pos, n, x);
    if (rc == MC_OK) rc = mc_step_chunk(w->st, &n, &err);
    if (rc == MC_OK) rc = all_blocks(w, w->st, x, &err);
    memcpy(last, x + (n - 1) * H, H * 4);
    if (rc == MC_OK) return mc_step_commit(w->st, &err);
    mc_step_abort(w->st);
    return rc;
}

static int stage(story *t, int i) {
    world *w = &t->w;
    const model *m = w->m;
    mc_engine_opts o = {.threads = w->set.threads, .io = w->set.io};
    mc_kv_desc kv = kv_desc(w->set);
    uint8_t meta[4];
    int rc = MC_OK, k = i - LAYERS;
    switch (i) {
    case ENGINE:
        return mc_engine_create(&o, &w->e, &err);
    case FILES:
        for (int f = 0; f < MODEL_FILES && rc >= 0; f++)
            rc = mc_engine_file(w->e, m->path[f], &err);
        return rc < 0 ? rc : MC_OK;
    case STATE:
        return mc_kv_create(w->e, &kv, &w->kv, &err);
    case STORE:
        return mc_store_create(w->e, 2, EXPERTS, TOP_K, w->set.policy, &w->store, &err);
    case MIXERS:
    case MIXERS + 1:
        return mc_attn_create(w->e, &m->attn[i - MIXERS], &w->attn[i - MIXERS], &err);
    case MIXERS + 2:
    case MIXERS + 3:
        return mc_delta_create(w->e, &m->delta[i - MIXERS - 2], &w->delta[i - MIXERS - 2], &err);
    case LAYERS:
    case LAYERS + 1:
        return mc_moe_create(w->e, w->store, &m->moe[k], m->expert[k], &w->moe[k], &err);
    case LAYERS + 2:
        return mc_moe_create(w->e, NULL, &m->moe[k], NULL, &w->moe[k], &err);
    case OPEN:
        return mc_store_open(w->store, w->set.slots, w->set.ahead, &err);
    case OUT:
        return mc_linear_create(w->e, &m->head, 1, &w->out, &err);
    case TABLE:
        return mc_linear_create(w->e, &m->table, 0, &w->table, &err);
    case HEAD:
        return mc_head_create(w->e, &m->final, w->out, CHUNK, &w->head, &err);
    case STEP:
        return mc_step_create(w->e, &w->st, &err);
    case SESSION:
        return mc_session_create(w->kv, &t->s, &err);
    case PREFILL:
        return forward(w, t->s, PROMPT, t->last[0]);
    case SNAPSHOT:
        return mc_session_snapshot(t->s, &err);
    case FORK:
        return mc_session_fork(t->s, &t->fork, &err);
    case DECODE:
        return forward(w, t->fork, MORE, t->last[1]);
    case RESIZE:
        return mc_store_resize(w->store, w->set.slots, &err);
    case SAVE:
        return mc_session_save(t->fork, saved, id, "abc", 3, &err);
    case LOAD:
        rc = (int)mc_session_load(w->kv, saved, id, meta, 4, &t->loaded, &err);
        return rc == 3 ? MC_OK : rc;
    default:
        return forward(w, t->loaded, MORE, t->last[2]);
    }
}

static void end_story(story *t) {
    mc_session_free(t->loaded);
    mc_session_free(t->fork);
    mc_session_free(t->s);
    close_world(&t->w);
}

/* ---- what a fault must not change ---- */

typedef struct account {
    int64_t mem[MC_MEM_KINDS], refs, kv_refs, free_pages, positions;
} account;

static account account_of(const story *t) {
    account a = {.refs = -1};
    const mc_engine *e = t->w.e;
    if (!e) return a;
    for (int i = 0; i < MC_MEM_KINDS; i++) a.mem[i] = e->mem.now[i];
    /* scratch that grew for a part which succeeded stays: it belongs to the engine */
    a.mem[MC_MEM_SCRATCH] -= e->scratch_size + e->thread_size * mci_pool_threads(e->pool);
    a.refs = e->refs;
    if (t->w.kv) a.kv_refs = t->w.kv->refs;
    if (t->w.kv) a.free_pages = t->w.kv->n_free;
    if (t->s) a.positions = mc_session_position(t->s);
    if (t->fork) a.positions += 1000 * mc_session_position(t->fork);
    return a;
}

static bool same_account(const story *t, const account *before) {
    const account now = account_of(t);
    return memcmp(&now, before, sizeof now) == 0 && (!t->s || !t->s->busy) &&
           (!t->fork || !t->fork->busy);
}

static bool same_holding(const holding *a, const holding *b) {
    return a->blocks == b->blocks && a->mapped == b->mapped && a->threads == b->threads &&
           a->file == b->file;
}

/* ---- allocations and threads that are refused ------------------------------------------------ */

/* The run from `first` on with the n-th request refused, or all from it on; the stage that met it,
 * or STAGES where there are not so many. Files are written only where nothing was refused before:
 * that is slow. */
static int refused_run(const model *m, setting set, int first, long long n, bool on,
                       const story *want) {
    const holding before = held_now();
    story t = {.w = {.m = m, .set = set}};
    int met = STAGES;
    for (int i = 0; i < STAGES; i++) {
        if (met < STAGES && i >= SAVE) break;
        const account was = account_of(&t);
        if (i == first) refuse(n, on);
        err = (mc_error){.code = 0};
        int rc = stage(&t, i);
        if (met == STAGES && refused) {
            met = i;
            refuse(0, false);
            CHECK(rc == MC_OK || ((rc == MC_ENOMEM || rc == MC_ESYS) && err.code == rc &&
                                  strlen(err.message) > 10),
                  "stage %d, %lld: %d \"%s\"", i, n, rc, err.message);
            if (rc == MC_OK) continue; /* it can do without: bits will tell */
            CHECK(same_account(&t, &was), "stage %d, %lld: counters changed", i, n);
            rc = stage(&t, i);
        }
        CHECK(rc == MC_OK, "stage %d, %lld: %d %s", i, n, rc, err.message);
        if (rc != MC_OK) break;
    }
    refuse(0, false);
    for (int i = 0; want && i < (met < STAGES ? 2 : 3); i++)
        CHECK(same_bits(t.last[i], want->last[i], H), "run %d, %lld: other bits", i, n);
    end_story(&t);
    const holding after = held_now();
    CHECK(same_holding(&before, &after),
          "%lld: left %lld blocks, %lld mapped bytes, %lld threads, file %d", n,
          after.blocks - before.blocks, after.mapped - before.mapped,
          after.threads - before.threads, after.file);
    return met;
}

static void check_refused(const model *m, setting set, int first, int last, const story *want) {
    for (int on = 0; on < 1 + (set.io == MC_IO_DIRECT); on++) {
        long long n = 1;
        while (n < 2000 && refused_run(m, set, first, n, on, want) < last) n++;
        CHECK(n > 10 && n < 2000, "mode %d, stages %d to %d: %lld requests", set.io, first, last,
              n);
    }
}

/* ---- reads that fail, end early, are interrupted; files that shrink or go ----------------------
 */

enum { CUT = STALL + 1, GONE, N_FAULT, ROUNDS = 16 };

static uint8_t *copy[MODEL_FILES]; /* of the model's files */
static size_t size[MODEL_FILES];

static void copy_files(const model *m) {
    for (int i = 0; i < MODEL_FILES; i++) {
        FILE *f = fopen(m->path[i], "rb");
        size[i] = (size_t)m->at[i];
        copy[i] = test_alloc(size[i]);
        CHECK(f && fread(copy[i], 1, size[i], f) == size[i] && !fclose(f), "%s", m->path[i]);
    }
}

/* The same bytes again, in the same file where there is one. */
static void restore_files(const model *m) {
    for (int i = 0; i < MODEL_FILES; i++) {
        int fd = open(m->path[i], O_CREAT | O_WRONLY, 0600);
        CHECK(fd >= 0 && write(fd, copy[i], size[i]) == (ssize_t)size[i] && !close(fd), "%s",
              m->path[i]);
    }
}

static void begin_fault(const model *m, int how) {
    for (int i = 0; i < MODEL_FILES; i++) {
        if (how == CUT) CHECK(truncate(m->path[i], 1000) == 0, "%s", strerror(errno));
        if (how == GONE) unlink(m->path[i]);
    }
    if (how < CUT) let_reads(how, how == FAIL ? 0 : 4);
}

static void end_fault(const model *m, int how) {
    if (how == CUT) restore_files(m);
    let_reads(GOOD, 0);
}

/* Chunks of a text, some of one token, of a session that all runs have in common. */
static int64_t length(int round) { return round % 4 ? 1 : 5; }

/* A text under a fault that comes and goes. want (ROUNDS rows): what each part of it gives; NULL:
 * no fault. */
static void faulty_run(const model *m, setting set, int how, const float *want, float *out) {
    const holding before = held_now();
    story t = {.w = open_world(m, set)};
    int failures = 0, met = 0;
    mc_stats st;
    t.s = new_session(&t.w);
    for (int i = 0; i < ROUNDS; i++) {
        const account was = account_of(&t);
        float last[H];
        bool bad = want && i % 3 != 2;
        err = (mc_error){.code = 0};
        if (bad) begin_fault(m, how);
        int rc = forward(&t.w, t.s, length(i), last);
        met += faulted;
        if (rc < 0) {
            failures++;
            CHECK(bad && (how == FAIL || how == CUT), "fault %d, round %d: %s", how, i,
                  err.message);
            CHECK(rc == MC_EIO && err.code == rc && err.sys == (how == FAIL ? EIO : 0) &&
                      (strstr(err.message, m->path[0]) || strstr(err.message, m->path[1])) &&
                      strstr(err.message, "wanted") && strstr(err.message, "got"),
                  "fault %d, round %d: %d \"%s\"", how, i, rc, err.message);
            CHECK(same_account(&t, &was), "fault %d, round %d: counters changed", how, i);
            if (i % 2) /* while the disk is bad it stays bad, and nothing gets stuck */
                CHECK(forward(&t.w, t.s, length(i), last) == MC_EIO && same_account(&t, &was),
                      "fault %d, round %d: %s", how, i, err.message);
            end_fault(m, how);
            CHECK(forward(&t.w, t.s, length(i), last) == MC_OK, "fault %d, round %d: %s", how, i,
                  err.message);
        }
        end_fault(m, bad ? how : GOOD);
        if (want)
            CHECK(same_bits(last, want + i * H, H), "mode %d, fault %d, round %d: other bits",
                  set.io, how, i);
        else
            memcpy(out + i * H, last, H * 4);
    }
    OK(mc_engine_stats(t.w.e, &st, &err));
    if (want && (how == FAIL || how == CUT))
        CHECK(failures > 1, "mode %d, fault %d, %d ahead: nothing failed", set.io, how, set.ahead);
    if (want && how < STALL)
        CHECK(met > 1, "mode %d, fault %d, %d ahead: nothing met", set.io, how, set.ahead);
    CHECK((st.ahead_reads > 0) == (set.ahead > 0), "%lld reads ahead", (long long)st.ahead_reads);
    CHECK(!want || st.io == set.io || st.io == MC_IO_PREAD, "mode %d is %d", set.io, st.io);
    end_story(&t);
    if (want && how == GONE) restore_files(m);
    const holding after = held_now();
    CHECK(same_holding(&before, &after), "mode %d, fault %d: something is left", set.io, how);
}

static void check_reads(const model *m, int io) {
    static float want[ROUNDS * H];
    setting set = {.threads = 2, .kv = MC_F32, .slots = TOP_K + 2, .pages = 4};
    faulty_run(m, set, GOOD, NULL, want);
    set.io = io;
    if (io == MC_IO_MMAP) set.slots = 2 * EXPERTS;
    for (set.ahead = 0; set.ahead <= (io == MC_IO_MMAP ? 0 : TOP_K); set.ahead += TOP_K)
        for (int how = FAIL; how < N_FAULT; how++)
            if (how != STALL) faulty_run(m, set, how, want, NULL);
}

/* ---- a disk that stalls ---- */

enum { STALL_MS = 100 };

typedef struct caller {
    story *t;
    int rc;
    double seconds;
    mc_error err;
    float last[H];
} caller;

static void *call_forward(void *arg) {
    caller *c = arg;
    double t0 = mci_now();
    c->rc = forward(&c->t->w, c->t->s, PROMPT, c->last);
    c->seconds = mci_now() - t0;
    return NULL;
}

/* Every read takes long. Who cancels waits for the one that is under way, or the next, and not for
 * all ten experts of the line; who does not cancel gets what is right, late. */
static void check_stall(const model *m, int io, const story *want) {
    setting set = {.threads = 1, .kv = MC_F32, .io = io, .lanes = 1, .slots = TOP_K, .pages = 4};
    if (io == MC_IO_MMAP) set.slots = 2 * EXPERTS;
    story t = {.w = open_world(m, set)};
    caller c = {.t = &t};
    pthread_t thread;
    t.s = new_session(&t.w);
    const account was = account_of(&t);
    stall_ms = STALL_MS;
    let_reads(STALL, 0);
    pthread_create(&thread, NULL, call_forward, &c);
    usleep(STALL_MS * 1000 / 3);
    mc_engine_cancel(t.w.e, 1);
    pthread_join(thread, NULL);
    /* an expert lies in up to three places */
    CHECK(c.rc == MC_ECANCEL && faulted > 0 && faulted <= 6, "mode %d: %d after %.2f s, %d reads",
          io, c.rc, c.seconds, faulted);
    CHECK(same_account(&t, &was), "mode %d: counters changed", io);
    mc_engine_cancel(t.w.e, 0);
    let_reads(STALL, 8);
    stall_ms = 1;
    call_forward(&c);
    let_reads(GOOD, 0);
    CHECK(c.rc == MC_OK && same_bits(c.last, want->last[0], H), "mode %d: %s", io, err.message);
    end_story(&t);
}

int main(int argc, char **argv) {
    char dir[4096];
    make_dir(argc, argv, dir, sizeof dir);
    snprintf(saved, sizeof saved, "%s/session", dir);
    alarm(300);
    model *m = make_model(dir);
    story want = {.w = {.m = m, .set = PLAIN}};
    want.w.set.threads = 2;
    for (int i = 0; i < STAGES; i++) OK(stage(&want, i));
    end_story(&want);
    copy_files(m);
    for (int io = MC_IO_AUTO; io <= MC_IO_MMAP; io++) {
        setting set = {.threads = 2, .kv = MC_F32, .io = io, .slots = TOP_K + 2, .pages = 4};
        if (io == MC_IO_MMAP) set.slots = 2 * EXPERTS;
        set.ahead = io == MC_IO_DIRECT ? TOP_K : 0;
        if (mci_io_mode(io, NULL) < 0) continue;
        /* how blocks are bound has nothing to do with the mode */
        if (io == MC_IO_DIRECT) check_refused(m, set, 0, STAGES, &want);
        if (io != MC_IO_DIRECT) check_refused(m, set, 0, STATE, &want);
        if (io != MC_IO_DIRECT) check_refused(m, set, OPEN, STAGES, &want);
        if (io == MC_IO_AUTO) continue; /* it becomes one of the others */
        check_reads(m, io);
        check_stall(m, io, &want);
    }
    for (int i = 0; i < MODEL_FILES; i++) free(copy[i]);
    unlink(saved);
    free_model(m);
    CHECK(rmdir(dir) == 0, "files left behind");
    return test_end();
}
