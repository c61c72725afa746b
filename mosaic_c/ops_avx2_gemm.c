/* ops_avx2_gemm.c - weights times activations with AVX2, FMA and F16C.
 *
 * One vector register is the 8 lanes of the canonical order, so a row of weights is one chain of
 * fused multiply-adds and speed comes from running several rows (and tokens) side by side:
 *
 *   few tokens    4 rows decoded on the fly for up to 3 tokens. The rows lie a quarter of the range
 *                 apart, so memory sees 4 long sequential streams.
 *   many tokens   4 rows x 512 columns decoded once into a tile on the stack, then 4 rows x 3
 *                 tokens at a time: 12 accumulators, 3 of x and 1 of w fill the 16 registers.
 *
 * A NaN weight makes the row's result NaN whatever x is, so FP8 rows are decoded as if no NaN
 * existed while a byte maximum watches for 0x7f and 0xff, unless w->no_nan; a row that has one is
 * set to NaN.
 *
 * The K block is a constant of each kernel. MXFP4 of few tokens: ops_avx2_f4.c. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx2.h"

#include <math.h>

enum {
    ROWS = 4,
    DIRECT_TOK = 3,                 /* tokens that share one decode on the fly */
    AHEAD = 1024,                   /* bytes a stream is prefetched */
    STRETCH = 128,                  /* columns prefetched at a time; whole K blocks */
    TILE_COLS = 512,                /* of a tile: 4 x 512 floats, 8 KB */
    TILE_BLOCKS = TILE_COLS / 32,   /* of the smallest K block */
    TOK = 96,                       /* tokens per pass over the weights; totals take 12 KB */
};

/* FP8 for tokens whose x is small: a kernel of its own, not a storage type. */
enum { F8 = MC_F8E4M3, F8_SMALL = 100 };

AVX2_INLINE bool is_scaled(int dtype) { return dtype > MC_F16; }

/* Bytes that n columns take. */
AVX2_INLINE int64_t bytes_of(int64_t n, const int dtype) {
    if (dtype == MC_F4E2M1) return (n + 1) / 2;
    return n * (dtype == MC_F32 ? 4 : is_scaled(dtype) ? 1 : 2);
}

/* Eight weights as f32, exactly; of FP8 all but the NaN codes.
 *
 *   FP8      s eeee mmm                          exponent bias 7
 *   f32      s 0000eeee mmm00000000000000000000  bias 127: 2^-120 of the value
 *
 *   MXFP4    s ee m                              exponent bias 1; 8 in a dword, each moved to the
 *            s ssssss ee m                       top of a lane and then right by 6, with the sign
 *   f32      s 000000ee m0000000000000000000000  2^-126 of the value
 *
 * F8_SMALL leaves it at that and x is multiplied by 2^120 instead, once for all rows; the products
 * are the same. Others scale the weight by an exact fma; its addend -0 keeps the sign of 0. (A
 * plain multiplication halves the speed where subnormal factors are slow, as on Zen.) */
AVX2_INLINE __m256 decode8(const uint8_t *p, const int dtype) {
    if (dtype == MC_F32) return _mm256_loadu_ps((const float *)(const void *)p);
    if (dtype == MC_BF16) return load_bf16(p);
    if (dtype == MC_F16) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
    if (dtype == MC_F4E2M1) {
        __m256i d = _mm256_set1_epi32((int)mci_u32(p));
        d = _mm256_sllv_epi32(d, _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0));
        d = _mm256_and_si256(_mm256_srai_epi32(d, 6), _mm256_set1_epi32((int)0x81c00000u));
        return _mm256_fmadd_ps(_mm256_castsi256_ps(d), _mm256_set1_ps(0x1p+126f),
                               _mm256_set1_ps(-0.0f));
    }
    __m256i b = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
    if (dtype == MC_INT8) return _mm256_cvtepi32_ps(b);
    b = _mm256_and_si256(_mm256_slli_epi32(b, 20), _mm256_set1_epi32((int)0x87f00000u));
    if (dtype == F8_SMALL) return _mm256_castsi256_ps(b);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(b), _mm256_set1_ps(0x1p+120f),
                           _mm256_set1_ps(-0.0f));
}

/* The last n < 8 weights of a row, padded with +0. */
AVX2_INLINE __m256 decode_tail(const uint8_t *p, int64_t n, const int dtype) {
    uint8_t b[32] = {0};
    memcpy(b, p, (size_t)bytes_of(n, dtype));
    if (dtype == MC_F4E2M1 && n % 2) b[n / 2] &= 15; /* the half byte after an odd end is junk */
    return decode8(b, dtype);
}

/* Stays in a register: compilers fold a load into each fma that uses it, and then the load ports,
 * not the fma units, set the pace. */
AVX2_INLINE __m256 in_register(__m256 v) {
    __asm__("" : "+x"(v));
    return v;
}

/* ---- NaN codes of FP8 ------------------------------------------------------------------------ */

typedef struct watch {
    __m256i smax, umax; /* 0x7f is the largest signed byte, 0xff the largest unsigned one */
} watch;

AVX2_INLINE void watch_bytes(watch *w, const uint8_t *p, int64_t n) {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)(p + i));
        w->smax = _mm256_max_epi8(w->smax, v);
        w->umax = _mm256_max_epu8(w->umax, v);
    }
    if (i == n) return;
    uint8_t b[32] = {0};
    memcpy(b, p + i, (size_t)(n - i));
    __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)b);
    w->smax = _mm256_max_epi8(w->smax, v);
    w->umax = _mm256_max_epu8(w->umax, v);
}

AVX2_INLINE bool watch_saw(const watch *w) {
    __m256i a = _mm256_cmpeq_epi8(w->smax, _mm256_set1_epi8(0x7f));
    __m256i b = _mm256_cmpeq_epi8(w->umax, _mm256_set1_epi8(-1));
    return _mm256_movemask_epi8(_mm256_or_si256(a, b)) != 0;
}

/* ---- few tokens: decode on the fly ----------------------------------------------------------- */

/* acc[r][t] = the dot product of n columns of nr rows and nt tokens, in lanes. All but n, and for a
 * whole block n too, are constants where this is inlined. */
#define UNROLL _Pragma("GCC unroll 4")

AVX2_INLINE void dot_block(const uint8_t *const *p, const int nr, const float *const *x,
                           const int nt, int64_t n, __m256 acc[ROWS][DIRECT_TOK], watch *nan,
                           const int dtype) {
    UNROLL for (int r = 0; r < nr; r++) {
        if (dtype == F8) watch_bytes(nan, p[r], n);
        UNROLL for (int t = 0; t < nt; t++) acc[r][t] = _mm256_setzero_ps();
    }
    int64_t c = 0;
    for (; c + 8 <= n; c += 8) {
        __m256 xv[DIRECT_TOK];
        UNROLL for (int t = 0; t < nt; t++)
            xv[t] = in_register(_mm256_loadu_ps(x[t] + c));
        UNROLL for (int r = 0; r < nr; r++) {
            __m256 v = in_register(decode8(p[r] + bytes_of(c, dtype), dtype));
            UNROLL for (int t = 0; t < nt; t++) acc[r][t] = _mm256_fmadd_ps(v, xv[t], acc[r][t]);
        }
    }
    if (c == n) return;
    UNROLL for (int r = 0; r < nr; r++) {
        __m256 v = decode_tail(p[r] + bytes_of(c, dtype), n - c, dtype);
        UNROLL for (int t = 0; t < nt; t++)
            acc[r][t] = _mm256_fmadd_ps(v, load_negzero(x[t] + c, n - c), acc[r][t]);
    }
}

/* y[t][row[r]] for nr rows and nt tokens. */
AVX2_INLINE void dot_rows(const mci_mat *w, const int64_t *row, const int nr,
                          const float *const *x, const int nt, float *const *y, const int dtype,
                          const int block) {
    const int64_t K = w->cols;
    const bool small = block < MCI_BLOCK; /* then scales are read 8 at a time */
    const uint8_t *p[ROWS];
    const float *xp[DIRECT_TOK];
    const uint8_t *scales[ROWS];
    float scale[ROWS][8]; /* those of 8 blocks */
    __m256 tot[ROWS][DIRECT_TOK], acc[ROWS][DIRECT_TOK];
    watch nan = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    UNROLL for (int t = 0; t < nt; t++) xp[t] = x[t];
    UNROLL for (int r = 0; r < nr; r++) {
        p[r] = w->data + row[r] * bytes_of(K, dtype);
        scales[r] = is_scaled(dtype) ? mci_scale_row(w, row[r]) : NULL;
        /* those of the row after the next */
        if (is_scaled(dtype) && dtype != F8 && dtype != F8_SMALL)
            for (int64_t i = 0, n = mci_mat_scales(w) * mci_scale_size(w); i < n; i += 64)
                _mm_prefetch((const char *)scales[r] + 2 * n + i, _MM_HINT_T0);
        UNROLL for (int t = 0; t < nt; t++) tot[r][t] = _mm256_setzero_ps();
    }
    for (int64_t b = 0, left = K; left > 0; b++, left -= block) {
        if (small && b % 8 == 0)
            UNROLL for (int r = 0; r < nr; r++)
                _mm256_storeu_ps(scale[r],
                                 scales8(w, scales[r], b, (left + block - 1) / block));
        if (b % (STRETCH / block) == 0)
            UNROLL for (int r = 0; r < nr; r++)
                for (int i = 0; i < bytes_of(STRETCH, dtype); i += 64)
                    _mm_prefetch((const char *)p[r] + AHEAD + i, _MM_HINT_T0);
        if (left >= block)
            dot_block(p, nr, xp, nt, block, acc, &nan, dtype);
        else
            dot_block(p, nr, xp, nt, left, acc, &nan, dtype);
        UNROLL for (int r = 0; r < nr; r++) {
            __m256 s = !is_scaled(dtype) ? _mm256_set1_ps(1.0f)
                       : small           ? _mm256_broadcast_ss(&scale[r][b % 8])
                                         : _mm256_set1_ps(mci_scale_of(w, scales[r], b));
            UNROLL for (int t = 0; t < nt; t++)
                tot[r][t] = _mm256_fmadd_ps(acc[r][t], s, tot[r][t]);
            p[r] += bytes_of(block, dtype);
        }
        UNROLL for (int t = 0; t < nt; t++) xp[t] += block;
    }
    UNROLL for (int r = 0; r < nr; r++)
        UNROLL for (int t = 0; t < nt; t++) y[t][row[r]] = tree8(tot[r][t]);
    if (dtype != F8 || !watch_saw(&nan)) return;
    UNROLL for (int r = 0; r < nr; r++)
        if (mci_avx2_f8_has_nan(w->data + row[r] * K, K))
            UNROLL for (int t = 0; t < nt; t++) y[t][row[r]] = NAN;
}

/* Threes, and the last four as two and two: one token alone leaves the fma units idle. */
AVX2_INLINE int64_t next_tokens(int64_t left) {
    return left == 2 || left == 4 ? 2 : MCI_MIN(left, 3);
}

/* ---- many tokens: decode once into a tile ---------------------------------------------------- */

typedef struct tile {
    float w[ROWS][TILE_COLS];         /* padded with +0 to a multiple of 8 columns */
    float scale[ROWS][TILE_BLOCKS];
} tile;

/* tot (nt, ROWS, 8) += the tile's n columns times x, block by block; nt, block are constants. */
AVX2_INLINE void tile_times(const tile *m, int64_t n, const float *const *x, const int nt,
                            float *tot, const int block) {
    const float *xp[3];
    for (int t = 0; t < nt; t++) xp[t] = x[t];
    for (int64_t b = 0; b * block < n; b++) {
        const int64_t c0 = b * block, end = MCI_MIN(n, c0 + block);
        __m256 acc[ROWS][3];
        for (int r = 0; r < ROWS; r++)
            for (int t = 0; t < nt; t++) acc[r][t] = _mm256_setzero_ps();
        int64_t c = c0;
        for (; c + 8 <= end; c += 8) {
            __m256 xv[3];
            for (int t = 0; t < nt; t++) xv[t] = in_register(_mm256_loadu_ps(xp[t] + c));
            for (int r = 0; r < ROWS; r++) {
                __m256 v = in_register(_mm256_load_ps(m->w[r] + c));
                for (int t = 0; t < nt; t++) acc[r][t] = _mm256_fmadd_ps(v, xv[t], acc[r][t]);
            }
        }
        if (c < end)
            for (int t = 0; t < nt; t++) {
                __m256 xv = load_negzero(xp[t] + c, end - c);
                for (int r = 0; r < ROWS; r++)
                    acc[r][t] = _mm256_fmadd_ps(_mm256_loadu_ps(m->w[r] + c), xv, acc[r][t]);
            }
        for (int r = 0; r < ROWS; r++) {
            __m256 s = _mm256_broadcast_ss(&m->scale[r][b]);
            for (int t = 0; t < nt; t++) {
                float *at = tot + (t * ROWS + r) * 8;
                _mm256_storeu_ps(at, _mm256_fmadd_ps(acc[r][t], s, _mm256_loadu_ps(at)));
            }
        }
    }
}

AVX2_INLINE void many_tokens(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                             int64_t n_tok, float *const *y, const int dtype, const int block) {
    const int64_t K = w->cols;
    _Alignas(32) float tot[TOK * ROWS * 8];
    _Alignas(32) tile m;
    for (int i = 0; i < ROWS; i++) /* for formats without scales */
        for (int b = 0; b < TILE_BLOCKS; b++) m.scale[i][b] = 1.0f;
    for (int64_t r = r0; r < r1; r += ROWS) {
        const int64_t nr = MCI_MIN(r1 - r, (int64_t)ROWS);
        watch nan = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        memset(tot, 0, (size_t)n_tok * ROWS * 8 * sizeof *tot);
        for (int64_t k0 = 0; k0 < K; k0 += TILE_COLS) {
            const int64_t n = MCI_MIN(K - k0, (int64_t)TILE_COLS);
            for (int i = 0; i < ROWS; i++) { /* rows past the end repeat the last one */
                const int64_t at = r + MCI_MIN(i, nr - 1);
                const uint8_t *p = w->data + at * bytes_of(K, dtype) + bytes_of(k0, dtype);
                if (dtype == F8 && !w->no_nan) watch_bytes(&nan, p, n);
                int64_t c = 0;
                for (; c + 8 <= n; c += 8)
                    _mm256_storeu_ps(m.w[i] + c, decode8(p + bytes_of(c, dtype), dtype));
                if (c < n)
                    _mm256_storeu_ps(m.w[i] + c,
                                     decode_tail(p + bytes_of(c, dtype), n - c, dtype));
                const int64_t blocks = (n + block - 1) / block;
                for (int64_t b = 0; b < blocks; b += 8)
                    if (is_scaled(dtype))
                        _mm256_storeu_ps(m.scale[i] + b, scales8(w, mci_scale_row(w, at),
                                                                 k0 / block + b, blocks - b));
            }
            const float *xp[3];
            int64_t t = 0;
            while (t < n_tok) { /* n_tok > 3, so nt is 2 or 3 */
                const int64_t nt = next_tokens(n_tok - t);
                for (int i = 0; i < nt; i++) xp[i] = x[t + i] + k0;
                if (nt == 3)
                    tile_times(&m, n, xp, 3, tot + t * ROWS * 8, block);
                else
                    tile_times(&m, n, xp, 2, tot + t * ROWS * 8, block);
                t += nt;
            }
        }
        for (int64_t t = 0; t < n_tok; t++)
            for (int64_t i = 0; i < nr; i++)
                y[t][r + i] = tree8(_mm256_loadu_ps(tot + (t * ROWS + i) * 8));
        if (dtype != F8 || !watch_saw(&nan)) continue;
        for (int64_t i = 0; i < nr; i++)
            if (mci_avx2_f8_has_nan(w->data + (r + i) * K, K))
                for (int64_t t = 0; t < n_tok; t++) y[t][r + i] = NAN;
    }
}

/* ---- dispatch -------------------------------------------------------------------------------- */

/* One function each, not inlined, so that every loop has the registers to itself. */
#define FEW(name, nt, dtype, block)                                                                \
    AVX2 static __attribute__((noinline)) void name##_4rows(                                       \
        const mci_mat *w, const int64_t *row, const float *const *x, float *const *y) {            \
        dot_rows(w, row, ROWS, x, nt, y, dtype, block);                                            \
    }                                                                                              \
    AVX2 static __attribute__((noinline)) void name##_1row(                                        \
        const mci_mat *w, const int64_t *row, const float *const *x, float *const *y) {            \
        dot_rows(w, row, 1, x, nt, y, dtype, block);                                               \
    }

typedef void dot_fn(const mci_mat *w, const int64_t *row, const float *const *x, float *const *y);
typedef void many_fn(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                     int64_t n_tok, float *const *y);

typedef struct format {
    dot_fn *rows4[DIRECT_TOK], *row1[DIRECT_TOK]; /* by tokens - 1 */
    many_fn *many;
    int64_t few; /* up to so many tokens decoding anew for every 3 beats the tile (measured) */
} format;

#define MANY(name, dtype, block)                                                                   \
    AVX2 static void name##_many(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,  \
                                 int64_t n_tok, float *const *y) {                                 \
        many_tokens(w, r0, r1, x, n_tok, y, dtype, block);                                         \
    }

/* The K block is a constant: loops over a block are of known length. */
#define FORMAT(name, dtype, block, limit)                                                          \
    FEW(name##_1, 1, dtype, block)                                                                 \
    FEW(name##_2, 2, dtype, block)                                                                 \
    FEW(name##_3, 3, dtype, block)                                                                 \
    MANY(name, dtype, block)                                                                       \
    static const format name = {{name##_1_4rows, name##_2_4rows, name##_3_4rows},                  \
                                {name##_1_1row, name##_2_1row, name##_3_1row}, name##_many,        \
                                limit};

FORMAT(f32, MC_F32, 128, 8)
FORMAT(bf16, MC_BF16, 128, 8)
FORMAT(f16, MC_F16, 128, 8)
FORMAT(f8, F8, 128, 5)

FEW(f8_small_1, 1, F8_SMALL, 128)
FEW(f8_small_2, 2, F8_SMALL, 128)
FEW(f8_small_3, 3, F8_SMALL, 128)
static const format f8_small = {{f8_small_1_4rows, f8_small_2_4rows, f8_small_3_4rows},
                                {f8_small_1_1row, f8_small_2_1row, f8_small_3_1row}, NULL, 0};

FORMAT(i8, MC_INT8, 128, 8)
FORMAT(i8_64, MC_INT8, 64, 8)
FORMAT(i8_32, MC_INT8, 32, 8)

MANY(f4, MC_F4E2M1, 32)
static const format f4 = {.many = f4_many, .few = 8}; /* few tokens: ops_avx2_f4.c */

static const format *format_of(const mci_mat *w) {
    switch (w->dtype) {
    case MC_F32: return &f32;
    case MC_BF16: return &bf16;
    case MC_F16: return &f16;
    case MC_F4E2M1: return &f4;
    case MC_INT8: return w->block_cols == 32 ? &i8_32 : w->block_cols == 64 ? &i8_64 : &i8;
    case MC_F8E4M3: return &f8;
    default: return NULL;
    }
}

/* Up to 3 tokens, decoding on the fly. */
AVX2 static void few_tokens(const mci_mat *w, const format *f, int64_t r0, int64_t r1,
                            const float *const *x, int64_t n, float *const *y) {
    _Alignas(32) float scaled[MCI_MAX_SCALED];
    const float *xs[DIRECT_TOK];
    if (f == &f8 && mci_avx2_scale_x(w, x, n, scaled, xs)) {
        f = &f8_small;
        x = xs;
    }
    const int64_t part = (r1 - r0) / ROWS;
    for (int64_t i = r0; i < r0 + part; i++) {
        const int64_t row[ROWS] = {i, i + part, i + 2 * part, i + 3 * part};
        f->rows4[n - 1](w, row, x, y);
    }
    for (int64_t i = r0 + ROWS * part; i < r1; i++) f->row1[n - 1](w, &i, x, y);
}

AVX2 void mci_avx2_gemm(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                        int64_t n_tok, float *const *y) {
    const format *f = format_of(w);
    if (!f) { /* right before it is fast */
        mci_ops_ref.gemm(w, r0, r1, x, n_tok, y);
        return;
    }
    for (int64_t left = n_tok, n; left > 0; left -= n, x += n, y += n) {
        if (left > f->few) {
            const int64_t passes = (left + TOK - 1) / TOK; /* of equal size */
            n = (left + passes - 1) / passes;
            f->many(w, r0, r1, x, n, y);
            continue;
        }
        n = next_tokens(left);
        if (f == &f4)
            mci_avx2_f4(w, r0, r1, x, n, y);
        else
            few_tokens(w, f, r0, r1, x, n, y);
    }
}
#endif
