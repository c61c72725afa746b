/* ops_avx512.h - what the AVX-512 files share. Included by them only.
 *
 * The canonical order has 8 lanes, a 512-bit register has 16: each half is the 8 lanes of a dot
 * product of its own (two rows of weights, two positions of K). All else is that of ops_avx2.h. */
#ifndef MCI_OPS_AVX512_H
#define MCI_OPS_AVX512_H
#include "ops_avx2.h"

#define TARGET512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define AVX512 __attribute__((target(TARGET512)))
#define AVX512_INLINE static inline __attribute__((always_inline, target(TARGET512)))

enum { UPPER = 0xff00 }; /* mask of the second half's lanes */

AVX512_INLINE __m512 both_halves(__m256 v) { return _mm512_broadcast_f32x8(v); }

AVX512_INLINE __m512 two_halves(__m256 low, __m256 high) {
    return _mm512_mask_broadcast_f32x8(_mm512_broadcast_f32x8(low), UPPER, high);
}

AVX512_INLINE __m512 two_scalars(float low, float high) {
    return _mm512_mask_broadcastss_ps(_mm512_set1_ps(low), UPPER, _mm_set_ss(high));
}

AVX512_INLINE float low_tree(__m512 t) { return tree8(_mm512_castps512_ps256(t)); }
AVX512_INLINE float high_tree(__m512 t) { return tree8(_mm512_extractf32x8_ps(t, 1)); }

/* ops_avx512_gemm.c, ops_avx512_mix.c */
void mci_avx512_gemm(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                     int64_t n_tok, float *const *y);
#endif
