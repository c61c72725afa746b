/* measure.c - a few reads of experts in each way, then the fastest one. */
#include "measure.h"

enum { SLABS = MCI_IO_LANES_MOST + 1, READS_MIN = 8, READS_MAX = 64, VOLUME = 16 << 20 };
static const double SECONDS = 0.06, WORTH = 1.1; /* at most; how much faster a later way must be */

typedef struct trial {
    mc_engine *e;
    const mci_experts *layers;
    int32_t n_layer, n;
    uint64_t random;
    mci_read read[SLABS]; /* one a slab, tag: which */
    uint8_t *slab[SLABS];
    bool bad; /* a read failed, or a file does not take direct reads */
} trial;

static int32_t below(trial *t, int32_t n) { /* xorshift: any experts but those of the last time */
    t->random ^= t->random << 13;
    t->random ^= t->random >> 7;
    t->random ^= t->random << 17;
    return (int32_t)(t->random % (uint64_t)n);
}

/* Another expert into the read's slab. */
static void submit(trial *t, mci_read *r) {
    const mci_experts *x = &t->layers[below(t, t->n_layer)];
    mci_experts_read(x, below(t, x->n), t->slab[r->tag], false, r);
    for (int32_t i = 0; i < r->n_run; i++) t->bad |= !mci_io_direct(t->e->io, r->run[i].file);
    if (!t->bad) t->bad = mci_io_submit(t->e->io, r, NULL) < 0;
}

/* GB/s of `reads` reads, or of those that the time allows. */
static double run(trial *t, int64_t reads) {
    int64_t sent = 0, bytes = 0;
    double t0 = mci_now(), seconds = 0;
    for (; sent < t->n && sent < reads; sent++) submit(t, &t->read[sent]);
    for (mci_read *r; (r = mci_io_next(t->e->io, true));) {
        t->bad |= r->err.code < 0;
        r->fresh = NULL;
        bytes += r->bytes;
        seconds = mci_now() - t0;
        if (t->bad || seconds > SECONDS) /* what no lane has begun need not be waited for */
            for (int32_t i = 0; i < t->n; i++) mci_io_withdraw(t->e->io, &t->read[i]);
        else if (sent++ < reads)
            submit(t, r);
    }
    return seconds > 0 ? 1e-9 * (double)bytes / seconds : 0;
}

int32_t mci_measure_best(const double *gbs, int32_t n) {
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++)
        if (best < 0 || gbs[i] > WORTH * gbs[best]) best = i;
    return best;
}

/* The ring comes first: it needs no thread, so where all cores compute it gains more than these
 * reads on idle ones show. Two reads before `most`: what is begun cannot be withdrawn. */
static void choose(trial *t, int64_t reads) {
    mci_io *io = t->e->io;
    mc_stats *st = &t->e->stats;
    const int32_t most = mci_io_lanes(io), n = mci_io_lanes_given(io) ? 2 : 5;
    const int32_t given[][2] = {{MC_IO_URING, most}, {MC_IO_DIRECT, most}};
    const int32_t any[][2] = {{MC_IO_URING, 2},
                              {MC_IO_URING, most},
                              {MC_IO_DIRECT, 2},
                              {MC_IO_DIRECT, 1},
                              {MC_IO_DIRECT, most}};
    _Static_assert(sizeof any / sizeof *any <= sizeof st->tried_io / sizeof *st->tried_io,
                   "mc_stats has no room for so many ways");
    st->tried = 0;
    for (int32_t i = 0; i < n && !t->bad; i++) {
        const int32_t *way = n == 2 ? given[i] : any[i];
        if (mci_io_use(io, way[0], way[1], NULL) < 0) continue;
        run(t, way[1]); /* its threads come into being */
        double gbs = run(t, reads);
        int32_t k = st->tried;
        if (t->bad) break;
        st->tried_io[k] = way[0];
        st->tried_lanes[k] = way[1];
        st->tried_gbs[k] = gbs;
        st->tried++;
    }
    const int32_t best = mci_measure_best(st->tried_gbs, st->tried);
    if (best < 0)
        mci_io_use(io, MC_IO_DIRECT, n == 2 ? most : 2, NULL);
    else
        mci_io_use(io, st->tried_io[best], st->tried_lanes[best], NULL);
}

void mci_measure_reads(mc_engine *e, const mci_experts *layers, int32_t n_layer, mci_slabs *slabs) {
    trial t = {.e = e, .layers = layers, .n_layer = n_layer};
    int32_t slab[SLABS];
    const int asked = mci_io_asked(e->io), most = mci_io_lanes(e->io);
    const bool direct = mci_io_direct(e->io, layers[0].ref[0].mat[0].file);
    if (asked != MC_IO_AUTO && direct && most > 4 && !mci_io_lanes_given(e->io))
        mci_io_use(e->io, asked, most, NULL); /* small experts, see mci_io_most */
    if (asked != MC_IO_AUTO || !mci_io_idle(e->io)) return;
    t.random = (uint64_t)(mci_now() * 1e9) | 1;
    for (bool fresh; t.n < SLABS && (slab[t.n] = mci_slabs_take(slabs, &fresh)) >= 0; t.n++) {
        t.slab[t.n] = mci_slabs_at(slabs, slab[t.n]);
        t.read[t.n].tag = t.n;
        t.read[t.n].fresh = fresh ? t.slab[t.n] : NULL;
        t.read[t.n].fresh_bytes = slabs->bytes;
    }
    mci_io_count(e->io, false);
    run(&t, t.n); /* pages of the slabs come into being */
    for (int32_t i = 0; i < t.n; i++)
        if (!t.read[i].fresh) mci_slabs_filled(slabs, slab[i]);
    if (!t.bad) choose(&t, MCI_MAX(READS_MIN, MCI_MIN(READS_MAX, VOLUME / slabs->bytes)));
    mci_io_count(e->io, true);
    while (t.n > 0) mci_slabs_give(slabs, slab[--t.n]);
}
