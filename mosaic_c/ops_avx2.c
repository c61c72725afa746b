/* ops_avx2.c - the AVX2 kernel table, and the kernels over rows of activations.
 *
 * The matrix product is in ops_avx2_gemm.c, attention and the recurrent mixers in ops_avx2_mix.c.
 * Bits equal those of ops_ref.c, for any length and any alignment. */
#include "cpu.h"
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx2.h"

#include <math.h>

AVX2 void mci_avx2_vexp(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i += 8)
        store_up_to(y + i, exp8(load_up_to(x + i, n - i)), n - i);
}

AVX2 void mci_avx2_vsigmoid(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i += 8)
        store_up_to(y + i, sigmoid8(load_up_to(x + i, n - i)), n - i);
}

AVX2 void mci_avx2_vsoftplus(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i += 8)
        store_up_to(y + i, softplus8(load_up_to(x + i, n - i)), n - i);
}

AVX2 void mci_avx2_to_bf16(const float *x, int64_t n, uint16_t *y) {
    for (int64_t i = 0; i < n; i += 8) {
        __m256 v = load_up_to(x + i, n - i);
        __m256i u = _mm256_castps_si256(v), high = _mm256_srli_epi32(u, 16);
        __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        __m256i even = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        even = _mm256_blendv_epi8(_mm256_srli_epi32(even, 16), nan, is_nan);
        __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(even),
                                     _mm256_extracti128_si256(even, 1));
        if (n - i >= 8)
            _mm_storeu_si128((__m128i *)(void *)(y + i), h);
        else
            memcpy(y + i, &h, (size_t)(n - i) * 2);
    }
}

/* 0x7f is the largest signed byte, 0xff the largest unsigned one. */
AVX2 bool mci_avx2_f8_has_nan(const uint8_t *p, int64_t n) {
    __m256i smax = _mm256_setzero_si256(), umax = smax;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)(p + i));
        smax = _mm256_max_epi8(smax, v);
        umax = _mm256_max_epu8(umax, v);
    }
    __m256i a = _mm256_cmpeq_epi8(smax, _mm256_set1_epi8(0x7f));
    __m256i b = _mm256_cmpeq_epi8(umax, _mm256_set1_epi8(-1));
    return _mm256_movemask_epi8(_mm256_or_si256(a, b)) != 0 ||
           mci_ops_ref.f8_has_nan(p + i, n - i);
}

AVX2_INLINE float sum_squares(const float *x, int64_t n) {
    __m256 t = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += 8) {
        __m256 v = load_up_to(x + i, n - i); /* t >= +0, so a padded +0 * +0 changes nothing */
        t = _mm256_fmadd_ps(v, v, t);
    }
    return tree8(t);
}

AVX2 void mci_avx2_rmsnorm(const float *x, const float *w, float eps, int64_t n, float *y) {
    __m256 r = _mm256_set1_ps(1.0f / sqrtf(sum_squares(x, n) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_mul_ps(load_up_to(x + i, n - i), r);
        store_up_to(y + i, _mm256_mul_ps(v, load_up_to(w + i, n - i)), n - i);
    }
}

AVX2 void mci_avx2_l2norm(float *x, float eps, float scale, int64_t n) {
    __m256 r = _mm256_set1_ps(1.0f / sqrtf(sum_squares(x, n) + eps));
    for (int64_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_mul_ps(load_up_to(x + i, n - i), r);
        store_up_to(x + i, _mm256_mul_ps(v, _mm256_set1_ps(scale)), n - i);
    }
}

AVX2 void mci_avx2_silu_mul(const float *g, const float *u, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i += 8) {
        __m256 v = silu8(load_up_to(g + i, n - i));
        store_up_to(y + i, _mm256_mul_ps(v, load_up_to(u + i, n - i)), n - i);
    }
}

AVX2 void mci_avx2_sigmoid_mul(const float *g, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i += 8) {
        __m256 s = sigmoid8(load_up_to(g + i, n - i));
        store_up_to(y + i, _mm256_mul_ps(load_up_to(y + i, n - i), s), n - i);
    }
}

AVX2 void mci_avx2_axpy(float a, const float *x, int64_t n, float *y) {
    const __m256 av = _mm256_set1_ps(a);
    for (int64_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_fmadd_ps(av, load_up_to(x + i, n - i), load_up_to(y + i, n - i));
        store_up_to(y + i, v, n - i);
    }
}

AVX2 void mci_avx2_add(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_add_ps(load_up_to(y + i, n - i), load_up_to(x + i, n - i));
        store_up_to(y + i, v, n - i);
    }
}

AVX2 float mci_avx2_exp_sum(float *x, int64_t n) {
    __m256 m = _mm256_set1_ps(-INFINITY), t = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) m = _mm256_max_ps(_mm256_loadu_ps(x + i), m); /* NaN leaves m */
    float lane[8], max = -INFINITY;
    _mm256_storeu_ps(lane, m);
    for (int l = 0; l < 8; l++) max = lane[l] > max ? lane[l] : max;
    for (; i < n; i++) max = x[i] > max ? x[i] : max;
    m = _mm256_set1_ps(max);
    for (i = 0; i < n; i += 8) {
        __m256 e = exp8(_mm256_sub_ps(load_up_to(x + i, n - i), m));
        store_up_to(x + i, e, n - i);
        t = _mm256_add_ps(t, _mm256_and_ps(e, _mm256_castsi256_ps(tail_mask(n - i))));
    }
    return tree8(t);
}

AVX2 void mci_avx2_softmax(float *x, int64_t n) {
    __m256 sum = _mm256_set1_ps(mci_avx2_exp_sum(x, n));
    for (int64_t i = 0; i < n; i += 8)
        store_up_to(x + i, _mm256_div_ps(load_up_to(x + i, n - i), sum), n - i);
}

AVX2 void mci_avx2_rope(float *x, const float *c, const float *s, int64_t half) {
    for (int64_t i = 0; i < half; i += 8) {
        int64_t left = half - i;
        __m256 a = load_up_to(x + i, left), b = load_up_to(x + half + i, left);
        __m256 cv = load_up_to(c + i, left), sv = load_up_to(s + i, left);
        store_up_to(x + i, _mm256_fmsub_ps(a, cv, _mm256_mul_ps(b, sv)), left);
        store_up_to(x + half + i, _mm256_fmadd_ps(b, cv, _mm256_mul_ps(a, sv)), left);
    }
}

const mci_ops mci_ops_avx2 = {
    .name = "avx2",
    .features = MCI_CPU_AVX2 | MCI_CPU_FMA | MCI_CPU_F16C,
    .gemm = mci_avx2_gemm,
    .qgemm = mci_avx2_qgemm,
    .quantise = mci_avx2_quantise,
    .f8_has_nan = mci_avx2_f8_has_nan,
    .rmsnorm = mci_avx2_rmsnorm,
    .l2norm = mci_avx2_l2norm,
    .silu_mul = mci_avx2_silu_mul,
    .sigmoid_mul = mci_avx2_sigmoid_mul,
    .axpy = mci_avx2_axpy,
    .add = mci_avx2_add,
    .softmax = mci_avx2_softmax,
    .rope = mci_avx2_rope,
    .attn = mci_avx2_attn,
    .delta = mci_avx2_delta,
    .conv = mci_avx2_conv,
    .vexp = mci_avx2_vexp,
    .vsigmoid = mci_avx2_vsigmoid,
    .vsoftplus = mci_avx2_vsoftplus,
    .to_bf16 = mci_avx2_to_bf16,
};
#else
const mci_ops mci_ops_avx2 = {.name = "avx2"};
#endif
