/* kernels.c - the case table in three modes.
 *
 *   kernels check [set]          every kernel set this CPU runs, or the one named, bit for bit
 *                                against ops_ref
 *   kernels sums                 CRC-32C of what ops_ref computes, one line a case: the same list
 * on
 *                                every machine
 *   kernels bench [threads [word [set [csv]]]]   bench.c's figures as a table or CSV: of the best
 *                                kernel set or the one named; only cases whose name holds the word
 *
 * Any NaN equals any NaN; everything else, zeros' signs included, must match. */
#include <sched.h>
#include <sys/mman.h>

#include "bench.h"
#include "cases.h"
#include "crc.h"
#include "test.h"

/* ---- check ----------------------------------------------------------------------------------- */

enum { GUARD = 64 };

/* out is one float past an aligned address, between two guards. */
static uint8_t *guarded(const kcase *c, uint8_t **base) {
    size_t n = (size_t)c->out_bytes;
    *base = test_alloc(n + 2 * GUARD + 4);
    memset(*base, 0xa5, n + 2 * GUARD + 4);
    uint8_t *out = *base + GUARD + 4;
    if (c->init) memcpy(out, c->init, n);
    return out;
}

/* out ends where memory ends: a store that touches more, masked or not, is a fault. */
static uint8_t *at_the_edge(const kcase *c, uint8_t **base, size_t *mapped) {
    const size_t n = (size_t)c->out_bytes, page = 4096;
    *mapped = (n + page - 1) / page * page + page;
    *base = mmap(NULL, *mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*base == MAP_FAILED || mprotect(*base + *mapped - page, page, PROT_NONE)) abort();
    uint8_t *out = *base + *mapped - page - n;
    memset(out, 0xa5, n);
    if (c->init) memcpy(out, c->init, n);
    return out;
}

static bool intact(const kcase *c, const uint8_t *base) {
    const uint8_t *after = base + GUARD + 4 + c->out_bytes;
    for (int i = 0; i < GUARD; i++)
        if (base[i] != 0xa5 || after[i] != 0xa5) return false;
    return true;
}

/* Value i as bits: a byte, or an f32 of which one NaN stands for all. size: 1, 2 (bf16), 4. */
static uint32_t value_bits(const uint8_t *p, int64_t i, int size) {
    if (size == 1) return p[i];
    uint32_t u = size == 2 ? (uint32_t)mci_u16(p + 2 * i) << 16 : mci_u32(p + 4 * i);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : u;
}

/* Index of the first difference, or -1. */
static int64_t differs(const uint8_t *a, const uint8_t *b, int64_t bytes, int size) {
    for (int64_t i = 0; i < bytes / size; i++)
        if (value_bits(a, i, size) != value_bits(b, i, size)) return i;
    return -1;
}

typedef struct engines {
    mc_engine *ref, *e; /* of ops_ref; of the kernel set under test */
} engines;

static void call(mc_engine *e, const kcase *c, void *out, int64_t part, int64_t parts) {
    if (c->whole)
        c->whole(e, c, out);
    else
        c->op->run(e->ops, c, out, part, parts);
}

static void check_case(kcase *c, void *arg) {
    const engines *g = arg;
    const mci_ops *o = g->e->ops;
    char name[128];
    uint8_t *ref_base, *base;
    if (!case_setup(c, 1)) {
        CHECK(false, "out of memory");
        case_free(c);
        return;
    }
    if (c->flops > 1e9) { /* minutes under a sanitizer; smaller ones show the same */
        case_free(c);
        return;
    }
    case_name(c, name, sizeof name);
    uint8_t *ref = guarded(c, &ref_base), *out = guarded(c, &base);
    call(g->ref, c, ref, 0, 1);
    for (int64_t i = 0, parts = MCI_MIN(c->parts, 3); i < parts; i++) call(g->e, c, out, i, parts);
    const int size = c->op->word;
    int64_t at = differs(ref, out, c->out_bytes, size);
    CHECK(at < 0, "%s %s: value %lld is %08x, should be %08x", o->name, name, (long long)at,
          mci_u32(out + size * at - (4 - size)), mci_u32(ref + size * at - (4 - size)));
    CHECK(intact(c, base) && intact(c, ref_base), "%s %s: wrote outside", o->name, name);
    uint8_t *page;
    size_t mapped;
    out = at_the_edge(c, &page, &mapped);
    call(g->e, c, out, 0, 1);
    CHECK(differs(ref, out, c->out_bytes, size) < 0, "%s %s: before a hole", o->name, name);
    munmap(page, mapped);
    free(ref_base);
    free(base);
    case_free(c);
}

/* Every FP8 code as a row of its own, through decode and every path of gemm: few tokens and tiles,
 * a column and a whole block, searched for NaN codes (then there are none) and not. */
static void check_codes(const mci_ops *o) {
    enum { K = 128, T = 9 };
    static uint8_t codes[256 * K];
    float decoded[256], y[T][256], x[T][K] = {{0}};
    const float scale[2] = {1, 1}, *xp[T];
    float *yp[T];
    for (int t = 0; t < T; t++) {
        x[t][0] = 1;
        xp[t] = x[t];
        yp[t] = y[t];
    }
    for (int no_nan = 0; no_nan < 2; no_nan++)
        for (int64_t cols = 1; cols <= K; cols += K - 1) {
            uint8_t code[256];
            for (int i = 0; i < 256; i++) {
                code[i] = (uint8_t)(no_nan && (i & 0x7f) == 0x7f ? 0 : i);
                memset(codes + i * cols, code[i], (size_t)cols);
            }
            mci_decode(MC_F8E4M3, code, 256, decoded);
            mci_mat m = {.data = codes, .scale = (const uint8_t *)scale, .rows = 256, .cols = cols,
                         .dtype = MC_F8E4M3, .scale_dtype = MC_F32, .block_rows = 128,
                         .block_cols = 128, .no_nan = no_nan};
            for (int64_t n = 1; n <= T; n++) {
                o->gemm(&m, 0, 256, xp, n, yp);
                for (int i = 0; i < 256; i++) {
                    float want = decoded[i] + 0.0f; /* the total starts at +0: a lone -0 is lost */
                    float got = y[n - 1][i];
                    CHECK(mci_bits(got) == mci_bits(want) || (got != got && want != want),
                          "%s: code %02x, %d columns, %d tokens: %a, should be %a", o->name, i,
                          (int)cols, (int)n, (double)got, (double)want);
                }
            }
        }
}

/* A result of -0: the first block's negative sum vanishes under a tiny scale, the partial second
 * block underflows to -0. Padding its tail with +0 products would turn the answer into +0. */
static void check_negative_zero(const mci_ops *o) {
    enum { K = 140, T = 9 };
    uint8_t codes[K];
    float xs[T][K], y[T];
    const float scale[2] = {0x1p-10f, 1}, *x[T];
    float *yp[T];
    memset(codes, 0x81, sizeof codes); /* -2^-9 */
    for (int t = 0; t < T; t++) {
        for (int c = 0; c < K; c++) xs[t][c] = c < 128 ? 0x1p-140f : 0x1p-149f;
        x[t] = xs[t];
        yp[t] = &y[t];
    }
    mci_mat m = {.data = codes, .scale = (const uint8_t *)scale, .rows = 1, .cols = K,
                 .dtype = MC_F8E4M3, .scale_dtype = MC_F32, .block_rows = 128, .block_cols = 128};
    for (int64_t n = 1; n <= 2 * T; n++) {
        m.no_nan = n > T;
        o->gemm(&m, 0, 1, x, m.no_nan ? n - T : n, yp);
        for (int64_t t = 0; t < (m.no_nan ? n - T : n); t++)
            CHECK(mci_bits(y[t]) == 0x80000000u, "%s: %d tokens: %a", o->name, (int)n,
                  (double)y[t]);
    }
}

static int check(const char *set) {
    const mc_engine_opts slow = {.threads = 1, .isa = "scalar"};
    mc_engine *ref;
    CHECK(mc_engine_create(&slow, &ref, NULL) == MC_OK, "no scalar engine");
    if (!ref) return test_end();
    for (int i = 0; set ? i == 0 : mci_ops_set(i) != NULL; i++) {
        engines g = {.ref = ref};
        const mc_engine_opts opts = {.threads = 1, .isa = set ? set : mci_ops_set(i)->name};
        mc_error err = {0};
        if (mc_engine_create(&opts, &g.e, &err) < 0) {
            CHECK(!set, "%s", err.message);
            if (!set) printf("kernels: %s cannot run here, not checked\n", opts.isa);
            continue;
        }
        check_codes(g.e->ops);
        check_negative_zero(g.e->ops);
        cases_each(check_case, &g);
        printf("kernels: %s checked\n", opts.isa);
        mc_engine_free(g.e);
    }
    mc_engine_free(ref);
    return test_end();
}

/* ---- sums ------------------------------------------------------------------------------------ */

static void print_sum(kcase *c, void *arg) {
    char name[128];
    uint8_t *base;
    uint32_t crc = 0;
    if (!case_setup(c, 1)) abort();
    if (c->flops <= 1e9) { /* as in check */
        case_name(c, name, sizeof name);
        uint8_t *out = guarded(c, &base);
        call(arg, c, out, 0, 1);
        for (int64_t i = 0; i < c->out_bytes / c->op->word; i++) {
            uint32_t u = value_bits(out, i, c->op->word);
            crc = mci_crc32c(crc, &u, sizeof u);
        }
        printf("%08x %s\n", crc, name);
        free(base);
    }
    case_free(c);
}

static int sums(void) {
    const mc_engine_opts slow = {.threads = 1, .isa = "scalar"};
    mc_engine *ref;
    if (mc_engine_create(&slow, &ref, NULL) < 0) return 1;
    cases_each(print_sum, ref);
    mc_engine_free(ref);
    return 0;
}

/* ---- bench ----------------------------------------------------------------------------------- */

static void print_row(const mc_bench_row *r, bool csv) {
    static const char *const limits[] = {"", "read", "fma"};
    if (csv) {
        printf("\"%s\",%.9g,%.9g,%.0f,%.0f,%.4g,%.4g,%.4g,%.4g,%.4g,%s,%.4g\n", r->name,
               r->median_s, r->min_s, r->bytes, r->flops, r->gbs, r->gflops, r->read_gbs,
               r->of_read, r->of_fma, limits[r->limit], r->ratio);
    } else {
        printf("%-46s %10.2f us %10.2f min %8.2f GB/s %8.1f GFLOP/s", r->name, r->median_s * 1e6,
               r->min_s * 1e6, r->gbs, r->gflops);
        if (r->of_read > 0) printf("  %.2f of read (%.1f)", r->of_read, r->read_gbs);
        if (r->of_fma > 0) printf("  %.2f of fma", r->of_fma);
        if (r->limit) printf("  %s", limits[r->limit]);
        if (r->ratio > 0) printf("  ours/this %.2f", r->ratio);
        printf("\n");
    }
    fflush(stdout);
}

/* The next timed case from i on whose name holds `only`, or -1. */
static int32_t next_case(int32_t i, const char *only) {
    char name[128];
    for (; mc_bench_name(i, name, sizeof name, NULL) == MC_OK; i++)
        if (strstr(name, only)) return i;
    return -1;
}

static int bench(int threads, const char *only, const char *isa, bool csv) {
    mc_bench *b;
    mc_error err;
    if (next_case(0, only) < 0) {
        fprintf(stderr, "kernels: no timed case has \"%s\" in its name\n", only);
        return 1;
    }
    int rc = mc_bench_create(threads, isa, &b, &err);
    if (rc == MC_OK && csv) {
        printf("name,median_s,min_s,bytes,flops,gbs,gflops,read_gbs,of_read,of_fma,limit,ratio\n");
    } else if (rc == MC_OK) {
        const mc_bench_limits *l = mc_bench_limits_of(b);
        printf("kernels %s, %d threads; read %.1f GB/s (%s), fma %.0f GFLOP/s; medians of %d\n",
               l->isa, l->threads, l->read_gbs, l->read[0].name, l->fma_gflops, MC_BENCH_RUNS);
    }
    for (int32_t i = -1; rc >= 0 && (i = next_case(i + 1, only)) >= 0;) {
        mc_bench_row rows[MC_BENCH_ROWS];
        rc = mc_bench_run(b, i, rows, &err);
        for (int k = 0; k < rc; k++) print_row(&rows[k], csv);
    }
    mc_bench_free(b);
    if (rc < 0) fprintf(stderr, "kernels: %s\n", err.message);
    return rc < 0;
}

int main(int argc, char **argv) {
    const char *arg[6] = {"", "check", "", "", "", ""};
    for (int i = 1; i < MCI_MIN(argc, 6); i++) arg[i] = argv[i];
    if (!strcmp(arg[1], "sums")) return sums();
    if (strcmp(arg[1], "bench") != 0) return check(*arg[2] ? arg[2] : NULL);
    cpu_set_t set;
    const int all = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    const int threads = atoi(arg[2]);
    return bench(threads ? threads : all, arg[3], *arg[4] ? arg[4] : NULL, !strcmp(arg[5], "csv"));
}
