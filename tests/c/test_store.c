/* test_store.c - experts from disk through the cache: right bytes whatever the capacity, policy,
 * order of arrival and order of use; every miss read once; failures that leave the store usable.
 * Its files lie beside the program. A hang ends by SIGALRM. */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "policy.h"
#include "store.h"
#include "test.h"

enum { L = 3, E = 12, TOP_K = 4, HIDDEN = 130, WIDTH = 20, FILES = 3, BLOCK = MCI_IO_BLOCK };

static char dir[4096];

/* ---- a model on disk: byte i of file f is pattern(f, i) ---- */

typedef struct model {
    char path[FILES][4200];
    int64_t size[FILES];
    mc_expert expert[L][E];
} model;

static uint8_t pattern(int64_t file, int64_t i) {
    uint64_t z = ((uint64_t)file << 40 ^ (uint64_t)i) * 0x9e3779b97f4a7c15u;
    /* some pieces of a file hold no NaN code of FP8 */
    return (uint8_t)((z >> 56 ^ z >> 33) & (i >> 15 & 1 ? 0xbf : 0xff));
}

static mc_tensor place(model *m, rng *r, int file, int dtype, int64_t rows, int64_t cols) {
    mc_tensor t = {.file = file,
                   .dtype = dtype,
                   .offset = m->size[file],
                   .rows = rows,
                   .cols = cols,
                   .scale_file = -1};
    m->size[file] += rows * mci_row_bytes(dtype, cols);
    if (!mci_dtype_get(dtype)->scale_types) return t;
    t.block_rows = t.block_cols = 128;
    t.scale_file = 2; /* the scales apart, sometimes with a hole between them */
    t.scale_dtype = rng_below(r, 2) ? MC_BF16 : MC_F32;
    if (rng_below(r, 10) == 0) m->size[2] += (int64_t)rng_below(r, 100000);
    t.scale_offset = m->size[2];
    m->size[2] += (rows + 127) / 128 * ((cols + 127) / 128) * (t.scale_dtype == MC_BF16 ? 2 : 4);
    return t;
}

static void place_expert(model *m, rng *r, mc_expert *x) {
    mc_tensor *const part[3] = {&x->gate, &x->up, &x->down};
    int first = (int)rng_below(r, 3), dir_ = rng_below(r, 2) ? 1 : 2, file = (int)rng_below(r, 2);
    int dtype = (int)rng_below(r, 4), style = (int)rng_below(r, 4);
    for (int i = 0; i < 3; i++) {
        int k = (first + i * dir_) % 3;
        if (style == 1) m->size[file] += (int64_t)rng_below(r, 9000); /* holes */
        if (style == 2) file = (int)rng_below(r, 2);                  /* all over */
        if (style == 3) dtype = (int)rng_below(r, 4);
        *part[k] = place(m, r, file, dtype, k < 2 ? WIDTH : HIDDEN, k < 2 ? HIDDEN : WIDTH);
    }
    m->size[file] += (int64_t)rng_below(r, 3000);
}

static void write_model(const model *m) {
    for (int f = 0; f < FILES; f++) {
        FILE *out = fopen(m->path[f], "w");
        for (int64_t i = 0; out && i < m->size[f]; i++) putc(pattern(f, i), out);
        if (!out || fclose(out)) {
            printf("FAIL cannot write %s: %s\n", m->path[f], strerror(errno));
            exit(1);
        }
    }
}

static void make_model(model *m, uint64_t seed) {
    rng r = {seed};
    memset(m, 0, sizeof *m);
    for (int f = 0; f < FILES; f++) {
        snprintf(m->path[f], sizeof m->path[f], "%s/m%d", dir, f);
        m->size[f] = (int64_t)rng_below(&r, 5000);
    }
    for (int l = 0; l < L; l++)
        for (int x = 0; x < E; x++) place_expert(m, &r, &m->expert[l][x]);
    m->expert[0][1].up = m->expert[0][1].gate; /* two names for the same bytes are no problem */
    write_model(m);
}

static void free_model(const model *m) {
    for (int f = 0; f < FILES; f++) unlink(m->path[f]);
}

static mc_engine *new_engine(const model *m, int io, int lanes) {
    mc_engine_opts o = {.threads = 1, .lanes = lanes, .io = io};
    mc_engine *e = NULL;
    mc_error err = {0};
    int rc = mc_engine_create(&o, &e, &err);
    CHECK(rc == MC_OK, "%s", err.message);
    for (int f = 0; m && f < FILES; f++)
        CHECK(mc_engine_file(e, m->path[f], &err) == f, "%s", err.message);
    return e;
}

static int bind_all(mc_engine *e, mc_store *s, const model *m, mc_error *err) {
    int rc = mci_enter(e, err);
    for (int l = 0; l < L && rc == MC_OK; l++)
        rc = mci_store_bind(s, LAYER(l, E, TOP_K, HIDDEN, WIDTH), m->expert[l], err);
    mci_leave(e);
    return rc;
}

static mc_store *new_store(mc_engine *e, const model *m, int policy, int64_t slots, int ahead) {
    mc_store *s = NULL;
    mc_error err = {0};
    int rc = mc_store_create(e, L, E, TOP_K, policy, &s, &err);
    if (rc == MC_OK) rc = bind_all(e, s, m, &err);
    if (rc == MC_OK) rc = mc_store_open(s, slots, ahead, &err);
    CHECK(rc == MC_OK, "%s", err.message);
    return s;
}

static bool bytes_right(const uint8_t *p, int64_t file, int64_t offset, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (p[i] != pattern(file, offset + i)) return false;
    return true;
}

static bool mat_right(const mci_mat *v, const mc_tensor *t) {
    int64_t scales =
        (t->rows + 127) / 128 * ((t->cols + 127) / 128) * (t->scale_dtype == MC_BF16 ? 2 : 4);
    return v->rows == t->rows && v->cols == t->cols && v->dtype == t->dtype &&
           (v->scale != NULL) == (t->scale_file >= 0) &&
           (!v->no_nan || (v->dtype == MC_F8E4M3 &&
                           !mci_ops_ref.f8_has_nan(v->data, v->rows * v->cols))) &&
           bytes_right(v->data, t->file, t->offset,
                       t->rows * mci_row_bytes(t->dtype, t->cols)) &&
           (!v->scale || (v->scale_dtype == t->scale_dtype &&
                          bytes_right(v->scale, t->scale_file, t->scale_offset, scales)));
}

static int64_t guesses[2];  /* that a line used, without and with faults */
static int64_t searched[2]; /* FP8 experts whose view says that NaN codes are possible, and not */

static bool view_right(const mci_expert_view *v, const mc_expert *x) {
    if (v->gate.dtype == MC_F8E4M3) searched[v->gate.no_nan]++;
    return mat_right(&v->gate, &x->gate) && mat_right(&v->up, &x->up) &&
           mat_right(&v->down, &x->down);
}

/* ---- injected pread ---- */

typedef struct inject {
    pthread_mutex_t lock;
    rng r;
    bool delay, shorten;
    int fail_percent;
    int64_t calls;
} inject;

static int64_t injected(void *ctx, int fd, void *buf, int64_t n, int64_t off) {
    inject *j = ctx;
    pthread_mutex_lock(&j->lock);
    uint64_t dice = rng_next(&j->r);
    j->calls++;
    bool shorten = j->shorten;
    int fail_percent = j->fail_percent;
    pthread_mutex_unlock(&j->lock);
    if (j->delay) usleep((useconds_t)(dice % 100));
    if ((int)(dice >> 20 & 0xffff) % 100 < fail_percent) {
        errno = EIO;
        return -1;
    }
    if (shorten && n > 1 && dice >> 40 & 1) n = 1 + n / 2;
    return pread(fd, buf, (size_t)n, off);
}

/* Guesses may be read just now. */
static void inject_now(inject *j, int fail_percent, bool shorten) {
    pthread_mutex_lock(&j->lock);
    j->fail_percent = fail_percent;
    j->shorten = shorten;
    pthread_mutex_unlock(&j->lock);
}

/* ---- one line, used in a random way ---- */

static int random_line(rng *r, int32_t *ids) {
    int n = 1 + (int)rng_below(r, rng_below(r, 3) ? TOP_K : E);
    for (int i = 0; i < E; i++) ids[i] = i;
    for (int i = 0; i < n; i++) {
        int j = i + (int)rng_below(r, 1 + rng_below(r, (uint64_t)(E - i)));
        int32_t swap = ids[i];
        ids[i] = ids[j];
        ids[j] = swap;
    }
    return n;
}

/* Takes and finishes experts in random portions and order; checks bytes when taken and again just
 * before they are done, by when a reused slab would show. Stops after `quit` experts. */
static int use_line(mc_store *s, const model *m, rng *r, int layer, const int32_t *ids, int n,
                    int quit, mc_error *err) {
    mci_expert_view held[E];
    bool seen[E] = {false};
    int n_held = 0, total = 0;
    while (total < quit) {
        /* waiting with experts in hand is not allowed, looking is */
        int want = 1 + (int)rng_below(r, E), got;
        got = mci_store_next(s, held + n_held, MCI_MIN(want, E - n_held), n_held == 0, err);
        if (got < 0) return got;
        if (got == 0 && n_held == 0) break;
        for (int i = n_held; i < n_held + got; i++) {
            int32_t x = held[i].index;
            CHECK(x >= 0 && x < n && !seen[x], "index %d comes twice or is outside", x);
            seen[x] = true;
            CHECK(view_right(&held[i], &m->expert[layer][ids[x]]), "layer %d, expert %d: taken",
                  layer, ids[x]);
        }
        n_held += got;
        total += got;
        for (int k = (int)rng_below(r, (uint64_t)n_held + 1); n_held && k >= 0; k--) {
            int i = (int)rng_below(r, (uint64_t)n_held);
            CHECK(view_right(&held[i], &m->expert[layer][ids[held[i].index]]),
                  "layer %d, expert %d: changed while in use", layer, ids[held[i].index]);
            mci_store_done(s, held[i].index);
            held[i] = held[--n_held];
        }
    }
    return total;
}

/* Guesses at the next line: right ones, wrong ones, twice the same, of another layer, too many. */
static void guess_line(mc_store *s, rng *r, int layer, const int32_t *ids, int n) {
    for (int k = (int)rng_below(r, 8); k > 0; k--) {
        int32_t x = (int32_t)rng_below(r, E);
        if (rng_below(r, 4)) x = ids[rng_below(r, (uint64_t)n)];
        mci_store_foresee(s, rng_below(r, 8) ? layer : (int)rng_below(r, L), x);
    }
}

/* ---- cases ---- */

static void check_random(const model *m, int policy, int lanes, int io, int64_t slots, int ahead,
                         bool faults) {
    if (io == MC_IO_URING && mci_io_mode(io, NULL) < 0) io = MC_IO_DIRECT;
    if (io == MC_IO_MMAP) slots = policy == MC_POLICY_LAYER_LRU ? E : L * E;
    inject j = {.lock = PTHREAD_MUTEX_INITIALIZER, .r = {(uint64_t)slots}, .delay = slots % 2};
    rng r = {(uint64_t)(policy * 1000 + lanes * 100 + slots)};
    mc_error err = {0};
    mc_engine *e = new_engine(m, io, lanes);
    mc_store *s = new_store(e, m, policy, slots, ahead);
    mci_policy *shadow = NULL;
    mci_touch touch[E];
    int64_t base_reads = 0, hits = 0, misses = 0, most = policy == MC_POLICY_LAYER_LRU ? E : L * E;
    int64_t floor = policy == MC_POLICY_LAYER_LRU ? 1 : TOP_K, slots_max = MCI_MIN(slots, most);
    mci_policy_create(NULL, policy, L, E, slots_max, &shadow, &err);
    mci_io_inject(e->io, injected, &j);
    int32_t ids[E], next[E];
    int n_next = random_line(&r, next);
    for (int step = 0; step < 45; step++) {
        int n = n_next, layer = step % L;
        memcpy(ids, next, sizeof ids);
        int quit = rng_below(&r, 10) ? E + 1 : (int)rng_below(&r, (uint64_t)n);
        mci_io_stats st;
        if (quit <= E && !faults) quit = E + 1; /* the shadow cannot know what an early end drops */
        int fail_percent = faults && rng_below(&r, 3) == 0 ? 15 : 0;
        inject_now(&j, fail_percent, rng_below(&r, 2));
        mci_enter(e, &err);
        if (layer == 0) {
            mci_store_token(s, false);
            mci_policy_token(shadow);
        }
        int64_t was = e->stats.misses;
        int rc = mci_store_begin(s, layer, ids, n, &err);
        CHECK(rc == MC_OK, "%s", err.message);
        rc = use_line(s, m, &r, layer, ids, n, quit, &err);
        if (faults && rc < 0) {
            CHECK(rc == MC_EIO && err.sys == EIO, "%s", err.message);
            CHECK(mci_store_next(s, NULL, 0, true, &err) == MC_EIO, "the error stays");
        } else {
            CHECK(rc == MCI_MIN(quit, n) || (quit <= E && rc >= quit && rc <= n), "took %d of %d",
                  rc, n);
        }
        mci_store_end(s);
        mci_store_end(s);
        mci_io_get_stats(e->io, &st);
        if (rc == n && quit > E && !ahead)
            CHECK(st.reads - base_reads == e->stats.misses - was, "%lld reads for %lld misses",
                  (long long)(st.reads - base_reads), (long long)(e->stats.misses - was));
        base_reads = st.reads;
        if (faults && rc < 0) { /* the same line works when the disk does */
            inject_now(&j, 0, false);
            rc = mci_store_begin(s, layer, ids, n, &err);
            CHECK(rc == MC_OK, "%s", err.message);
            rc = use_line(s, m, &r, layer, ids, n, E + 1, &err);
            CHECK(rc == n, "after a failure: %s", err.message);
            mci_store_end(s);
            mci_io_get_stats(e->io, &st);
            base_reads = st.reads;
        }
        mci_leave(e);
        mci_policy_line(shadow, layer, ids, n, NULL, touch);
        for (int i = 0; i < n; i++) hits += touch[i].hit;
        for (int i = 0; i < n; i++) misses += !touch[i].hit;
        n_next = random_line(&r, next);
        mci_enter(e, &err);
        if (ahead) guess_line(s, &r, (step + 1) % L, next, n_next);
        mci_leave(e);
        if (rng_below(&r, 12) == 0) {
            int64_t gone[L * E];
            int64_t to = floor + (int64_t)rng_below(&r, (uint64_t)(slots_max - floor + 1));
            if (io == MC_IO_MMAP && to < slots_max) {
                CHECK(mc_store_resize(s, to, &err) == MC_EBUDGET, "mapped: all or none");
                to = slots_max;
            }
            CHECK(mc_store_resize(s, to, &err) == MC_OK, "%s", err.message);
            mci_policy_resize(shadow, to, gone);
            CHECK(e->stats.slots == (policy == MC_POLICY_LAYER_LRU ? to * L : to), "slots told");
        }
    }
    if (!faults)
        CHECK(e->stats.hits == hits && e->stats.misses == misses,
              "%s: %lld hits, %lld misses, expected %lld and %lld", mci_policy_name(policy),
              (long long)e->stats.hits, (long long)e->stats.misses, (long long)hits,
              (long long)misses);
    if (ahead) guesses[faults] += e->stats.ahead_used;
    if (io == MC_IO_MMAP) ahead = 0;
    CHECK(!e->stats.ahead_reads == !ahead && e->stats.ahead_used <= e->stats.ahead_reads,
          "%d ahead: %lld read, %lld used", ahead, (long long)e->stats.ahead_reads,
          (long long)e->stats.ahead_used);
    mci_policy_free(shadow);
    mc_store_free(s); /* and with it the guesses on their way */
    mci_io_inject(e->io, NULL, NULL);
    CHECK(e->mem.total == 0, "leak of %lld bytes", (long long)e->mem.total);
    mc_engine_free(e);
}

static mc_tensor tensor(int file, int64_t offset, int64_t rows, int64_t cols, int dtype) {
    return (mc_tensor){.file = file,
                       .dtype = dtype,
                       .offset = offset,
                       .rows = rows,
                       .cols = cols,
                       .scale_file = dtype == MC_F8E4M3 ? 0 : -1,
                       .scale_dtype = MC_BF16,
                       .block_rows = dtype == MC_F8E4M3 ? 128 : 0,
                       .block_cols = dtype == MC_F8E4M3 ? 128 : 0};
}

static void check_bind_errors(const model *m) {
    mc_error err = {0};
    mc_engine *e = new_engine(m, MC_IO_AUTO, 1);
    mc_store *s = NULL;
    model bad;
    int64_t f8 = -1;
    CHECK(mc_store_create(e, 0, E, 1, MC_POLICY_LRU, &s, &err) == MC_EINVAL && !s, "layers");
    CHECK(mc_store_create(e, L, E, E + 1, MC_POLICY_LRU, &s, &err) == MC_EINVAL, "top-k");
    CHECK(mc_store_create(e, L, E, 1, MC_POLICY_BELADY, &s, &err) == MC_EINVAL, "belady");
    CHECK(mc_store_create(e, 1 << 20, 1 << 20, 1, MC_POLICY_LRU, &s, &err) == MC_EINVAL, "items");
    CHECK(mc_store_create(e, L, E, TOP_K, MC_POLICY_LRU, &s, &err) == MC_OK, "%s", err.message);
    CHECK(!strcmp(e->stats.policy, "lru"), "told");
    CHECK(mci_store_bind(s, LAYER(0, E - 1, TOP_K, HIDDEN, WIDTH), m->expert[0], &err) ==
                  MC_EINVAL &&
              mci_store_bind(s, LAYER(0, E, TOP_K + 1, HIDDEN, WIDTH), m->expert[0], &err) ==
                  MC_EINVAL,
          "another number of experts, a larger top-k");
    for (int x = 0; x < E; x++)
        if (m->expert[0][x].down.dtype == MC_F8E4M3) f8 = x;
    CHECK(f8 >= 0, "the model has no scaled matrix");
    int64_t total = e->mem.total;
    for (int c = 0; c < 9 && f8 >= 0; c++) {
        static const int want[9] = {MC_EFORMAT, MC_EFORMAT, MC_EIO,     MC_ERANGE, MC_EFORMAT,
                                    MC_EIO,     MC_EIO,     MC_EFORMAT, MC_ERANGE};
        bad = *m;
        mc_tensor *t = &bad.expert[0][f8].down;
        switch (c) {
        case 0:
            t->cols++;
            break;
        case 1:
            t->dtype = 9;
            break;
        case 2:
            t->offset = m->size[t->file] - 10;
            break;
        case 3:
            t->file = 40;
            break;
        case 4:
            t->scale_file = -1;
            break;
        case 5:
            t->scale_offset = m->size[2];
            break;
        case 6:
            t->offset = -1;
            break;
        case 7:
            t->scale_dtype = MC_F16;
            break;
        case 8:
            t->scale_file = 40;
            break;
        }
        if (c == 6) t->offset = INT64_MIN;
        mci_enter(e, &err);
        int rc = mci_store_bind(s, LAYER(0, E, TOP_K, HIDDEN, WIDTH), bad.expert[0], &err);
        mci_leave(e);
        CHECK(rc == (c == 6 ? MC_EFORMAT : want[c]), "case %d: %d, %s", c, rc, err.message);
        CHECK(strstr(err.message, "expert"), "which one? %s", err.message);
        if (c == 2)
            CHECK(strstr(err.message, m->path[t->file]) && strstr(err.message, "got 10"), "%s",
                  err.message);
        CHECK(e->mem.total == total, "case %d leaks", c);
    }
    CHECK(mc_store_open(s, TOP_K, 0, &err) == MC_EINVAL, "layers missing: %s", err.message);
    CHECK(bind_all(e, s, m, &err) == MC_OK, "%s", err.message);
    CHECK(bind_all(e, s, m, &err) == MC_EINVAL, "twice");
    int32_t ids[2] = {1, 1};
    CHECK(mci_store_begin(s, 0, ids, 1, &err) == MC_EINVAL, "not open");
    CHECK(mc_store_resize(s, 10, &err) == MC_EINVAL, "not open");
    CHECK(mc_store_open(s, TOP_K - 1, 0, &err) == MC_EBUDGET && strstr(err.message, "3 slots") &&
              strstr(err.message, "at least 4"),
          "%s", err.message);
    e->mem.budget = e->mem.total + 100000;
    CHECK(mc_store_open(s, L * E, 0, &err) == MC_EBUDGET, "%s", err.message);
    e->mem.budget = 0;
    CHECK(mc_store_open(s, 1 << 30, 0, &err) == MC_OK && e->stats.slots == L * E,
          "%s", err.message);
    CHECK(mc_store_open(s, TOP_K, 0, &err) == MC_EINVAL, "twice");
    CHECK(mc_store_resize(s, TOP_K - 1, &err) == MC_EBUDGET, "floor");
    CHECK(mc_store_resize(s, L * E + 1, &err) == MC_EBUDGET, "ceiling");
    CHECK(mci_store_next(s, NULL, 0, true, &err) == MC_EINVAL, "no line");
    CHECK(mci_store_begin(s, 0, ids, 2, &err) == MC_EINVAL, "twice in a line");
    ids[1] = E;
    CHECK(mci_store_begin(s, 0, ids, 2, &err) == MC_ERANGE, "outside");
    CHECK(mci_store_begin(s, L, ids, 1, &err) == MC_ERANGE, "layer");
    ids[1] = 2;
    CHECK(mci_store_begin(s, 0, ids, 2, &err) == MC_OK, "%s", err.message);
    CHECK(mci_store_begin(s, 0, ids, 2, &err) == MC_EINVAL, "inside a line");
    CHECK(mc_store_resize(s, TOP_K, &err) == MC_EBUSY, "inside a line");
    mci_store_done(s, 0); /* not taken: nothing happens */
    mci_store_done(s, 99);
    mci_store_end(s);
    CHECK(mci_store_begin(s, 0, ids, 0, &err) == MC_OK &&
              mci_store_next(s, NULL, 0, true, &err) == 0,
          "an empty line");
    mci_store_end(s);
    mc_engine_free(e); /* parents may go first */
    mc_store_free(s);
    mc_store_free(NULL);
}

/* Experts kept in hand while the next are waited for: an error, not a hang. */
static void check_hoarder(const model *m) {
    mc_error err = {0};
    mc_engine *e = new_engine(m, MC_IO_PREAD, 1);
    mc_store *s = new_store(e, m, MC_POLICY_LRU, TOP_K, 0);
    mci_expert_view v[E];
    int32_t ids[E];
    int n = 0, got;
    for (int i = 0; i < E; i++) ids[i] = i;
    CHECK(mci_store_begin(s, 1, ids, E, &err) == MC_OK, "%s", err.message);
    while ((got = mci_store_next(s, v, E, true, &err)) > 0) n += got;
    CHECK(got == MC_EINVAL && n == TOP_K + 1, "%d taken: %s", n, err.message);
    mci_store_end(s);
    rng r = {1};
    mci_store_begin(s, 1, ids, E, &err);
    CHECK(use_line(s, m, &r, 1, ids, E, E + 1, &err) == E, "%s", err.message);
    mci_store_end(s);
    mc_store_free(s);
    mc_engine_free(e);
}

static void check_truncated(const model *m) {
    mc_error err = {0};
    mci_expert_view v[E];
    mc_engine *e = new_engine(m, MC_IO_AUTO, 2);
    mc_store *s = new_store(e, m, MC_POLICY_LFU, L * E, 0);
    int32_t id = E - 1;
    CHECK(truncate(m->path[0], 100) == 0 && truncate(m->path[1], 100) == 0, "truncate");
    CHECK(mci_store_begin(s, L - 1, &id, 1, &err) == MC_OK, "%s", err.message);
    CHECK(mci_store_next(s, v, E, true, &err) == MC_EIO && strstr(err.message, "end of file") &&
              strstr(err.message, dir),
          "%s", err.message);
    mci_store_end(s);
    write_model(m);
    CHECK(mci_store_begin(s, L - 1, &id, 1, &err) == MC_OK &&
              mci_store_next(s, v, E, true, &err) == 1 && view_right(v, &m->expert[L - 1][id]),
          "the file is whole again: %s", err.message);
    mci_store_end(s);
    CHECK(e->stats.misses == 2 && e->stats.hits == 0, "a failed item is forgotten");
    mc_store_free(s);
    mc_engine_free(e);
}

/* Every allocation fails once; nothing leaks, the next try works. */
static void check_allocations(const model *m) {
    for (int step = 0; step < 3; step++) {
        int failures = 0;
        for (int64_t k = 1;; k++) {
            mc_error err = {0};
            mc_store *s = NULL;
            mc_engine *e = new_engine(m, MC_IO_AUTO, 1);
            if (step == 0) e->mem.fail_after = k;
            int rc = mc_store_create(e, L, E, TOP_K, MC_POLICY_AUTO, &s, &err);
            if (step == 1) e->mem.fail_after = k;
            if (rc == MC_OK) rc = bind_all(e, s, m, &err);
            if (step == 2) e->mem.fail_after = k;
            if (rc == MC_OK && (rc = mc_store_open(s, 2 * TOP_K, 0, &err)) < 0) {
                CHECK(rc == MC_ENOMEM, "%s", err.message);
                CHECK(mc_store_open(s, 2 * TOP_K, 0, &err) == MC_OK, "%s", err.message);
            }
            CHECK(rc == MC_OK || rc == MC_ENOMEM, "%s", err.message);
            mc_store_free(s);
            CHECK(e->mem.total == 0, "leak of %lld bytes", (long long)e->mem.total);
            mc_engine_free(e);
            if (rc == MC_OK) break;
            failures++;
        }
        CHECK(failures > 0, "no allocation in step %d", step);
    }
}

static int64_t resident(void) {
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%*d %ld", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return pages * sysconf(_SC_PAGESIZE);
}

/* A cache of 48 MiB that shrinks to an eighth gives its memory back; what stays is still right. */
static void check_memory_returned(void) {
    enum { N = 32, D = 512, MAT = D * D * 2 };
    char path[4200];
    mc_error err = {0};
    mc_expert x[N];
    mci_expert_view v[N];
    int32_t ids[N];
    mc_engine *e = new_engine(NULL, MC_IO_AUTO, 2);
    mc_store *s = NULL;
    snprintf(path, sizeof path, "%s/sparse", dir);
    int fd = open(path, O_CREAT | O_RDWR, 0600);
    CHECK(ftruncate(fd, (int64_t)N * 3 * MAT) == 0, "sparse file");
    for (int64_t i = 0; i < N; i++) { /* the first byte of each expert tells them apart */
        uint8_t mark = (uint8_t)(i + 1);
        CHECK(pwrite(fd, &mark, 1, i * 3 * MAT) == 1, "mark");
    }
    close(fd);
    int file = mc_engine_file(e, path, &err);
    for (int i = 0; i < N; i++) {
        ids[i] = i;
        x[i].gate = tensor(file, ((int64_t)i * 3) * MAT, D, D, MC_BF16);
        x[i].up = tensor(file, ((int64_t)i * 3 + 1) * MAT, D, D, MC_BF16);
        x[i].down = tensor(file, ((int64_t)i * 3 + 2) * MAT, D, D, MC_BF16);
    }
    mc_store_create(e, 1, N, 4, MC_POLICY_LRU, &s, &err);
    CHECK(mci_store_bind(s, LAYER(0, N, 4, D, D), x, &err) == MC_OK, "%s", err.message);
    CHECK(mc_store_open(s, N, 0, &err) == MC_OK, "%s", err.message);
    for (int round = 0; round < 3; round++) {
        int64_t slots = round == 1 ? N / 8 : N, hits = e->stats.hits, before = resident();
        CHECK(mc_store_resize(s, slots, &err) == MC_OK, "%s", err.message);
        int64_t back = before - resident();
        if (round == 1)
            CHECK(back > (N - N / 8 - 6) * 3 * MAT, "%lld bytes came back", (long long)back);
        /* the most recent ones first: they must have survived */
        for (int i = N; i-- > 0;) {
            int n = mci_store_begin(s, 0, &ids[i], 1, &err);
            CHECK(n == MC_OK && mci_store_next(s, v, N, true, &err) == 1 &&
                      v[0].gate.data[0] == i + 1,
                  "expert %d: %s", i, err.message);
            mci_store_end(s);
        }
        for (int i = 0; i < N; i++) { /* so that the last ids are the most recent */
            mci_store_begin(s, 0, &ids[i], 1, &err);
            mci_store_next(s, v, N, true, &err);
            mci_store_end(s);
        }
        hits = e->stats.hits - hits;
        if (round == 1) CHECK(hits >= N / 8, "%lld hits after shrinking", (long long)hits);
    }
    mc_store_free(s);
    CHECK(e->mem.total == 0, "leak");
    mc_engine_free(e);
    unlink(path);
}

int main(int argc, char **argv) {
    char at[4000];
    model *m = test_alloc(sizeof *m);
    snprintf(at, sizeof at, "%s", argc > 1 ? argv[1] : argv[0]);
    snprintf(dir, sizeof dir, "%s/store_XXXXXX", argc > 1 ? at : dirname(at));
    if (!mkdtemp(dir)) {
        printf("FAIL cannot make a folder %s: %s\n", dir, strerror(errno));
        return 1;
    }
    alarm(300);
    make_model(m, 1);
    for (int policy = MC_POLICY_LFU; policy <= MC_POLICY_LAYER_LRU; policy++)
        for (int lanes = 1; lanes <= 4; lanes += lanes)
            for (int k = 0; k < 6; k++) {
                static const int64_t all[6] = {4, 5, 7, 11, 20, 40}, each[6] = {1, 2, 3, 6, 11, 12};
                int64_t slots = policy == MC_POLICY_LAYER_LRU ? each[k] : all[k];
                check_random(m, policy, lanes, MC_IO_PREAD + k % 4, slots, k % 3, false);
                check_random(m, policy, lanes, (k + 2) % 5, slots, k % 3 * 2, true);
            }
    check_bind_errors(m);
    check_hoarder(m);
    check_truncated(m);
    check_allocations(m);
    free_model(m);
    for (uint64_t seed = 2; seed < 8; seed++) { /* other layouts on disk */
        make_model(m, seed);
        check_random(m, MC_POLICY_AUTO, 2, MC_IO_AUTO, 9, TOP_K, false);
        free_model(m);
    }
    check_memory_returned();
    rmdir(dir);
    free(m);
    CHECK(guesses[0] > 100 && guesses[1] > 100, "guesses used: %lld, with faults %lld",
          (long long)guesses[0], (long long)guesses[1]);
    CHECK(searched[0] > 10 && searched[1] > 10,
          "experts searched for NaN codes: %lld with, %lld without", (long long)searched[0],
          (long long)searched[1]);
    return test_end();
}
