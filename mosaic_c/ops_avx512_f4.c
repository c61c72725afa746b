/* ops_avx512_f4.c - MXFP4 weights times activations with AVX-512.
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
    TOKENS = 4, /* side by side */
};

typedef __m512 sums[8]; /* of 16 rows and a token, by lane */

/* tot += n K blocks times x, all of whose 32 columns exist; next: what to prefetch. nt is a
 * constant: the more tokens, the fewer lanes at a time, whose sums all stay in registers. */
AVX512_INLINE void times(const __m512i *w, const __m512 *scale, int64_t n, const float *const *x,
                         const int nt, sums *tot, const uint8_t *next) {
    /* 0 0.5 1 1.5 2 3 4 6 and their negatives */
    static const uint16_t code[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    const __m128i plus = _mm_loadu_si128((const __m128i *)(const void *)code);
    const __m128i minus = _mm_or_si128(plus, _mm_set1_epi16((int16_t)0x8000));
    const __m512i bf16 = _mm512_broadcast_i64x4(_mm256_set_m128i(minus, plus));
    const __m512i zero = _mm512_setzero_si512();
    const int some = nt == 1 ? 4 : nt == 2 ? 2 : 1;
    UNROLL for (int first = 0; first < 4; first += some) {
        __m512 lo[TOKENS][4], hi[TOKENS][4]; /* lanes k and k + 4 */
        UNROLL for (int t = 0; t < nt; t++)
            UNROLL for (int k = 0; k < some; k++) {
                lo[t][k] = tot[t][first + k];
                hi[t][k] = tot[t][first + k + 4];
            }
        for (int64_t b = 0; b < n; b++) {
            __m512i v[4];
            if (first == 0) side_fetch(next + 256 * b);
            UNROLL for (int d = 0; d < 4; d++) v[d] = ints_in_register(w[4 * b + d]);
            UNROLL for (int k = 0; k < some; k++) {
                __m512 a[TOKENS], c[TOKENS];
                UNROLL for (int t = 0; t < nt; t++) a[t] = c[t] = _mm512_setzero_ps();
                UNROLL for (int d = 0; d < 4; d++) {
                    const __m512i two = _mm512_permutexvar_epi16(
                        _mm512_srli_epi16(v[d], 4 * (first + k)), bf16);
                    const __m512 wa = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, two));
                    const __m512 wc = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, two));
                    UNROLL for (int t = 0; t < nt; t++) {
                        const float *at = x[t] + BLOCK * b + 8 * d + first + k;
                        a[t] = _mm512_fmadd_ps(wa, _mm512_set1_ps(at[0]), a[t]);
                        c[t] = _mm512_fmadd_ps(wc, _mm512_set1_ps(at[4]), c[t]);
                    }
                }
                UNROLL for (int t = 0; t < nt; t++) {
                    lo[t][k] = _mm512_fmadd_ps(a[t], scale[b], lo[t][k]);
                    hi[t][k] = _mm512_fmadd_ps(c[t], scale[b], hi[t][k]);
                }
            }
        }
        UNROLL for (int t = 0; t < nt; t++)
            UNROLL for (int k = 0; k < some; k++) {
                tot[t][first + k] = lo[t][k];
                tot[t][first + k + 4] = hi[t][k];
            }
    }
}

AVX512_INLINE __m512 tree(const sums s) {
    __m512 t[4];
    UNROLL for (int l = 0; l < 4; l++) t[l] = _mm512_add_ps(s[l], s[l + 4]);
    return _mm512_add_ps(_mm512_add_ps(t[0], t[2]), _mm512_add_ps(t[1], t[3]));
}

#define TIMES(nt)                                                                                  \
    AVX512 static __attribute__((noinline)) void times_##nt(                                       \
        const __m512i *w, const __m512 *scale, int64_t n, const float *const *x, sums *tot,        \
        const uint8_t *next) {                                                                     \
        times(w, scale, n, x, nt, tot, next);                                                      \
    }
TIMES(1)
TIMES(2)
TIMES(3)
TIMES(4)

/* n columns of 16 rows times nt tokens. */
AVX512_INLINE void tile_times(const __m512i *w, const __m512 *scale, int64_t n,
                              const float *const *x, int64_t nt, sums *tot, const uint8_t *next) {
    static void (*const by_tokens[])(const __m512i *, const __m512 *, int64_t, const float *const *,
                                     sums *, const uint8_t *) = {times_1, times_2, times_3,
                                                                 times_4};
    const int64_t whole = n / BLOCK, left = n % BLOCK;
    by_tokens[nt - 1](w, scale, whole, x, tot, next);
    if (!left) return;
    float tail[TOKENS][BLOCK]; /* padded with -0: the products are, and change nothing */
    const float *xp[TOKENS];
    for (int t = 0; t < nt; t++) {
        for (int c = 0; c < BLOCK; c++) tail[t][c] = c < left ? x[t][whole * BLOCK + c] : -0.0f;
        xp[t] = tail[t];
    }
    by_tokens[nt - 1](w + 4 * whole, scale + whole, 1, xp, tot, next);
}

/* Rows r0 .. r1, at most 16, of n_tok <= MCI_TILE_TOK tokens. */
AVX512 static void rows16(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                          int64_t n_tok, float *const *y) {
    const int64_t K = w->cols, row = mci_row_bytes(MC_F4E2M1, K);
    const uint8_t *p[SIDE], *sp[SIDE];
    sums tot[MCI_TILE_TOK];
    __m512i tile[TILE_COLS / 8];
    __m512 scale[SIDE];
    memset(tot, 0, sizeof *tot * (size_t)n_tok);
    for (int64_t r = 0; r < SIDE; r++) {
        p[r] = w->data + MCI_MIN(r0 + r, r1 - 1) * row;
        sp[r] = mci_scale_row(w, MCI_MIN(r0 + r, r1 - 1));
    }
    for (int64_t k = 0; k < K; k += TILE_COLS) {
        const int64_t n = MCI_MIN(K - k, (int64_t)TILE_COLS);
        const uint8_t *next = p[0] + SIDE * row + k * (SIDE / 2);
        side_lines(p, k / 2, n, true, tile);
        side_scales(w, sp, k / BLOCK, (n + BLOCK - 1) / BLOCK, scale);
        for (int64_t t = 0, nt; t < n_tok; t += nt) {
            const float *xp[TOKENS];
            nt = MCI_MIN(n_tok - t, (int64_t)TOKENS);
            for (int i = 0; i < nt; i++) xp[i] = x[t + i] + k;
            tile_times(tile, scale, n, xp, nt, tot + t, t ? (const uint8_t *)tile : next);
        }
    }
    const __mmask16 in = (__mmask16)((1 << (r1 - r0)) - 1);
    for (int64_t t = 0; t < n_tok; t++) _mm512_mask_storeu_ps(y[t] + r0, in, tree(tot[t]));
}

void mci_avx512_f4(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x, int64_t n_tok,
                   float *const *y) {
    for (int64_t n; n_tok > 0; n_tok -= n, x += n, y += n) {
        n = MCI_MIN(n_tok, (int64_t)MCI_TILE_TOK);
        for (int64_t r = r0; r < r1; r += SIDE) rows16(w, r, MCI_MIN(r + SIDE, r1), x, n, y);
    }
}
#endif
