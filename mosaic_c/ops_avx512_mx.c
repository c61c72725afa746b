/* ops_avx512_mx.c - MXFP4 weights times few tokens with AVX-512.
 *
 * Sixteen rows lie side by side (ops_avx512.h) and each lane of the canonical order has a register
 * of 16 sums. Of every 16 bits a table turns the lowest 4 into a BF16 (it looks at 5 and holds all
 * twice): one column of the lower halves and, 4 columns further, one of the upper halves, which
 * unpacking makes f32. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx512.h"

enum {
    BLOCK = 32,
    TILE_COLS = SIDE * BLOCK, /* whose scales are fetched at once */
    TOKENS = 4,
};

typedef float sums[8][SIDE]; /* of a token: by lane and row */

/* tot += n K blocks times x, all of whose 32 columns exist; nt is a constant. next: to prefetch. */
AVX512_INLINE void times(const __m512i *w, const __m512 *scale, int64_t n, const float *const *x,
                         const int nt, sums *tot, const uint8_t *next) {
    /* 0 0.5 1 1.5 2 3 4 6 and their negatives */
    static const uint16_t code[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    const __m128i plus = _mm_loadu_si128((const __m128i *)(const void *)code);
    const __m128i minus = _mm_or_si128(plus, _mm_set1_epi16((int16_t)0x8000));
    const __m512i bf16 = _mm512_broadcast_i64x4(_mm256_set_m128i(minus, plus));
    const __m512i zero = _mm512_setzero_si512();
    const float *xp[TOKENS];
    UNROLL for (int t = 0; t < nt; t++) xp[t] = x[t];
    for (int64_t b = 0; b < n; b++) {
        __m512i v[4];
        side_fetch(next + 256 * b);
        UNROLL for (int d = 0; d < 4; d++) v[d] = words_in_register(w[4 * b + d]);
        UNROLL for (int k = 0; k < 4; k++) {
            __m512 lo[TOKENS], hi[TOKENS];
            UNROLL for (int t = 0; t < nt; t++) lo[t] = hi[t] = _mm512_setzero_ps();
            UNROLL for (int d = 0; d < 4; d++) {
                const __m512i two =
                    _mm512_permutexvar_epi16(_mm512_srli_epi16(v[d], 4 * k), bf16);
                const __m512 a = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, two));
                const __m512 c = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, two));
                UNROLL for (int t = 0; t < nt; t++) {
                    lo[t] = _mm512_fmadd_ps(a, _mm512_set1_ps(xp[t][8 * d + k]), lo[t]);
                    hi[t] = _mm512_fmadd_ps(c, _mm512_set1_ps(xp[t][8 * d + k + 4]), hi[t]);
                }
            }
            UNROLL for (int t = 0; t < nt; t++) {
                float *a = tot[t][k], *c = tot[t][k + 4];
                _mm512_store_ps(a, _mm512_fmadd_ps(lo[t], scale[b], _mm512_load_ps(a)));
                _mm512_store_ps(c, _mm512_fmadd_ps(hi[t], scale[b], _mm512_load_ps(c)));
            }
        }
        UNROLL for (int t = 0; t < nt; t++) xp[t] += BLOCK;
    }
}

AVX512_INLINE __m512 tree(const sums s) {
    __m512 t[8];
    UNROLL for (int l = 0; l < 8; l++) t[l] = _mm512_load_ps(s[l]);
    UNROLL for (int l = 0; l < 4; l++) t[l] = _mm512_add_ps(t[l], t[l + 4]);
    return _mm512_add_ps(_mm512_add_ps(t[0], t[2]), _mm512_add_ps(t[1], t[3]));
}

/* Rows r0 .. r1, at most 16, of nt tokens. */
AVX512_INLINE void rows16(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                          const int nt, float *const *y) {
    const int64_t K = w->cols, row = mci_row_bytes(MC_F4E2M1, K);
    const uint8_t *p[SIDE], *sp[SIDE];
    _Alignas(64) sums tot[TOKENS];
    __m512i tile[TILE_COLS / 8];
    __m512 scale[SIDE];
    memset(tot, 0, sizeof *tot * (size_t)nt);
    for (int64_t r = 0; r < SIDE; r++) {
        p[r] = w->data + MCI_MIN(r0 + r, r1 - 1) * row;
        sp[r] = mci_scale_row(w, MCI_MIN(r0 + r, r1 - 1));
    }
    for (int64_t k = 0; k < K; k += TILE_COLS) {
        const int64_t n = MCI_MIN(K - k, (int64_t)TILE_COLS), whole = n / BLOCK, left = n % BLOCK;
        const uint8_t *next = p[0] + SIDE * row + k * (SIDE / 2);
        const float *xp[TOKENS];
        side_lines(p, k / 2, n, true, tile);
        side_scales(w, sp, k / BLOCK, whole + (left > 0), scale);
        for (int t = 0; t < nt; t++) xp[t] = x[t] + k;
        times(tile, scale, whole, xp, nt, tot, next);
        if (!left) continue;
        float tail[TOKENS][BLOCK]; /* padded with -0: the products are, and change nothing */
        for (int t = 0; t < nt; t++) {
            for (int c = 0; c < BLOCK; c++)
                tail[t][c] = c < left ? xp[t][whole * BLOCK + c] : -0.0f;
            xp[t] = tail[t];
        }
        times(tile + 4 * whole, scale + whole, 1, xp, nt, tot, next);
    }
    const __mmask16 in = (__mmask16)((1 << (r1 - r0)) - 1);
    UNROLL for (int t = 0; t < nt; t++) _mm512_mask_storeu_ps(y[t] + r0, in, tree(tot[t]));
}

#define ROWS(nt)                                                                                   \
    AVX512 static __attribute__((noinline)) void rows_##nt(const mci_mat *w, int64_t r0,           \
                                                           int64_t r1, const float *const *x,      \
                                                           float *const *y) {                      \
        rows16(w, r0, r1, x, nt, y);                                                               \
    }
ROWS(1)
ROWS(2)
ROWS(3)
ROWS(4)

void mci_avx512_mx(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x, int64_t n_tok,
                   float *const *y) {
    static void (*const rows[])(const mci_mat *, int64_t, int64_t, const float *const *,
                                float *const *) = {rows_1, rows_2, rows_3, rows_4};
    for (int64_t r = r0; r < r1; r += SIDE)
        rows[n_tok - 1](w, r, MCI_MIN(r + SIDE, r1), x, y);
}
#endif
