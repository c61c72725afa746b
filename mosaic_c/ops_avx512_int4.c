/* ops_avx512_int4.c - 4-bit integers times quantised activations with AVX-512 and maybe VNNI.
 *
 * Sixteen rows lie side by side (ops_avx512.h): 4 columns of each meet 4 bytes of q, broadcast, and
 * a register sums a group for 16 rows. A tile of the weights serves all tokens; its bytes are taken
 * apart anew for each few of these, on ports that the products leave idle. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx512.h"

#include <float.h>
#include <math.h>

enum {
    TILE_COLS = 2048,    /* at most, and 16 groups */
    FEW_TILE_COLS = 512, /* leave the first cache to what is fetched */
    MAX_TOKENS = 8,      /* side by side */
    FEW = 4,             /* by one tile */
};

typedef struct int4_tile {
    __m512i w[TILE_COLS / 8];
    __m512 scale[SIDE];
} int4_tile;

/* Of a token: the unfinished group's, and the row's. */
typedef struct int4_sums {
    __m512i isum;
    __m512 tot;
} int4_sums;

typedef void int4_times(const int4_tile *m, int64_t n, int64_t group, bool last, const mci_qact *x,
                        int4_sums *sums, const uint8_t *next);

typedef struct int4_kernels {
    int4_times *one[FEW], *two; /* by tiles; one: by tokens - 1 */
    int64_t two_tokens;
} int4_kernels;

AVX512_INLINE __m512i broadcast_4(const int8_t *q) {
    return _mm512_set1_epi32((int)mci_u32((const uint8_t *)q));
}

/* Pairs of products are summed in 16 bits: 8 times 2 * 15 * 127 is no overflow. */
AVX512_INLINE __m512i begin_words(__m512i acc, const int nt) {
    (void)acc, (void)nt;
    return _mm512_setzero_si512();
}
AVX512_INLINE __m512i madd_words(__m512i part, __m512i a, __m512i b) {
    return _mm512_add_epi16(part, _mm512_maddubs_epi16(a, b));
}
AVX512_INLINE __m512i end_words(__m512i acc, __m512i part, const int nt) {
    (void)nt;
    return _mm512_add_epi32(acc, _mm512_madd_epi16(part, _mm512_set1_epi16(1)));
}

/* One chain of additions is slow; with many tokens there are enough, and registers are few. */
VNNI_INLINE __m512i begin_vnni(__m512i acc, const int nt) {
    return nt > FEW ? acc : _mm512_setzero_si512();
}
VNNI_INLINE __m512i madd_vnni(__m512i part, __m512i a, __m512i b) {
    return _mm512_dpbusd_epi32(part, a, b);
}
VNNI_INLINE __m512i end_vnni(__m512i acc, __m512i part, const int nt) {
    return nt > FEW ? part : _mm512_add_epi32(acc, part);
}

#define TARGET target(TARGET512)
#define NAME(x) x##_words
#define PAIR_TOKENS 4
#include "ops_avx512_int4_dot.h"
#undef TARGET
#undef NAME
#undef PAIR_TOKENS

#define TARGET target(TARGET512_VNNI)
#define NAME(x) x##_vnni
#define PAIR_TOKENS 8
#include "ops_avx512_int4_dot.h"

/* Columns k .. k+n of 16 rows. */
AVX512_INLINE void fill_tile(int4_tile *m, const mci_mat *w, int64_t r0, int64_t r1, int64_t k,
                             int64_t n) {
    const int64_t row = mci_row_bytes(MC_INT4, w->cols);
    const int64_t group = w->block_cols ? w->block_cols : w->cols;
    const uint8_t *p[SIDE], *sp[SIDE];
    for (int64_t r = 0; r < SIDE; r++) {
        p[r] = w->data + MCI_MIN(r0 + r, r1 - 1) * row;
        sp[r] = mci_scale_row(w, MCI_MIN(r0 + r, r1 - 1));
    }
    side_lines(p, k / 2, n, false, m->w);
    side_scales(w, sp, k / group, (n + group - 1) / group, m->scale);
}

AVX512_INLINE void product(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x,
                           int64_t n_tok, float *const *y, const int4_kernels *f) {
    const int64_t K = w->cols, group = w->block_cols ? w->block_cols : K;
    const int64_t row = mci_row_bytes(MC_INT4, K);
    const int64_t cols = MCI_MIN(SIDE * group, n_tok > FEW ? TILE_COLS : FEW_TILE_COLS);
    int4_sums sums[2][MCI_TILE_TOK];
    int4_tile m[2];
    for (int64_t r = r0, tiles; r < r1; r += tiles * SIDE) {
        tiles = r1 - r > SIDE && n_tok >= f->two_tokens ? 2 : 1;
        for (int i = 0; i < tiles; i++) memset(sums[i], 0, (size_t)n_tok * sizeof **sums);
        for (int64_t k = 0; k < K; k += cols) {
            const int64_t n = MCI_MIN(K - k, cols), g = k / group;
            const uint8_t *next = w->data + (r + tiles * SIDE) * row + k * (tiles * SIDE / 2);
            for (int i = 0; i < tiles; i++) fill_tile(&m[i], w, r + i * SIDE, r1, k, n);
            for (int64_t t = 0, nt; t < n_tok; t += nt) {
                mci_qact part[MAX_TOKENS];
                const bool two = tiles == 2 && n_tok - t >= f->two_tokens;
                nt = two ? f->two_tokens : MCI_MIN(n_tok - t, (int64_t)FEW);
                for (int i = 0; i < nt; i++)
                    part[i] = (mci_qact){x[t + i].q + k, x[t + i].s + g, x[t + i].q8 + g};
                for (int i = 0; i < (two ? 1 : tiles); i++, next = (const uint8_t *)m)
                    (two ? f->two : f->one[nt - 1])(m + i, n, group, k + n == K, part,
                                                    sums[i] + t, next);
            }
        }
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t at = r + i * SIDE, rows = MCI_MIN(r1 - at, (int64_t)SIDE);
            for (int64_t t = 0; t < n_tok; t++)
                _mm512_mask_storeu_ps(y[t] + at, (__mmask16)((1 << rows) - 1), sums[i][t].tot);
        }
    }
}

AVX512_INLINE void products(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x,
                            int64_t n_tok, float *const *y, const int4_kernels *f) {
    for (int64_t n; n_tok > 0; n_tok -= n, x += n, y += n) {
        n = MCI_MIN(n_tok, (int64_t)MCI_TILE_TOK);
        product(w, r0, r1, x, n, y, f);
    }
}

AVX512 void mci_avx512_qgemm(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x,
                             int64_t n_tok, float *const *y) {
    products(w, r0, r1, x, n_tok, y, &kernels_words);
}

AVX512 void mci_avx512vnni_qgemm(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x,
                                 int64_t n_tok, float *const *y) {
    products(w, r0, r1, x, n_tok, y, &kernels_vnni);
}

/* ---- quantise -------------------------------------------------------------------------------- */

AVX512_INLINE __mmask16 first(int64_t n) { return (__mmask16)(n >= 16 ? 0xffff : (1 << n) - 1); }

/* The largest |x|, or a NaN or infinity. */
AVX512_INLINE float largest(const float *x, int64_t n) {
    __m512i most = _mm512_setzero_si512(); /* bits of |x| order as integers, NaN above infinity */
    for (int64_t c = 0; c < n; c += 16) {
        __m512i v = _mm512_maskz_loadu_epi32(first(n - c), x + c);
        most = _mm512_max_epi32(most, _mm512_and_si512(v, _mm512_set1_epi32(0x7fffffff)));
    }
    return mci_f32((uint32_t)_mm512_reduce_max_epi32(most));
}

AVX512 void mci_avx512_quantise(const float *x, int64_t n, int64_t group, int8_t *q, float *s,
                                int32_t *q8) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m512 limit = _mm512_set1_ps(127.0f);
    for (int64_t c0 = 0; c0 < n; c0 += group, x += group, q += group, s++, q8++) {
        const int64_t len = MCI_MIN(n - c0, group);
        const float most = largest(x, len), scale = most / 127.0f;
        const bool bad = !(most <= FLT_MAX);
        __m512i sum = _mm512_setzero_si512();
        *s = bad ? NAN : scale < 1e-12f ? 1e-12f : scale;
        for (int64_t c = 0; c < len; c += 16) {
            const __mmask16 in = bad ? 0 : first(len - c);
            __m512 v = _mm512_div_ps(_mm512_maskz_loadu_ps(in, x + c), _mm512_set1_ps(*s));
            v = _mm512_min_ps(_mm512_max_ps(v, _mm512_sub_ps(_mm512_setzero_ps(), limit)), limit);
            const __m512i i = _mm512_maskz_cvt_roundps_epi32(
                in, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            sum = _mm512_add_epi32(sum, i);
            const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(i), order);
            if (len - c > 8)
                _mm_storeu_si128((__m128i *)(void *)(q + c), bytes);
            else
                _mm_storel_epi64((__m128i *)(void *)(q + c), bytes);
        }
        *q8 = 8 * _mm512_reduce_add_epi32(sum);
    }
}
#endif
