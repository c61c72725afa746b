/* ops.h - the kernel table. ops_ref.c is the specification: plain C, no intrinsics, every other set
 * gives the same bits. Kernels allocate nothing, check nothing and cannot fail; callers validated.
 *
 * Letters: T tokens, H hidden, K columns of a weight row, D head dim.
 *
 * Canonical order (docs/design.md section 4). Dot product of a row w with x: K is cut into blocks
 * (of the columns that share a scale, of 128 where there is none or one a row); inside a block
 * lane l = (c - block start) mod 8 does acc[l] = fma(w_c, x_c, acc[l]) over increasing c from +0;
 * at the block's end tot[l] = fma(acc[l], scale, tot[l]); at the row's end ((t0+t4)+(t2+t6)) +
 * ((t1+t5)+(t3+t7)). Sums (norms, softmax) use the same 8 lanes over the whole length and the
 * same tree. */
#ifndef MCI_OPS_H
#define MCI_OPS_H
#include "base.h"
#include "dtype.h"

/* Attention of one token over one KV head: all `group` query heads that share it. Page p holds
 * positions p*page_tokens ...: k and v each (page_tokens, D) of kv_dtype (MC_F32 or MC_BF16). */
typedef struct mci_attn_args {
    int64_t head_dim, group, n_pos, page_tokens;
    int32_t kv_dtype;
    float scale;
    const void *const *k, *const *v; /* one pointer a page */
    const float *q;                  /* (group, D) */
    float *out;                      /* (group, D) */
    float *scores;                   /* scratch (group, n_pos) */
} mci_attn_args;

/* Gated delta rule of one value head over T tokens, value columns j0..j1 (j0 a multiple of 8; the
 * range is independent of the others). Rows of q, k, v, o are ld_* floats apart. */
typedef struct mci_delta_args {
    int64_t dk, dv, j0, j1, n_tok;
    const float *s_in; /* (dk, dv) */
    float *s_out;      /* (dk, dv), may be s_in */
    const float *q, *k, *v, *alpha, *beta; /* q, k (T, dk), v (T, dv); alpha, beta (T) */
    int64_t ld_qk, ld_v, ld_ab, ld_o;
    float *o;          /* (T, dv) */
} mci_delta_args;

/* One token's activations for the integer path, in groups of columns (the columns of w that share a
 * scale): x = q * s. q is padded with 0 to a multiple of 8, and each 8 columns lie in the order
 * 0 2 4 6 1 3 5 7, so that the low halves of 4 weight bytes meet the first 4 and the high halves
 * the others. */
typedef struct mci_qact {
    const int8_t *q;   /* (round_up(K, 8)) */
    const float *s;    /* (groups) */
    const int32_t *q8; /* (groups) 8 times the sum of q: weights are stored as v + 8 */
} mci_qact;

typedef struct mci_ops {
    const char *name;   /* "scalar", "avx2", "avx512", "avx512vnni" */
    uint32_t features;  /* MCI_CPU_... it needs */

    /* y[t][r] = dot(row r of w, x[t]) for r in [r0, r1), t in [0, n_tok). Not for integer types. */
    void (*gemm)(const mci_mat *w, int64_t r0, int64_t r1, const float *const *x, int64_t n_tok,
                 float *const *y);
    /* The same for integer types: isum = the exact sum of w_c * q_c over a group;
     * tot = fma((float)isum, w_scale * s, tot) over the groups in order, from +0. */
    void (*qgemm)(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x, int64_t n_tok,
                  float *const *y);
    /* Fills an mci_qact from x (n): s = max(absmax / 127, 1e-12), q = x / s, rounded half to even
     * and clamped to +-127. A group that holds a NaN or an infinity has q = 0 and s = NaN. */
    void (*quantise)(const float *x, int64_t n, int64_t group, int8_t *q, float *s, int32_t *q8);
    /* Is any of n FP8 codes a NaN (0x7f, 0xff)? */
    bool (*f8_has_nan)(const uint8_t *p, int64_t n);
    /* y = x * (1 / sqrt(mean(x^2) + eps)) * w ; the mean is sum / n; y may be x. Order: (x * r) *
     * w. */
    void (*rmsnorm)(const float *x, const float *w, float eps, int64_t n, float *y);
    /* x = x * (1 / sqrt(sum(x^2) + eps)) * scale, as (x * r) * scale. In place. */
    void (*l2norm)(float *x, float eps, float scale, int64_t n);
    /* y = silu(g) * u ; silu(g) = g * sigmoid(g). y may be g or u. */
    void (*silu_mul)(const float *g, const float *u, int64_t n, float *y);
    /* y = y * sigmoid(g). */
    void (*sigmoid_mul)(const float *g, int64_t n, float *y);
    /* y = fma(a, x, y). */
    void (*axpy)(float a, const float *x, int64_t n, float *y);
    /* y = y + x. */
    void (*add)(const float *x, int64_t n, float *y);
    /* x = exp(x - max) / sum, sum in 8 lanes. In place. Division, not a reciprocal. */
    void (*softmax)(float *x, int64_t n);
    /* Half-split rotation of the first 2*half dims: a' = a*c - b*s as fma(a, c, -(b*s)),
     * b' = b*c + a*s as fma(b, c, a*s). c, s: (half). In place. */
    void (*rope)(float *x, const float *c, const float *s, int64_t half);
    /* score_j = dot(q, k_j) (canonical, blocks of 128) * scale; e_j = exp(score_j - max);
     * out_c = (sum_j in position order fma(e_j, v_jc, out_c)) * (1 / sum of e in 8 lanes). */
    void (*attn)(const mci_attn_args *a);
    /* Per token, per column j: m = sum_k in order fma(alpha*S[k][j], key[k], m) from +0;
     * d = beta * (v_j - m); S[k][j] = fma(key[k], d, alpha*S[k][j]);
     * o_j = sum_k in order fma(S[k][j], query[k], o_j). */
    void (*delta)(const mci_delta_args *a);
    /* Depthwise causal convolution of T tokens, channels c0..c1, then silu:
     * y[t][c] = silu(sum_{j in order} fma(w[c*kernel + j], u[t - kernel+1 + j][c], .) from +0),
     * where u of negative time comes from state_in (kernel-1, C) (oldest first). state_out (may
     * be state_in) receives the last kernel-1 inputs. x, y (T, C) rows, x is not y. */
    void (*conv)(const float *x, int64_t n_tok, int64_t c_total, int64_t c0, int64_t c1,
                 const float *w, int64_t kernel, const float *state_in, float *state_out, float *y);
    /* Elementwise exp, sigmoid, softplus: y[i] = f(x[i]); the functions all kernels use. */
    void (*vexp)(const float *x, int64_t n, float *y);
    void (*vsigmoid)(const float *x, int64_t n, float *y);
    void (*vsoftplus)(const float *x, int64_t n, float *y);
    /* bf16 storage of KV: round to nearest even. */
    void (*to_bf16)(const float *x, int64_t n, uint16_t *y);
} mci_ops;

extern const mci_ops mci_ops_ref;
/* functions NULL where it is no x86-64 build */
extern const mci_ops mci_ops_avx2, mci_ops_avx512, mci_ops_avx512vnni;
const mci_ops *mci_ops_set(int i); /* all of them, best first; NULL: no more */

/* name NULL: the best set this CPU runs. Unknown or not runnable here: MC_EINVAL, naming those
 * that are. */
int mci_ops_get(const char *name, const mci_ops **out, mc_error *err);

/* Memory of one mci_qact, a multiple of MCI_ALIGN, and filling one there. */
int64_t mci_qact_bytes(int64_t n, int64_t group);
mci_qact mci_qact_fill(const mci_ops *ops, const float *x, int64_t n, int64_t group, void *mem);

/* Top-k of scores (n): ids by descending score, ties to the lower id, NaN ranks below everything;
 * always k distinct ids, k <= n. */
void mci_topk(const float *scores, int64_t n, int64_t k, int32_t *ids);
#endif
