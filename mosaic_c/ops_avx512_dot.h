/* ops_avx512_dot.h - 4-bit integers times int8 activations; ops_avx512_int4.c includes it once for
 * each way to multiply bytes, with these defined:
 *
 *   TARGET        attribute of a function that may multiply so
 *   NAME(x)       its name
 *   NAME(begin)   the sums to which products of up to 32 columns are added
 *   NAME(madd)    adds four products of a (0..15) and b (signed) to each
 *   NAME(end)     the int32 sums again */

/* isum and tot += n columns of 16 rows times nt tokens, of which x is the part that meets them.
 * isum goes into tot at the end of each group, and at `last`, the row's; nt is a constant. */
static inline __attribute__((always_inline, TARGET)) void NAME(times)(
    const int4_tile *m, int64_t n, int64_t group, bool last, const mci_qact *x, const int nt,
    int4_sums *sums) {
    const __m512i low = _mm512_set1_epi8(0x0f);
    const int8_t *q[MAX_TOKENS];
    UNROLL for (int t = 0; t < nt; t++) q[t] = x[t].q;
    for (int64_t k = 0, g = 0; k < n; k += group, g++) {
        const __m512i *w = m->w + k / 8, *end = m->w + (MCI_MIN(k + group, n) + 7) / 8;
        __m512i acc[MAX_TOKENS];
        UNROLL for (int t = 0; t < nt; t++) acc[t] = sums[t].isum;
        while (w < end) {
            __m512i part[MAX_TOKENS];
            const int64_t some = MCI_MIN(end - w, 4);
            UNROLL for (int t = 0; t < nt; t++) part[t] = NAME(begin)(acc[t]);
            UNROLL for (int i = 0; i < 4; i++) {
                if (i >= some) break;
                const __m512i lo = _mm512_and_si512(w[i], low);
                const __m512i hi = _mm512_and_si512(_mm512_srli_epi16(w[i], 4), low);
                UNROLL for (int t = 0; t < nt; t++) {
                    part[t] = NAME(madd)(part[t], lo, q[t] + 8 * i);
                    part[t] = NAME(madd)(part[t], hi, q[t] + 8 * i + 4);
                }
            }
            UNROLL for (int t = 0; t < nt; t++) {
                acc[t] = NAME(end)(acc[t], part[t]);
                q[t] += 8 * some;
            }
            w += some;
        }
        const bool whole = k + group <= n || last;
        UNROLL for (int t = 0; t < nt; t++) {
            sums[t].isum = whole ? _mm512_setzero_si512() : acc[t];
            if (!whole) continue;
            const __m512i isum = _mm512_sub_epi32(acc[t], _mm512_set1_epi32(x[t].q8[g]));
            const __m512 s = _mm512_mul_ps(m->scale[g], _mm512_set1_ps(x[t].s[g]));
            sums[t].tot = _mm512_fmadd_ps(_mm512_cvtepi32_ps(isum), s, sums[t].tot);
        }
    }
}

#define TIMES(nt)                                                                                  \
    static __attribute__((noinline, TARGET)) void NAME(times_##nt)(                                \
        const int4_tile *m, int64_t n, int64_t group, bool last, const mci_qact *x,                \
        int4_sums *sums) {                                                                         \
        NAME(times)(m, n, group, last, x, nt, sums);                                               \
    }
TIMES(1)
TIMES(2)
TIMES(3)
TIMES(4)
TIMES(8)
#undef TIMES

static int4_times *const NAME(by_tokens)[] = {NAME(times_1), NAME(times_2), NAME(times_3),
                                              NAME(times_4), NAME(times_8)};
