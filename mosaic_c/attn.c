/* attn.c - full attention with grouped K/V heads over KV pages: norm, q/k/v, per-head norms, rotary
 * embedding, softmax(q k) v, optional output gate, output projection, residual. */
#include <math.h>
#include <stdlib.h>

#include "linear.h"
#include "session.h"

struct mc_attn {
    mc_engine *e;
    mc_attn_desc d;
    mci_weight q, k, v, o;
    float *norm, *q_norm, *k_norm;            /* (hidden), (head_dim), (head_dim) or NULL */
    float *q_bias, *k_bias, *v_bias, *o_bias; /* or NULL */
    float *inv_freq;                          /* (rope_dim / 2) */
};

static int64_t q_rows(const mc_attn_desc *d) {
    return (int64_t)d->n_head * d->head_dim * (d->gate ? 2 : 1);
}

static int64_t table_len(const mc_attn_desc *d) {
    return (d->ctx + MC_PAGE_TOKENS - 1) / MC_PAGE_TOKENS;
}

/* inv_freq as transformers computes it; the power in double, one rounding, one f32 division. */
static void rope_freq(double theta, int32_t dim, float *out) {
    for (int32_t i = 0; i < dim / 2; i++)
        out[i] = 1.0f / (float)pow(theta, (double)((float)(2 * i) / (float)dim));
}

/* The angle is an f32 product; its cosine and sine are rounded once from double. */
static void rope_at(const float *inv_freq, int64_t half, int64_t pos, float *c, float *s) {
    for (int64_t i = 0; i < half; i++) {
        double angle = (double)((float)pos * inv_freq[i]);
        c[i] = (float)cos(angle);
        s[i] = (float)sin(angle);
    }
}

int mc_rope_table(double theta, int32_t dim, int64_t pos, float *inv_freq, float *c, float *s) {
    if (dim < 2 || dim % 2 || pos < 0 || !(theta > 0)) return MC_EINVAL;
    rope_freq(theta, dim, inv_freq);
    rope_at(inv_freq, dim / 2, pos, c, s);
    return MC_OK;
}

/* Per thread: page pointers of K and V, cos and sin, scores of one group of heads. */
static int64_t thread_scratch(const mc_attn_desc *d) {
    return 2 * mci_scratch_bytes(table_len(d), sizeof(void *)) +
           2 * mci_scratch_bytes(d->rope_dim / 2, 4) +
           mci_scratch_bytes((int64_t)(d->n_head / d->n_kv_head) * d->ctx, 4);
}

static int check(const mc_attn_desc *d, mc_error *err);

int64_t mc_attn_scratch(const mc_attn_desc *d, int32_t threads, mc_error *err) {
    int rc = check(d, err);
    if (rc < 0) return rc;
    if (threads < 1 || threads > 256)
        return mci_fail(err, MC_EINVAL, 0, "attention: threads: expected 1..256, got %d", threads);
    int64_t t = d->max_tok, kv = (int64_t)d->n_kv_head * d->head_dim;
    return mci_scratch_bytes(t * d->hidden, 4) + mci_scratch_bytes(t * q_rows(d), 4) +
           2 * mci_scratch_bytes(t * kv, 4) +
           2 * mci_scratch_bytes(t * d->n_head * d->head_dim, 4) +
           6 * mci_scratch_bytes(t, sizeof(void *)) + threads * thread_scratch(d);
}

static int check(const mc_attn_desc *d, mc_error *err) {
    const struct {
        const char *name;
        int64_t v, lo, hi;
    } f[] = {{"layer", d->layer, 0, 4096},
             {"hidden", d->hidden, 1, 1 << 20},
             {"heads", d->n_head, 1, 4096},
             {"KV heads", d->n_kv_head, 1, 4096},
             {"head_dim", d->head_dim, 1, 4096},
             {"rope dim", d->rope_dim, 0, d->head_dim},
             {"gate", d->gate, 0, 1},
             {"ctx", d->ctx, 1, (int64_t)1 << 31},
             {"chunk", d->max_tok, 1, 1 << 20}};
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        if (f[i].v < f[i].lo || f[i].v > f[i].hi)
            return mci_fail(err, MC_EINVAL, 0, "attention: %s: expected %lld..%lld, got %lld",
                            f[i].name, (long long)f[i].lo, (long long)f[i].hi, (long long)f[i].v);
    if (d->n_head % d->n_kv_head || d->rope_dim % 2)
        return mci_fail(err, MC_EINVAL, 0,
                        "attention: %d heads over %d KV heads, rope dim %d: expected a multiple "
                        "and an even number",
                        d->n_head, d->n_kv_head, d->rope_dim);
    if (d->rope_dim && !(d->rope_theta >= 1.0))
        return mci_fail(err, MC_EINVAL, 0, "attention: rope theta: expected 1 or more, got %g",
                        d->rope_theta);
    return MC_OK;
}

int mc_attn_create(mc_engine *e, const mc_attn_desc *d, mc_attn **out, mc_error *err) {
    int64_t kv, qo;
    void *freq = NULL;
    mc_attn *a;
    int rc;
    *out = NULL;
    if ((rc = check(d, err)) < 0) return rc;
    if (!(a = calloc(1, sizeof *a))) return mci_fail(err, MC_ENOMEM, 0, "attention: out of memory");
    if ((rc = mci_enter(e, err)) < 0) {
        free(a);
        return rc;
    }
    mci_engine_retain(e);
    a->e = e;
    a->d = *d;
    kv = (int64_t)d->n_kv_head * d->head_dim;
    qo = (int64_t)d->n_head * d->head_dim;
    if ((rc = mci_weight_load(e, &d->q, q_rows(d), d->hidden, "q_proj", &a->q, err)) < 0 ||
        (rc = mci_weight_load(e, &d->k, kv, d->hidden, "k_proj", &a->k, err)) < 0 ||
        (rc = mci_weight_load(e, &d->v, kv, d->hidden, "v_proj", &a->v, err)) < 0 ||
        (rc = mci_weight_load(e, &d->o, d->hidden, qo, "o_proj", &a->o, err)) < 0 ||
        (rc = mci_vector_load(e, &d->norm.weight, d->hidden, "attention norm", d->norm.plus_one,
                              &a->norm, err)) < 0 ||
        (rc = mci_vector_load(e, &d->q_norm.weight, d->head_dim, "q_norm", d->q_norm.plus_one,
                              &a->q_norm, err)) < 0 ||
        (rc = mci_vector_load(e, &d->k_norm.weight, d->head_dim, "k_norm", d->k_norm.plus_one,
                              &a->k_norm, err)) < 0 ||
        (rc = mci_vector_load(e, &d->q_bias, q_rows(d), "q bias", false, &a->q_bias, err)) < 0 ||
        (rc = mci_vector_load(e, &d->k_bias, kv, "k bias", false, &a->k_bias, err)) < 0 ||
        (rc = mci_vector_load(e, &d->v_bias, kv, "v bias", false, &a->v_bias, err)) < 0 ||
        (rc = mci_vector_load(e, &d->o_bias, d->hidden, "o bias", false, &a->o_bias, err)) < 0 ||
        (rc = mci_alloc(&e->mem, MC_MEM_WEIGHTS, d->rope_dim * 2, "rope", &freq, err)) < 0 ||
        (rc = mci_scratch_reserve(e, mc_attn_scratch(d, mci_pool_threads(e->pool), err), err)) < 0)
        goto done;
    a->inv_freq = freq;
    freq = NULL;
    rope_freq(d->rope_theta, d->rope_dim, a->inv_freq);
    if (!a->norm || !a->q.mat.data || !a->k.mat.data || !a->v.mat.data || !a->o.mat.data)
        rc = mci_fail(err, MC_EINVAL, 0, "attention: norm, q, k, v and o are needed");
done:
    mci_release(&e->mem, MC_MEM_WEIGHTS, freq, d->rope_dim * 2);
    mci_leave(e);
    if (rc < 0) {
        mc_attn_free(a);
        return rc;
    }
    *out = a;
    return MC_OK;
}

void mc_attn_free(mc_attn *a) {
    if (!a) return;
    mc_engine *e = a->e;
    const mc_attn_desc *d = &a->d;
    int64_t kv = (int64_t)d->n_kv_head * d->head_dim;
    mci_weight_free(e, &a->q);
    mci_weight_free(e, &a->k);
    mci_weight_free(e, &a->v);
    mci_weight_free(e, &a->o);
    mci_vector_free(e, a->norm, d->hidden);
    mci_vector_free(e, a->q_norm, d->head_dim);
    mci_vector_free(e, a->k_norm, d->head_dim);
    mci_vector_free(e, a->q_bias, q_rows(d));
    mci_vector_free(e, a->k_bias, kv);
    mci_vector_free(e, a->v_bias, kv);
    mci_vector_free(e, a->o_bias, d->hidden);
    mci_release(&e->mem, MC_MEM_WEIGHTS, a->inv_freq, d->rope_dim * 2);
    free(a);
    mci_engine_release(e);
}

/* ---- forward ---- */

typedef struct attn_ctx {
    mc_attn *a;
    const mc_step *st;
    float *h, *q, *k, *v; /* normed input (T, H); projections (T, rows) */
    float *qc, *out;      /* queries without their gates, and results (T, heads * D) */
    uint8_t *threads;     /* thread_scratch each */
} attn_ctx;

static const mci_seg *seg_of(const mc_step *st, int64_t t) {
    const mci_seg *g = st->seg;
    while (t >= g->first + g->count) g++;
    return g;
}

static void *carve(uint8_t **at, int64_t n, int64_t size) {
    void *p = *at;
    *at += mci_scratch_bytes(n, size);
    return p;
}

/* Bias, head norms and rotation of one token; K and V go to its place in the page. */
static void place_token(void *ctx, int64_t t, int thread) {
    const attn_ctx *c = ctx;
    const mc_attn *a = c->a;
    const mc_attn_desc *d = &a->d;
    const mci_ops *ops = a->e->ops;
    const mci_seg *g = seg_of(c->st, t);
    const mc_kv *kv = g->s->kv;
    int64_t D = d->head_dim, half = d->rope_dim / 2, pos = g->pos + t - g->first;
    int64_t row = pos % MC_PAGE_TOKENS, stride = d->gate ? 2 * D : D;
    uint8_t *mine = c->threads + thread * thread_scratch(d);
    uint8_t *page = mci_kv_page(kv, g->s->pages[pos / MC_PAGE_TOKENS]);
    float *q = c->q + t * q_rows(d), *k = c->k + t * d->n_kv_head * D,
          *v = c->v + t * d->n_kv_head * D;
    float *cs = carve(&mine, half, 4), *sn = carve(&mine, half, 4);
    rope_at(a->inv_freq, half, pos, cs, sn);
    if (a->q_bias) ops->add(a->q_bias, q_rows(d), q);
    if (a->k_bias) ops->add(a->k_bias, d->n_kv_head * D, k);
    if (a->v_bias) ops->add(a->v_bias, d->n_kv_head * D, v);
    for (int64_t i = 0; i < d->n_head; i++) {
        float *to = c->qc + (t * d->n_head + i) * D;
        memcpy(to, q + i * stride, (size_t)D * 4);
        if (a->q_norm) ops->rmsnorm(to, a->q_norm, d->q_norm.eps, D, to);
        ops->rope(to, cs, sn, half);
    }
    for (int32_t i = 0; i < d->n_kv_head; i++) {
        float *ki = k + i * D;
        if (a->k_norm) ops->rmsnorm(ki, a->k_norm, d->k_norm.eps, D, ki);
        ops->rope(ki, cs, sn, half);
        for (int w = 0; w < 2; w++) {
            uint8_t *to = page + mci_kv_offset(kv, d->layer, w, i);
            const float *from = w ? v + i * D : ki;
            if (kv->d.dtype == MC_F32)
                memcpy(to + row * D * 4, from, (size_t)D * 4);
            else
                ops->to_bf16(from, D, (uint16_t *)(void *)(to + row * D * 2));
        }
    }
}

/* One token over one KV head. */
static void attend(void *ctx, int64_t item, int thread) {
    const attn_ctx *c = ctx;
    const mc_attn *a = c->a;
    const mc_attn_desc *d = &a->d;
    int32_t head = (int32_t)(item % d->n_kv_head);
    int64_t t = item / d->n_kv_head, group = d->n_head / d->n_kv_head, D = d->head_dim;
    const mci_seg *g = seg_of(c->st, t);
    const mc_kv *kv = g->s->kv;
    int64_t n_pos = g->pos + t - g->first + 1;
    uint8_t *mine = c->threads + thread * thread_scratch(d);
    const void **k = carve(&mine, table_len(d), sizeof *k);
    const void **v = carve(&mine, table_len(d), sizeof *v);
    float *scores = carve(&mine, group * d->ctx, 4);
    float *out = c->out + (t * d->n_head + head * group) * D;
    for (int64_t p = 0; p * MC_PAGE_TOKENS < n_pos; p++) {
        const uint8_t *page = mci_kv_page(kv, g->s->pages[p]);
        k[p] = page + mci_kv_offset(kv, d->layer, 0, head);
        v[p] = page + mci_kv_offset(kv, d->layer, 1, head);
    }
    a->e->ops->attn(&(mci_attn_args){.head_dim = D,
                                     .group = group,
                                     .n_pos = n_pos,
                                     .page_tokens = MC_PAGE_TOKENS,
                                     .kv_dtype = kv->d.dtype,
                                     .scale = 1.0f / sqrtf((float)D),
                                     .k = k,
                                     .v = v,
                                     .q = c->qc + (t * d->n_head + head * group) * D,
                                     .out = out,
                                     .scores = scores});
    for (int64_t i = 0; d->gate && i < group; i++)
        a->e->ops->sigmoid_mul(c->q + t * q_rows(d) + (head * group + i) * 2 * D + D, D,
                               out + i * D);
}

static int fits(const mc_attn_desc *d, const mc_step *st, mc_error *err) {
    for (int32_t i = 0; i < st->n; i++) {
        const mc_kv_desc *k = &st->seg[i].s->kv->d;
        if (d->layer >= k->n_attn || d->n_kv_head != k->n_kv_head || d->head_dim != k->head_dim ||
            k->ctx > d->ctx)
            return mci_fail(err, MC_EINVAL, 0,
                            "attention: layer %d was bound for another kind of session", d->layer);
    }
    return MC_OK;
}

int mc_attn_forward(mc_attn *a, mc_step *st, float *x, mc_error *err) {
    mc_engine *e = a->e;
    const mc_attn_desc *d = &a->d;
    int64_t T = st->n_tok, kv = (int64_t)d->n_kv_head * d->head_dim,
            qo = (int64_t)d->n_head * d->head_dim;
    int rc = mci_enter(e, err);
    if (rc < 0) return rc;
    if ((rc = mci_step_check(st, e, d->max_tok, err)) < 0 || (rc = fits(d, st, err)) < 0) goto done;
    attn_ctx c = {.a = a, .st = st};
    c.h = mci_scratch(e, T * d->hidden, 4);
    c.q = mci_scratch(e, T * q_rows(d), 4);
    c.k = mci_scratch(e, T * kv, 4);
    c.v = mci_scratch(e, T * kv, 4);
    c.qc = mci_scratch(e, T * qo, 4);
    c.out = mci_scratch(e, T * qo, 4);
    const float *const *hp = (const float *const *)mci_row_ptrs(e, c.h, T, d->hidden);
    float *const *qp = mci_row_ptrs(e, c.q, T, q_rows(d));
    float *const *kp = mci_row_ptrs(e, c.k, T, kv);
    float *const *vp = mci_row_ptrs(e, c.v, T, kv);
    const float *const *op = (const float *const *)mci_row_ptrs(e, c.out, T, qo);
    c.threads = mci_scratch(e, mci_pool_threads(e->pool), thread_scratch(d));

    mci_norm_rows(e, x, a->norm, d->norm.eps, T, d->hidden, c.h);
    mci_run_jobs(e,
                 (mci_job[]){{.w = &a->q.mat, .x = hp, .y = qp, .n_tok = T},
                             {.w = &a->k.mat, .x = hp, .y = kp, .n_tok = T},
                             {.w = &a->v.mat, .x = hp, .y = vp, .n_tok = T}},
                 3);
    mci_pool_run(e->pool, place_token, &c, T);
    mci_pool_run(e->pool, attend, &c, T * d->n_kv_head);
    mci_run_jobs(e, &(mci_job){.w = &a->o.mat, .x = op, .y = (float *const *)hp, .n_tok = T}, 1);
    mci_add_rows(e, c.h, a->o_bias, T, d->hidden, x);
done:
    st->failed |= rc < 0;
    mci_leave(e);
    return rc;
}
