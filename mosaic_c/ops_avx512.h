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
#define TARGET512_VNNI TARGET512 ",avx512vnni"
#define VNNI_INLINE static inline __attribute__((always_inline, target(TARGET512_VNNI)))

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

/* Kernels of their own, not storage types: FP8 where x is small, INT8 in groups of 32. */
enum { F8 = MC_F8E4M3, F8_SMALL = 100, I8 = MC_INT8, I8_32 = 101 };

AVX512_INLINE bool is_f8(int dtype) { return dtype == F8 || dtype == F8_SMALL; }
AVX512_INLINE bool is_i8(int dtype) { return dtype == I8 || dtype == I8_32; }
AVX512_INLINE int size_of(int dtype) {
    return dtype == MC_F32 ? 4 : is_f8(dtype) || is_i8(dtype) ? 1 : 2;
}

/* Stays in a register: compilers fold a load into each fma that uses it, and then the load ports,
 * not the fma units, set the pace. */
AVX512_INLINE __m512 in_register(__m512 v) {
    __asm__("" : "+v"(v));
    return v;
}

AVX512_INLINE __m512i ints_in_register(__m512i v) {
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

/* ---- sixteen rows side by side --------------------------------------------------------------- */

/* 4-bit weights: a line of 64 bytes of 16 rows is transposed, so that a register holds the same 8
 * columns of all. Nothing is summed across a register, and what belongs to a column (x) or to a
 * row (its scale) is one broadcast or one register. */
enum {
    SIDE = 16,
    LINE_COLS = 128, /* 4-bit columns of a line */
};

/* v[k], of row k, becomes v[i], the 32 bits i of each row, in order. Or in halves: of 128 bits for
 * four rows the first 64 are their lower halves, the last 64 their upper ones, so that unpacking
 * widens the lower or the upper halves of all rows, in order. */
AVX512_INLINE void transpose(__m512i v[SIDE], const bool halves) {
    __m512i u[SIDE];
    UNROLL for (int k = 0; k < SIDE; k += 4) { /* inside 128 bits */
        const __m512i r0 = v[k], r1 = v[k + 1], r2 = v[k + 2], r3 = v[k + 3];
        if (halves) {
            const __m512i a = _mm512_unpacklo_epi16(r0, r1), b = _mm512_unpackhi_epi16(r0, r1);
            const __m512i c = _mm512_unpacklo_epi16(r2, r3), d = _mm512_unpackhi_epi16(r2, r3);
            u[k] = _mm512_unpacklo_epi32(a, c);
            u[k + 1] = _mm512_unpackhi_epi32(a, c);
            u[k + 2] = _mm512_unpacklo_epi32(b, d);
            u[k + 3] = _mm512_unpackhi_epi32(b, d);
        } else {
            const __m512i a = _mm512_unpacklo_epi32(r0, r1), b = _mm512_unpackhi_epi32(r0, r1);
            const __m512i c = _mm512_unpacklo_epi32(r2, r3), d = _mm512_unpackhi_epi32(r2, r3);
            u[k] = _mm512_unpacklo_epi64(a, c);
            u[k + 1] = _mm512_unpackhi_epi64(a, c);
            u[k + 2] = _mm512_unpacklo_epi64(b, d);
            u[k + 3] = _mm512_unpackhi_epi64(b, d);
        }
    }
    UNROLL for (int i = 0; i < 4; i++) { /* pieces of 128 bits */
        const __m512i a = _mm512_shuffle_i32x4(u[i], u[4 + i], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(u[i], u[4 + i], 0xee);
        const __m512i c = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0x44);
        const __m512i d = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0xee);
        v[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        v[4 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
        v[8 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
        v[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

/* v (ceil(n / 128), 16) = the lines of n columns at p[r] + at; those past the end are 0. */
AVX512_INLINE void side_lines(const uint8_t *const *p, int64_t at, int64_t n, const bool halves,
                              __m512i *v) {
    for (; n > 0; n -= LINE_COLS, at += 64, v += SIDE) {
        __m512i u[SIDE];
        if (n >= LINE_COLS) {
            UNROLL for (int r = 0; r < SIDE; r++) u[r] = _mm512_loadu_si512(p[r] + at);
        } else {
            const __mmask64 whole = (1ull << n / 2) - 1, in = ~0ull >> (64 - (n + 1) / 2);
            const __m512i keep = _mm512_mask_blend_epi8(whole, _mm512_set1_epi8(0x0f),
                                                        _mm512_set1_epi8(-1));
            UNROLL for (int r = 0; r < SIDE; r++)
                u[r] = _mm512_and_si512(_mm512_maskz_loadu_epi8(in, p[r] + at), keep);
        }
        transpose(u, halves);
        UNROLL for (int i = 0; i < SIDE; i++) v[i] = u[i];
    }
}

/* Prefetches as many bytes as four registers of weights hold. While these are used, not while they
 * are loaded: memory then has something to do all the time. */
AVX512_INLINE void side_fetch(const uint8_t *p) {
    UNROLL for (int i = 0; i < 4; i++) _mm_prefetch((const char *)p + 64 * i, _MM_HINT_T0);
}

/* n <= 16 scales from p on, as mci_scale_at makes them. */
AVX512_INLINE __m512 load_scales(int dtype, const uint8_t *p, int64_t n) {
    const __mmask16 in = (__mmask16)((1 << n) - 1);
    if (dtype == MC_F32) return _mm512_maskz_loadu_ps(in, p);
    if (dtype == MC_F8E8M0) { /* 0 and 0xff are not exponents of an f32 */
        __m512i e = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(in, p)), 23);
        __mmask16 nan = _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(0x7f800000));
        e = _mm512_max_epi32(e, _mm512_set1_epi32(0x00400000));
        return _mm512_castsi512_ps(_mm512_mask_mov_epi32(e, nan, _mm512_set1_epi32(0x7fc00000)));
    }
    const __m256i h = _mm256_maskz_loadu_epi16(in, p);
    if (dtype == MC_F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* scale[i] = that of K block b + i of 16 rows, whose first scales are at p; n <= 16 of them. */
AVX512_INLINE void side_scales(const mci_mat *w, const uint8_t *const *p, int64_t b, int64_t n,
                               __m512 scale[SIDE]) {
    const int64_t size = mci_dtype_get(w->scale_dtype)->bits / 8, at = b * size;
    const int64_t ahead = SIDE * mci_mat_scales(w) * size; /* the next rows' */
    __m512i v[SIDE];
    UNROLL for (int r = 0; r < SIDE; r++)
        _mm_prefetch((const char *)p[r] + at + ahead, _MM_HINT_T0);
    UNROLL for (int r = 0; r < SIDE; r++)
        v[r] = _mm512_castps_si512(load_scales(w->scale_dtype, p[r] + at, n));
    transpose(v, false);
    UNROLL for (int i = 0; i < SIDE; i++) scale[i] = _mm512_castsi512_ps(v[i]);
}

/* ops_avx512_f4.c, ops_avx512_int4.c */
void mci_avx512_f4(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x, int64_t n_tok,
                   float *const *y);
void mci_avx512_qgemm(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x, int64_t n_tok,
                      float *const *y);
void mci_avx512vnni_qgemm(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x,
                          int64_t n_tok, float *const *y);
void mci_avx512_quantise(const float *x, int64_t n, int64_t group, int8_t *q, float *s,
                         int32_t *q8);

/* ops_avx512_gemm.c, ops_avx512_tile.c (n_tok <= MCI_TILE_TOK, decoding once for all tokens) */
enum { MCI_TILE_TOK = 96 };
void mci_avx512_gemm(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                     int64_t n_tok, float *const *y);
void mci_avx512_tile(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x,
                     int64_t n_tok, float *const *y);

/* ops_avx512_delta.c */
void mci_avx512_delta(const mci_delta_args *a);
#endif
