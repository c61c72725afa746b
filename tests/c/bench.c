/* bench.c - see bench.h. Everything runs on the threads and kernels of an engine, in its floating
 * point mode. */
#include "bench.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cases.h"
#include "cpu.h"
#include "peaks.h"
#include "yardstick.h"

enum {
    READ_BYTES = 384 << 20,
    FROM_MEMORY = 64 << 20, /* a run that moves more is measured by plain reads */
    AROUND = 2,             /* ways of reading tried again around a case */
};
static const double RUN_S = 0.5;     /* a longer run is of fewer cases: Ctrl-C must not wait */
static const double REPEAT_S = 1e-3; /* shorter cases are repeated to last so long */

struct mc_bench {
    mc_engine *e;
    uint8_t *mem;
    peak_way way[PEAK_WAYS]; /* best first */
    mc_bench_limits limits;
};

_Static_assert((int)PEAK_WAYS <= (int)MC_BENCH_READS, "room for every way of reading");

static double read_gbs(mc_bench *b, int i) {
    return peak_read(b->e->pool, &b->way[i], b->mem, READ_BYTES, 3) * 1e-9;
}

/* Does the kernel set compute in 512 bits? */
static bool is_wide(const char *isa) { return !strncmp(isa, "avx512", 6); }

static void measure_limits(mc_bench *b) {
    mc_bench_limits *l = &b->limits;
    l->isa = b->e->ops->name;
    l->threads = mci_pool_threads(b->e->pool);
    l->read_bytes = READ_BYTES;
    l->n_read = peak_ways(b->way);
    for (int i = 0; i < l->n_read; i++) {
        const peak_way w = b->way[i];
        mc_bench_read r = {.gbs = read_gbs(b, i)};
        snprintf(r.name, sizeof r.name, "%s %s x%d%s", w.isa, w.shares ? "shares" : "chunks",
                 w.streams, w.ahead ? " prefetch" : "");
        int k = i;
        for (; k > 0 && l->read[k - 1].gbs < r.gbs; k--) {
            l->read[k] = l->read[k - 1];
            b->way[k] = b->way[k - 1];
        }
        l->read[k] = r;
        b->way[k] = w;
    }
    l->read_gbs = l->read[0].gbs;
    /* last: new threads may share a core in their first milliseconds */
    l->fma_gflops = peak_fma(b->e->pool, is_wide(l->isa), 9) * 1e-9;
}

int mc_bench_create(int32_t threads, const char *isa, mc_bench **out, mc_error *err) {
    const mc_engine_opts opts = {.threads = threads, .isa = isa};
    void *mem;
    *out = NULL;
    mc_bench *b = calloc(1, sizeof *b);
    if (!b) return mci_fail(err, MC_ENOMEM, ENOMEM, "bench: out of memory");
    int rc = mc_engine_create(&opts, &b->e, err);
    if (rc < 0) goto fail;
    rc = mci_alloc(&b->e->mem, MC_MEM_SCRATCH, READ_BYTES, "memory to read", &mem, err);
    if (rc < 0) goto fail;
    b->mem = mem;
    if ((rc = mci_enter(b->e, err)) < 0) goto fail;
    memset(b->mem, 1, READ_BYTES);
    measure_limits(b);
    mci_leave(b->e);
    *out = b;
    return MC_OK;
fail:
    mc_bench_free(b);
    return rc;
}

void mc_bench_free(mc_bench *b) {
    if (!b) return;
    if (b->mem) mci_release(&b->e->mem, MC_MEM_SCRATCH, b->mem, READ_BYTES);
    mc_engine_free(b->e);
    free(b);
}

void mc_bench_clear(mc_bench **p) {
    mc_bench_free(*p);
    *p = NULL;
}

const mc_bench_limits *mc_bench_limits_of(const mc_bench *b) { return &b->limits; }

/* ---- rows ------------------------------------------------------------------------------------ */

static double median(const double *v, int n) {
    double s[MC_BENCH_RUNS];
    for (int i = 0; i < n; i++) {
        int k = i;
        for (; k > 0 && s[k - 1] > v[i]; k--) s[k] = s[k - 1];
        s[k] = v[i];
    }
    return s[n / 2];
}

/* From s, bytes, flops and read_gbs. */
static void finish(const mc_bench *b, mc_bench_row *r) {
    r->median_s = median(r->s, MC_BENCH_RUNS);
    r->min_s = r->s[0];
    for (int i = 1; i < MC_BENCH_RUNS; i++) r->min_s = MCI_MIN(r->min_s, r->s[i]);
    r->gbs = r->bytes / r->median_s * 1e-9;
    r->gflops = r->flops / r->median_s * 1e-9;
    if (r->read_gbs > 0) r->of_read = r->gbs / r->read_gbs;
    /* the integer path's multiply-adds are not the f32 ones whose peak was measured */
    if (b->limits.fma_gflops > 0 && strncmp(r->name, "qgemm", 5) != 0)
        r->of_fma = r->gflops / b->limits.fma_gflops;
    if (r->of_read > 0 || r->of_fma > 0)
        r->limit = r->of_read >= r->of_fma ? MC_BENCH_READ : MC_BENCH_FMA;
}

/* ---- cases of the table ---------------------------------------------------------------------- */

typedef struct finder {
    int32_t want, seen; /* among the timed ones */
    kcase found;
} finder;

static void find_case(kcase *c, void *arg) {
    finder *f = arg;
    if (c->bench && f->seen++ == f->want) f->found = *c;
}

typedef struct region {
    const mci_ops *ops;
    const kcase *c;
    void *out;
} region;

static void run_part(void *arg, int64_t i, int thread) {
    const region *r = arg;
    (void)thread;
    r->c->op->run(r->ops, r->c, r->out, i, r->c->parts);
}

static double run_case(mc_engine *e, const kcase *c, void *out, int64_t repeat) {
    region r = {e->ops, c, out};
    const double start = mci_now();
    for (int64_t i = 0; i < repeat; i++) {
        if (c->whole)
            c->whole(e, c, out);
        else
            mci_pool_run(e->pool, run_part, &r, c->parts);
    }
    return (mci_now() - start) / (double)repeat;
}

/* Inputs of so many cases and room for their results; NULL: no memory. case_free either way. */
static void *ready(kcase *c, int64_t times, uint8_t **base) {
    *base = NULL;
    if (times && case_setup(c, times))
        *base = aligned_alloc(64, (size_t)mci_round_up(c->out_bytes + 4, 64));
    if (!*base) return NULL;
    memset(*base, 0, (size_t)c->out_bytes + 4);
    if (c->init) memcpy(*base + 4, c->init, (size_t)c->out_bytes);
    return *base + 4; /* as the inputs: one float off alignment */
}

/* How many cases side by side: as the table says, but no more than take RUN_S. 0: no memory. */
static int64_t times_of(const mc_bench *b, kcase c) {
    uint8_t *base;
    void *out = ready(&c, 1, &base);
    int64_t times = 0;
    if (out) {
        run_case(b->e, &c, out, 1);
        const double most = RUN_S / MCI_MAX(run_case(b->e, &c, out, 1), 1e-9);
        times = most < (double)c.bench ? MCI_MAX((int64_t)most, 1) : c.bench;
    }
    free(base);
    case_free(&c);
    return times;
}

static double read_around(mc_bench *b) {
    double best = 0;
    for (int i = 0; i < AROUND; i++) best = MCI_MAX(best, read_gbs(b, i));
    return best;
}

static int time_case(mc_bench *b, kcase *c, mc_bench_row *r, mc_error *err) {
    const int64_t times = times_of(b, *c);
    uint8_t *base;
    void *at = ready(c, times, &base);
    int rc = MC_OK;
    if (!at) {
        rc = mci_fail(err, MC_ENOMEM, ENOMEM, "%s: not enough memory for its data", r->name);
        goto done;
    }
    const bool from_memory = c->bytes > FROM_MEMORY;
    if (from_memory) r->read_gbs = read_around(b);
    const double once = run_case(b->e, c, at, 1);
    const int64_t repeat = once < REPEAT_S ? (int64_t)(REPEAT_S / once) + 1 : 1;
    for (int i = 0; i < MC_BENCH_RUNS; i++)
        r->s[i] = run_case(b->e, c, at, repeat) / (double)times;
    if (from_memory) r->read_gbs = MCI_MAX(r->read_gbs, read_around(b));
    r->times = (int32_t)times;
    r->bytes = c->bytes / (double)times;
    r->flops = c->flops / (double)times;
    finish(b, r);
done:
    free(base);
    case_free(c);
    return rc;
}

/* ---- the yardstick --------------------------------------------------------------------------- */

/* FP8 matrix times vector on one thread, by our kernel and by two others in turns: 8 matrices of
 * 1 MiB one after the other, which the last-level cache keeps and an L2 below 8 MiB does not. */
enum { YARD_ROWS = 512, YARD_K = 2048, YARD_MATS = 8, YARD_PASSES = 4 };
static const char *const yard_names[] = {"yardstick F8_E4M3/BF16 512x2048 from L3, ours",
                                         "yardstick plain AVX2",
                                         "yardstick fastest without the canonical order"};

static bool has_yardstick(void) {
    const uint32_t need = MCI_CPU_AVX2 | MCI_CPU_FMA;
    return (mci_cpu_features() & need) == need;
}

static void yard_call(const mc_bench *b, int k, const mci_mat *m, int i, const float *x, float *y) {
    const int64_t r0 = i * YARD_ROWS, r1 = r0 + YARD_ROWS;
    const bool wide = is_wide(b->limits.isa);
    if (k == 0) b->e->ops->gemm(m, r0, r1, &x, 1, &y);
    if (k == 1) yard_plain_avx2(m, r0, r1, x, y);
    if (k == 2) (wide ? yard_fast_avx512 : yard_fast_avx2)(m, r0, r1, x, y);
}

/* Seconds of one matrix, over all of them so many times. */
static double yard_pass(const mc_bench *b, int k, const mci_mat *m, int passes, const float *x,
                        float *y) {
    const double start = mci_now();
    for (int p = 0; p < passes; p++)
        for (int i = 0; i < YARD_MATS; i++) yard_call(b, k, m, i, x, y);
    return (mci_now() - start) / (passes * YARD_MATS);
}

/* Sums in another order differ by rounding; anything more is a mistake in a yardstick. */
static bool agrees(const float *want, const float *got, int64_t n) {
    double worst = 0, top = 0;
    for (int64_t i = 0; i < n; i++) {
        worst = MCI_MAX(worst, fabs((double)want[i] - (double)got[i]));
        top = MCI_MAX(top, fabs((double)want[i]));
    }
    return worst <= 1e-5 * top && top > 0;
}

static int time_yardstick(mc_bench *b, mc_bench_row *rows, mc_error *err) {
    const int64_t n_rows = YARD_ROWS * YARD_MATS, bytes = n_rows * YARD_K,
                  n_scale = bytes / (128 * 128);
    kcase c = {.n = {n_rows, YARD_K}};
    uint8_t *w = case_alloc(&c, 0, bytes), *scale = case_alloc(&c, 1, 2 * n_scale);
    float *x = case_alloc(&c, 2, YARD_K * 4), *y[3];
    for (int k = 0; k < 3; k++) y[k] = case_alloc(&c, 3 + k, n_rows * 4);
    int rc = 3;
    if (c.failed) {
        rc = mci_fail(err, MC_ENOMEM, ENOMEM, "yardstick: not enough memory for its data");
        goto done;
    }
    rng r = {1};
    for (int64_t i = 0; i < bytes; i++) {
        w[i] = (uint8_t)rng_next(&r);
        if ((w[i] & 0x7f) == 0x7f) w[i] = 0; /* no NaN: the others do not know it */
    }
    for (int64_t i = 0; i < n_scale; i++) {
        const uint16_t s = mci_f32_to_bf16(0.002f + 0.001f * rng_unit(&r));
        memcpy(scale + 2 * i, &s, 2);
    }
    for (int64_t i = 0; i < YARD_K; i++) x[i] = rng_unit(&r);
    const mci_mat m = {.data = w, .scale = scale, .rows = n_rows, .cols = YARD_K,
                       .dtype = MC_F8E4M3, .scale_dtype = MC_BF16, .block_rows = 128,
                       .block_cols = 128, .no_nan = !b->e->ops->f8_has_nan(w, bytes)};
    for (int k = 0; k < 3; k++) {
        yard_pass(b, k, &m, 1, x, y[k]); /* also warms up */
        if (!agrees(y[0], y[k], n_rows)) {
            rc = mci_fail(err, MC_EINVAL, 0, "%s: a wrong product", yard_names[k]);
            goto done;
        }
    }
    double ratio[3][MC_BENCH_RUNS];
    for (int i = 0; i < MC_BENCH_RUNS; i++)
        for (int k = 0; k < 3; k++) {
            rows[k].s[i] = yard_pass(b, k, &m, YARD_PASSES, x, y[k]);
            ratio[k][i] = rows[0].s[i] / rows[k].s[i];
        }
    for (int k = 0; k < 3; k++) {
        rows[k].times = YARD_MATS;
        rows[k].bytes = (double)(bytes + 2 * n_scale) / YARD_MATS + 4 * (YARD_K + YARD_ROWS);
        rows[k].flops = 2.0 * YARD_ROWS * YARD_K;
        rows[k].ratio = median(ratio[k], MC_BENCH_RUNS);
        finish(b, &rows[k]);
        rows[k].of_fma *= b->limits.threads; /* one thread works */
    }
done:
    case_free(&c);
    return rc;
}

/* ---- public ---------------------------------------------------------------------------------- */

int32_t mc_bench_cases(void) {
    finder f = {.want = -1};
    cases_each(find_case, &f);
    return f.seen + (has_yardstick() ? 1 : 0);
}

int mc_bench_name(int32_t i, char *name, int32_t size, mc_error *err) {
    finder f = {.want = i};
    if (i < 0 || i >= mc_bench_cases())
        return mci_fail(err, MC_ERANGE, 0, "bench: case %d of %d", i, mc_bench_cases());
    cases_each(find_case, &f);
    if (f.found.op)
        case_name(&f.found, name, (size_t)size);
    else
        snprintf(name, (size_t)size, "%s", yard_names[0]);
    return MC_OK;
}

int mc_bench_run(mc_bench *b, int32_t i, mc_bench_row *rows, mc_error *err) {
    finder f = {.want = i};
    memset(rows, 0, MC_BENCH_ROWS * sizeof *rows);
    int rc = mc_bench_name(i, rows[0].name, sizeof rows[0].name, err);
    if (rc < 0 || (rc = mci_enter(b->e, err)) < 0) return rc;
    cases_each(find_case, &f);
    if (f.found.op) {
        rc = time_case(b, &f.found, rows, err);
        rc = rc < 0 ? rc : 1;
    } else {
        for (int k = 1; k < 3; k++)
            snprintf(rows[k].name, sizeof rows[k].name, "%s", yard_names[k]);
        rc = time_yardstick(b, rows, err);
    }
    mci_leave(b->e);
    return rc;
}
