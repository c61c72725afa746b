/* ops_avx512.h - what the AVX-512 files share. Included by them only.
 *
 * The canonical order has 8 lanes, a 512-bit register 16: it holds those of two rows, or 4 lanes of
 * four rows. What needs no more than 8 comes from ops_avx2.h. */
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

/* ---- weights --------------------------------------------------------------------------------- */

#define UNROLL _Pragma("GCC unroll 16")

/* FP8 for tokens whose x is small: a kernel of its own, not a storage type. */
enum { F8 = MC_F8E4M3, F8_SMALL = 100 };

AVX512_INLINE bool is_f8(int dtype) { return dtype == F8 || dtype == F8_SMALL; }
AVX512_INLINE int size_of(int dtype) { return dtype == MC_F32 ? 4 : is_f8(dtype) ? 1 : 2; }

/* Stays in a register: compilers fold a load into each fma that uses it, and then the load ports,
 * not the fma units, set the pace. */
AVX512_INLINE __m512 in_register(__m512 v) {
    __asm__("" : "+v"(v));
    return v;
}

/* NaN codes of FP8 */

typedef struct watch {
    __m512i smax, umax; /* 0x7f is the largest signed byte, 0xff the largest unsigned one */
} watch;

AVX512_INLINE watch watch_none(void) {
    return (watch){_mm512_setzero_si512(), _mm512_setzero_si512()};
}

AVX512_INLINE void watch_64(watch *w, __m512i v) {
    w->smax = _mm512_max_epi8(w->smax, v);
    w->umax = _mm512_max_epu8(w->umax, v);
}

AVX512_INLINE void watch_bytes(watch *w, const uint8_t *p, int64_t n) {
    for (int64_t i = 0; i < n; i += 64) {
        __mmask64 in = n - i >= 64 ? ~0ull : (1ull << (n - i)) - 1;
        __m512i v = n - i >= 64 ? _mm512_loadu_si512(p + i) : _mm512_maskz_loadu_epi8(in, p + i);
        watch_64(w, v);
    }
}

AVX512_INLINE bool watch_saw(const watch *w) {
    return (_mm512_cmpeq_epi8_mask(w->smax, _mm512_set1_epi8(0x7f)) |
            _mm512_cmpeq_epi8_mask(w->umax, _mm512_set1_epi8(-1))) != 0;
}

/* Rare: some row of the group has a NaN code. Which? */
AVX512_INLINE bool row_has_nan(const uint8_t *p, int64_t n) {
    watch w = watch_none();
    watch_bytes(&w, p, n);
    return watch_saw(&w);
}

/* ops_avx512_gemm.c, ops_avx512_tile.c (n_tok <= MCI_TILE_TOK, decoding once for all tokens) */
enum { MCI_TILE_TOK = 96 };
void mci_avx512_gemm(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                     int64_t n_tok, float *const *y);
void mci_avx512_tile(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                     int64_t n_tok, float *const *y);
#endif
