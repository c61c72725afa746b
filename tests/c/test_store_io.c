/* test_store_io.c - the store and the ways to read: what auto measures and chooses, and experts
 * that stay in mapped files. */
#include "engine.h"
#include "expert.h"
#include "io_fixture.h"
#include "measure.h"
#include "store.h"

enum { L = 2, E = 24, TOP_K = 2, HIDDEN = 128, WIDTH = 64, MAT = WIDTH * HIDDEN * 2, FIRST = 1000 };

static mc_expert expert[L][E];

/* Experts side by side in the large file, at odd places. */
static void lay_out_experts(void) {
    for (int i = 0; i < L * E; i++)
        for (int k = 0; k < 3; k++) {
            mc_expert *x = &expert[i / E][i % E];
            *(k == 0   ? &x->gate
              : k == 1 ? &x->up
                       : &x->down) = (mc_tensor){.dtype = MC_BF16,
                                                 .offset = FIRST + (int64_t)(3 * i + k) * MAT,
                                                 .rows = k < 2 ? WIDTH : HIDDEN,
                                                 .cols = k < 2 ? HIDDEN : WIDTH,
                                                 .scale_file = -1};
        }
}

static mc_engine *new_engine(int io, int lanes) {
    mc_engine_opts o = {.threads = 1, .lanes = lanes, .io = io};
    mc_engine *e = NULL;
    mc_error err = {0};
    int rc = mc_engine_create(&o, &e, &err);
    CHECK(rc == MC_OK && mc_engine_file(e, big, &err) == 0, "%s", err.message);
    return e;
}

static mc_store *bound_store(mc_engine *e) {
    mc_store *s = NULL;
    mc_error err = {0};
    int rc = mc_store_create(e, L, E, TOP_K, MC_POLICY_LRU, &s, &err);
    mci_enter(e, NULL);
    for (int l = 0; l < L && rc == MC_OK; l++)
        rc = mci_store_bind(s, LAYER(l, E, TOP_K, HIDDEN, WIDTH), expert[l], &err);
    mci_leave(e);
    CHECK(rc == MC_OK, "%s", err.message);
    return s;
}

/* The line of all experts of a layer; their bytes are right. */
static int use_all(mc_engine *e, mc_store *s, int layer, bool in_place, mc_error *err) {
    int32_t ids[E], total = 0;
    mci_expert_view v[E];
    for (int i = 0; i < E; i++) ids[i] = E - 1 - i;
    mci_enter(e, NULL);
    int rc = mci_store_begin(s, layer, ids, E, err);
    while (rc == MC_OK && (rc = mci_store_next(s, v, E, true, err)) > 0) {
        total += rc;
        for (int i = 0; i < rc; i++) {
            const mc_expert *x = &expert[layer][ids[v[i].index]];
            const uint8_t *p = v[i].down.data;
            bool same = true;
            for (int64_t k = 0; k < MAT; k++) same = same && p[k] == byte_at(x->down.offset + k);
            CHECK(same, "layer %d, expert %d", layer, ids[v[i].index]);
            CHECK((p == mci_io_at(e->io, 0, x->down.offset)) == in_place, "where it lies");
            mci_store_done(s, v[i].index);
        }
        rc = MC_OK;
    }
    mci_store_end(s);
    mci_leave(e);
    return rc < 0 ? rc : total;
}

/* ---- auto ------------------------------------------------------------------------------------ */

/* A disk: how long a read takes when others are under way. */
typedef struct disk {
    pthread_mutex_t lock, head;
    int busy, calls;
    int us, us_shared; /* of a read alone; of one among others */
    bool one_head;     /* one read at a time */
    bool fails, buffered;
} disk;

static int64_t read_disk(void *ctx, int fd, void *buf, int64_t n, int64_t off) {
    disk *d = ctx;
    if (d->buffered && fcntl(fd, F_GETFL) & O_DIRECT) {
        errno = EINVAL;
        return -1;
    }
    pthread_mutex_lock(&d->lock);
    bool shared = ++d->busy > 1;
    d->calls++;
    pthread_mutex_unlock(&d->lock);
    if (d->one_head) pthread_mutex_lock(&d->head);
    usleep((useconds_t)(shared ? d->us_shared : d->us));
    if (d->one_head) pthread_mutex_unlock(&d->head);
    pthread_mutex_lock(&d->lock);
    d->busy--;
    pthread_mutex_unlock(&d->lock);
    errno = EIO;
    return d->fails ? -1 : pread(fd, buf, (size_t)n, off);
}

static disk new_disk(int us, int us_shared) {
    return (disk){.lock = PTHREAD_MUTEX_INITIALIZER,
                  .head = PTHREAD_MUTEX_INITIALIZER,
                  .us = us,
                  .us_shared = us_shared};
}

static mc_stats opened_with(disk *d, int io, int lanes, double *seconds) {
    mc_error err = {0};
    mc_stats st;
    mc_engine *e = new_engine(io, lanes);
    mc_store *s = bound_store(e);
    mci_io_inject(e->io, d ? read_disk : NULL, d);
    double t0 = mci_now();
    int rc = mc_store_open(s, 10, 0, &err);
    if (seconds) *seconds = mci_now() - t0;
    CHECK(rc == MC_OK, "%s", err.message);
    mci_io_inject(e->io, NULL, NULL);
    mc_engine_stats(e, &st, &err);
    CHECK(st.reads == 0 && st.bytes_read == 0 && st.busy_s == 0 && st.read_s == 0 && st.depth == 0,
          "a measurement is no expert read");
    for (int l = 0; l < L; l++)
        CHECK(use_all(e, s, l, false, &err) == E, "all slabs are free again: %s", err.message);
    mc_engine_stats(e, &st, &err);
    CHECK(st.reads == L * E, "%lld reads", (long long)st.reads);
    CHECK(st.lanes_ran >= (st.io != MC_IO_URING) && st.lanes_ran <= st.lanes,
          "threads of the measurement are not those that read: %d", st.lanes_ran);
    mc_store_free(s);
    CHECK(e->mem.total == 0, "leak");
    mc_engine_free(e);
    return st;
}

static bool tried(const mc_stats *st, int i, int io, int lanes) {
    return i < st->tried && st->tried_io[i] == io && st->tried_lanes[i] == lanes &&
           st->tried_gbs[i] > 0;
}

static void check_rule(void) {
    static const double a[] = {1, 1.05, 0.5}, b[] = {1, 1.09, 1.11, 1.2}, c[] = {1, 2, 2.1, 2.3};
    CHECK(mci_measure_best(a, 3) == 0, "nothing is faster by a tenth");
    CHECK(mci_measure_best(b, 4) == 2, "by more than a tenth of the choice, not of the last");
    CHECK(mci_measure_best(c, 3) == 1 && mci_measure_best(c, 4) == 3, "of the choice so far");
    CHECK(mci_measure_best(a, 0) == -1, "nothing to choose from");
}

static bool chose_well(const mc_stats *st) {
    int32_t best = mci_measure_best(st->tried_gbs, st->tried);
    return best >= 0 && st->io == st->tried_io[best] && st->lanes == st->tried_lanes[best];
}

/* So is the choice for such a disk, on a machine that others use too in one
 * of a few tries; and every choice follows from its figures. */
static bool comes_to(int us, int us_shared, bool one_head, int io, int lanes) {
    for (int i = 0; i < 10; i++) {
        disk d = new_disk(us, us_shared);
        d.one_head = one_head;
        mc_stats st = opened_with(&d, MC_IO_AUTO, 0, NULL);
        CHECK(chose_well(&st), "%d with %d lanes", st.io, st.lanes);
        if (st.io == io && st.lanes == lanes) return true;
    }
    return false;
}

static void check_auto(void) {
    const bool ring = mci_io_mode(MC_IO_URING, NULL) == MC_OK;
    double seconds;
    mc_stats st = opened_with(NULL, MC_IO_AUTO, 0, NULL);
    if (!st.files_direct) {
        printf("note: no direct reads in this folder; what auto measures is not checked\n");
        CHECK(st.tried == 0 && st.io == MC_IO_PREAD && st.lanes == 4, "nothing to compare");
        return;
    }
    const int more = ring ? 2 : 0; /* ways by a ring, first */
    CHECK((!ring || (tried(&st, 0, MC_IO_URING, 2) && tried(&st, 1, MC_IO_URING, 4))) &&
              tried(&st, more, MC_IO_DIRECT, 2) && tried(&st, more + 1, MC_IO_DIRECT, 1) &&
              tried(&st, more + 2, MC_IO_DIRECT, 4) && st.tried == 3 + more && chose_well(&st),
          "%d ways, chose %d with %d lanes", st.tried, st.io, st.lanes);
    st = opened_with(NULL, MC_IO_AUTO, 3, NULL);
    CHECK((!ring || tried(&st, 0, MC_IO_URING, 3)) && tried(&st, ring, MC_IO_DIRECT, 3) &&
              st.tried == 1 + ring && chose_well(&st),
          "with lanes given: %d ways", st.tried);
    for (int io = MC_IO_PREAD; io <= MC_IO_URING; io++) {
        if (io == MC_IO_URING && !ring) continue;
        st = opened_with(NULL, io, 0, NULL);
        CHECK(st.tried == 0 && st.io == io, "mode %d measures nothing, is %d", io, st.io);
        CHECK(st.lanes == (io == MC_IO_PREAD ? 4 : 2), "%d lanes", st.lanes);
    }

    /* a ring with a stand-in for pread has lanes */
    const int first = ring ? MC_IO_URING : MC_IO_DIRECT;
    CHECK(comes_to(1000, 1000, false, first, 4), "a disk of many heads");
    CHECK(comes_to(1000, 3000, true, MC_IO_DIRECT, 1), "a disk that seeks");
    CHECK(comes_to(1000, 1000, true, first, 2), "no difference: the first way");
    disk d = new_disk(25000, 25000);
    st = opened_with(&d, MC_IO_AUTO, 0, &seconds);
    CHECK(st.tried == 3 + more && seconds < 1.5 && d.calls < 100,
          "a slow disk: %.2f s for %d reads; 8 reads in each of 11 rounds would take 2", seconds,
          d.calls);
    d = new_disk(10, 10);
    d.fails = true;
    st = opened_with(&d, MC_IO_AUTO, 0, NULL);
    CHECK(st.tried == 0 && st.io == MC_IO_DIRECT, "a failing disk: %d ways", st.tried);
    d = new_disk(10, 10);
    d.buffered = true;
    st = opened_with(&d, MC_IO_AUTO, 0, NULL);
    CHECK(st.tried == 0 && st.io == MC_IO_PREAD, "a refusal that comes late: %d ways", st.tried);
}

/* ---- mmap ------------------------------------------------------------------------------------ */

static void check_mapped(void) {
    mc_error err = {0};
    mc_engine *e = new_engine(MC_IO_MMAP, 0);
    mc_store *s = bound_store(e);
    mc_stats st;
    int64_t before = e->mem.now[MC_MEM_CACHE], slab = mc_expert_slab(expert[0], E, NULL, NULL);
    slab = MCI_MAX(slab, mc_expert_slab(expert[1], E, NULL, NULL));
    CHECK(mc_store_open(s, L * E - 1, 0, &err) == MC_EBUDGET &&
              strstr(err.message, "mmap holds all 48 experts, 47 slots given"),
          "%s", err.message);
    e->mem.budget = e->mem.total + L * E * slab;
    CHECK(mc_store_open(s, L * E, 0, &err) == MC_EBUDGET, "the tables need some too");
    CHECK(e->mem.now[MC_MEM_CACHE] == before, "a refused store counts nothing");
    e->mem.budget = 0;
    CHECK(mc_store_open(s, 1 << 20, 0, &err) == MC_OK, "%s", err.message);
    CHECK(e->mem.now[MC_MEM_CACHE] == before + L * E * slab, "all experts count");
    for (int round = 0; round < 2; round++)
        for (int l = 0; l < L; l++)
            CHECK(use_all(e, s, l, true, &err) == E, "round %d: %s", round, err.message);
    mc_engine_stats(e, &st, &err);
    CHECK(st.io == MC_IO_MMAP && st.tried == 0 && st.hits == L * E && st.misses == L * E &&
              st.reads == L * E && st.evictions == 0 && st.bytes_read >= 3LL * MAT * L * E,
          "%lld hits, %lld misses", (long long)st.hits, (long long)st.misses);
    /* a hit of a file that shrank would end the process */
    CHECK(truncate(big, 5000) == 0, "truncate");
    CHECK(use_all(e, s, 1, true, &err) == MC_EIO && strstr(err.message, "shrank") &&
              strstr(err.message, big),
          "%s", err.message);
    make_file(big, SIZE);
    for (int l = 0; l < L; l++)
        CHECK(use_all(e, s, l, true, &err) == E, "whole again: %s", err.message);
    mc_store_free(s);
    CHECK(e->mem.total == 0, "leak of %lld", (long long)e->mem.total);
    mc_engine_free(e);
}

int main(int argc, char **argv) {
    if (!begin_files(argc, argv)) return 1;
    lay_out_experts();
    check_rule();
    check_auto();
    check_mapped();
    return end_files();
}
