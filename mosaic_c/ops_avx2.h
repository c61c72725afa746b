/* ops_avx2.h - what the AVX2 files share: masked tails, the lane tree, exp. Included by them only.
 *
 * Every function carries its target, so that the file compiles with no -m flag and nothing of it
 * leaks into code that runs on older CPUs. */
#ifndef MCI_OPS_AVX2_H
#define MCI_OPS_AVX2_H
#include <immintrin.h>

#include "ops.h"
#include "ops_poly.h"

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma,f16c")))

/* Lanes 0..left-1 set, for left >= 0. */
AVX2_INLINE __m256i tail_mask(int64_t left) {
    static const int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    return _mm256_loadu_si256((const __m256i *)(ones + 8 - MCI_MIN(left, 8)));
}

/* Up to 8 of the `left` floats at p; the other lanes are +0 and their memory is not touched. */
AVX2_INLINE __m256 load_up_to(const float *p, int64_t left) {
    return left >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, tail_mask(left));
}

/* The same with -0 in the other lanes: +0 * -0 = -0, the addend that changes nothing, so a padded
 * fma leaves even an accumulator of -0 as it was. */
AVX2_INLINE __m256 load_negzero(const float *p, int64_t left) {
    __m256 v = _mm256_maskload_ps(p, tail_mask(left));
    return _mm256_blendv_ps(_mm256_set1_ps(-0.0f), v, _mm256_castsi256_ps(tail_mask(left)));
}

AVX2_INLINE void store_up_to(float *p, __m256 v, int64_t left) {
    if (left >= 8)
        _mm256_storeu_ps(p, v);
    else
        _mm256_maskstore_ps(p, tail_mask(left), v);
}

/* ((t0+t4)+(t2+t6)) + ((t1+t5)+(t3+t7)) */
AVX2_INLINE float tree8(__m256 t) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

/* The trees of eight vectors at once: lane i = tree8(t[i]). */
AVX2_INLINE __m256 tree8x8(const __m256 t[8]) {
    __m256 a[4];
    for (int i = 0; i < 4; i++) /* [0+4 1+5 2+6 3+7 of t[2i] | of t[2i+1]] */
        a[i] = _mm256_add_ps(_mm256_permute2f128_ps(t[2 * i], t[2 * i + 1], 0x20),
                             _mm256_permute2f128_ps(t[2 * i], t[2 * i + 1], 0x31));
    __m256 b = _mm256_add_ps(_mm256_shuffle_ps(a[0], a[1], 0x44),
                             _mm256_shuffle_ps(a[0], a[1], 0xee));
    __m256 c = _mm256_add_ps(_mm256_shuffle_ps(a[2], a[3], 0x44),
                             _mm256_shuffle_ps(a[2], a[3], 0xee));
    return _mm256_permutevar8x32_ps(_mm256_hadd_ps(b, c), /* 0 2 4 6 | 1 3 5 7 */
                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

AVX2_INLINE __m256 load_bf16(const uint8_t *p) {
    __m128i h = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* The scales of K blocks b .. b+7 of a row, of which n exist (all of them where n >= 8); row: of
 * mci_scale_row. */
AVX2_INLINE __m256 scales8(const mci_mat *w, const uint8_t *row, int64_t b, int64_t n) {
    if (!w->block_cols) return _mm256_set1_ps(mci_scale_of(w, row, 0));
    if (n < 8) {
        float s[8] = {0};
        for (int64_t i = 0; i < n; i++) s[i] = mci_scale_of(w, row, b + i);
        return _mm256_loadu_ps(s);
    }
    const uint8_t *p = row + b * mci_scale_size(w);
    switch (w->scale_dtype) {
    case MC_BF16: return load_bf16(p);
    case MC_F16: return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
    case MC_F8E8M0: { /* an exponent; 0 stands for 2^-127, 0xff is NaN */
        __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
        __m256i nan = _mm256_srli_epi32(_mm256_cmpeq_epi32(e, _mm256_set1_epi32(0xff)), 1);
        e = _mm256_max_epi32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(0x00400000));
        return _mm256_castsi256_ps(_mm256_or_si256(e, nan));
    }
    default: return _mm256_loadu_ps((const float *)(const void *)p);
    }
}

/* ---- elementary functions: line by line those of ops_ref.c ---- */

AVX2_INLINE __m256 pow2_8(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

AVX2_INLINE __m256 exp8(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(EXP_HI), x); /* min(a, b) is b when either is NaN */
    x = _mm256_max_ps(_mm256_set1_ps(EXP_LO), x);
    const __m256 magic = _mm256_set1_ps(EXP_MAGIC);
    __m256 z = _mm256_fmadd_ps(x, _mm256_set1_ps(EXP_LOG2E), magic);
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(z), _mm256_castps_si256(magic));
    __m256 nf = _mm256_sub_ps(z, magic);
    __m256 r = _mm256_fmadd_ps(nf, _mm256_set1_ps(-EXP_LN2_HI), x);
    r = _mm256_fmadd_ps(nf, _mm256_set1_ps(-EXP_LN2_LO), r);
    __m256 p = _mm256_set1_ps(EXP_C6);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C2));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    __m256i half = _mm256_srai_epi32(n, 1);
    p = _mm256_mul_ps(p, pow2_8(half));
    return _mm256_mul_ps(p, pow2_8(_mm256_sub_epi32(n, half)));
}

AVX2_INLINE __m256 minus_abs(__m256 x) { return _mm256_or_ps(x, _mm256_set1_ps(-0.0f)); }

AVX2_INLINE __m256 sigmoid8(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 e = exp8(minus_abs(x));
    return _mm256_div_ps(_mm256_blendv_ps(one, e, x), _mm256_add_ps(one, e));
}

AVX2_INLINE __m256 silu8(__m256 x) { return _mm256_mul_ps(x, sigmoid8(x)); }

AVX2_INLINE __m256 softplus8(__m256 x) {
    __m256 e = exp8(minus_abs(x));
    __m256 d = _mm256_div_ps(_mm256_add_ps(e, e), _mm256_add_ps(_mm256_set1_ps(2.0f), e));
    __m256 u = _mm256_mul_ps(_mm256_mul_ps(d, d), _mm256_set1_ps(0.25f));
    __m256 l = _mm256_set1_ps(LOG_L3);
    l = _mm256_fmadd_ps(l, u, _mm256_set1_ps(LOG_L2));
    l = _mm256_fmadd_ps(l, u, _mm256_set1_ps(LOG_L1));
    l = _mm256_fmadd_ps(l, u, _mm256_set1_ps(LOG_L0));
    l = _mm256_fmadd_ps(d, _mm256_mul_ps(u, l), d);
    return _mm256_add_ps(_mm256_max_ps(x, _mm256_setzero_ps()), l); /* max(NaN, 0) is 0 here */
}

/* FP8 of few tokens, in both vector sets: xs[t] = x[t] * 2^120, kept in `scaled`. True where the
 * weights hold no NaN code, there is room, and no finite |x| reaches 128, so that this is exact;
 * infinity and NaN scale to themselves. */
enum { MCI_MAX_SCALED = 8192 };
AVX2_INLINE bool mci_avx2_scale_x(const mci_mat *w, const float *const *x, int64_t n_tok,
                                  float *scaled, const float **xs) {
    const int64_t n = w->cols;
    __m256 big = _mm256_setzero_ps();
    if (!w->no_nan || n_tok * n > MCI_MAX_SCALED) return false;
    for (int64_t t = 0; t < n_tok; t++, scaled += n) {
        xs[t] = scaled;
        for (int64_t i = 0; i < n; i += 8) {
            __m256 v = load_up_to(x[t] + i, n - i), a = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
            big = _mm256_or_ps(big, _mm256_cmp_ps(a, _mm256_set1_ps(128.0f), _CMP_GE_OQ));
            store_up_to(scaled + i, _mm256_mul_ps(v, _mm256_set1_ps(0x1p+120f)), n - i);
        }
    }
    return _mm256_movemask_ps(big) == 0;
}

/* ops_avx2.c; ops_avx512.c names them in its own table */
void mci_avx2_vexp(const float *x, int64_t n, float *y);
void mci_avx2_vsigmoid(const float *x, int64_t n, float *y);
void mci_avx2_vsoftplus(const float *x, int64_t n, float *y);
void mci_avx2_to_bf16(const float *x, int64_t n, uint16_t *y);
bool mci_avx2_f8_has_nan(const uint8_t *p, int64_t n);
void mci_avx2_rmsnorm(const float *x, const float *w, float eps, int64_t n, float *y);
void mci_avx2_l2norm(float *x, float eps, float scale, int64_t n);
void mci_avx2_silu_mul(const float *g, const float *u, int64_t n, float *y);
void mci_avx2_sigmoid_mul(const float *g, int64_t n, float *y);
void mci_avx2_axpy(float a, const float *x, int64_t n, float *y);
void mci_avx2_add(const float *x, int64_t n, float *y);
void mci_avx2_softmax(float *x, int64_t n);
void mci_avx2_rope(float *x, const float *c, const float *s, int64_t half);
/* x = exp(x - max), the sum in 8 lanes. */
float mci_avx2_exp_sum(float *x, int64_t n);

/* ops_avx2_int4.c */
void mci_avx2_quantise(const float *x, int64_t n, int64_t group, int8_t *q, float *s, int32_t *q8);
void mci_avx2_qgemm(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x, int64_t n_tok,
                    float *const *y);

/* ops_avx2_f4.c: gemm of MXFP4 for 1 to MCI_F4_TOK tokens */
enum { MCI_F4_TOK = 3 };
void mci_avx2_f4(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x, int64_t n_tok,
                 float *const *y);

/* ops_avx2_gemm.c, ops_avx2_mix.c */
void mci_avx2_gemm(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x, int64_t n_tok,
                   float *const *y);
void mci_avx2_attn(const mci_attn_args *a);
void mci_avx2_delta(const mci_delta_args *a);
void mci_avx2_conv(const float *x, int64_t n_tok, int64_t c_total, int64_t c0, int64_t c1,
                   const float *w, int64_t kernel, const float *state_in, float *state_out,
                   float *y);
#endif
