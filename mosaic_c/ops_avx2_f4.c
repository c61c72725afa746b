/* ops_avx2_f4.c - MXFP4 weights times the activations of few tokens with AVX2.
 *
 * Decoded 8 columns at a time a weight would cost a shift, a mask and a scaling of its own. Two
 * tables of 16 bytes give the upper half of its f32 instead, for 32 weights at a time, and two rows
 * share a register from the first load to the last sum:
 *
 *   16 bytes of row a          | of row b     c1c0 c3c2 c5c4 ..: even columns are the low halves
 *   their nibbles in order     | of row b     c0 c1 c2 c3 ..: even and odd ones interleaved
 *   looked up, interleaved     | of row b     8 columns as BF16
 *   c0 c1 c2 c3 | of row b and c4 c5 c6 c7 | of row b: f32, over zeros
 *
 * so lanes 0..3 of the canonical order lie in one register and 4..7 in another. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx2.h"

enum {
    ROWS = 4,     /* a quarter of the range apart: memory sees 4 sequential streams */
    BLOCK = 32,
    AHEAD = 1024, /* bytes a row is prefetched */
};

#define UNROLL _Pragma("GCC unroll 4")

/* tot[h][t] += n blocks of rows a and b times x, each with its scale; nt is a constant. */
AVX2_INLINE void add_blocks(const uint8_t *a, const uint8_t *b, const float *sa, const float *sb,
                            int64_t n, const float *const *x, const int nt,
                            __m256 tot[2][MCI_F4_TOK]) {
    /* the upper halves of 0 0.5 1 1.5 2 3 4 6: 0000 3f00 3f80 3fc0 4000 4040 4080 40c0 */
    const __m256i lower = _mm256_set1_epi64x((long long)0xc0804000c0800000u);
    const __m256i upper = _mm256_broadcastsi128_si256(
        _mm_set_epi64x((long long)0xc0c0c0c0bfbfbf80u, 0x404040403f3f3f00));
    const __m256i low = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i++) {
        __m256 acc[2][MCI_F4_TOK];
        const __m256i v = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(a + 16 * i))),
            _mm_loadu_si128((const __m128i *)(const void *)(b + 16 * i)), 1);
        const __m256i even = _mm256_and_si256(v, low);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
        UNROLL for (int t = 0; t < nt; t++) acc[0][t] = acc[1][t] = _mm256_setzero_ps();
        UNROLL for (int c = 0; c < BLOCK; c += 8) {
            const __m256i code =
                c < 16 ? _mm256_unpacklo_epi8(even, odd) : _mm256_unpackhi_epi8(even, odd);
            const __m256i l = _mm256_shuffle_epi8(lower, code);
            const __m256i u = _mm256_shuffle_epi8(upper, code);
            const __m256i h = c % 16 ? _mm256_unpackhi_epi8(l, u) : _mm256_unpacklo_epi8(l, u);
            const __m256 w0 = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, h));
            const __m256 w1 = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, h));
            UNROLL for (int t = 0; t < nt; t++) {
                const __m128 *xt = (const __m128 *)(const void *)(x[t] + BLOCK * i + c);
                acc[0][t] = _mm256_fmadd_ps(w0, _mm256_broadcast_ps(xt), acc[0][t]);
                acc[1][t] = _mm256_fmadd_ps(w1, _mm256_broadcast_ps(xt + 1), acc[1][t]);
            }
        }
        const __m256 s =
            _mm256_blend_ps(_mm256_broadcast_ss(sa + i), _mm256_broadcast_ss(sb + i), 0xf0);
        UNROLL for (int h = 0; h < 2; h++)
            UNROLL for (int t = 0; t < nt; t++)
                tot[h][t] = _mm256_fmadd_ps(acc[h][t], s, tot[h][t]);
    }
}

/* The same for the last n < BLOCK columns, in copies padded with +0 weights and with x of -0: their
 * product -0 changes nothing. */
AVX2_INLINE void add_tail(const uint8_t *a, const uint8_t *b, const float *sa, const float *sb,
                          int64_t n, const float *const *x, const int nt,
                          __m256 tot[2][MCI_F4_TOK]) {
    uint8_t w[2][BLOCK / 2] = {{0}};
    float xs[MCI_F4_TOK][BLOCK];
    const float *xp[MCI_F4_TOK];
    memcpy(w[0], a, (size_t)(n + 1) / 2);
    memcpy(w[1], b, (size_t)(n + 1) / 2);
    for (int r = 0; n % 2 && r < 2; r++) w[r][n / 2] &= 15; /* half a byte of junk */
    for (int t = 0; t < nt; t++) {
        xp[t] = xs[t];
        for (int c = 0; c < BLOCK; c++) xs[t][c] = c < n ? x[t][c] : -0.0f;
    }
    add_blocks(w[0], w[1], sa, sb, 1, xp, nt, tot);
}

/* y[t][row[r]] for ROWS rows and nt tokens. */
AVX2_INLINE void dot_rows(const mci_mat *w, const int64_t row[ROWS], const float *const *x,
                          const int nt, float *const *y) {
    const int64_t K = w->cols, bytes = (K + 1) / 2, blocks = mci_mat_blocks(w);
    __m256 tot[ROWS / 2][2][MCI_F4_TOK];
    UNROLL for (int r = 0; r < ROWS; r += 2)
        UNROLL for (int t = 0; t < nt; t++)
            tot[r / 2][0][t] = tot[r / 2][1][t] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b += 8) { /* as many scales as are decoded together */
        const int64_t whole = MCI_MIN(K / BLOCK - b, 8), c = b * BLOCK;
        const float *xp[MCI_F4_TOK];
        UNROLL for (int t = 0; t < nt; t++) xp[t] = x[t] + c;
        UNROLL for (int r = 0; r < ROWS; r += 2) {
            const uint8_t *p[2];
            float s[2][8];
            UNROLL for (int i = 0; i < 2; i++) {
                const uint8_t *scale = w->scale + row[r + i] * blocks;
                p[i] = w->data + row[r + i] * bytes + c / 2;
                _mm256_storeu_ps(s[i], scales8(w, scale, b, blocks - b));
                _mm_prefetch((const char *)p[i] + AHEAD, _MM_HINT_T0);
                _mm_prefetch((const char *)p[i] + AHEAD + 64, _MM_HINT_T0);
                _mm_prefetch((const char *)scale + b + AHEAD / 4, _MM_HINT_T0);
            }
            add_blocks(p[0], p[1], s[0], s[1], whole, xp, nt, tot[r / 2]);
            if (whole < 8 && K - c > whole * BLOCK) {
                const float *xt[MCI_F4_TOK];
                for (int t = 0; t < nt; t++) xt[t] = xp[t] + whole * BLOCK;
                add_tail(p[0] + 16 * whole, p[1] + 16 * whole, s[0] + whole, s[1] + whole,
                         K - c - whole * BLOCK, xt, nt, tot[r / 2]);
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; r += 2)
        UNROLL for (int t = 0; t < nt; t++) {
            const __m256 t0 = tot[r / 2][0][t], t1 = tot[r / 2][1][t];
            y[t][row[r]] = tree8(_mm256_permute2f128_ps(t0, t1, 0x20));
            y[t][row[r + 1]] = tree8(_mm256_permute2f128_ps(t0, t1, 0x31));
        }
}

/* One function each, not inlined, so that every loop has the registers to itself. */
#define DOT(nt)                                                                                    \
    AVX2 static __attribute__((noinline)) void dot_##nt(const mci_mat *w, const int64_t *row,      \
                                                        const float *const *x, float *const *y) {  \
        dot_rows(w, row, x, nt, y);                                                                \
    }
DOT(1)
DOT(2)
DOT(3)

AVX2 void mci_avx2_f4(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                      int64_t n_tok, float *const *y) {
    static void (*const dot[MCI_F4_TOK])(const mci_mat *w, const int64_t *row,
                                         const float *const *x, float *const *y) = {dot_1, dot_2,
                                                                                    dot_3};
    const int64_t part = (r1 - r0) / ROWS;
    for (int64_t i = r0; i < r0 + part; i++)
        dot[n_tok - 1](w, (int64_t[ROWS]){i, i + part, i + 2 * part, i + 3 * part}, x, y);
    const int64_t i = r0 + ROWS * part, last = r1 - 1; /* rows past the end repeat the last one */
    if (i < r1)
        dot[n_tok - 1](w, (int64_t[ROWS]){i, MCI_MIN(i + 1, last), MCI_MIN(i + 2, last), last}, x,
                       y);
}
#endif
