/* immintrin.h - the AVX-512 intrinsics emulated by SIMDe, in the place of the compiler's header.
 *
 * `make simde` puts this folder first and names AVX2, FMA and F16C on the command line, so these
 * stay native and every 512-bit intrinsic is SIMDe's. One that SIMDe lacks fails to compile
 * ("target specific option mismatch") and goes to the end of this file. */
#ifndef SIMDE_IMMINTRIN_H
#define SIMDE_IMMINTRIN_H
#include <math.h>
#include <string.h>
#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

/* For the kernel file that includes this: no target but the command line's, and no asm to keep a
 * value in a 512-bit register. System headers use __asm__ too: those it needs are above. */
#define target(...)
#define __asm__(...) (void)0

/* ---- what SIMDe 0.8.2 lacks ------------------------------------------------------------------ */

#define _mm512_broadcast_i32x8(a) _mm512_inserti64x4(_mm512_castsi256_si512(a), a, 1)
#define _mm512_broadcast_i64x2(a) _mm512_broadcast_i32x4(a)
#define _mm512_mask_broadcast_i64x2(v, k, a) _mm512_mask_mov_epi64(v, k, _mm512_broadcast_i32x4(a))
#define _mm512_movehdup_ps(a) _mm512_shuffle_ps(a, a, 0xf5)
#define _mm512_stream_ps(p, v) _mm512_store_ps(p, v)
#define _mm512_maskz_loadu_epi8(k, p) simde_lacks_maskz_loadu_epi8(k, p)
#define _mm_maskz_loadu_epi8(k, p) simde_lacks_maskz_loadu_epi8_16(k, p)
#undef _mm512_mask_storeu_ps /* SIMDe's writes all lanes, and its load reads them */
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps(k, p) simde_lacks_maskz_loadu_ps(k, p)
#define _mm512_mask_storeu_ps(p, k, v) simde_lacks_mask_storeu_ps(p, k, v)
#define _mm512_maskz_loadu_epi32(k, p) _mm512_castps_si512(_mm512_maskz_loadu_ps(k, p))
#define _mm512_maskz_cvt_roundps_epi32(k, v, mode) simde_lacks_maskz_cvtps_epi32(k, v)
#define _mm512_cvtepi32_epi8(v) simde_lacks_cvtepi32_epi8(v)
#define _mm512_reduce_add_epi32(v) simde_lacks_reduce_add_epi32(v)
#define _mm512_cvtepi8_epi32(a) _mm512_cvtepi16_epi32(_mm256_cvtepi8_epi16(a))
#define _mm512_cvtepu8_epi32(a) _mm512_cvtepu16_epi32(_mm256_cvtepu8_epi16(a))

static inline __m512i simde_lacks_maskz_loadu_epi8(__mmask64 k, const void *p) {
    uint8_t b[64];
    for (int i = 0; i < 64; i++) b[i] = k >> i & 1 ? ((const uint8_t *)p)[i] : 0;
    return _mm512_loadu_si512(b);
}

static inline __m128i simde_lacks_maskz_loadu_epi8_16(__mmask16 k, const void *p) {
    uint8_t b[16];
    for (int i = 0; i < 16; i++) b[i] = k >> i & 1 ? ((const uint8_t *)p)[i] : 0;
    return _mm_loadu_si128((const __m128i *)(const void *)b);
}

static inline __m512 simde_lacks_maskz_loadu_ps(__mmask16 k, const void *p) {
    float f[16] = {0};
    for (int l = 0; l < 16; l++)
        if (k >> l & 1) memcpy(&f[l], (const char *)p + 4 * l, 4);
    return _mm512_loadu_ps(f);
}

static inline void simde_lacks_mask_storeu_ps(void *p, __mmask16 k, __m512 v) {
    float f[16];
    _mm512_storeu_ps(f, v);
    for (int l = 0; l < 16; l++)
        if (k >> l & 1) memcpy((char *)p + 4 * l, &f[l], 4);
}

/* To nearest, as the rounding mode is wherever kernels run. */
static inline __m512i simde_lacks_maskz_cvtps_epi32(__mmask16 k, __m512 v) {
    float f[16];
    int32_t i[16];
    _mm512_storeu_ps(f, v);
    for (int l = 0; l < 16; l++) i[l] = k >> l & 1 ? (int32_t)lrintf(f[l]) : 0;
    return _mm512_loadu_si512(i);
}

static inline __m128i simde_lacks_cvtepi32_epi8(__m512i v) {
    int32_t i[16];
    int8_t b[16];
    _mm512_storeu_si512(i, v);
    for (int l = 0; l < 16; l++) b[l] = (int8_t)i[l];
    return _mm_loadu_si128((const __m128i *)(const void *)b);
}

static inline int simde_lacks_reduce_add_epi32(__m512i v) {
    int32_t i[16], sum = 0;
    _mm512_storeu_si512(i, v);
    for (int l = 0; l < 16; l++) sum += i[l];
    return sum;
}
#endif
