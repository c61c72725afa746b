/* moe.c - the MLP of a layer: router, top-k, routed experts from the store, shared expert, combine.
 *
 * Order of work: route all tokens; ask the store for the union of their experts but those in VRAM,
 * which starts the reads; hand those in VRAM to the GPU; compute the shared expert and the cached
 * experts while both run, then each expert as it arrives. Outputs wait in rows (token, rank) and
 * are summed at the end by ascending expert id, so neither the caches nor the order of arrival can
 * change a bit. */
#include <math.h>
#include <stdlib.h>

#include "linear.h"
#include "session.h"
#include "store.h"

#define GROUP (MCI_MLPS - 1) /* experts computed as one pair of parallel regions */
enum { AHEAD_TOKENS = 4 };   /* steps of more tokens need most experts anyway */

struct mc_moe {
    mc_engine *e;
    mc_store *store; /* NULL: dense */
    mc_moe_desc d;
    mci_weight router, shared_gate, gate, up, down;
    float *norm;
};

/* Floats of gate and up activations for one group: every token once through the widest expert, and
 * a decode step's top-k and shared expert at once. */
static int64_t act_floats(const mc_moe_desc *d) {
    return (d->max_tok + MCI_MIN(d->top_k, GROUP) + 1) *
           (int64_t)MCI_MAX(d->width, d->shared_width);
}

/* Rows that pass through experts in one call: (token, rank) pairs, then the shared expert's. */
static int64_t max_rows(const mc_moe_desc *d) { return d->max_tok * ((int64_t)d->top_k + 1); }

static int check(const mc_moe_desc *d, mc_error *err);

int64_t mc_moe_scratch(const mc_moe_desc *d, mc_error *err) {
    int rc = check(d, err);
    if (rc < 0) return rc;
    int64_t t = d->max_tok, rows = max_rows(d);
    return mci_scratch_bytes(t * d->hidden, 4) + mci_scratch_bytes(t * d->n_expert, 4) +
           mci_scratch_bytes(t, 4) + 2 * mci_scratch_bytes(t * d->top_k, 4) +
           3 * mci_scratch_bytes((int64_t)d->n_expert + 1, 4) + mci_scratch_bytes(t * d->top_k, 4) +
           mci_scratch_bytes(rows * d->hidden, 4) + 2 * mci_scratch_bytes(act_floats(d), 4) +
           4 * mci_scratch_bytes(rows, sizeof(void *)) + 3 * mci_scratch_bytes(t, sizeof(void *));
}

static int check(const mc_moe_desc *d, mc_error *err) {
    const struct {
        const char *name;
        int64_t v, lo, hi;
    } f[] = {{"layer", d->layer, 0, 4096},
             {"hidden", d->hidden, 1, 1 << 20},
             {"experts", d->n_expert, 0, 1 << 16},
             {"top-k", d->top_k, d->n_expert ? 1 : 0, d->n_expert},
             {"expert width", d->width, d->n_expert ? 1 : 0, 1 << 20},
             {"shared width", d->shared_width, d->n_expert ? 0 : 1, 1 << 20},
             {"chunk", d->max_tok, 1, 1 << 20}};
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        if (f[i].v < f[i].lo || f[i].v > f[i].hi)
            return mci_fail(err, MC_EINVAL, 0, "moe: %s: expected %lld..%lld, got %lld", f[i].name,
                            (long long)f[i].lo, (long long)f[i].hi, (long long)f[i].v);
    if (d->max_tok * d->top_k > INT32_MAX)
        return mci_fail(err, MC_EINVAL, 0, "moe: chunks of %lld tokens, top-%d: too many pairs",
                        (long long)d->max_tok, d->top_k);
    return MC_OK;
}

int mc_moe_create(mc_engine *e, mc_store *s, const mc_moe_desc *d, const mc_expert *experts,
                  mc_moe **out, mc_error *err) {
    const mc_expert *sh = &d->shared;
    mc_moe *m;
    int rc;
    *out = NULL;
    if ((rc = check(d, err)) < 0) return rc;
    if (d->n_expert && (!s || !experts))
        return mci_fail(err, MC_EINVAL, 0, "moe: routed experts need a store");
    if (!(m = calloc(1, sizeof *m))) return mci_fail(err, MC_ENOMEM, 0, "moe: out of memory");
    if ((rc = mci_enter(e, err)) < 0) {
        free(m);
        return rc;
    }
    mci_engine_retain(e);
    m->e = e;
    m->d = *d;
    if ((rc = mci_vector_load(e, &d->norm.weight, d->hidden, "moe norm", d->norm.plus_one, &m->norm,
                              err)) < 0)
        goto done;
    if (d->n_expert) {
        m->store = s;
        mci_store_retain(s);
        rc = mci_weight_load(e, &d->router, d->n_expert, d->hidden, "router", &m->router, err);
    }
    if (rc == MC_OK && d->shared_width &&
        (rc = mci_weight_load(e, &sh->gate, d->shared_width, d->hidden, "gate_proj", &m->gate,
                              err)) == MC_OK &&
        (rc = mci_weight_load(e, &sh->up, d->shared_width, d->hidden, "up_proj", &m->up, err)) ==
            MC_OK &&
        (rc = mci_weight_load(e, &sh->down, d->hidden, d->shared_width, "down_proj", &m->down,
                              err)) == MC_OK)
        rc = mci_weight_load(e, &d->shared_gate, 1, d->hidden, "shared expert gate",
                             &m->shared_gate, err);
    if (rc == MC_OK) rc = mci_scratch_reserve(e, mc_moe_scratch(d, err), err);
    if (rc == MC_OK &&
        (!m->norm || (d->n_expert && !m->router.mat.data) ||
         (d->shared_width && (!m->gate.mat.data || !m->up.mat.data || !m->down.mat.data))))
        rc = mci_fail(err, MC_EINVAL, 0, "moe: norm, router and shared expert are needed");
    /* last: a layer of the store is bound once */
    if (rc == MC_OK && d->n_expert) rc = mci_store_bind(s, d, experts, err);
    if (rc == MC_OK && d->n_expert) mci_store_set_peer(s, d->layer, m);
done:
    mci_leave(e);
    if (rc < 0) {
        mc_moe_free(m);
        return rc;
    }
    *out = m;
    return MC_OK;
}

void mc_moe_free(mc_moe *m) {
    if (!m) return;
    mc_engine *e = m->e;
    if (m->store && mci_enter(e, NULL) == MC_OK) { /* another layer's step may be looking at it */
        if (mci_store_peer(m->store, m->d.layer) == m)
            mci_store_set_peer(m->store, m->d.layer, NULL);
        mci_leave(e);
    }
    mci_weight *const w[] = {&m->router, &m->shared_gate, &m->gate, &m->up, &m->down};
    for (size_t i = 0; i < sizeof w / sizeof *w; i++) mci_weight_free(e, w[i]);
    mci_vector_free(e, m->norm, m->d.hidden);
    mci_store_release(m->store);
    free(m);
    mci_engine_release(e);
}

/* ---- forward ---- */

typedef struct moe_ctx {
    const mc_moe *m;
    int64_t n_tok;
    float *x, *h;   /* residual and normed input (T, H) */
    float *scores;  /* router logits, then probabilities (T, E) */
    float *sigma;   /* logit of the shared expert's gate (T) */
    const int32_t *forced; /* (T, k) or NULL */
    int32_t *ids;   /* (T, k), best first */
    float *weight;  /* (T, k) */
    int32_t *line;  /* (n_line) distinct experts by first appearance; from n_cold on: in VRAM */
    int32_t *place; /* (E) rows of an expert, then its index in line */
    int32_t *start; /* (n_line + 1) into pairs */
    int32_t *pairs; /* (T * k) token * k + rank, grouped by place in line */
    int32_t n_line, n_cold;
    float *out;       /* (T * k rows, then T of the shared expert, H) */
    float *act, *up;  /* act_floats */
    const float *const *hp; /* rows of h, of scores */
    float **sp;
    const float **xp; /* row pointers, by row of out */
    float **ap, **upp, **op;
} moe_ctx;

/* Softmax over all experts, then the best k; weights are their probabilities, which sum to 1 where
 * the family renormalises. */
static void route_token(void *ctx, int64_t t, int thread) {
    const moe_ctx *c = ctx;
    const mc_moe_desc *d = &c->m->d;
    float *p = c->scores + t * d->n_expert, *w = c->weight + t * d->top_k, sum = 0.0f;
    int32_t *ids = c->ids + t * d->top_k;
    (void)thread;
    if (c->forced)
        memcpy(ids, c->forced + t * d->top_k, (size_t)d->top_k * sizeof *ids);
    else
        mci_topk(p, d->n_expert, d->top_k, ids);
    c->m->e->ops->softmax(p, d->n_expert);
    for (int32_t i = 0; i < d->top_k; i++) sum += w[i] = p[ids[i]];
    for (int32_t i = 0; d->renormalise && i < d->top_k; i++) w[i] /= sum;
}

/* The union of the chunk's experts and which tokens go to each. */
static void gather(moe_ctx *c) {
    const mc_moe_desc *d = &c->m->d;
    mci_tier *tier = mci_store_tier(c->m->store);
    int64_t n = c->n_tok * d->top_k;
    for (int32_t i = 0; i < d->n_expert; i++) c->place[i] = 0;
    for (int64_t i = 0; i < n; i++)
        if (!c->place[c->ids[i]]++) c->line[c->n_line++] = c->ids[i];
    c->n_cold = tier ? mci_tier_split(tier, d->layer, c->line, c->n_line) : c->n_line;
    for (int32_t i = 0, sum = 0; i < c->n_line; i++) { /* counts become ends of the place before */
        int32_t *at = &c->place[c->line[i]];
        c->start[i + 1] = sum;
        sum += *at;
        *at = i;
    }
    for (int64_t i = 0; i < n; i++) c->pairs[c->start[c->place[c->ids[i]] + 1]++] = (int32_t)i;
    c->start[0] = 0;
}

/* One expert of a group and the rows of `out` it fills. */
typedef struct item {
    mci_mlp mlp;
    const int32_t *rows; /* pair numbers; NULL: the shared expert, all tokens */
    int64_t width;
} item;

static void run_group(moe_ctx *c, const item *items, int n) {
    const mc_moe_desc *d = &c->m->d;
    mci_mlp mlps[GROUP + 1];
    float *act = c->act, *up = c->up;
    int64_t r = 0, k = d->top_k, H = d->hidden;
    for (int i = 0; i < n; i++) {
        const item *it = &items[i];
        mlps[i] = it->mlp;
        for (int64_t j = 0; j < it->mlp.n; j++, r++, act += it->width, up += it->width) {
            int64_t row = it->rows ? it->rows[j] : c->n_tok * k + j;
            c->xp[r] = c->h + (it->rows ? row / k : j) * H;
            c->ap[r] = act;
            c->upp[r] = up;
            c->op[r] = c->out + row * H;
        }
    }
    mci_run_mlps(c->m->e, mlps, n, c->xp, c->ap, c->upp, c->op);
}

/* Computes the shared expert and every expert of the line but those in VRAM, in whatever order they
 * become ready. The shared expert goes with the first group and never waits for the disk. */
static int run_cold(moe_ctx *c, mc_error *err) {
    const mc_moe *m = c->m;
    const mc_moe_desc *d = &m->d;
    mci_tier *tier = c->n_cold < c->n_line ? mci_store_tier(m->store) : NULL;
    mci_expert_view view[GROUP];
    item items[GROUP + 1];
    int n = 0, got = 0, done = 0, rc;
    int64_t room = act_floats(d);
    if (d->shared_width) {
        items[n++] = (item){
            {&m->gate.mat, &m->up.mat, &m->down.mat, c->n_tok}, NULL, d->shared_width};
        room -= c->n_tok * d->shared_width;
    }
    do {
        if (done == got && d->n_expert) {
            if ((rc = mci_check_cancel(m->e, err)) < 0) return rc;
            if (tier && (rc = mci_tier_step(tier, false, err)) < 0) return rc;
            got = mci_store_next(m->store, view, GROUP, n == 0, err);
            if (got < 0) return got;
            done = 0;
        }
        int first = done;
        for (; done < got; done++) {
            int32_t i = view[done].index;
            int64_t rows = c->start[i + 1] - c->start[i];
            if (n && rows * d->width > room) break;
            room -= rows * d->width;
            items[n++] = (item){{&view[done].gate, &view[done].up, &view[done].down, rows},
                                c->pairs + c->start[i], d->width};
        }
        if (!n) return MC_OK;
        run_group(c, items, n);
        for (; first < done; first++) mci_store_done(m->store, view[first].index);
        n = 0;
        room = act_floats(d);
    } while (d->n_expert);
    return MC_OK;
}

/* All experts: the GPU has its own while the CPU computes. */
static int run_experts(moe_ctx *c, mc_error *err) {
    const int32_t hot = c->n_line - c->n_cold;
    if (!hot) return run_cold(c, err);
    mci_tier *tier = mci_store_tier(c->m->store);
    const mci_products line = {.ids = c->line + c->n_cold, .start = c->start + c->n_cold,
                               .pairs = c->pairs, .n = hot, .top_k = c->m->d.top_k,
                               .n_tok = c->n_tok, .x = c->h, .out = c->out};
    int rc = mci_tier_run(tier, &line, err);
    if (rc == MC_OK) rc = run_cold(c, err);
    if (rc == MC_OK) rc = mci_tier_step(tier, true, err);
    return rc < 0 ? rc : MC_OK;
}

/* x += sum of p_e out_e by ascending expert, then sigma * shared. h is free and holds the sum. */
static void combine_token(void *ctx, int64_t t, int thread) {
    const moe_ctx *c = ctx;
    const mc_moe_desc *d = &c->m->d;
    const mci_ops *ops = c->m->e->ops;
    int64_t H = d->hidden, k = d->top_k;
    const int32_t *ids = c->ids + t * k;
    float *y = c->h + t * H;
    (void)thread;
    memset(y, 0, (size_t)H * 4);
    for (int32_t last = -1;;) {
        int64_t best = -1;
        for (int64_t i = 0; i < k; i++)
            if (ids[i] > last && (best < 0 || ids[i] < ids[best])) best = i;
        if (best < 0) break;
        ops->axpy(c->weight[t * k + best], c->out + (t * k + best) * H, H, y);
        last = ids[best];
    }
    if (d->shared_width) {
        float s = 1.0f;
        if (c->m->shared_gate.mat.data) ops->vsigmoid(c->sigma + t, 1, &s);
        ops->axpy(s, c->out + (c->n_tok * k + t) * H, H, y);
    }
    ops->add(y, H, c->x + t * H);
}

/* Runs the next layer's router on this layer's output. The mixer in between changes the choice
 * little; its time is what the reads gain. Best ranks first: the slabs may not do for all. */
static void foresee(moe_ctx *c) {
    mc_engine *e = c->m->e;
    const mc_moe *next = mci_store_peer(c->m->store, c->m->d.layer + 1);
    if (!next || next->d.hidden != c->m->d.hidden || next->d.top_k > c->m->d.top_k) return;
    const mc_moe_desc *d = &next->d;
    mci_job job = {.w = &next->router.mat, .x = c->hp, .n_tok = c->n_tok, .y = c->sp};
    mci_norm_rows(e, c->x, next->norm, d->norm.eps, c->n_tok, d->hidden, c->h);
    mci_run_jobs(e, &job, 1);
    for (int64_t t = 0; t < c->n_tok; t++)
        mci_topk(c->scores + t * d->n_expert, d->n_expert, d->top_k, c->ids + t * d->top_k);
    for (int32_t rank = 0; rank < d->top_k; rank++)
        for (int64_t t = 0; t < c->n_tok; t++)
            if (!mci_store_foresee(c->m->store, d->layer, c->ids[t * d->top_k + rank])) return;
}

/* Ids from outside: in range, and no token names one twice. seen: (n_expert) scratch. */
static int check_forced(const mc_moe_desc *d, const int32_t *ids, int64_t n_tok, int32_t *seen,
                        mc_error *err) {
    for (int32_t i = 0; i < d->n_expert; i++) seen[i] = -1;
    for (int64_t i = 0; i < n_tok * d->top_k; i++) {
        if (ids[i] < 0 || ids[i] >= d->n_expert)
            return mci_fail(err, MC_ERANGE, 0, "layer %d: forced expert %d of %d", d->layer, ids[i],
                            d->n_expert);
        if (seen[ids[i]] == i / d->top_k)
            return mci_fail(err, MC_EINVAL, 0, "layer %d: forced expert %d twice in a token",
                            d->layer, ids[i]);
        seen[ids[i]] = (int32_t)(i / d->top_k);
    }
    return MC_OK;
}

int mc_moe_forward(mc_moe *m, mc_step *st, float *x, const int32_t *forced, int32_t *routed,
                   mc_error *err) {
    mc_engine *e = m->e;
    const mc_moe_desc *d = &m->d;
    int64_t T = st->n_tok, rows = max_rows(d);
    int rc = mci_enter(e, err);
    if (rc < 0) return rc;
    double t0 = mci_now();
    if ((rc = mci_step_check(st, e, d->max_tok, err)) < 0) goto done;
    moe_ctx c = {.m = m, .n_tok = T, .x = x, .forced = forced};
    c.h = mci_scratch(e, T * d->hidden, 4);
    c.scores = mci_scratch(e, T * d->n_expert, 4);
    c.sigma = mci_scratch(e, T, 4);
    c.ids = mci_scratch(e, T * d->top_k, 4);
    c.weight = mci_scratch(e, T * d->top_k, 4);
    c.line = mci_scratch(e, (int64_t)d->n_expert + 1, 4);
    c.place = mci_scratch(e, (int64_t)d->n_expert + 1, 4);
    c.start = mci_scratch(e, (int64_t)d->n_expert + 1, 4);
    c.pairs = mci_scratch(e, T * d->top_k, 4);
    c.out = mci_scratch(e, T * (d->top_k + 1) * d->hidden, 4);
    c.act = mci_scratch(e, act_floats(d), 4);
    c.up = mci_scratch(e, act_floats(d), 4);
    c.xp = mci_scratch(e, rows, sizeof(void *));
    c.ap = mci_scratch(e, rows, sizeof(void *));
    c.upp = mci_scratch(e, rows, sizeof(void *));
    c.op = mci_scratch(e, rows, sizeof(void *));
    c.hp = (const float *const *)mci_row_ptrs(e, c.h, T, d->hidden);
    c.sp = mci_row_ptrs(e, c.scores, T, d->n_expert);

    if (forced && (rc = check_forced(d, forced, T, c.place, err)) < 0) goto done;
    mci_norm_rows(e, x, m->norm, d->norm.eps, T, d->hidden, c.h);
    mci_job jobs[2];
    int n_job = 0;
    if (d->n_expert)
        jobs[n_job++] = (mci_job){.w = &m->router.mat,
                                  .x = c.hp,
                                  .n_tok = T,
                                  .y = c.sp};
    if (m->shared_gate.mat.data)
        jobs[n_job++] = (mci_job){
            .w = &m->shared_gate.mat, .x = c.hp, .n_tok = T, .y = mci_row_ptrs(e, c.sigma, T, 1)};
    mci_run_jobs(e, jobs, n_job);
    if (d->n_expert) {
        mci_pool_run(e->pool, route_token, &c, T);
        gather(&c);
        if (d->layer == 0) mci_store_token(m->store, T <= AHEAD_TOKENS && !forced);
        rc = mci_store_begin(m->store, d->layer, c.line, c.n_cold, err);
    }
    if (rc == MC_OK) rc = run_experts(&c, err);
    if (d->n_expert) mci_store_end(m->store);
    if (rc < 0) goto done;
    mci_pool_run(e->pool, combine_token, &c, T);
    if (routed) memcpy(routed, c.ids, (size_t)(T * d->top_k) * 4);
    e->stats.expert_rows += T * d->top_k;
    if (d->n_expert && mci_store_ahead(m->store)) foresee(&c);
done:
    st->failed |= rc < 0;
    e->stats.moe_s += mci_now() - t0;
    mci_leave(e);
    return rc;
}
