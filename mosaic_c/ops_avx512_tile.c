/* ops_avx512_tile.c - weights times many activations with AVX-512.
 *
 * 8 rows x 512 columns are decoded once into a tile on the stack, two rows to a register, then
 * 4 such pairs meet 4 tokens at a time: 16 accumulators, which also hide the latency of the fma. x
 * is broadcast to both halves, a vector with two values scales them, and each half goes down the
 * lane tree alone. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx512.h"

#include <math.h>

enum {
    PAIRS = 4,
    ROWS = 2 * PAIRS,
    TOKENS = 4,                     /* side by side */
    STEP = 16,                      /* columns decoded at a time */
    TILE_COLS = 512,                /* of whole K blocks: 8 x 512 floats, 16 KB */
    TILE_BLOCKS = TILE_COLS / 32,   /* K blocks, at most */
};

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

/* See ops_avx512_gemm.c. */
AVX512_INLINE __m512 f8_value(__m512i top) {
    __m512 v = _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_srai_epi32(top, 4), _mm512_set1_epi32((int)0x87f00000u)));
    return _mm512_fmadd_ps(v, _mm512_set1_ps(0x1p+120f), _mm512_set1_ps(-0.0f));
}

/* Sixteen weights of row a and of row b as f32, exactly; of FP8 all but the NaN codes. v[0]: the
 * first eight of a, then of b; v[1]: the other eight of both. */
AVX512_INLINE void decode_pair(const uint8_t *a, const uint8_t *b, __m512 v[2], const int dtype) {
    if (dtype == F8) { /* both rows' bytes twice, so that a shuffle inside 128 bits finds them */
        __m512i rows = _mm512_mask_broadcast_i64x2(_mm512_broadcast_i64x2(load16(a)), 0xf0,
                                                   load16(b));
        v[0] = f8_value(top_bytes(rows, 0));
        v[1] = f8_value(top_bytes(rows, 8));
        return;
    }
    if (dtype == I8) {
        const __m128i la = load16(a), lb = load16(b);
        v[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_unpacklo_epi64(la, lb)));
        v[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_unpackhi_epi64(la, lb)));
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

typedef struct tile {
    float w[PAIRS][TILE_COLS / 8][16]; /* padded with +0 to a multiple of 16 columns */
    float scale[TILE_BLOCKS][PAIRS][16];
} tile;

/* Row r and columns k0 .. k0+n of eight rows; those past `last` repeat it. */
AVX512_INLINE void fill_tile(tile *m, const mci_mat *w, int64_t r, int64_t last, int64_t k0,
                             int64_t n, watch *nan, const int dtype) {
    const int size = size_of(dtype);
    const int64_t block = mci_mat_block(w);
    for (int i = 0; i < PAIRS; i++) {
        const int64_t ra = MCI_MIN(r + 2 * i, last), rb = MCI_MIN(ra + 1, last);
        const uint8_t *a = w->data + (ra * w->cols + k0) * size;
        const uint8_t *b = w->data + (rb * w->cols + k0) * size;
        if (dtype == F8 && !w->no_nan) {
            watch_bytes(nan, a, n);
            watch_bytes(nan, b, n);
        }
        /* the same columns of the next eight rows, which are read when this tile is done with */
        const int64_t next = ROWS * w->cols * size;
        for (int64_t at = 0; at < n * size; at += 64) {
            _mm_prefetch((const char *)a + next + at, _MM_HINT_T0);
            _mm_prefetch((const char *)b + next + at, _MM_HINT_T0);
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
        for (int64_t k = 0; k * block < n; k++)
            _mm512_store_ps(m->scale[k][i], two_scalars(mci_mat_scale(w, ra, k0 / block + k),
                                                        mci_mat_scale(w, rb, k0 / block + k)));
    }
}

/* tot (nt, PAIRS, 16) += the tile's n columns times x, block by block; block and nt are
 * constants. */
AVX512_INLINE void tile_times(const tile *m, int64_t n, const int block, const float *const *x,
                              const int nt, float *tot) {
    const float *xp[TOKENS];
    for (int t = 0; t < nt; t++) xp[t] = x[t];
    for (int64_t b = 0; b * block < n; b++) {
        const int64_t c0 = b * block, end = MCI_MIN(n, c0 + block);
        __m512 acc[PAIRS][TOKENS];
        UNROLL for (int i = 0; i < PAIRS; i++)
            UNROLL for (int t = 0; t < nt; t++) acc[i][t] = _mm512_setzero_ps();
        int64_t c = c0;
        for (; c + 8 <= end; c += 8) {
            __m512 xv[TOKENS];
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

#define TIMES(block, nt)                                                                           \
    AVX512 static __attribute__((noinline)) void times_##block##_##nt(                             \
        const tile *m, int64_t n, const float *const *x, float *tot) {                             \
        tile_times(m, n, block, x, nt, tot);                                                       \
    }
#define TIMES_OF(block) TIMES(block, 1) TIMES(block, 2) TIMES(block, 3) TIMES(block, 4)
TIMES_OF(32)
TIMES_OF(64)
TIMES_OF(128)

/* Fours, then threes and twos: one token alone leaves the fma units idle. */
AVX512_INLINE int64_t next_tokens(int64_t left) {
    return left == 5 || left == 6 ? 3 : MCI_MIN(left, (int64_t)TOKENS);
}

AVX512_INLINE void many_tokens(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                               int64_t n_tok, float *const *y, const int dtype) {
    typedef void times_fn(const tile *, int64_t, const float *const *, float *);
    static times_fn *const of_block[3][TOKENS] = {
        {times_32_1, times_32_2, times_32_3, times_32_4},
        {times_64_1, times_64_2, times_64_3, times_64_4},
        {times_128_1, times_128_2, times_128_3, times_128_4}};
    times_fn *const *times = of_block[mci_mat_block(w) / 64];
    const int64_t K = w->cols;
    _Alignas(64) float tot[MCI_TILE_TOK * PAIRS * 16];
    _Alignas(64) tile m;
    for (int64_t r = r0; r < r1; r += ROWS) {
        const int64_t nr = MCI_MIN(r1 - r, (int64_t)ROWS);
        watch nan = watch_none();
        memset(tot, 0, (size_t)n_tok * PAIRS * 16 * sizeof *tot);
        for (int64_t k0 = 0; k0 < K; k0 += TILE_COLS) {
            const int64_t n = MCI_MIN(K - k0, (int64_t)TILE_COLS);
            fill_tile(&m, w, r, r1 - 1, k0, n, &nan, dtype);
            for (int64_t t = 0, nt; t < n_tok; t += nt) {
                const float *xp[TOKENS] = {0};
                nt = next_tokens(n_tok - t);
                for (int i = 0; i < nt; i++) xp[i] = x[t + i] + k0;
                times[nt - 1](&m, n, xp, tot + t * PAIRS * 16);
            }
        }
        for (int64_t t = 0; t < n_tok; t++)
            for (int64_t i = 0; i < nr; i++)
                y[t][r + i] = tree8(_mm256_load_ps(tot + (t * ROWS + i) * 8));
        if (dtype != F8 || !watch_saw(&nan)) continue;
        for (int64_t i = 0; i < nr; i++)
            if (mci_avx2_f8_has_nan(w->data + (r + i) * K, K))
                for (int64_t t = 0; t < n_tok; t++) y[t][r + i] = NAN;
    }
}

AVX512 void mci_avx512_tile(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                            int64_t n_tok, float *const *y) {
    if (w->dtype == MC_F32)
        many_tokens(w, r0, r1, x, n_tok, y, MC_F32);
    else if (w->dtype == MC_BF16)
        many_tokens(w, r0, r1, x, n_tok, y, MC_BF16);
    else if (w->dtype == MC_F16)
        many_tokens(w, r0, r1, x, n_tok, y, MC_F16);
    else if (w->dtype == I8)
        many_tokens(w, r0, r1, x, n_tok, y, I8);
    else
        many_tokens(w, r0, r1, x, n_tok, y, F8);
}
#endif
