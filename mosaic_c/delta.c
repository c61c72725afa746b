/* delta.c - gated delta rule (linear attention with constant state): norm, projections, short
 * causal convolution, recurrence, gated output norm, output projection, residual. Formulas:
 * transformers modeling_qwen3_5_moe, torch_recurrent_gated_delta_rule. */
#include <math.h>
#include <stdlib.h>

#include "linear.h"
#include "session.h"

#define CONV_CHUNK 256 /* channels a thread convolves at once */
#define HEAD_COLS 128  /* value columns of one head a thread takes: whole rows of the state */
#define L2_EPS 1e-6f   /* of the q and k normalisation, fixed in the reference code */

struct mc_delta {
    mc_engine *e;
    mc_delta_desc d;
    mci_weight qkv, z, b, a, out;
    float *norm, *out_norm; /* (hidden), (dv) */
    float *conv;            /* (conv_dim, kernel) */
    float *decay, *dt_bias; /* exp(A_log), dt_bias (n_v_head) */
};

static int64_t key_dim(const mc_delta_desc *d) { return (int64_t)d->n_k_head * d->dk; }
static int64_t value_dim(const mc_delta_desc *d) { return (int64_t)d->n_v_head * d->dv; }
static int64_t conv_dim(const mc_delta_desc *d) { return 2 * key_dim(d) + value_dim(d); }

static int check(const mc_delta_desc *d, mc_error *err);

int64_t mc_delta_scratch(const mc_delta_desc *d, mc_error *err) {
    int rc = check(d, err);
    if (rc < 0) return rc;
    int64_t t = d->max_tok;
    return mci_scratch_bytes(t * d->hidden, 4) + 2 * mci_scratch_bytes(t * conv_dim(d), 4) +
           2 * mci_scratch_bytes(t * value_dim(d), 4) + 2 * mci_scratch_bytes(t * d->n_v_head, 4) +
           6 * mci_scratch_bytes(t, sizeof(void *));
}

static int check(const mc_delta_desc *d, mc_error *err) {
    const struct {
        const char *name;
        int64_t v, lo, hi;
    } f[] = {{"layer", d->layer, 0, 4096},
             {"hidden", d->hidden, 1, 1 << 20},
             {"key heads", d->n_k_head, 1, 4096},
             {"value heads", d->n_v_head, 1, 4096},
             {"key dim", d->dk, 1, 4096},
             {"value dim", d->dv, 1, 4096},
             {"conv kernel", d->conv_kernel, 1, 16},
             {"chunk", d->max_tok, 1, 1 << 20}};
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        if (f[i].v < f[i].lo || f[i].v > f[i].hi)
            return mci_fail(err, MC_EINVAL, 0, "delta rule: %s: expected %lld..%lld, got %lld",
                            f[i].name, (long long)f[i].lo, (long long)f[i].hi, (long long)f[i].v);
    if (d->n_v_head % d->n_k_head)
        return mci_fail(err, MC_EINVAL, 0,
                        "delta rule: %d value heads over %d key heads: expected a multiple",
                        d->n_v_head, d->n_k_head);
    return MC_OK;
}

/* A matrix decoded to float32 whole. */
static int load_f32(mc_engine *e, const mc_tensor *t, int64_t rows, int64_t cols, const char *name,
                    float **out, mc_error *err) {
    mci_weight w;
    void *p;
    int rc = mci_weight_load(e, t, rows, cols, name, &w, err);
    if (rc < 0 || !w.mat.data) return rc;
    rc = mci_alloc(&e->mem, MC_MEM_WEIGHTS, rows * cols * 4, name, &p, err);
    for (int64_t r = 0; rc == MC_OK && r < rows; r++) {
        *out = p;
        mci_mat_row(&w.mat, r, *out + r * cols);
    }
    mci_weight_free(e, &w);
    return rc;
}

int mc_delta_create(mc_engine *e, const mc_delta_desc *d, mc_delta **out, mc_error *err) {
    int64_t vd, cd;
    mc_delta *a;
    int rc;
    *out = NULL;
    if ((rc = check(d, err)) < 0) return rc;
    if (!(a = calloc(1, sizeof *a)))
        return mci_fail(err, MC_ENOMEM, 0, "delta rule: out of memory");
    if ((rc = mci_enter(e, err)) < 0) {
        free(a);
        return rc;
    }
    mci_engine_retain(e);
    a->e = e;
    a->d = *d;
    vd = value_dim(d);
    cd = conv_dim(d);
    if ((rc = mci_weight_load(e, &d->qkv, cd, d->hidden, "in_proj_qkv", &a->qkv, err)) < 0 ||
        (rc = mci_weight_load(e, &d->z, vd, d->hidden, "in_proj_z", &a->z, err)) < 0 ||
        (rc = mci_weight_load(e, &d->b, d->n_v_head, d->hidden, "in_proj_b", &a->b, err)) < 0 ||
        (rc = mci_weight_load(e, &d->a, d->n_v_head, d->hidden, "in_proj_a", &a->a, err)) < 0 ||
        (rc = mci_weight_load(e, &d->out, d->hidden, vd, "out_proj", &a->out, err)) < 0 ||
        (rc = mci_vector_load(e, &d->norm.weight, d->hidden, "linear attention norm",
                              d->norm.plus_one, &a->norm, err)) < 0 ||
        (rc = mci_vector_load(e, &d->out_norm.weight, d->dv, "linear_attn.norm",
                              d->out_norm.plus_one, &a->out_norm, err)) < 0 ||
        (rc = mci_vector_load(e, &d->a_log, d->n_v_head, "A_log", false, &a->decay, err)) < 0 ||
        (rc = mci_vector_load(e, &d->dt_bias, d->n_v_head, "dt_bias", false, &a->dt_bias, err)) <
            0 ||
        (rc = load_f32(e, &d->conv, cd, d->conv_kernel, "conv1d", &a->conv, err)) < 0 ||
        (rc = mci_scratch_reserve(e, mc_delta_scratch(d, err), err)) < 0)
        goto done;
    if (!a->norm || !a->out_norm || !a->decay || !a->dt_bias || !a->conv || !a->qkv.mat.data ||
        !a->z.mat.data || !a->b.mat.data || !a->a.mat.data || !a->out.mat.data) {
        rc = mci_fail(err, MC_EINVAL, 0, "delta rule: every tensor is needed");
        goto done;
    }
    e->ops->vexp(a->decay, d->n_v_head, a->decay);
done:
    mci_leave(e);
    if (rc < 0) {
        mc_delta_free(a);
        return rc;
    }
    *out = a;
    return MC_OK;
}

void mc_delta_free(mc_delta *a) {
    if (!a) return;
    mc_engine *e = a->e;
    const mc_delta_desc *d = &a->d;
    mci_weight *const w[] = {&a->qkv, &a->z, &a->b, &a->a, &a->out};
    for (size_t i = 0; i < sizeof w / sizeof *w; i++) mci_weight_free(e, w[i]);
    mci_vector_free(e, a->norm, d->hidden);
    mci_vector_free(e, a->out_norm, d->dv);
    mci_vector_free(e, a->decay, d->n_v_head);
    mci_vector_free(e, a->dt_bias, d->n_v_head);
    mci_vector_free(e, a->conv, conv_dim(d) * d->conv_kernel);
    free(a);
    mci_engine_release(e);
}

/* ---- forward ---- */

typedef struct delta_ctx {
    mc_delta *a;
    const mc_step *st;
    float *h;            /* normed input (T, H) */
    float *u, *c;        /* before and after the convolution (T, conv_dim): q | k | v */
    float *z, *o;        /* output gate and recurrence output (T, value_dim) */
    float *beta, *alpha; /* (T, n_v_head) */
    int64_t blocks;      /* chunks per segment in conv, per head in the recurrence */
    int64_t cols;        /* of a head's chunk */
} delta_ctx;

static void conv_block(void *ctx, int64_t item, int thread) {
    const delta_ctx *c = ctx;
    const mc_delta_desc *d = &c->a->d;
    const mci_seg *g = &c->st->seg[item / c->blocks];
    int64_t cd = conv_dim(d), c0 = item % c->blocks * CONV_CHUNK;
    const float *conv_in, *rec_in;
    float *conv_out, *rec_out;
    (void)thread;
    if (!g->count) return;
    mci_seg_state(g, d->layer, &conv_in, &conv_out, &rec_in, &rec_out);
    c->a->e->ops->conv(c->u + g->first * cd, g->count, cd, c0, MCI_MIN(c0 + CONV_CHUNK, cd),
                       c->a->conv, d->conv_kernel, conv_in, conv_out, c->c + g->first * cd);
}

/* Normalised q and k, and the gates: beta = sigmoid(b), alpha = exp(-exp(A_log) softplus(a + dt)).
 */
static void gate_token(void *ctx, int64_t t, int thread) {
    const delta_ctx *c = ctx;
    const mc_delta *a = c->a;
    const mc_delta_desc *d = &a->d;
    const mci_ops *ops = a->e->ops;
    float *q = c->c + t * conv_dim(d), *k = q + key_dim(d);
    float *beta = c->beta + t * d->n_v_head, *alpha = c->alpha + t * d->n_v_head;
    (void)thread;
    for (int64_t i = 0; i < d->n_k_head; i++) {
        ops->l2norm(q + i * d->dk, L2_EPS, 1.0f / sqrtf((float)d->dk), d->dk);
        ops->l2norm(k + i * d->dk, L2_EPS, 1.0f, d->dk);
    }
    ops->vsigmoid(beta, d->n_v_head, beta);
    ops->add(a->dt_bias, d->n_v_head, alpha);
    ops->vsoftplus(alpha, d->n_v_head, alpha);
    for (int64_t i = 0; i < d->n_v_head; i++) alpha[i] = -a->decay[i] * alpha[i];
    ops->vexp(alpha, d->n_v_head, alpha);
}

/* Some columns of one value head of one segment, all its tokens in order. */
static void recur(void *ctx, int64_t item, int thread) {
    const delta_ctx *c = ctx;
    const mc_delta_desc *d = &c->a->d;
    int64_t per_seg = d->n_v_head * c->blocks, cd = conv_dim(d);
    const mci_seg *g = &c->st->seg[item / per_seg];
    int64_t head = item % per_seg / c->blocks, j0 = item % c->blocks * c->cols;
    int64_t key = head / (d->n_v_head / d->n_k_head) * d->dk, state = head * d->dk * d->dv;
    const float *conv_in, *rec_in, *in = c->c + g->first * cd;
    float *conv_out, *rec_out;
    (void)thread;
    if (!g->count) return;
    mci_seg_state(g, d->layer, &conv_in, &conv_out, &rec_in, &rec_out);
    c->a->e->ops->delta(&(mci_delta_args){.dk = d->dk,
                                          .dv = d->dv,
                                          .j0 = j0,
                                          .j1 = MCI_MIN(j0 + c->cols, d->dv),
                                          .n_tok = g->count,
                                          .s_in = rec_in + state,
                                          .s_out = rec_out + state,
                                          .q = in + key,
                                          .k = in + key_dim(d) + key,
                                          .v = in + 2 * key_dim(d) + head * d->dv,
                                          .alpha = c->alpha + g->first * d->n_v_head + head,
                                          .beta = c->beta + g->first * d->n_v_head + head,
                                          .ld_qk = cd,
                                          .ld_v = cd,
                                          .ld_ab = d->n_v_head,
                                          .ld_o = value_dim(d),
                                          .o = c->o + g->first * value_dim(d) + head * d->dv});
}

static void gated_norm_token(void *ctx, int64_t t, int thread) {
    const delta_ctx *c = ctx;
    const mc_delta_desc *d = &c->a->d;
    float *o = c->o + t * value_dim(d);
    (void)thread;
    for (int64_t i = 0; i < d->n_v_head; i++)
        c->a->e->ops->rmsnorm(o + i * d->dv, c->a->out_norm, d->out_norm.eps, d->dv, o + i * d->dv);
    c->a->e->ops->silu_mul(c->z + t * value_dim(d), o, value_dim(d), o);
}

static int fits(const mc_delta_desc *d, const mc_step *st, mc_error *err) {
    for (int32_t i = 0; i < st->n; i++) {
        const mc_kv_desc *k = &st->seg[i].s->kv->d;
        if (d->layer >= k->n_delta || conv_dim(d) != k->conv_dim || d->dk != k->dk ||
            d->dv != k->dv || d->n_v_head != k->n_v_head || d->conv_kernel != k->conv_kernel)
            return mci_fail(err, MC_EINVAL, 0,
                            "delta rule: layer %d was bound for another kind of session", d->layer);
    }
    return MC_OK;
}

int mc_delta_forward(mc_delta *a, mc_step *st, float *x, mc_error *err) {
    mc_engine *e = a->e;
    const mc_delta_desc *d = &a->d;
    int64_t T = st->n_tok, cd = conv_dim(d), vd = value_dim(d);
    int rc = mci_enter(e, err);
    if (rc < 0) return rc;
    if ((rc = mci_step_check(st, e, d->max_tok, err)) < 0 || (rc = fits(d, st, err)) < 0) goto done;
    delta_ctx c = {.a = a, .st = st};
    c.h = mci_scratch(e, T * d->hidden, 4);
    c.u = mci_scratch(e, T * cd, 4);
    c.c = mci_scratch(e, T * cd, 4);
    c.z = mci_scratch(e, T * vd, 4);
    c.o = mci_scratch(e, T * vd, 4);
    c.beta = mci_scratch(e, T * d->n_v_head, 4);
    c.alpha = mci_scratch(e, T * d->n_v_head, 4);
    const float *const *hp = (const float *const *)mci_row_ptrs(e, c.h, T, d->hidden);
    float *const *up = mci_row_ptrs(e, c.u, T, cd);
    float *const *zp = mci_row_ptrs(e, c.z, T, vd);
    float *const *bp = mci_row_ptrs(e, c.beta, T, d->n_v_head);
    float *const *ap = mci_row_ptrs(e, c.alpha, T, d->n_v_head);
    const float *const *op = (const float *const *)mci_row_ptrs(e, c.o, T, vd);

    mci_norm_rows(e, x, a->norm, d->norm.eps, T, d->hidden, c.h);
    mci_run_jobs(e,
                 (mci_job[]){{.w = &a->qkv.mat, .x = hp, .y = up, .n_tok = T},
                             {.w = &a->z.mat, .x = hp, .y = zp, .n_tok = T},
                             {.w = &a->b.mat, .x = hp, .y = bp, .n_tok = T},
                             {.w = &a->a.mat, .x = hp, .y = ap, .n_tok = T}},
                 4);
    c.blocks = (cd + CONV_CHUNK - 1) / CONV_CHUNK;
    mci_pool_run(e->pool, conv_block, &c, st->n * c.blocks);
    mci_pool_run(e->pool, gate_token, &c, T);
    const bool few = st->n * d->n_v_head < mci_pool_threads(e->pool); /* then threads share heads */
    c.cols = few ? HEAD_COLS / 2 : HEAD_COLS;
    c.blocks = (d->dv + c.cols - 1) / c.cols;
    mci_pool_run(e->pool, recur, &c, st->n * d->n_v_head * c.blocks);
    mci_pool_run(e->pool, gated_norm_token, &c, T);
    mci_run_jobs(e, &(mci_job){.w = &a->out.mat, .x = op, .y = (float *const *)hp, .n_tok = T}, 1);
    mci_add_rows(e, c.h, NULL, T, d->hidden, x);
done:
    st->failed |= rc < 0;
    mci_leave(e);
    return rc;
}
