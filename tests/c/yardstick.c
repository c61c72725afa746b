/* yardstick.c - see yardstick.h. */
#include "yardstick.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma")))
#define TARGET512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
#define AVX512 __attribute__((target(TARGET512)))
#define AVX512_INLINE static inline __attribute__((always_inline, target(TARGET512)))

AVX2_INLINE float sum8(__m256 v) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

/* ---- plain ----------------------------------------------------------------------------------- */

/* Sign and the other bits where an f32 has them, then times 2^120: right also for subnormals. (By
 * an fma: a multiplication of subnormal f32 is slow on some CPUs.) */
AVX2_INLINE __m256 decode8(const uint8_t *p) {
    __m256i b = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
    b = _mm256_and_si256(_mm256_slli_epi32(b, 20), _mm256_set1_epi32((int)0x87f00000u));
    return _mm256_fmadd_ps(_mm256_castsi256_ps(b), _mm256_set1_ps(0x1p+120f), _mm256_setzero_ps());
}

AVX2 void yard_plain_avx2(const mci_mat *w, int64_t r0, int64_t r1, const float *x, float *y) {
    for (int64_t r = r0; r < r1; r++) {
        const uint8_t *p = w->data + r * w->cols, *scale = mci_scale_row(w, r);
        __m256 tot = _mm256_setzero_ps();
        for (int64_t b = 0; b < w->cols / MCI_BLOCK; b++) {
            __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
            for (int64_t c = b * MCI_BLOCK; c < (b + 1) * MCI_BLOCK; c += 16) {
                even = _mm256_fmadd_ps(decode8(p + c), _mm256_loadu_ps(x + c), even);
                odd = _mm256_fmadd_ps(decode8(p + c + 8), _mm256_loadu_ps(x + c + 8), odd);
            }
            __m256 s = _mm256_set1_ps(mci_bf16_to_f32(mci_u16(scale + 2 * b)));
            tot = _mm256_fmadd_ps(_mm256_add_ps(even, odd), s, tot);
        }
        y[r] = sum8(tot);
    }
}

/* ---- fastest --------------------------------------------------------------------------------- */

/* Four weights in each 32-bit lane, sorted apart without a shuffle:
 *
 *   lane      seee emmm|seee emmm|seee emmm|seee emmm    byte 3, 2, 1, 0
 *   high      ssss seee emmm....|ssss seee emmm....      16-bit shift by 4: bytes 3 and 1
 *   low       the same of the lane's bytes 2 and 0, moved up by 8 first
 *
 * masked with 0x87f00000 the upper half of such a word is an f32 worth 2^-120 of the weight, and so
 * is its lower half after another shift: 9 instructions for 4 vectors, where widening bytes takes
 * 12. x lies in the order of the lanes, multiplied by 2^120 and by the scale of its block, anew for
 * every 128 rows: the inner loop knows no blocks. */
enum { FAST_ROWS = 4, AHEAD = 2048 };

/* to: for each 32 columns x[4 j + 3], x[4 j + 1], x[4 j + 2], x[4 j], j = 0..7 */
AVX2_INLINE void sort_x32(const float *x, float *to) {
    __m256 v[4], a[4];
    for (int i = 0; i < 4; i++)
        v[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x + 4 * i)),
                                    _mm_loadu_ps(x + 16 + 4 * i), 1);
    a[0] = _mm256_unpacklo_ps(v[0], v[1]); /* 0 4 1 5 */
    a[1] = _mm256_unpackhi_ps(v[0], v[1]); /* 2 6 3 7 */
    a[2] = _mm256_unpacklo_ps(v[2], v[3]);
    a[3] = _mm256_unpackhi_ps(v[2], v[3]);
    _mm256_store_ps(to, _mm256_shuffle_ps(a[1], a[3], 0xee));
    _mm256_store_ps(to + 8, _mm256_shuffle_ps(a[0], a[2], 0xee));
    _mm256_store_ps(to + 16, _mm256_shuffle_ps(a[1], a[3], 0x44));
    _mm256_store_ps(to + 24, _mm256_shuffle_ps(a[0], a[2], 0x44));
}

/* The same for 64 columns and 16 lanes. */
AVX512_INLINE void sort_x64(const float *x, float *to) {
    __m512 v[4], a[4];
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_castps128_ps512(_mm_loadu_ps(x + 4 * i));
        v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(x + 16 + 4 * i), 1);
        v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(x + 32 + 4 * i), 2);
        v[i] = _mm512_insertf32x4(v[i], _mm_loadu_ps(x + 48 + 4 * i), 3);
    }
    a[0] = _mm512_unpacklo_ps(v[0], v[1]);
    a[1] = _mm512_unpackhi_ps(v[0], v[1]);
    a[2] = _mm512_unpacklo_ps(v[2], v[3]);
    a[3] = _mm512_unpackhi_ps(v[2], v[3]);
    _mm512_store_ps(to, _mm512_shuffle_ps(a[1], a[3], 0xee));
    _mm512_store_ps(to + 16, _mm512_shuffle_ps(a[0], a[2], 0xee));
    _mm512_store_ps(to + 32, _mm512_shuffle_ps(a[1], a[3], 0x44));
    _mm512_store_ps(to + 48, _mm512_shuffle_ps(a[0], a[2], 0x44));
}

/* xs = x times 2^120 and the scales of row r's blocks. */
AVX2_INLINE void scale_x(const mci_mat *w, int64_t r, const float *x, float *xs) {
    const uint8_t *scale = mci_scale_row(w, r);
    for (int64_t c = 0; c < w->cols; c += 8) {
        float s = mci_bf16_to_f32(mci_u16(scale + c / MCI_BLOCK * 2)) * 0x1p+120f;
        _mm256_store_ps(xs + c, _mm256_mul_ps(_mm256_load_ps(x + c), _mm256_set1_ps(s)));
    }
}

AVX2 void yard_fast_avx2(const mci_mat *w, int64_t r0, int64_t r1, const float *x, float *y) {
    _Alignas(64) float sorted[YARD_COLS], xs[YARD_COLS];
    const __m256i mask = _mm256_set1_epi32((int)0x87f00000u);
    const int64_t K = w->cols;
    for (int64_t c = 0; c < K; c += 32) sort_x32(x + c, sorted + c);
    for (int64_t r = r0; r < r1; r += FAST_ROWS) {
        if (r % MCI_BLOCK == 0) scale_x(w, r, sorted, xs);
        const uint8_t *p = w->data + r * K;
        __m256 acc[FAST_ROWS][2];
        for (int i = 0; i < FAST_ROWS; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
        for (int64_t c = 0; c < K; c += 32)
            for (int i = 0; i < FAST_ROWS; i++) {
                const uint8_t *at = p + i * K + c;
                _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
                __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)at);
                __m256i high = _mm256_srai_epi16(v, 4);
                __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 4);
                __m256i b3 = _mm256_and_si256(high, mask);
                __m256i b1 = _mm256_and_si256(_mm256_slli_epi32(high, 16), mask);
                __m256i b2 = _mm256_and_si256(low, mask);
                __m256i b0 = _mm256_and_si256(_mm256_slli_epi32(low, 16), mask);
                __m256 *a = acc[i];
                a[0] = _mm256_fmadd_ps(_mm256_castsi256_ps(b3), _mm256_load_ps(xs + c), a[0]);
                a[1] = _mm256_fmadd_ps(_mm256_castsi256_ps(b1), _mm256_load_ps(xs + c + 8), a[1]);
                a[0] = _mm256_fmadd_ps(_mm256_castsi256_ps(b2), _mm256_load_ps(xs + c + 16), a[0]);
                a[1] = _mm256_fmadd_ps(_mm256_castsi256_ps(b0), _mm256_load_ps(xs + c + 24), a[1]);
            }
        for (int i = 0; i < FAST_ROWS; i++) y[r + i] = sum8(_mm256_add_ps(acc[i][0], acc[i][1]));
    }
}

AVX512 void yard_fast_avx512(const mci_mat *w, int64_t r0, int64_t r1, const float *x, float *y) {
    _Alignas(64) float sorted[YARD_COLS], xs[YARD_COLS];
    const __m512i mask = _mm512_set1_epi32((int)0x87f00000u);
    const int64_t K = w->cols;
    for (int64_t c = 0; c < K; c += 64) sort_x64(x + c, sorted + c);
    for (int64_t r = r0; r < r1; r += FAST_ROWS) {
        if (r % MCI_BLOCK == 0) scale_x(w, r, sorted, xs);
        const uint8_t *p = w->data + r * K;
        __m512 acc[FAST_ROWS][2];
        for (int i = 0; i < FAST_ROWS; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
        for (int64_t c = 0; c < K; c += 64)
            for (int i = 0; i < FAST_ROWS; i++) {
                const uint8_t *at = p + i * K + c;
                _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
                __m512i v = _mm512_loadu_si512(at);
                __m512i high = _mm512_srai_epi16(v, 4);
                __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 4);
                __m512i b3 = _mm512_and_si512(high, mask);
                __m512i b1 = _mm512_and_si512(_mm512_slli_epi32(high, 16), mask);
                __m512i b2 = _mm512_and_si512(low, mask);
                __m512i b0 = _mm512_and_si512(_mm512_slli_epi32(low, 16), mask);
                __m512 *a = acc[i];
                a[0] = _mm512_fmadd_ps(_mm512_castsi512_ps(b3), _mm512_load_ps(xs + c), a[0]);
                a[1] = _mm512_fmadd_ps(_mm512_castsi512_ps(b1), _mm512_load_ps(xs + c + 16), a[1]);
                a[0] = _mm512_fmadd_ps(_mm512_castsi512_ps(b2), _mm512_load_ps(xs + c + 32), a[0]);
                a[1] = _mm512_fmadd_ps(_mm512_castsi512_ps(b0), _mm512_load_ps(xs + c + 48), a[1]);
            }
        for (int i = 0; i < FAST_ROWS; i++)
            y[r + i] = _mm512_reduce_add_ps(_mm512_add_ps(acc[i][0], acc[i][1]));
    }
}
#else
void yard_plain_avx2(const mci_mat *w, int64_t r0, int64_t r1, const float *x, float *y) {
    (void)w, (void)r0, (void)r1, (void)x, (void)y;
}
void yard_fast_avx2(const mci_mat *w, int64_t r0, int64_t r1, const float *x, float *y) {
    (void)w, (void)r0, (void)r1, (void)x, (void)y;
}
void yard_fast_avx512(const mci_mat *w, int64_t r0, int64_t r1, const float *x, float *y) {
    (void)w, (void)r0, (void)r1, (void)x, (void)y;
}
#endif
