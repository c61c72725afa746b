/* ops_avx512_gemm.c - weights times activations with AVX-512 F, BW, DQ and VL.
 *
 * Few tokens: four rows lie side by side in a register, 128 bits each, a quad. 64 bytes of each
 * row are transposed in pieces of 128 bits, and unpacking inside these widens them, which is
 * cheaper than conversion: it leaves 4 columns of 4 rows in a register. So columns 0..3 of eight
 * meet lanes 0..3 in one accumulator, columns 4..7 lanes 4..7 in another, and x is 4 floats
 * broadcast. Two quads are decoded on the fly for up to 4 tokens; meanwhile the next eight rows are
 * fetched in the order they have in memory, which pleases it more than a stream for each row.
 * MXFP4: ops_avx512_f4.c. Many tokens: ops_avx512_tile.c.
 *
 * A partial last K block is copied and padded, weights with +0 and x with -0: the products are -0,
 * the addend that changes nothing. A NaN weight makes the row's result NaN whatever x is, so FP8
 * rows are decoded as if no NaN existed while a byte maximum watches for 0x7f and 0xff, unless
 * w->no_nan. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx512.h"

#include <math.h>

enum {
    QUADS = 2,
    ROWS = 4 * QUADS,
    DIRECT_TOK = 4, /* tokens that share one decode */
    LINE = 64,      /* bytes of a row read at a time */
};

/* Sixty-four bytes of each of four rows: v[i] has bytes 16i .. 16i+15 of all. Whole lines are read:
 * reading each row's 16 bytes to their place costs as little decoding but slows memory down. */
AVX512_INLINE void load_quad(const uint8_t *const *p, int64_t at, __m512i v[4]) {
    /* in registers: folded into the shuffles each would be read twice, across two lines mostly */
    const __m512i a = ints_in_register(_mm512_loadu_si512(p[0] + at));
    const __m512i b = ints_in_register(_mm512_loadu_si512(p[1] + at));
    const __m512i c = ints_in_register(_mm512_loadu_si512(p[2] + at));
    const __m512i d = ints_in_register(_mm512_loadu_si512(p[3] + at));
    const __m512i ab01 = _mm512_shuffle_i32x4(a, b, 0x44), cd01 = _mm512_shuffle_i32x4(c, d, 0x44);
    const __m512i ab23 = _mm512_shuffle_i32x4(a, b, 0xee), cd23 = _mm512_shuffle_i32x4(c, d, 0xee);
    v[0] = _mm512_shuffle_i32x4(ab01, cd01, 0x88);
    v[1] = _mm512_shuffle_i32x4(ab01, cd01, 0xdd);
    v[2] = _mm512_shuffle_i32x4(ab23, cd23, 0x88);
    v[3] = _mm512_shuffle_i32x4(ab23, cd23, 0xdd);
}

/* Thirty-two bytes: v[0] and v[1]. */
AVX512_INLINE void load_half(const uint8_t *const *p, int64_t at, __m512i v[2]) {
    __m256i a[4];
    UNROLL for (int r = 0; r < 4; r++)
        a[r] = _mm256_loadu_si256((const __m256i *)(const void *)(p[r] + at));
    const __m512i ab = _mm512_inserti64x4(_mm512_castsi256_si512(a[0]), a[1], 1);
    const __m512i cd = _mm512_inserti64x4(_mm512_castsi256_si512(a[2]), a[3], 1);
    v[0] = _mm512_shuffle_i32x4(ab, cd, 0x88);
    v[1] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
}

/* Words as the upper halves of 32 bits: columns 0..3 and 4..7. */
AVX512_INLINE void widen_quad(__m512i words, __m512 v[2]) {
    const __m512i zero = _mm512_setzero_si512();
    v[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, words));
    v[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, words));
}

/* Sixteen bytes of each of four rows as f32, exactly, four columns in each v; of FP8 all but the
 * NaN codes.
 *
 *   byte     s eeee mmm                          exponent bias 7
 *   f32      s 0000eeee mmm00000000000000000000  bias 127: 2^-120 of the value
 *
 * The upper half of the f32 is the byte as the top of a word, shifted right by 4 with its sign.
 * F8_SMALL leaves it at that and x is multiplied by 2^120 instead, once for all rows; the products
 * are the same. F8 scales the weight by an exact fma; its addend -0 keeps the sign of 0.
 *
 * INT8 plus 128 are the last bits of an f32 worth 2^23 + 128 more than the weight. */
AVX512_INLINE void decode_quad(__m512i b, __m512 v[4], const int dtype) {
    if (is_f8(dtype)) {
        const __m512i keep = _mm512_set1_epi16((int16_t)0x87f0), zero = _mm512_setzero_si512();
        const __m512i low = _mm512_unpacklo_epi8(zero, b), high = _mm512_unpackhi_epi8(zero, b);
        widen_quad(_mm512_and_si512(_mm512_srai_epi16(low, 4), keep), v);
        widen_quad(_mm512_and_si512(_mm512_srai_epi16(high, 4), keep), v + 2);
        if (dtype == F8)
            UNROLL for (int i = 0; i < 4; i++)
                v[i] = _mm512_fmadd_ps(v[i], _mm512_set1_ps(0x1p+120f), _mm512_set1_ps(-0.0f));
    } else if (is_i8(dtype)) {
        const __m512i u = _mm512_xor_si512(b, _mm512_set1_epi8(-128));
        const __m512i zero = _mm512_setzero_si512(), top = _mm512_set1_epi16(0x4b00);
        const __m512i low = _mm512_unpacklo_epi8(u, zero), high = _mm512_unpackhi_epi8(u, zero);
        const __m512i w[4] = {_mm512_unpacklo_epi16(low, top), _mm512_unpackhi_epi16(low, top),
                              _mm512_unpacklo_epi16(high, top), _mm512_unpackhi_epi16(high, top)};
        UNROLL for (int i = 0; i < 4; i++)
            v[i] = _mm512_sub_ps(_mm512_castsi512_ps(w[i]), _mm512_set1_ps(0x1p+23f + 128));
    } else if (dtype == MC_BF16) {
        widen_quad(b, v);
    } else if (dtype == MC_F16) {
        __m512i h = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), b);
        v[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(h));
        v[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1));
    } else {
        v[0] = _mm512_castsi512_ps(b);
    }
}

/* ---- scales ---------------------------------------------------------------------------------- */

AVX512_INLINE __m128i four_halves(const uint8_t *const *row, int64_t b) {
    return _mm_setr_epi32(mci_u16(row[0] + 2 * b), mci_u16(row[1] + 2 * b),
                          mci_u16(row[2] + 2 * b), mci_u16(row[3] + 2 * b));
}

/* The scale of four rows in K block b, each in its 128 bits. */
AVX512_INLINE __m512 quad_scale(const mci_mat *w, const uint8_t *const *row, int64_t b) {
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __m128 s;
    if (!w->block_cols) b = 0;
    if (w->scale_dtype == MC_BF16) {
        s = _mm_castsi128_ps(_mm_slli_epi32(four_halves(row, b), 16));
    } else if (w->scale_dtype == MC_F16) { /* mci_f16_to_f32 is a call: registers would go */
        const __m128i h = four_halves(row, b);
        s = _mm_cvtph_ps(_mm_packus_epi32(h, h));
    } else {
        s = _mm_setr_ps(mci_scale_of(w, row[0], b), mci_scale_of(w, row[1], b),
                        mci_scale_of(w, row[2], b), mci_scale_of(w, row[3], b));
    }
    return _mm512_permutexvar_ps(spread, _mm512_broadcast_f32x4(s));
}

/* ---- the dot product ------------------------------------------------------------------------- */

typedef __m512 sums[QUADS][DIRECT_TOK][2]; /* [2]: lanes 0..3 and 4..7 of four rows */

/* acc = the dot products of n columns (whole lines) of nq quads and nt tokens; next: what to
 * prefetch, as many bytes. nq, nt, dtype and, but for INT8, n of a whole block are constants. */
AVX512_INLINE void dot_block(const uint8_t *const *p, const int nq, const float *const *x,
                             const int nt, int64_t n, sums acc, watch *nan, const uint8_t *next,
                             const int dtype) {
    const int size = size_of(dtype), fours = size == 1 ? 4 : dtype == MC_F32 ? 1 : 2;
    const int line = dtype == I8_32 ? LINE / 2 : LINE;
    UNROLL for (int t = 0; t < nt; t++)
        UNROLL for (int q = 0; q < nq; q++) acc[q][t][0] = acc[q][t][1] = _mm512_setzero_ps();
    for (int64_t c = 0; c < n; c += line / size) {
        __m512i b[QUADS][4];
        UNROLL for (int r = 0; r < 4 * nq; r++)
            _mm_prefetch((const char *)next + c * size * 4 * nq + line * r, _MM_HINT_T0);
        UNROLL for (int q = 0; q < nq; q++) {
            if (dtype == I8_32)
                load_half(p + 4 * q, c * size, b[q]);
            else
                load_quad(p + 4 * q, c * size, b[q]);
            if (dtype == F8)
                UNROLL for (int i = 0; i < 4; i++) watch_64(nan, b[q][i]);
        }
        UNROLL for (int k = 0; k < line / 16; k++) {
            __m512 v[QUADS][4];
            UNROLL for (int q = 0; q < nq; q++) decode_quad(b[q][k], v[q], dtype);
            UNROLL for (int i = 0; i < fours; i++)
                UNROLL for (int t = 0; t < nt; t++) {
                    const int f = fours * k + i; /* which four columns */
                    __m512 xv = _mm512_broadcast_f32x4(_mm_loadu_ps(x[t] + c + 4 * f));
                    UNROLL for (int q = 0; q < nq; q++)
                        acc[q][t][f & 1] = _mm512_fmadd_ps(v[q][i], xv, acc[q][t][f & 1]);
                }
        }
    }
}

/* The same for the last columns, less than a K block, from padded copies. */
AVX512_INLINE void dot_tail(const uint8_t *const *p, const int nq, const float *const *x,
                            const int nt, int64_t n, sums acc, watch *nan, const int dtype) {
    const int size = size_of(dtype);
    uint8_t w[ROWS][MCI_BLOCK * 4] = {{0}};
    float xs[DIRECT_TOK][MCI_BLOCK];
    const uint8_t *wp[ROWS];
    const float *xp[DIRECT_TOK];
    for (int r = 0; r < 4 * nq; r++) {
        memcpy(w[r], p[r], (size_t)(n * size));
        wp[r] = w[r];
    }
    for (int t = 0; t < nt; t++) {
        for (int64_t c = 0; c < MCI_BLOCK; c++) xs[t][c] = c < n ? x[t][c] : -0.0f;
        xp[t] = xs[t];
    }
    dot_block(wp, nq, xp, nt, (n * size + LINE - 1) / LINE * LINE / size, acc, nan, p[0], dtype);
}

/* The lane trees of four rows. */
AVX512_INLINE __m128 quad_tree(const __m512 tot[2]) {
    __m512 a = _mm512_add_ps(tot[0], tot[1]);
    a = _mm512_add_ps(a, _mm512_shuffle_ps(a, a, 0x4e));
    a = _mm512_add_ps(a, _mm512_movehdup_ps(a));
    return _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, a));
}

/* y[t][r ..] for the n rows from r on, in nq quads of which the last may repeat row r + n - 1. */
AVX512_INLINE void dot_rows(const mci_mat *w, int64_t r, int64_t n, const int nq,
                            const float *const *x, const int nt, float *const *y,
                            const int dtype) {
    const int size = size_of(dtype);
    const bool scaled = is_f8(dtype) || is_i8(dtype);
    const int64_t block = dtype == I8 ? mci_mat_block(w) : dtype == I8_32 ? 32 : MCI_BLOCK;
    const int64_t K = w->cols, blocks = (K + block - 1) / block;
    const uint8_t *p[ROWS], *scale[ROWS]; /* scale: of the row's first block */
    const uint8_t *next = w->data + (r + 4 * nq) * K * size;
    const float *xp[DIRECT_TOK];
    sums tot, acc;
    watch nan = watch_none();
    UNROLL for (int t = 0; t < nt; t++) xp[t] = x[t];
    UNROLL for (int i = 0; i < 4 * nq; i++) {
        const int64_t row = r + MCI_MIN(i, n - 1);
        p[i] = w->data + row * K * size;
        scale[i] = scaled ? mci_scale_row(w, row) : NULL;
    }
    const bool one_scale = !scaled || scale[0] == scale[4 * nq - 1];
    UNROLL for (int q = 0; q < nq; q++)
        UNROLL for (int t = 0; t < nt; t++) tot[q][t][0] = tot[q][t][1] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t left = K - b * block;
        if (left >= block)
            dot_block(p, nq, xp, nt, block, acc, &nan, next, dtype);
        else
            dot_tail(p, nq, xp, nt, left, acc, &nan, dtype);
        const float one = scaled && one_scale ? mci_scale_of(w, scale[0], b) : 1.0f;
        UNROLL for (int q = 0; q < nq; q++) {
            __m512 s = one_scale ? _mm512_set1_ps(one) : quad_scale(w, scale + 4 * q, b);
            UNROLL for (int t = 0; t < nt; t++)
                UNROLL for (int k = 0; k < 2; k++)
                    tot[q][t][k] = _mm512_fmadd_ps(acc[q][t][k], s, tot[q][t][k]);
        }
        UNROLL for (int i = 0; i < 4 * nq; i++) p[i] += block * size;
        next += 4 * nq * block * size;
        UNROLL for (int t = 0; t < nt; t++) xp[t] += block;
    }
    UNROLL for (int q = 0; q < nq; q++) {
        const __m128i rows = _mm256_castsi256_si128(tail_mask(MCI_MAX(n - 4 * q, 0)));
        UNROLL for (int t = 0; t < nt; t++)
            _mm_maskstore_ps(y[t] + r + 4 * q, rows, quad_tree(tot[q][t]));
    }
    if (dtype != F8 || !watch_saw(&nan)) return;
    for (int64_t i = 0; i < n; i++)
        if (mci_avx2_f8_has_nan(w->data + (r + i) * K, K))
            for (int t = 0; t < nt; t++) y[t][r + i] = NAN;
}

/* ---- dispatch -------------------------------------------------------------------------------- */

/* One function each, not inlined, so that every loop has the registers to itself. */
#define FEW(name, nt, dtype)                                                                       \
    AVX512 static __attribute__((noinline)) void name##_8rows(                                     \
        const mci_mat *w, int64_t r, int64_t n, const float *const *x, float *const *y) {          \
        dot_rows(w, r, n, QUADS, x, nt, y, dtype);                                                 \
    }                                                                                              \
    AVX512 static __attribute__((noinline)) void name##_4rows(                                     \
        const mci_mat *w, int64_t r, int64_t n, const float *const *x, float *const *y) {          \
        dot_rows(w, r, n, 1, x, nt, y, dtype);                                                     \
    }

typedef void dot_fn(const mci_mat *w, int64_t r, int64_t n, const float *const *x, float *const *y);

typedef struct format {
    dot_fn *rows8[DIRECT_TOK], *rows4[DIRECT_TOK]; /* by tokens - 1 */
} format;

#define FORMAT(name, dtype)                                                                        \
    FEW(name##_1, 1, dtype)                                                                        \
    FEW(name##_2, 2, dtype)                                                                        \
    FEW(name##_3, 3, dtype)                                                                        \
    FEW(name##_4, 4, dtype)                                                                        \
    static const format name = {                                                                   \
        {name##_1_8rows, name##_2_8rows, name##_3_8rows, name##_4_8rows},                          \
        {name##_1_4rows, name##_2_4rows, name##_3_4rows, name##_4_4rows}};

FORMAT(f32, MC_F32)
FORMAT(bf16, MC_BF16)
FORMAT(f16, MC_F16)
FORMAT(f8, F8)
FORMAT(f8_small, F8_SMALL)
FORMAT(i8, I8)
FORMAT(i8_32, I8_32)

/* Up to DIRECT_TOK tokens, decoding on the fly. */
AVX512 static void few_tokens(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                              int64_t n, float *const *y) {
    const format *f = w->dtype == MC_F32 ? &f32 : w->dtype == MC_BF16 ? &bf16
                    : w->dtype == MC_F16 ? &f16 : w->dtype == F8 ? &f8
                    : w->block_cols == 32 ? &i8_32 : &i8;
    _Alignas(64) float scaled[MCI_MAX_SCALED];
    const float *xs[DIRECT_TOK];
    if (f == &f8 && mci_avx2_scale_x(w, x, n, scaled, xs)) {
        f = &f8_small;
        x = xs;
    }
    int64_t r = r0;
    for (; r + 4 < r1; r += ROWS) f->rows8[n - 1](w, r, MCI_MIN(r1 - r, (int64_t)ROWS), x, y);
    if (r < r1) f->rows4[n - 1](w, r, r1 - r, x, y);
}

AVX512 void mci_avx512_gemm(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                            int64_t n_tok, float *const *y) {
    if (w->dtype == MC_F4E2M1) {
        mci_avx512_f4(w, r0, r1, x, n_tok, y);
        return;
    }
    if (w->dtype > MC_F8E4M3 && w->dtype != MC_INT8) { /* right before it is fast */
        mci_ops_ref.gemm(w, r0, r1, x, n_tok, y);
        return;
    }
    for (int64_t left = n_tok, n; left > 0; left -= n, x += n, y += n) {
        n = MCI_MIN(left, DIRECT_TOK);
        if (left > 2 * DIRECT_TOK) { /* up to there decoding twice is faster than the tile */
            const int64_t passes = (left + MCI_TILE_TOK - 1) / MCI_TILE_TOK; /* of equal size */
            n = (left + passes - 1) / passes;
            mci_avx512_tile(w, r0, r1, x, n, y);
        } else {
            few_tokens(w, r0, r1, x, n, y);
        }
    }
}
#endif
