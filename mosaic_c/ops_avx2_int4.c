/* ops_avx2_int4.c - 4-bit weights times quantised activations with AVX2.
 *
 * Rows lie across lanes: 16 bytes of 8 rows, turned by dwords, give 4 registers that each hold the
 * same 8 columns of 8 rows. No sum crosses lanes, a row's total is one lane, and nibbles unpacked
 * once serve up to 4 tokens.
 *
 *   dword     c1c0 c3c2 c5c4 c7c6   a byte holds an even column low and the odd one after it high
 *   & 15      c0 c2 c4 c6           meets the dword of q that mci_qact stores first
 *   >> 4      c1 c3 c5 c7           and the second
 *
 * Weights enter as v + 8, 0 .. 15, so that a byte product is unsigned times signed and two of them
 * are below 3810: 8 such pairs, 32 columns, stay an int16. q8 takes the 8 out again. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx2.h"

#include <math.h>

enum {
    ROWS = 8,
    TOK = 4,      /* tokens that share the unpacked nibbles */
    CHUNK = 32,   /* columns: 16 bytes a row; groups are whole chunks */
    AHEAD = 1024, /* bytes a row is prefetched */
};

#define UNROLL _Pragma("GCC unroll 8")

/* v[j] = dword j of each of the 8 rows' 16 bytes at p[r] + at. */
AVX2_INLINE void load_turned(const uint8_t *const p[ROWS], int64_t at, __m256i v[4]) {
    __m256i a[4];
    UNROLL for (int r = 0; r < 4; r++) /* row r | row r + 4 */
        a[r] = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(p[r] + at))),
            _mm_loadu_si128((const __m128i *)(const void *)(p[r + 4] + at)), 1);
    const __m256i b0 = _mm256_unpacklo_epi32(a[0], a[1]), b1 = _mm256_unpackhi_epi32(a[0], a[1]);
    const __m256i b2 = _mm256_unpacklo_epi32(a[2], a[3]), b3 = _mm256_unpackhi_epi32(a[2], a[3]);
    v[0] = _mm256_unpacklo_epi64(b0, b2);
    v[1] = _mm256_unpackhi_epi64(b0, b2);
    v[2] = _mm256_unpacklo_epi64(b1, b3);
    v[3] = _mm256_unpackhi_epi64(b1, b3);
}

AVX2_INLINE __m256i dword(const int8_t *q) {
    return _mm256_set1_epi32((int)mci_u32((const uint8_t *)q));
}

/* isum[t] += the products of n columns, at most a chunk, of 8 rows; nt is a constant, n too for a
 * whole chunk. */
AVX2_INLINE void add_chunk(const uint8_t *const p[ROWS], int64_t at, int64_t n,
                           const int8_t *const *q, int64_t c, const int nt, __m256i isum[TOK]) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i v[4], sum[TOK];
    load_turned(p, at, v);
    UNROLL for (int t = 0; t < nt; t++) sum[t] = _mm256_setzero_si256();
    UNROLL for (int j = 0; j < 4; j++) {
        if (8 * j >= n) break;
        const __m256i even = _mm256_and_si256(v[j], low);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(v[j], 4), low);
        UNROLL for (int t = 0; t < nt; t++) {
            const int8_t *qt = q[t] + c + 8 * j;
            sum[t] = _mm256_add_epi16(sum[t], _mm256_maddubs_epi16(even, dword(qt)));
            sum[t] = _mm256_add_epi16(sum[t], _mm256_maddubs_epi16(odd, dword(qt + 4)));
        }
    }
    UNROLL for (int t = 0; t < nt; t++)
        isum[t] = _mm256_add_epi32(isum[t], _mm256_madd_epi16(sum[t], _mm256_set1_epi16(1)));
}

/* The same for the last n < CHUNK columns of the rows; the bytes after them are not touched. */
AVX2_INLINE void add_tail(const uint8_t *const p[ROWS], int64_t at, int64_t n,
                          const int8_t *const *q, int64_t c, const int nt, __m256i isum[TOK]) {
    uint8_t copy[ROWS][16] = {{0}};
    const uint8_t *cp[ROWS];
    for (int r = 0; r < ROWS; r++) cp[r] = memcpy(copy[r], p[r] + at, (size_t)(n + 1) / 2);
    add_chunk(cp, 0, n, q, c, nt, isum);
}

/* b[i] = lane i of each a[r]. */
AVX2_INLINE void turn8x8(const __m256 a[8], __m256 b[8]) {
    __m256 c[8], d[8];
    UNROLL for (int i = 0; i < 4; i++) { /* pairs of rows, then fours, then the halves */
        c[i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        c[i + 4] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4)
        UNROLL for (int k = 0; k < 2; k++) {
            d[i + k] = _mm256_shuffle_ps(c[i + 2 * k], c[i + 2 * k + 1], 0x44);
            d[i + k + 2] = _mm256_shuffle_ps(c[i + 2 * k], c[i + 2 * k + 1], 0xee);
        }
    UNROLL for (int i = 0; i < 4; i++) {
        b[i] = _mm256_permute2f128_ps(d[2 * i], d[2 * i + 1], 0x20);
        b[i + 4] = _mm256_permute2f128_ps(d[2 * i], d[2 * i + 1], 0x31);
    }
}

/* scale[i] = those of group g + i of 8 rows, a lane a row; n: groups left. */
AVX2_INLINE void load_scales(const mci_mat *w, const uint8_t *const p[ROWS], int64_t g, int64_t n,
                             __m256 scale[8]) {
    __m256 s[ROWS];
    for (int r = 0; r < ROWS; r++) {
        s[r] = scales8(w, p[r], g, n);
        _mm_prefetch((const char *)p[r] + g * mci_scale_size(w) + AHEAD / 2, _MM_HINT_T0);
    }
    turn8x8(s, scale);
}

/* Eight rows: lane r is row first + r * step; lanes from n on repeat a row and are not kept. */
typedef struct lanes {
    const uint8_t *w[ROWS], *scale[ROWS];
    int64_t first, step, n;
} lanes;

/* y[t][row] for the rows of l and nt tokens. */
AVX2_INLINE void dot_rows(const mci_mat *w, const lanes *l, const mci_qact *x, const int nt,
                          float *const *y) {
    const int64_t K = w->cols, group = w->block_cols ? w->block_cols : K;
    const int8_t *q[TOK];
    __m256 tot[TOK], scale[8];
    UNROLL for (int t = 0; t < nt; t++) {
        q[t] = x[t].q;
        tot[t] = _mm256_setzero_ps();
    }
    for (int64_t g = 0, c = 0, left = K; left > 0; g++, left -= group) {
        const int64_t end = c + MCI_MIN(group, left);
        __m256i isum[TOK];
        if (g % 8 == 0) load_scales(w, l->scale, g, (left + group - 1) / group, scale);
        UNROLL for (int t = 0; t < nt; t++) isum[t] = _mm256_set1_epi32(-x[t].q8[g]);
        for (; c + CHUNK <= end; c += CHUNK) {
            if (c % 128 == 0)
                UNROLL for (int r = 0; r < ROWS; r++)
                    _mm_prefetch((const char *)l->w[r] + (c >> 1) + AHEAD, _MM_HINT_T0);
            add_chunk(l->w, c >> 1, CHUNK, q, c, nt, isum);
        }
        if (c < end) add_tail(l->w, c >> 1, end - c, q, c, nt, isum);
        c = end;
        UNROLL for (int t = 0; t < nt; t++)
            tot[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(isum[t]),
                                     _mm256_mul_ps(scale[g % 8], _mm256_set1_ps(x[t].s[g])),
                                     tot[t]);
    }
    UNROLL for (int t = 0; t < nt; t++) {
        float out[ROWS];
        _mm256_storeu_ps(out, tot[t]);
        for (int64_t r = 0; r < l->n; r++) y[t][l->first + r * l->step] = out[r];
    }
}

/* One function each, not inlined, so that every loop has the registers to itself. */
#define DOT(nt)                                                                                    \
    AVX2 static __attribute__((noinline)) void dot_##nt(const mci_mat *w, const lanes *l,          \
                                                        const mci_qact *x, float *const *y) {      \
        dot_rows(w, l, x, nt, y);                                                                  \
    }
DOT(1)
DOT(2)
DOT(3)
DOT(4)

/* Rows lie an eighth of the range apart, so memory sees 8 long sequential streams; the last few
 * go together. */
AVX2 void mci_avx2_qgemm(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x, int64_t n_tok,
                         float *const *y) {
    static void (*const dot[TOK])(const mci_mat *w, const lanes *l, const mci_qact *x,
                                  float *const *y) = {dot_1, dot_2, dot_3, dot_4};
    const int64_t row = mci_row_bytes(w->dtype, w->cols);
    const int64_t scales = mci_mat_scales(w) * mci_scale_size(w);
    const int64_t part = (r1 - r0) / ROWS;
    lanes l = {.first = r0, .step = part, .n = ROWS};
    for (int64_t i = 0; i < part + ((r1 - r0) % ROWS != 0); i++, l.first++) {
        if (i == part) l = (lanes){.first = r0 + ROWS * part, .step = 1, .n = (r1 - r0) % ROWS};
        for (int64_t r = 0; r < ROWS; r++) {
            const int64_t at = l.first + MCI_MIN(r, l.n - 1) * l.step;
            l.w[r] = w->data + at * row;
            l.scale[r] = w->scale + at * scales;
        }
        for (int64_t t = 0, nt; t < n_tok; t += nt) {
            nt = MCI_MIN(n_tok - t, (int64_t)TOK);
            dot[nt - 1](w, &l, x + t, y + t);
        }
    }
}

/* ---- activations ----------------------------------------------------------------------------- */

/* The largest |x| as its bits: ordered as integers, infinity and NaN are above every number. */
AVX2_INLINE int32_t max_bits(const float *x, int64_t n) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (int64_t c = 0; c < n; c += 8)
        most = _mm256_max_epi32(
            most, _mm256_and_si256(mask, _mm256_castps_si256(load_up_to(x + c, n - c))));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
}

/* No clamp: |x| <= absmax, and absmax / s is 127 within rounding. */
AVX2 void mci_avx2_quantise(const float *x, int64_t n, int64_t group, int8_t *q, float *s,
                            int32_t *q8) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 0, 0, 0, 0, 0, 0, 0, 0);
    for (int64_t g = 0, c = 0; c < n; g++) {
        const int64_t end = MCI_MIN(c + group, n);
        const int32_t most = max_bits(x + c, end - c);
        if (most >= 0x7f800000) {
            memset(q + c, 0, (size_t)mci_round_up(end - c, 8));
            s[g] = NAN;
            q8[g] = 0;
            c = end;
            continue;
        }
        s[g] = MCI_MAX(mci_f32((uint32_t)most) / 127.0f, 1e-12f);
        const __m256 by = _mm256_set1_ps(s[g]);
        __m256i sum = _mm256_setzero_si256();
        for (; c < end; c += 8) {
            const __m256i i = _mm256_cvtps_epi32(_mm256_div_ps(load_up_to(x + c, end - c), by));
            sum = _mm256_add_epi32(sum, i);
            __m128i b = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
            b = _mm_shuffle_epi8(_mm_packs_epi16(b, b), order);
            _mm_storel_epi64((__m128i *)(void *)(q + c), b);
        }
        c = end;
        __m128i m = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
        m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0xb1));
        q8[g] = 8 * _mm_cvtsi128_si32(m);
    }
}
#endif
