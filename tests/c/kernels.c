/* kernels.c - the case table in three modes.
 *
 *   kernels check [set]      every kernel set this CPU runs, or the one named, bit for bit against
 *                            ops_ref
 *   kernels sums             CRC-32C of what ops_ref computes, one line a case: the same list on
 *                            every machine
 *   kernels bench [threads [word [set]]]   speed of the best set, or of the set named, beside plain
 *                            reads and FMA peak (of that set's registers) of the same run; only the
 *                            cases whose name holds the word
 *
 * Any NaN equals any NaN; everything else, zeros' signs included, must match. */
#include "cases.h"
#include "cpu.h"
#include "crc.h"
#include "pool.h"
#include "test.h"

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

static void check_case(kcase *c, void *arg) {
    const mci_ops *o = arg;
    char name[128];
    uint8_t *ref_base, *base;
    case_setup(c, false);
    case_name(c, name, sizeof name);
    uint8_t *ref = guarded(c, &ref_base), *out = guarded(c, &base);
    c->op->run(&mci_ops_ref, c, ref, 0, 1);
    for (int64_t i = 0, parts = MCI_MIN(c->parts, 3); i < parts; i++)
        c->op->run(o, c, out, i, parts);
    const int size = c->op->word;
    int64_t at = differs(ref, out, c->out_bytes, size);
    CHECK(at < 0, "%s %s: value %lld is %08x, should be %08x", o->name, name, (long long)at,
          mci_u32(out + size * at - (4 - size)), mci_u32(ref + size * at - (4 - size)));
    CHECK(intact(c, base) && intact(c, ref_base), "%s %s: wrote outside", o->name, name);
    free(ref_base);
    free(base);
    case_free(c);
}

/* Every FP8 code as a 1x1 matrix through decode and through each gemm path. */
static void check_codes(const mci_ops *o) {
    uint8_t codes[256];
    float decoded[256], y[4][256], one[4] = {1, 1, 1, 1};
    const float scale[2] = {1, 1}, *const x[4] = {one, one + 1, one + 2, one + 3};
    float *const yp[4] = {y[0], y[1], y[2], y[3]};
    for (int i = 0; i < 256; i++) codes[i] = (uint8_t)i;
    mci_decode(MC_F8E4M3, codes, 256, decoded);
    mci_mat m = {.data = codes, .scale = (const uint8_t *)scale, .rows = 256, .cols = 1,
                 .dtype = MC_F8E4M3, .scale_dtype = MC_F32, .block_rows = 128, .block_cols = 128};
    for (int64_t n = 1; n <= 4; n++) {
        o->gemm(&m, 0, 256, x, n, yp);
        for (int i = 0; i < 256; i++) {
            float want = decoded[i] + 0.0f; /* the total starts at +0: a lone -0 comes out as +0 */
            float got = y[n - 1][i];
            CHECK(mci_bits(got) == mci_bits(want) || (got != got && want != want),
                  "%s: code %02x, %d tokens: %a, should be %a", o->name, i, (int)n, (double)got,
                  (double)want);
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
    for (int64_t n = 1; n <= T; n++) {
        o->gemm(&m, 0, 1, x, n, yp);
        for (int64_t t = 0; t < n; t++)
            CHECK(mci_bits(y[t]) == 0x80000000u, "%s: %d tokens: %a", o->name, (int)n,
                  (double)y[t]);
    }
}

static void check_set(const mci_ops *o) {
    check_codes(o);
    check_negative_zero(o);
    cases_each(check_case, (void *)(uintptr_t)o);
    printf("kernels: %s checked\n", o->name);
}

static int check(const char *set) {
    static const char *const names[] = {"avx512vnni", "avx512", "avx2", "scalar"};
    const mci_ops *o;
    if (set) {
        mc_error err = {0};
        CHECK(mci_ops_get(set, &o, &err) == MC_OK, "%s", err.message);
        if (o) check_set(o);
    }
    for (size_t i = 0; i < sizeof names / sizeof *names && !set; i++) {
        if (mci_ops_get(names[i], &o, NULL) == MC_OK)
            check_set(o);
        else
            printf("kernels: %s cannot run here, not checked\n", names[i]);
    }
    return test_end();
}

/* ---- sums ------------------------------------------------------------------------------------ */

static void print_sum(kcase *c, void *arg) {
    (void)arg;
    char name[128];
    uint8_t *base;
    mci_crc crc;
    case_setup(c, false);
    case_name(c, name, sizeof name);
    uint8_t *out = guarded(c, &base);
    c->op->run(&mci_ops_ref, c, out, 0, 1);
    mci_crc_init(&crc);
    for (int64_t i = 0; i < c->out_bytes / c->op->word; i++) {
        uint32_t u = value_bits(out, i, c->op->word);
        mci_crc_add(&crc, &u, sizeof u);
    }
    printf("%08x %s\n", crc.value, name);
    free(base);
    case_free(c);
}

static int sums(void) {
    cases_each(print_sum, NULL);
    return 0;
}

/* ---- bench ----------------------------------------------------------------------------------- */

typedef struct bench {
    mci_pool *pool;
    const mci_ops *ops;
    uint8_t *mem; /* for plain reads */
    double fma;   /* GFLOP/s */
    /* one region */
    const kcase *c;
    uint8_t *out;
    const char *word;
} bench;

enum { MEM = 384 << 20, READ_CHUNK = 1 << 20, FMA_LOOPS = 1 << 20 };

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void read_chunk(void *arg, int64_t i, int thread) {
    (void)thread;
    const uint8_t *p = ((const bench *)arg)->mem + i * READ_CHUNK;
    __m256i s = _mm256_setzero_si256();
    for (int64_t k = 0; k < READ_CHUNK / 4; k += 32) /* four streams, as the matrix kernel */
        for (int64_t q = 0; q < 4; q++) {
            const uint8_t *at = p + q * (READ_CHUNK / 4) + k;
            _mm_prefetch((const char *)at + 1024, _MM_HINT_T0);
            s = _mm256_xor_si256(s, _mm256_load_si256((const __m256i *)(const void *)at));
        }
    __asm__ volatile("" : : "x"(s));
}

__attribute__((target("avx2,fma"))) static void fma_chunk(void *arg, int64_t i, int thread) {
    (void)arg, (void)i, (void)thread;
    __m256 a[12], x = _mm256_set1_ps(1.0f);
    for (int k = 0; k < 12; k++) a[k] = _mm256_setzero_ps();
    for (int64_t k = 0; k < FMA_LOOPS; k++) {
        for (int j = 0; j < 12; j++) a[j] = _mm256_fmadd_ps(x, x, a[j]);
        __asm__ volatile("" : "+x"(x));
    }
    for (int k = 0; k < 12; k++) __asm__ volatile("" : : "x"(a[k]));
}

__attribute__((target("avx512f"))) static void fma_chunk512(void *arg, int64_t i, int thread) {
    (void)arg, (void)i, (void)thread;
    __m512 a[12], x = _mm512_set1_ps(1.0f);
    for (int k = 0; k < 12; k++) a[k] = _mm512_setzero_ps();
    for (int64_t k = 0; k < FMA_LOOPS; k++) {
        for (int j = 0; j < 12; j++) a[j] = _mm512_fmadd_ps(x, x, a[j]);
        __asm__ volatile("" : "+v"(x));
    }
    for (int k = 0; k < 12; k++) __asm__ volatile("" : : "v"(a[k]));
}
#else
static void read_chunk(void *arg, int64_t i, int thread) { (void)arg, (void)i, (void)thread; }
static void fma_chunk(void *arg, int64_t i, int thread) { (void)arg, (void)i, (void)thread; }
static void fma_chunk512(void *arg, int64_t i, int thread) { (void)arg, (void)i, (void)thread; }
#endif

static double best_of(bench *b, mci_chunk_fn *fn, int64_t n, int times) {
    double best = 1e30;
    for (int i = 0; i < times; i++) {
        double t = mci_now();
        mci_pool_run(b->pool, fn, b, n);
        t = mci_now() - t;
        best = MCI_MIN(best, t);
    }
    return best;
}

static double plain_read(bench *b) {
    return (double)MEM / best_of(b, read_chunk, MEM / READ_CHUNK, 3) * 1e-9;
}

static void run_part(void *arg, int64_t i, int thread) {
    (void)thread;
    const bench *b = arg;
    b->c->op->run(b->ops, b->c, b->out, i, b->c->parts);
}

static void bench_case(kcase *c, void *arg) {
    bench *b = arg;
    if (!c->bench) return;
    char name[128];
    case_name(c, name, sizeof name);
    if (b->word && !strstr(name, b->word)) return;
    case_setup(c, true);
    uint8_t *base;
    b->out = guarded(c, &base);
    b->c = c;
    bool from_memory = c->bytes > (double)(64 << 20);
    double read = from_memory ? plain_read(b) : 0;
    int64_t repeat = 1;
    double t = best_of(b, run_part, c->parts, 1);
    if (t < 1e-3) repeat = (int64_t)(1e-3 / t) + 1;
    double best = 1e30, all[9];
    int n = 0;
    for (; n < 9; n++) {
        double start = mci_now();
        for (int64_t i = 0; i < repeat; i++) mci_pool_run(b->pool, run_part, b, c->parts);
        double took = (mci_now() - start) / (double)repeat;
        best = MCI_MIN(best, took);
        int k = n;
        for (; k > 0 && all[k - 1] > took; k--) all[k] = all[k - 1];
        all[k] = took;
    }
    double median = all[n / 2];
    printf("%-30s %10.2f us  %7.2f GB/s  %7.1f GFLOP/s", name, median * 1e6,
           c->bytes / median * 1e-9, c->flops / median * 1e-9);
    if (from_memory) {
        read = MCI_MAX(read, plain_read(b));
        printf("  %.2f of read (%.1f)", c->bytes / median * 1e-9 / read, read);
    }
    if (c->flops > 0) printf("  %.2f of fma", c->flops / median * 1e-9 / b->fma);
    printf("\n");
    fflush(stdout);
    free(base);
    case_free(c);
}

static int bench_all(int threads, const char *word, const char *isa) {
    bench b = {.word = word};
    mc_error err;
    if (mci_ops_get(isa, &b.ops, &err) || mci_pool_create(threads, &b.pool, &err)) {
        printf("%s\n", err.message);
        return 1;
    }
    b.mem = test_alloc(MEM + 4096);
    memset(b.mem, 1, MEM + 4096);
    const bool wide = !strcmp(b.ops->name, "avx512");
    double peak = best_of(&b, wide ? fma_chunk512 : fma_chunk, threads, 5);
    b.fma = 12.0 * (wide ? 32 : 16) * (double)FMA_LOOPS * threads / peak * 1e-9;
    printf("kernels %s, %d threads; plain read %.1f GB/s, fma %.0f GFLOP/s; medians of 9\n",
           b.ops->name, threads, plain_read(&b), b.fma);
    cases_each(bench_case, &b);
    mci_pool_free(b.pool);
    free(b.mem);
    return 0;
}

int main(int argc, char **argv) {
    if (argc >= 2 && !strcmp(argv[1], "bench")) {
        cpu_set_t set;
        int threads = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
        const int asked = argc > 2 ? atoi(argv[2]) : 0; /* 0: all */
        return bench_all(asked > 0 ? asked : threads, argc > 3 ? argv[3] : NULL,
                         argc > 4 ? argv[4] : NULL);
    }
    if (argc >= 2 && !strcmp(argv[1], "sums")) return sums();
    return check(argc > 2 ? argv[2] : NULL);
}
