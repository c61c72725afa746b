/* ops_ref.c - the specification of every kernel in plain C: no intrinsics, no shortcuts.
 *
 * Every other kernel set gives these bits. fma is always written out (fmaf); nothing is left to
 * contraction. It is the fallback without vector kernels and the oracle of the tests. */
#include "ops.h"

#include <float.h>
#include <math.h>

#include "ops_poly.h"

/* ((t0+t4)+(t2+t6)) + ((t1+t5)+(t3+t7)): what halving a vector register three times gives. */
static float tree(const float t[8]) {
    return ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
}

/* ---- elementary functions -------------------------------------------------------------------- */

static float pow2(uint32_t n) { return mci_f32((n + 127u) << 23); }

static float ref_exp(float x) {
    x = EXP_HI < x ? EXP_HI : x; /* operands so that NaN passes */
    x = EXP_LO > x ? EXP_LO : x;
    float z = fmaf(x, EXP_LOG2E, EXP_MAGIC);
    int32_t n = (int32_t)(mci_bits(z) - mci_bits(EXP_MAGIC));
    float nf = z - EXP_MAGIC;
    float r = fmaf(nf, -EXP_LN2_LO, fmaf(nf, -EXP_LN2_HI, x));
    float p = EXP_C6;
    p = fmaf(p, r, EXP_C5);
    p = fmaf(p, r, EXP_C4);
    p = fmaf(p, r, EXP_C3);
    p = fmaf(p, r, EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    int32_t half = n >> 1;
    return p * pow2((uint32_t)half) * pow2((uint32_t)n - (uint32_t)half);
}

static float ref_sigmoid(float x) {
    float e = ref_exp(-fabsf(x));
    return (mci_bits(x) >> 31 ? e : 1.0f) / (1.0f + e);
}

static float ref_silu(float x) { return x * ref_sigmoid(x); }

static float ref_softplus(float x) {
    float e = ref_exp(-fabsf(x));
    float d = (e + e) / (2.0f + e);
    float u = d * d * 0.25f;
    float l = fmaf(fmaf(fmaf(LOG_L3, u, LOG_L2), u, LOG_L1), u, LOG_L0);
    l = fmaf(d, u * l, d);
    return (x > 0.0f ? x : 0.0f) + l;
}

static void vexp(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = ref_exp(x[i]);
}

static void vsigmoid(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = ref_sigmoid(x[i]);
}

static void vsoftplus(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = ref_softplus(x[i]);
}

static void to_bf16(const float *x, int64_t n, uint16_t *y) {
    for (int64_t i = 0; i < n; i++) y[i] = mci_f32_to_bf16(x[i]);
}

/* ---- matrix ---------------------------------------------------------------------------------- */

static void gemm(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x, int64_t n_tok,
                 float *const *y) {
    const int64_t K = w->cols, block = mci_mat_block(w), row = mci_row_bytes(w->dtype, K);
    for (int64_t r = r0; r < r1; r++) {
        for (int64_t t = 0; t < n_tok; t++) {
            float tot[8] = {0}, v[MCI_BLOCK];
            for (int64_t c0 = 0; c0 < K; c0 += block) {
                int64_t n = MCI_MIN(K - c0, block);
                float acc[8] = {0}, scale = mci_mat_scale(w, r, c0 / block);
                mci_decode(w->dtype, w->data + r * row + mci_row_bytes(w->dtype, c0), n, v);
                for (int64_t c = 0; c < n; c++) acc[c % 8] = fmaf(v[c], x[t][c0 + c], acc[c % 8]);
                for (int l = 0; l < 8; l++) tot[l] = fmaf(acc[l], scale, tot[l]);
            }
            y[t][r] = tree(tot);
        }
    }
}

/* Column c of a group lies at q[at(c)]. */
static int64_t at(int64_t c) { return (c & -8) + (c % 2) * 4 + c % 8 / 2; }

static void quantise(const float *x, int64_t n, int64_t group, int8_t *q, float *s, int32_t *q8) {
    memset(q, 0, (size_t)mci_round_up(n, 8));
    for (int64_t g = 0; g * group < n; g++) {
        const int64_t c0 = g * group, end = MCI_MIN(c0 + group, n);
        float most = 0;
        int32_t sum = 0;
        for (int64_t c = c0; c < end; c++) /* NaN wins and stays */
            if (most == most && !(fabsf(x[c]) <= most)) most = fabsf(x[c]);
        s[g] = most / 127.0f;
        q8[g] = 0;
        if (!(most <= FLT_MAX)) {
            s[g] = NAN;
            continue;
        }
        if (s[g] < 1e-12f) s[g] = 1e-12f;
        for (int64_t c = c0; c < end; c++) {
            float v = rintf(x[c] / s[g]);
            int32_t i = (int32_t)MCI_MIN(MCI_MAX(v, -127.0f), 127.0f);
            q[at(c)] = (int8_t)i;
            sum += i;
        }
        q8[g] = 8 * sum;
    }
}

static void qgemm(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x, int64_t n_tok,
                  float *const *y) {
    const int64_t K = w->cols, group = w->block_cols ? w->block_cols : K;
    for (int64_t r = r0; r < r1; r++) {
        const uint8_t *p = w->data + r * mci_row_bytes(w->dtype, K);
        for (int64_t t = 0; t < n_tok; t++) {
            float tot = 0;
            for (int64_t c0 = 0; c0 < K; c0 += group) {
                int32_t sum = 0;
                for (int64_t c = c0; c < MCI_MIN(c0 + group, K); c++)
                    sum += ((p[c / 2] >> (c % 2 * 4) & 15) - 8) * x[t].q[at(c)];
                const int64_t g = c0 / group;
                tot = fmaf((float)sum, mci_mat_scale(w, r, g) * x[t].s[g], tot);
            }
            y[t][r] = tot;
        }
    }
}

static bool f8_has_nan(const uint8_t *p, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if ((p[i] & 0x7f) == 0x7f) return true;
    return false;
}

/* ---- rows of activations --------------------------------------------------------------------- */

static float sum_squares(const float *x, int64_t n) {
    float t[8] = {0};
    for (int64_t i = 0; i < n; i++) t[i % 8] = fmaf(x[i], x[i], t[i % 8]);
    return tree(t);
}

static void rmsnorm(const float *x, const float *w, float eps, int64_t n, float *y) {
    float r = 1.0f / sqrtf(sum_squares(x, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * r * w[i];
}

static void l2norm(float *x, float eps, float scale, int64_t n) {
    float r = 1.0f / sqrtf(sum_squares(x, n) + eps);
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * r * scale;
}

static void silu_mul(const float *g, const float *u, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = ref_silu(g[i]) * u[i];
}

static void sigmoid_mul(const float *g, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = y[i] * ref_sigmoid(g[i]);
}

static void axpy(float a, const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

static void add(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = y[i] + x[i];
}

/* x = exp(x - max); returns the sum in 8 lanes. A NaN takes no part in the maximum; it makes the
 * sum NaN all the same. */
static float exp_sum(float *x, int64_t n) {
    float max = -INFINITY, t[8] = {0};
    for (int64_t i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int64_t i = 0; i < n; i++) {
        x[i] = ref_exp(x[i] - max);
        t[i % 8] += x[i];
    }
    return tree(t);
}

static void softmax(float *x, int64_t n) {
    float sum = exp_sum(x, n);
    for (int64_t i = 0; i < n; i++) x[i] /= sum;
}

static void rope(float *x, const float *c, const float *s, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = fmaf(a, c[i], -(b * s[i]));
        x[half + i] = fmaf(b, c[i], a * s[i]);
    }
}

/* ---- mixers ---------------------------------------------------------------------------------- */

/* Element c of the vector at position j of a paged (n_pos, D) store. */
static float paged(const mci_attn_args *a, const void *const *pages, int64_t j, int64_t c) {
    const uint8_t *page = pages[j / a->page_tokens];
    int64_t i = j % a->page_tokens * a->head_dim + c;
    return a->kv_dtype == MC_BF16 ? mci_bf16_to_f32(mci_u16(page + 2 * i))
                                  : mci_f32(mci_u32(page + 4 * i));
}

static void attn(const mci_attn_args *a) {
    const int64_t D = a->head_dim;
    for (int64_t h = 0; h < a->group; h++) {
        const float *q = a->q + h * D;
        float *score = a->scores + h * a->n_pos, *out = a->out + h * D;
        for (int64_t j = 0; j < a->n_pos; j++) {
            float tot[8] = {0};
            for (int64_t c0 = 0; c0 < D; c0 += MCI_BLOCK) {
                int64_t n = MCI_MIN(D - c0, MCI_BLOCK);
                float acc[8] = {0};
                for (int64_t c = 0; c < n; c++)
                    acc[c % 8] = fmaf(q[c0 + c], paged(a, a->k, j, c0 + c), acc[c % 8]);
                for (int l = 0; l < 8; l++) tot[l] += acc[l];
            }
            score[j] = tree(tot) * a->scale;
        }
        float inv = 1.0f / exp_sum(score, a->n_pos);
        for (int64_t c = 0; c < D; c++) {
            float o = 0.0f;
            for (int64_t j = 0; j < a->n_pos; j++) o = fmaf(score[j], paged(a, a->v, j, c), o);
            out[c] = o * inv;
        }
    }
}

static void delta(const mci_delta_args *a) {
    const int64_t dk = a->dk, dv = a->dv;
    if (a->s_in != a->s_out) /* from here on the state is updated in place */
        for (int64_t k = 0; k < dk; k++)
            for (int64_t j = a->j0; j < a->j1; j++) a->s_out[k * dv + j] = a->s_in[k * dv + j];
    for (int64_t t = 0; t < a->n_tok; t++) {
        const float *q = a->q + t * a->ld_qk, *key = a->k + t * a->ld_qk, *v = a->v + t * a->ld_v;
        float alpha = a->alpha[t * a->ld_ab], beta = a->beta[t * a->ld_ab];
        for (int64_t j = a->j0; j < a->j1; j++) {
            float *s = a->s_out + j, m = 0.0f, o = 0.0f;
            for (int64_t k = 0; k < dk; k++) m = fmaf(alpha * s[k * dv], key[k], m);
            float d = beta * (v[j] - m);
            for (int64_t k = 0; k < dk; k++) {
                s[k * dv] = fmaf(key[k], d, alpha * s[k * dv]);
                o = fmaf(s[k * dv], q[k], o);
            }
            a->o[t * a->ld_o + j] = o;
        }
    }
}

static void conv(const float *x, int64_t n_tok, int64_t c_total, int64_t c0, int64_t c1,
                 const float *w, int64_t kernel, const float *state_in, float *state_out,
                 float *y) {
    const int64_t past = kernel - 1;
    for (int64_t c = c0; c < c1; c++) {
        for (int64_t t = 0; t < n_tok; t++) {
            float s = 0.0f;
            for (int64_t j = 0; j < kernel; j++) {
                int64_t at = t - past + j;
                float u = at < 0 ? state_in[(at + past) * c_total + c] : x[at * c_total + c];
                s = fmaf(w[c * kernel + j], u, s);
            }
            y[t * c_total + c] = ref_silu(s);
        }
        for (int64_t i = 0; i < past; i++) { /* reads ahead of what it writes: in place is fine */
            int64_t at = n_tok - past + i;
            state_out[i * c_total + c] =
                at < 0 ? state_in[(at + past) * c_total + c] : x[at * c_total + c];
        }
    }
}

const mci_ops mci_ops_ref = {
    .name = "scalar",
    .features = 0,
    .gemm = gemm,
    .qgemm = qgemm,
    .quantise = quantise,
    .f8_has_nan = f8_has_nan,
    .rmsnorm = rmsnorm,
    .l2norm = l2norm,
    .silu_mul = silu_mul,
    .sigmoid_mul = sigmoid_mul,
    .axpy = axpy,
    .add = add,
    .softmax = softmax,
    .rope = rope,
    .attn = attn,
    .delta = delta,
    .conv = conv,
    .vexp = vexp,
    .vsigmoid = vsigmoid,
    .vsoftplus = vsoftplus,
    .to_bf16 = to_bf16,
};
