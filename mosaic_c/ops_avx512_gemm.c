/* ops_avx512_gemm.c - weights times activations with AVX-512 F, BW, DQ and VL.
 *
 * A register holds the 8 lanes of two rows, a pair: x is broadcast to both halves, a vector with
 * two values scales them, and each half goes down the lane tree alone.
 *
 *   few tokens    4 pairs decoded on the fly for up to 4 tokens. The rows lie an eighth of the
 *                 range apart, so memory sees 8 long sequential streams.
 *   many tokens   4 pairs x 512 columns decoded once into a tile on the stack, then 4 pairs x 4
 *                 tokens at a time: 16 accumulators, which also hide the latency of the fma.
 *
 * A partial last K block is copied and padded, weights with +0 and x with -0: the products are -0,
 * the addend that changes nothing. A NaN weight makes the row's result NaN whatever x is, so FP8
 * rows are decoded as if no NaN existed while a byte maximum watches for 0x7f and 0xff. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx512.h"

#include <math.h>

enum {
    PAIRS = 4,
    ROWS = 2 * PAIRS,
    DIRECT_TOK = 4,                 /* tokens that share one decode */
    STEP = 16,                      /* columns decoded at a time */
    AHEAD = 1024,                   /* bytes a stream is prefetched */
    TILE_BLOCKS = 4,                /* K blocks in a tile: 8 x 512 floats, 16 KB */
    TILE_COLS = TILE_BLOCKS * MCI_BLOCK,
    TOK = 96,                       /* tokens per pass over the weights; totals take 24 KB */
};

/* FP8 for tokens whose x is small: a kernel of its own, not a storage type. */
enum { F8 = MC_F8E4M3, F8_SMALL = 100 };

AVX512_INLINE bool is_f8(int dtype) { return dtype == F8 || dtype == F8_SMALL; }
AVX512_INLINE int size_of(int dtype) { return dtype == MC_F32 ? 4 : is_f8(dtype) ? 1 : 2; }

AVX512_INLINE __m128i load16(const uint8_t *p) {
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

AVX512_INLINE __m256 load_f32(const uint8_t *p) {
    return _mm256_loadu_ps((const float *)(const void *)p);
}

/* Byte i .. i+7 of the first and of the second row, each as the top byte of 32 bits, the rest 0. */
AVX512_INLINE __m512i top_bytes(__m512i rows, const int i) {
    const int t = (int)0x00808080;
    const __m512i at = _mm512_broadcast_i32x8(_mm256_setr_epi32(
        i << 24 | t, (i + 1) << 24 | t, (i + 2) << 24 | t, (i + 3) << 24 | t, (i + 4) << 24 | t,
        (i + 5) << 24 | t, (i + 6) << 24 | t, (i + 7) << 24 | t));
    return _mm512_shuffle_epi8(rows, at);
}

/*   byte     s eeee mmm                          exponent bias 7
 *   f32      s 0000eeee mmm00000000000000000000  bias 127: 2^-120 of the value
 *
 * F8_SMALL leaves it at that and x is multiplied by 2^120 instead, once for all rows; the products
 * are the same. F8 scales the weight by an exact fma; its addend -0 keeps the sign of 0. */
AVX512_INLINE __m512 f8_value(__m512i top, const int dtype) {
    __m512 v = _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_srai_epi32(top, 4), _mm512_set1_epi32((int)0x87f00000u)));
    if (dtype == F8_SMALL) return v;
    return _mm512_fmadd_ps(v, _mm512_set1_ps(0x1p+120f), _mm512_set1_ps(-0.0f));
}

/* Sixteen weights of row a and of row b as f32, exactly; of FP8 all but the NaN codes. v[0]: the
 * first eight of a, then of b; v[1]: the other eight of both. */
AVX512_INLINE void decode_pair(const uint8_t *a, const uint8_t *b, __m512 v[2], const int dtype) {
    if (is_f8(dtype)) { /* both rows' bytes twice, so that a shuffle inside 128 bits finds them */
        __m512i rows = _mm512_mask_broadcast_i64x2(_mm512_broadcast_i64x2(load16(a)), 0xf0,
                                                   load16(b));
        v[0] = f8_value(top_bytes(rows, 0), dtype);
        v[1] = f8_value(top_bytes(rows, 8), dtype);
        return;
    }
    for (int i = 0; i < 2; i++) {
        if (dtype == MC_F32) {
            v[i] = two_halves(load_f32(a + 32 * i), load_f32(b + 32 * i));
            continue;
        }
        __m256i h = _mm256_inserti128_si256(_mm256_castsi128_si256(load16(a + 16 * i)),
                                            load16(b + 16 * i), 1);
        v[i] = dtype == MC_F16 ? _mm512_cvtph_ps(h)
             : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }
}

AVX512_INLINE __m512 load_x(const float *x, const int dtype) {
    __m512 v = both_halves(_mm256_loadu_ps(x));
    return dtype == F8_SMALL ? _mm512_mul_ps(v, _mm512_set1_ps(0x1p+120f)) : v;
}

/* No finite |x| reaches 128, so x * 2^120 is exact. Infinity and NaN scale to themselves. */
AVX512 static bool is_small(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 in = n - i >= 16 ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
        __m512 a = _mm512_abs_ps(_mm512_maskz_loadu_ps(in, x + i));
        if (_mm512_cmp_ps_mask(a, _mm512_set1_ps(128.0f), _CMP_GE_OQ)) return false;
    }
    return true;
}

/* Stays in a register: compilers fold a load into each fma that uses it, and then the load ports,
 * not the fma units, set the pace. */
AVX512_INLINE __m512 in_register(__m512 v) {
    __asm__("" : "+v"(v));
    return v;
}

/* ---- NaN codes of FP8 ------------------------------------------------------------------------ */

typedef struct watch {
    __m512i smax, umax; /* 0x7f is the largest signed byte, 0xff the largest unsigned one */
} watch;

AVX512_INLINE watch watch_none(void) {
    return (watch){_mm512_setzero_si512(), _mm512_setzero_si512()};
}

AVX512_INLINE void watch_bytes(watch *w, const uint8_t *p, int64_t n) {
    for (int64_t i = 0; i < n; i += 64) {
        __mmask64 in = n - i >= 64 ? ~0ull : (1ull << (n - i)) - 1;
        __m512i v = n - i >= 64 ? _mm512_loadu_si512(p + i) : _mm512_maskz_loadu_epi8(in, p + i);
        w->smax = _mm512_max_epi8(w->smax, v);
        w->umax = _mm512_max_epu8(w->umax, v);
    }
}

AVX512_INLINE bool watch_saw(const watch *w) {
    return (_mm512_cmpeq_epi8_mask(w->smax, _mm512_set1_epi8(0x7f)) |
            _mm512_cmpeq_epi8_mask(w->umax, _mm512_set1_epi8(-1))) != 0;
}

/* Rare: some row of the group has a NaN code. Which? */
AVX512 static bool row_has_nan(const uint8_t *p, int64_t n) {
    watch w = watch_none();
    watch_bytes(&w, p, n);
    return watch_saw(&w);
}

/* ---- scales ---------------------------------------------------------------------------------- */

AVX512_INLINE const uint8_t *scale_row(const mci_mat *w, int64_t r) {
    return w->scale + (r >> 7) * mci_mat_blocks(w) * (w->scale_dtype == MC_BF16 ? 2 : 4);
}

/* As mci_mat_scale, but the division by 128 is done once a row. */
AVX512_INLINE float scale_at(const mci_mat *w, const uint8_t *row, int64_t b) {
    return w->scale_dtype == MC_BF16 ? mci_bf16_to_f32(mci_u16(row + 2 * b))
                                     : mci_f32(mci_u32(row + 4 * b));
}

/* ---- few tokens: decode on the fly ----------------------------------------------------------- */

#define UNROLL _Pragma("GCC unroll 8")

/* acc[i][t] = the dot product of n columns (a multiple of 16) of np pairs and nt tokens, in lanes.
 * All but n, and for a whole block n too, are constants where this is inlined. */
AVX512_INLINE void dot_block(const uint8_t *const *p, const int np, const float *const *x,
                             const int nt, int64_t n, __m512 acc[PAIRS][DIRECT_TOK], watch *nan,
                             const int dtype) {
    const int size = size_of(dtype);
    UNROLL for (int r = 0; r < 2 * np; r++) {
        for (int i = 0; i < MCI_BLOCK * size; i += 64)
            _mm_prefetch((const char *)p[r] + AHEAD + i, _MM_HINT_T0);
        if (is_f8(dtype)) watch_bytes(nan, p[r], n);
    }
    UNROLL for (int i = 0; i < np; i++)
        UNROLL for (int t = 0; t < nt; t++) acc[i][t] = _mm512_setzero_ps();
    for (int64_t c = 0; c < n; c += STEP) {
        __m512 xv[DIRECT_TOK][2];
        UNROLL for (int t = 0; t < nt; t++)
            UNROLL for (int k = 0; k < 2; k++)
                xv[t][k] = in_register(load_x(x[t] + c + 8 * k, dtype));
        UNROLL for (int i = 0; i < np; i++) {
            __m512 v[2];
            decode_pair(p[2 * i] + c * size, p[2 * i + 1] + c * size, v, dtype);
            UNROLL for (int k = 0; k < 2; k++)
                UNROLL for (int t = 0; t < nt; t++)
                    acc[i][t] = _mm512_fmadd_ps(v[k], xv[t][k], acc[i][t]);
        }
    }
}

/* The same for the last n < 128 columns, from padded copies. */
AVX512_INLINE void dot_tail(const uint8_t *const *p, const int np, const float *const *x,
                            const int nt, int64_t n, __m512 acc[PAIRS][DIRECT_TOK], watch *nan,
                            const int dtype) {
    uint8_t w[ROWS][MCI_BLOCK * 4] = {{0}};
    float xs[DIRECT_TOK][MCI_BLOCK];
    const uint8_t *wp[ROWS];
    const float *xp[DIRECT_TOK];
    for (int r = 0; r < 2 * np; r++) {
        memcpy(w[r], p[r], (size_t)(n * size_of(dtype)));
        wp[r] = w[r];
    }
    for (int t = 0; t < nt; t++) {
        for (int64_t c = 0; c < MCI_BLOCK; c++) xs[t][c] = c < n ? x[t][c] : -0.0f;
        xp[t] = xs[t];
    }
    dot_block(wp, np, xp, nt, (n + STEP - 1) / STEP * STEP, acc, nan, dtype);
}

/* y[t][row[r]] for np pairs of rows and nt tokens. */
AVX512_INLINE void dot_rows(const mci_mat *w, const int64_t *row, const int np,
                            const float *const *x, const int nt, float *const *y,
                            const int dtype) {
    const int size = size_of(dtype);
    const int64_t K = w->cols;
    const uint8_t *p[ROWS], *scale[ROWS]; /* scale: of the row's first block */
    const float *xp[DIRECT_TOK];
    __m512 tot[PAIRS][DIRECT_TOK], acc[PAIRS][DIRECT_TOK];
    watch nan = watch_none();
    UNROLL for (int t = 0; t < nt; t++) xp[t] = x[t];
    UNROLL for (int r = 0; r < 2 * np; r++) {
        p[r] = w->data + row[r] * K * size;
        scale[r] = is_f8(dtype) ? scale_row(w, row[r]) : NULL;
    }
    UNROLL for (int i = 0; i < np; i++)
        UNROLL for (int t = 0; t < nt; t++) tot[i][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < mci_mat_blocks(w); b++) {
        const int64_t left = K - b * MCI_BLOCK;
        if (left >= MCI_BLOCK)
            dot_block(p, np, xp, nt, MCI_BLOCK, acc, &nan, dtype);
        else
            dot_tail(p, np, xp, nt, left, acc, &nan, dtype);
        UNROLL for (int i = 0; i < np; i++) {
            __m512 s = is_f8(dtype) ? two_scalars(scale_at(w, scale[2 * i], b),
                                                  scale_at(w, scale[2 * i + 1], b))
                                    : _mm512_set1_ps(1.0f);
            UNROLL for (int t = 0; t < nt; t++)
                tot[i][t] = _mm512_fmadd_ps(acc[i][t], s, tot[i][t]);
            p[2 * i] += MCI_BLOCK * size;
            p[2 * i + 1] += MCI_BLOCK * size;
        }
        UNROLL for (int t = 0; t < nt; t++) xp[t] += MCI_BLOCK;
    }
    UNROLL for (int i = 0; i < np; i++)
        UNROLL for (int t = 0; t < nt; t++) {
            y[t][row[2 * i]] = low_tree(tot[i][t]);
            y[t][row[2 * i + 1]] = high_tree(tot[i][t]);
        }
    if (!is_f8(dtype) || !watch_saw(&nan)) return;
    for (int r = 0; r < 2 * np; r++)
        if (row_has_nan(w->data + row[r] * K, K))
            for (int t = 0; t < nt; t++) y[t][row[r]] = NAN;
}

/* Fours, then threes and twos: one token alone leaves the fma units idle. */
AVX512_INLINE int64_t next_tokens(int64_t left) {
    return left == 5 || left == 6 ? 3 : MCI_MIN(left, (int64_t)DIRECT_TOK);
}

/* ---- many tokens: decode once into a tile ---------------------------------------------------- */

typedef struct tile {
    float w[PAIRS][TILE_COLS / 8][16]; /* padded with +0 to a multiple of 16 columns */
    float scale[TILE_BLOCKS][PAIRS][16];
} tile;

/* Row r and columns k0 .. k0+n of eight rows; those past `last` repeat it. */
AVX512_INLINE void fill_tile(tile *m, const mci_mat *w, int64_t r, int64_t last, int64_t k0,
                             int64_t n, watch *nan, const int dtype) {
    const int size = size_of(dtype);
    for (int i = 0; i < PAIRS; i++) {
        const int64_t ra = MCI_MIN(r + 2 * i, last), rb = MCI_MIN(ra + 1, last);
        const uint8_t *a = w->data + (ra * w->cols + k0) * size;
        const uint8_t *b = w->data + (rb * w->cols + k0) * size;
        if (is_f8(dtype)) {
            watch_bytes(nan, a, n);
            watch_bytes(nan, b, n);
        }
        __m512 v[2];
        int64_t c = 0;
        for (; c + STEP <= n; c += STEP) {
            decode_pair(a + c * size, b + c * size, v, dtype);
            _mm512_store_ps(m->w[i][c / 8], v[0]);
            _mm512_store_ps(m->w[i][c / 8 + 1], v[1]);
        }
        if (c < n) {
            uint8_t ta[STEP * 4] = {0}, tb[STEP * 4] = {0};
            memcpy(ta, a + c * size, (size_t)((n - c) * size));
            memcpy(tb, b + c * size, (size_t)((n - c) * size));
            decode_pair(ta, tb, v, dtype);
            _mm512_store_ps(m->w[i][c / 8], v[0]);
            _mm512_store_ps(m->w[i][c / 8 + 1], v[1]);
        }
        for (int64_t k = 0; k * MCI_BLOCK < n; k++)
            _mm512_store_ps(m->scale[k][i],
                            two_scalars(mci_mat_scale(w, ra, k0 / MCI_BLOCK + k),
                                        mci_mat_scale(w, rb, k0 / MCI_BLOCK + k)));
    }
}

/* tot (nt, PAIRS, 16) += the tile's n columns times x, block by block; nt is a constant. */
AVX512_INLINE void tile_times(const tile *m, int64_t n, const float *const *x, const int nt,
                              float *tot) {
    const float *xp[DIRECT_TOK];
    for (int t = 0; t < nt; t++) xp[t] = x[t];
    for (int64_t b = 0; b * MCI_BLOCK < n; b++) {
        const int64_t c0 = b * MCI_BLOCK, end = MCI_MIN(n, c0 + MCI_BLOCK);
        __m512 acc[PAIRS][DIRECT_TOK];
        UNROLL for (int i = 0; i < PAIRS; i++)
            UNROLL for (int t = 0; t < nt; t++) acc[i][t] = _mm512_setzero_ps();
        int64_t c = c0;
        for (; c + 8 <= end; c += 8) {
            __m512 xv[DIRECT_TOK];
            UNROLL for (int t = 0; t < nt; t++)
                xv[t] = in_register(both_halves(_mm256_loadu_ps(xp[t] + c)));
            UNROLL for (int i = 0; i < PAIRS; i++) {
                __m512 v = in_register(_mm512_load_ps(m->w[i][c / 8]));
                UNROLL for (int t = 0; t < nt; t++)
                    acc[i][t] = _mm512_fmadd_ps(v, xv[t], acc[i][t]);
            }
        }
        if (c < end)
            UNROLL for (int t = 0; t < nt; t++) {
                __m512 xv = both_halves(load_negzero(xp[t] + c, end - c));
                UNROLL for (int i = 0; i < PAIRS; i++)
                    acc[i][t] = _mm512_fmadd_ps(_mm512_load_ps(m->w[i][c / 8]), xv, acc[i][t]);
            }
        UNROLL for (int i = 0; i < PAIRS; i++) {
            __m512 s = _mm512_load_ps(m->scale[b][i]);
            UNROLL for (int t = 0; t < nt; t++) {
                float *at = tot + (t * PAIRS + i) * 16;
                _mm512_store_ps(at, _mm512_fmadd_ps(acc[i][t], s, _mm512_load_ps(at)));
            }
        }
    }
}

#define TIMES(nt)                                                                                  \
    AVX512 static __attribute__((noinline)) void times_##nt(                                       \
        const tile *m, int64_t n, const float *const *x, float *tot) {                             \
        tile_times(m, n, x, nt, tot);                                                              \
    }
TIMES(1)
TIMES(2)
TIMES(3)
TIMES(4)

AVX512_INLINE void many_tokens(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                               int64_t n_tok, float *const *y, const int dtype) {
    static void (*const times[])(const tile *, int64_t, const float *const *, float *) = {
        times_1, times_2, times_3, times_4};
    const int64_t K = w->cols;
    _Alignas(64) float tot[TOK * PAIRS * 16];
    _Alignas(64) tile m;
    for (int64_t r = r0; r < r1; r += ROWS) {
        const int64_t nr = MCI_MIN(r1 - r, (int64_t)ROWS);
        watch nan = watch_none();
        memset(tot, 0, (size_t)n_tok * PAIRS * 16 * sizeof *tot);
        for (int64_t k0 = 0; k0 < K; k0 += TILE_COLS) {
            const int64_t n = MCI_MIN(K - k0, (int64_t)TILE_COLS);
            fill_tile(&m, w, r, r1 - 1, k0, n, &nan, dtype);
            for (int64_t t = 0, nt; t < n_tok; t += nt) {
                const float *xp[DIRECT_TOK] = {0};
                nt = next_tokens(n_tok - t);
                for (int i = 0; i < nt; i++) xp[i] = x[t + i] + k0;
                times[nt - 1](&m, n, xp, tot + t * PAIRS * 16);
            }
        }
        for (int64_t t = 0; t < n_tok; t++)
            for (int64_t i = 0; i < nr; i++)
                y[t][r + i] = tree8(_mm256_load_ps(tot + (t * ROWS + i) * 8));
        if (!is_f8(dtype) || !watch_saw(&nan)) continue;
        for (int64_t i = 0; i < nr; i++)
            if (row_has_nan(w->data + (r + i) * K, K))
                for (int64_t t = 0; t < n_tok; t++) y[t][r + i] = NAN;
    }
}

/* ---- dispatch -------------------------------------------------------------------------------- */

/* One function each, not inlined, so that every loop has the registers to itself. */
#define FEW(name, nt, dtype)                                                                       \
    AVX512 static __attribute__((noinline)) void name##_8rows(                                     \
        const mci_mat *w, const int64_t *row, const float *const *x, float *const *y) {            \
        dot_rows(w, row, PAIRS, x, nt, y, dtype);                                                  \
    }                                                                                              \
    AVX512 static __attribute__((noinline)) void name##_2rows(                                     \
        const mci_mat *w, const int64_t *row, const float *const *x, float *const *y) {            \
        dot_rows(w, row, 1, x, nt, y, dtype);                                                      \
    }

typedef void dot_fn(const mci_mat *w, const int64_t *row, const float *const *x, float *const *y);
typedef void many_fn(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                     int64_t n_tok, float *const *y);

typedef struct format {
    dot_fn *rows8[DIRECT_TOK], *rows2[DIRECT_TOK]; /* by tokens - 1 */
    many_fn *many;
    int64_t few; /* up to so many tokens decoding anew for every 4 beats the tile (measured) */
} format;

#define FORMAT(name, dtype, limit)                                                                 \
    FEW(name##_1, 1, dtype)                                                                        \
    FEW(name##_2, 2, dtype)                                                                        \
    FEW(name##_3, 3, dtype)                                                                        \
    FEW(name##_4, 4, dtype)                                                                        \
    AVX512 static void name##_many(const mci_mat *w, int64_t r0, int64_t r1,                       \
                                   const float *const *x, int64_t n_tok, float *const *y) {        \
        many_tokens(w, r0, r1, x, n_tok, y, dtype);                                                \
    }                                                                                              \
    static const format name = {                                                                   \
        {name##_1_8rows, name##_2_8rows, name##_3_8rows, name##_4_8rows},                          \
        {name##_1_2rows, name##_2_2rows, name##_3_2rows, name##_4_2rows}, name##_many, limit};

FORMAT(f32, MC_F32, 8)
FORMAT(bf16, MC_BF16, 8)
FORMAT(f16, MC_F16, 8)
FORMAT(f8, F8, 4)
FORMAT(f8_small, F8_SMALL, 4)

AVX512 void mci_avx512_gemm(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                            int64_t n_tok, float *const *y) {
    const format *f = w->dtype == MC_F32 ? &f32 : w->dtype == MC_BF16 ? &bf16
                    : w->dtype == MC_F16 ? &f16 : &f8;
    for (int64_t left = n_tok, n; left > 0; left -= n, x += n, y += n) {
        if (left > f->few) {
            const int64_t passes = (left + TOK - 1) / TOK; /* of equal size */
            n = (left + passes - 1) / passes;
            f->many(w, r0, r1, x, n, y);
            continue;
        }
        n = next_tokens(left);
        const format *g = f;
        if (f == &f8) {
            bool small = true;
            for (int64_t i = 0; i < n && small; i++) small = is_small(x[i], w->cols);
            if (small) g = &f8_small;
        }
        const int64_t part = (r1 - r0) / ROWS;
        for (int64_t i = r0; i < r0 + part; i++) {
            int64_t row[ROWS];
            for (int k = 0; k < ROWS; k++) row[k] = i + k * part;
            g->rows8[n - 1](w, row, x, y);
        }
        for (int64_t i = r0 + ROWS * part; i < r1; i += 2) { /* an odd last row pairs with itself */
            const int64_t row[2] = {i, MCI_MIN(i + 1, r1 - 1)};
            g->rows2[n - 1](w, row, x, y);
        }
    }
}
#endif
