/* ops_avx512_delta.c - gated delta rule with AVX-512.
 *
 * Bits equal those of ops_ref.c: a column's sums run down one lane in the order written there. 128
 * columns at a time hide the latency of the sums behind each other, and with 128 value columns the
 * state streams through in whole rows. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx512.h"

/* Up to 16 floats, or exactly 16 where there are more vectors. */
AVX512_INLINE __m512 load(const float *p, const int nv, __mmask16 in) {
    return nv == 1 ? _mm512_maskz_loadu_ps(in, p) : _mm512_loadu_ps(p);
}

AVX512_INLINE void store(float *p, __m512 v, const int nv, __mmask16 in) {
    if (nv == 1)
        _mm512_mask_storeu_ps(p, in, v);
    else
        _mm512_storeu_ps(p, v);
}

/* All tokens for the columns j .. j+16*nv (in: those of a lone vector). The first token reads s_in,
 * the others what was written. */
AVX512_INLINE void delta_columns(const mci_delta_args *a, int64_t j, const int nv, __mmask16 in,
                                 const bool stream) {
    const int64_t dk = a->dk, dv = a->dv;
    const float *from = a->s_in + j;
    float *to = a->s_out + j;
    for (int64_t t = 0; t < a->n_tok; t++, from = to) {
        const float *q = a->q + t * a->ld_qk, *key = a->k + t * a->ld_qk;
        const float *v = a->v + t * a->ld_v + j;
        float *out = a->o + t * a->ld_o + j;
        const __m512 alpha = _mm512_set1_ps(a->alpha[t * a->ld_ab]);
        const __m512 beta = _mm512_set1_ps(a->beta[t * a->ld_ab]);
        __m512 d[8], o[8];
        UNROLL for (int i = 0; i < nv; i++) d[i] = o[i] = _mm512_setzero_ps();
        for (int64_t k = 0; k < dk; k++) {
            const __m512 kk = _mm512_set1_ps(key[k]);
            UNROLL for (int i = 0; i < nv; i++) {
                const __m512 s = load(from + k * dv + 16 * i, nv, in);
                d[i] = _mm512_fmadd_ps(_mm512_mul_ps(alpha, s), kk, d[i]);
            }
        }
        UNROLL for (int i = 0; i < nv; i++)
            d[i] = _mm512_mul_ps(beta, _mm512_sub_ps(load(v + 16 * i, nv, in), d[i]));
        for (int64_t k = 0; k < dk; k++) {
            const __m512 kk = _mm512_set1_ps(key[k]), qq = _mm512_set1_ps(q[k]);
            UNROLL for (int i = 0; i < nv; i++) {
                __m512 s = load(from + k * dv + 16 * i, nv, in);
                s = _mm512_fmadd_ps(kk, d[i], _mm512_mul_ps(alpha, s));
                if (stream)
                    _mm512_stream_ps(to + k * dv + 16 * i, s);
                else
                    store(to + k * dv + 16 * i, s, nv, in);
                o[i] = _mm512_fmadd_ps(s, qq, o[i]);
            }
        }
        UNROLL for (int i = 0; i < nv; i++) store(out + 16 * i, o[i], nv, in);
    }
}

AVX512_INLINE void delta_range(const mci_delta_args *a, const bool stream) {
    int64_t j = a->j0;
    for (; j + 128 <= a->j1; j += 128) delta_columns(a, j, 8, 0, stream);
    for (; j + 64 <= a->j1; j += 64) delta_columns(a, j, 4, 0, stream);
    for (; j < a->j1; j += 16)
        delta_columns(a, j, 1, (__mmask16)(0xffff >> (16 - MCI_MIN(a->j1 - j, 16))), stream);
}

/* Whole cache lines that nobody reads again in this call? */
static bool can_stream(const mci_delta_args *a) {
    return a->n_tok == 1 && a->s_in != a->s_out && a->dv % 16 == 0 && (a->j1 - a->j0) % 16 == 0 &&
           (uintptr_t)(a->s_out + a->j0) % 64 == 0;
}

AVX512 void mci_avx512_delta(const mci_delta_args *a) {
    if (a->n_tok == 0 && a->s_in != a->s_out)
        for (int64_t k = 0; k < a->dk; k++)
            memcpy(a->s_out + k * a->dv + a->j0, a->s_in + k * a->dv + a->j0,
                   (size_t)(a->j1 - a->j0) * sizeof(float));
    if (can_stream(a)) { /* past the caches: a line need not be read before it is written */
        delta_range(a, true);
        _mm_sfence();
    } else {
        delta_range(a, false);
    }
}
#endif
