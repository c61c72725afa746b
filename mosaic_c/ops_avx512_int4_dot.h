/* ops_avx512_int4_dot.h - 4-bit integers times int8 activations; ops_avx512_int4.c includes it
 * once for each way to multiply bytes, with these defined:
 *
 *   TARGET        attribute of a function that may multiply so
 *   NAME(x)       its name
 *   NAME(begin)   what the products of up to 32 columns are added to, of one of nt tokens
 *   NAME(madd)    adds to each 32 bits four products of a (0..15) and 4 bytes at b
 *   NAME(end)     the int32 sums that come of it
 *   PAIR_TOKENS   of which, with two tiles, all sums stay in registers */

/* sums (tiles, MCI_TILE_TOK) += n columns of each tile times nt tokens, whose q, s and q8 begin
 * where the tile does. isum goes into tot at the end of each group and at `last`, the row's; next:
 * what to prefetch. nt and tiles are constants. */
static inline __attribute__((always_inline, TARGET)) void NAME(times)(
    const int4_tile *m, const int tiles, int64_t n, int64_t group, bool last, const mci_qact *x,
    const int nt, int4_sums *sums, const uint8_t *next) {
    const __m512i low = _mm512_set1_epi8(0x0f);
    const int8_t *q[MAX_TOKENS];
    UNROLL for (int t = 0; t < nt; t++) q[t] = x[t].q;
    for (int64_t k = 0, g = 0; k < n; k += group, g++) {
        const bool whole = k + group <= n || last, begun = group > FEW_TILE_COLS; /* elsewhere */
        const int64_t end = (MCI_MIN(k + group, n) + 7) / 8;
        __m512i acc[MAX_TOKENS][2];
        UNROLL for (int t = 0; t < nt; t++)
            UNROLL for (int r = 0; r < tiles; r++)
                acc[t][r] = begun ? sums[r * MCI_TILE_TOK + t].isum : _mm512_setzero_si512();
        for (int64_t w = k / 8, some; w < end; w += some) {
            some = MCI_MIN(end - w, 4);
            UNROLL for (int r = 0; r < tiles; r++, next += 256) side_fetch(next);
            __m512i part[MAX_TOKENS][2];
            UNROLL for (int t = 0; t < nt; t++)
                UNROLL for (int r = 0; r < tiles; r++) part[t][r] = NAME(begin)(acc[t][r], nt);
            UNROLL for (int i = 0; i < 4; i++) {
                if (i >= some) break;
                __m512i lo[2], hi[2];
                UNROLL for (int r = 0; r < tiles; r++) {
                    const __m512i v = ints_in_register(m[r].w[w + i]);
                    lo[r] = _mm512_and_si512(v, low);
                    hi[r] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
                }
                UNROLL for (int t = 0; t < nt; t++) {
                    const __m512i b = broadcast_4(q[t] + 8 * i);
                    const __m512i c = broadcast_4(q[t] + 8 * i + 4);
                    UNROLL for (int r = 0; r < tiles; r++) {
                        part[t][r] = NAME(madd)(part[t][r], lo[r], b);
                        part[t][r] = NAME(madd)(part[t][r], hi[r], c);
                    }
                }
            }
            UNROLL for (int t = 0; t < nt; t++) {
                UNROLL for (int r = 0; r < tiles; r++)
                    acc[t][r] = NAME(end)(acc[t][r], part[t][r], nt);
                q[t] += 8 * some;
            }
        }
        UNROLL for (int t = 0; t < nt; t++)
            UNROLL for (int r = 0; r < tiles; r++) {
                int4_sums *s = &sums[r * MCI_TILE_TOK + t];
                if (begun) s->isum = whole ? _mm512_setzero_si512() : acc[t][r];
                if (!whole) continue;
                const __m512i isum = _mm512_sub_epi32(acc[t][r], _mm512_set1_epi32(x[t].q8[g]));
                const __m512 scale = _mm512_mul_ps(m[r].scale[g], _mm512_set1_ps(x[t].s[g]));
                s->tot = _mm512_fmadd_ps(_mm512_cvtepi32_ps(isum), scale, s->tot);
            }
    }
}

#define TIMES(name, tiles, nt)                                                                     \
    static __attribute__((noinline, TARGET)) void NAME(name)(                                      \
        const int4_tile *m, int64_t n, int64_t group, bool last, const mci_qact *x,                \
        int4_sums *sums, const uint8_t *next) {                                                    \
        NAME(times)(m, tiles, n, group, last, x, nt, sums, next);                                  \
    }
TIMES(one_1, 1, 1)
TIMES(one_2, 1, 2)
TIMES(one_3, 1, 3)
TIMES(one_4, 1, 4)
TIMES(two, 2, PAIR_TOKENS)
#undef TIMES

static const int4_kernels NAME(kernels) = {
    .one = {NAME(one_1), NAME(one_2), NAME(one_3), NAME(one_4)},
    .two = NAME(two),
    .two_tokens = PAIR_TOKENS,
};
