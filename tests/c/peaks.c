/* peaks.c - see peaks.h. No one way of reading is the fastest everywhere: how the work is cut, how
 * many streams there are, prefetching and the width of a load each win on some machine. */
#include "peaks.h"

#include "cpu.h"

enum { AHEAD = 1024, LOOPS = 1 << 19, CHAINS = 12 };

/* ---- reading --------------------------------------------------------------------------------- */

/* n bytes as `streams` runs side by side, a cache line at a time; n / streams a multiple of 64. */
#define STREAMS(name, target, type, load, add, keep)                                               \
    target static inline __attribute__((always_inline)) void name##_streams(                       \
        const uint8_t *p, int64_t n, const int streams, const bool ahead) {                        \
        type sum[8] = {0};                                                                         \
        const int64_t part = n / streams;                                                          \
        for (int64_t k = 0; k < part; k += 64)                                                     \
            for (int q = 0; q < streams; q++) {                                                    \
                const uint8_t *at = p + q * part + k;                                              \
                if (ahead) __builtin_prefetch(at + AHEAD);                                         \
                for (int i = 0; i < (int)(64 / sizeof(type)); i++)                                 \
                    sum[q] = add(sum[q], load((const void *)(at + i * (int)sizeof(type))));        \
            }                                                                                      \
        for (int q = 0; q < streams; q++) __asm__ volatile("" : : keep(sum[q]));                   \
    }                                                                                              \
    target static void name(const uint8_t *p, int64_t n, int streams, bool ahead) {                \
        switch (streams * 2 + ahead) {                                                             \
        case 2: name##_streams(p, n, 1, false); break;                                             \
        case 3: name##_streams(p, n, 1, true); break;                                              \
        case 4: name##_streams(p, n, 2, false); break;                                             \
        case 5: name##_streams(p, n, 2, true); break;                                              \
        case 8: name##_streams(p, n, 4, false); break;                                             \
        case 9: name##_streams(p, n, 4, true); break;                                              \
        case 16: name##_streams(p, n, 8, false); break;                                            \
        case 17: name##_streams(p, n, 8, true); break;                                             \
        }                                                                                          \
    }

static inline uint64_t load_word(const void *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}
static inline uint64_t xor_word(uint64_t a, uint64_t b) { return a ^ b; }
STREAMS(read_word, , uint64_t, load_word, xor_word, "r")

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx2,fma")))
STREAMS(read_avx2, AVX2, __m256i, _mm256_load_si256, _mm256_xor_si256, "x")
STREAMS(read_avx512, AVX512, __m512i, _mm512_load_si512, _mm512_xor_si512, "v")
#endif

static int add_ways(peak_way *ways, const char *isa,
                    void (*read)(const uint8_t *p, int64_t n, int streams, bool ahead)) {
    static const struct {
        bool shares;
        int streams;
    } cuts[] = {{true, 1}, {true, 4}, {false, 1}, {false, 2}, {false, 4}, {false, 8}};
    int n = 0;
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++)
        for (int ahead = 0; ahead < 2; ahead++)
            ways[n++] = (peak_way){cuts[i].shares, cuts[i].streams, ahead != 0, isa, read};
    return n;
}

int peak_ways(peak_way *ways) {
    int n = 0;
#if defined(__x86_64__)
    if (mci_cpu_features() & MCI_CPU_AVX512) n += add_ways(ways, "avx512", read_avx512);
    if (mci_cpu_features() & MCI_CPU_AVX2) n += add_ways(ways + n, "avx2", read_avx2);
#endif
    return n ? n : add_ways(ways, "scalar", read_word);
}

typedef struct reading {
    const peak_way *way;
    const uint8_t *mem;
    int64_t n, parts;
} reading;

static void read_part(void *ctx, int64_t i, int thread) {
    const reading *r = ctx;
    const int64_t chunks = r->n / PEAK_CHUNK, c0 = chunks * i / r->parts,
                  c1 = chunks * (i + 1) / r->parts;
    (void)thread;
    r->way->read(r->mem + c0 * PEAK_CHUNK, (c1 - c0) * PEAK_CHUNK, r->way->streams, r->way->ahead);
}

static double best_time(mci_pool *pool, mci_chunk_fn *fn, void *ctx, int64_t parts, int times) {
    double best = 1e30;
    for (int i = 0; i < times; i++) {
        double t = mci_now();
        mci_pool_run(pool, fn, ctx, parts);
        t = mci_now() - t;
        best = MCI_MIN(best, t);
    }
    return best;
}

double peak_read(mci_pool *pool, const peak_way *w, const uint8_t *mem, int64_t n, int times) {
    reading r = {w, mem, n, w->shares ? mci_pool_threads(pool) : n / PEAK_CHUNK};
    return (double)n / best_time(pool, read_part, &r, r.parts, times);
}

/* ---- fused multiply-adds --------------------------------------------------------------------- */

#if defined(__x86_64__)
/* As many chains as hide the latency; x opaque, so that no compiler folds the loop. */
#define FMA_LOOP(name, target, type, set1, fma, keep)                                              \
    target static void name(void *ctx, int64_t i, int thread) {                                    \
        type a[CHAINS], x = set1(1.0f);                                                            \
        (void)ctx, (void)i, (void)thread;                                                          \
        for (int k = 0; k < CHAINS; k++) a[k] = set1(0.0f);                                        \
        for (int64_t k = 0; k < LOOPS; k++) {                                                      \
            for (int j = 0; j < CHAINS; j++) a[j] = fma(x, x, a[j]);                               \
            __asm__ volatile("" : "+" keep(x));                                                    \
        }                                                                                          \
        for (int k = 0; k < CHAINS; k++) __asm__ volatile("" : : keep(a[k]));                      \
    }
FMA_LOOP(fma_avx2, AVX2, __m256, _mm256_set1_ps, _mm256_fmadd_ps, "x")
FMA_LOOP(fma_avx512, AVX512, __m512, _mm512_set1_ps, _mm512_fmadd_ps, "v")

double peak_fma(mci_pool *pool, bool wide, int times) {
    const int threads = mci_pool_threads(pool);
    if (!(mci_cpu_features() & (wide ? MCI_CPU_AVX512 : MCI_CPU_FMA))) return 0;
    const double t = best_time(pool, wide ? fma_avx512 : fma_avx2, NULL, threads, times);
    return 2.0 * CHAINS * (wide ? 16 : 8) * (double)LOOPS * threads / t;
}
#else
double peak_fma(mci_pool *pool, bool wide, int times) {
    (void)pool, (void)wide, (void)times;
    return 0;
}
#endif
