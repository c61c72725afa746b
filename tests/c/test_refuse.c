/* test_refuse.c - what must be refused: allocations that fail one after the other, budgets too
 * small by any amount, descriptions that make no sense. A refusal names its reason, leaves nothing
 * behind and does no harm to what was there before. */
#include "blocks.h"

static mc_error err;
static char saved[4200]; /* a session in a file */
static const uint8_t id[32] = {1};

#define OK(call) CHECK((call) == MC_OK, "%s", err.message)

/* ---- refused memory ---- */

/* What can be created beside a world that is there. */
enum { KV, SESSION, FORK, SNAPSHOT, LOAD, LINEAR, HEAD, ATTN, DELTA, DENSE, EXPERT_LAYERS, N_KIND };

typedef struct extra {
    mc_kv *kv;
    mc_session *s;
    mc_linear *l;
    mc_head *h;
    mc_attn *a;
    mc_delta *d;
    mc_moe *m[2];
    mc_store *store;
} extra;

static void free_extra(extra *x) {
    mc_session_free(x->s);
    mc_kv_free(x->kv);
    mc_head_free(x->h);
    mc_linear_free(x->l);
    mc_attn_free(x->a);
    mc_delta_free(x->d);
    mc_moe_free(x->m[0]);
    mc_moe_free(x->m[1]);
    mc_store_free(x->store);
    memset(x, 0, sizeof *x);
}

/* Larger chunks than the world's, so that scratch must grow. */
static int create(const world *w, int kind, mc_session *base, extra *x) {
    const model *m = w->m;
    mc_kv_desc kv = kv_desc(w->set);
    mc_attn_desc attn = m->attn[0];
    mc_delta_desc delta = m->delta[0];
    mc_moe_desc moe = m->moe[2], routed;
    uint8_t meta[8];
    int rc;
    attn.max_tok = delta.max_tok = moe.max_tok = 5 * CHUNK;
    memset(x, 0, sizeof *x);
    switch (kind) {
    case KV:
        return mc_kv_create(w->e, &kv, &x->kv, &err);
    case SESSION:
        return mc_session_create(w->kv, &x->s, &err);
    case FORK:
        return mc_session_fork(base, &x->s, &err);
    case SNAPSHOT:
        return mc_session_snapshot(base, &err);
    case LOAD:
        return (int)mc_session_load(w->kv, saved, id, meta, 8, &x->s, &err);
    case LINEAR:
        return mc_linear_create(w->e, &m->head, 1, &x->l, &err);
    case HEAD:
        return mc_head_create(w->e, &m->final, w->out, CHUNK, &x->h, &err);
    case ATTN:
        return mc_attn_create(w->e, &attn, &x->a, &err);
    case DELTA:
        return mc_delta_create(w->e, &delta, &x->d, &err);
    case DENSE:
        return mc_moe_create(w->e, NULL, &moe, NULL, &x->m[0], &err);
    }
    rc = mc_store_create(w->e, 2, EXPERTS, TOP_K, MC_POLICY_AUTO, &x->store, &err);
    for (int i = 0; i < 2 && rc == MC_OK; i++) {
        routed = m->moe[i];
        routed.max_tok = (4 + i) * CHUNK;
        rc = mc_moe_create(w->e, x->store, &routed, m->expert[i], &x->m[i], &err);
        if (rc < 0) CHECK(!x->m[i], "a handle for a failure");
    }
    if (rc == MC_OK) rc = mc_store_open(x->store, TOP_K, 0, &err);
    if (rc < 0) free_extra(x);
    return rc;
}

static bool nothing(const extra *x) {
    static const extra none;
    return memcmp(x, &none, sizeof none) == 0;
}

/* The blocks that were there still give the same bits, from the same session. */
static void probe(const world *w, mc_session *base, const float *want, int kind, int64_t n) {
    mc_session *f = NULL;
    float got[H];
    memset(got, 0, sizeof got);
    OK(mc_session_fork(base, &f, &err));
    if (!f) return;
    OK(run(w, w->st, f, 2, 3, 2, got, &err));
    CHECK(same_bits(want, got, H), "kind %d, refusal %lld: other bits", kind, (long long)n);
    mc_session_free(f);
}

/* Refuses the n-th allocation, or all beyond a budget that grows slowly, until it succeeds. */
static void check_refusals(const model *m, int kind, bool budget) {
    world w = open_world(m, PLAIN);
    mci_mem *mem = &w.e->mem;
    int64_t n, room = 1, first = mem->total - mem->now[MC_MEM_SCRATCH];
    mc_session *base = new_session(&w), *f = NULL;
    float want[H];
    extra x;
    OK(run(&w, w.st, base, 1, 70, CHUNK, NULL, &err));
    OK(mc_session_save(base, saved, id, NULL, 0, &err));
    OK(mc_session_fork(base, &f, &err));
    OK(run(&w, w.st, f, 2, 3, 3, want, &err));
    mc_session_free(f);
    for (n = 1; n < 300; n++, room += room / 4 + 64) {
        int64_t total = mem->total, refs = w.e->refs, kv_refs = w.kv->refs, pages = w.kv->n_free,
                now[MC_MEM_KINDS];
        for (int i = 0; i < MC_MEM_KINDS; i++) now[i] = mem->now[i];
        mem->fail_after = budget ? 0 : n;
        mem->budget = budget ? total + room : 0;
        err.message[0] = 0;
        int rc = create(&w, kind, base, &x);
        mem->fail_after = mem->budget = 0;
        if (rc >= 0) break;
        CHECK(rc == (budget ? MC_EBUDGET : MC_ENOMEM) && err.code == rc && err.message[0],
              "kind %d, %lld: %d \"%s\"", kind, (long long)n, rc, err.message);
        CHECK(nothing(&x), "kind %d, %lld: a handle for a failure", kind, (long long)n);
        /* scratch that grew for a part which succeeded stays: it belongs to the engine */
        CHECK(mem->total - mem->now[MC_MEM_SCRATCH] == total - now[MC_MEM_SCRATCH] &&
                  mem->now[MC_MEM_SCRATCH] == w.e->scratch_size &&
                  (w.e->scratch_size == now[MC_MEM_SCRATCH] || kind == EXPERT_LAYERS),
              "kind %d, %lld: %lld bytes left", kind, (long long)n,
              (long long)(mem->total - total));
        for (int i = 0; i < MC_MEM_KINDS; i++)
            CHECK(mem->now[i] == now[i] || i == MC_MEM_SCRATCH, "kind %d, %lld: memory %d", kind,
                  (long long)n, i);
        CHECK(w.e->refs == refs && w.kv->refs == kv_refs && w.kv->n_free == pages && !base->busy,
              "kind %d, %lld: references", kind, (long long)n);
        if (n % 3 == 1 || kind >= ATTN) probe(&w, base, want, kind, n);
    }
    CHECK(n > 1 && n < 300, "kind %d: refused %lld times", kind, (long long)n - 1);
    probe(&w, base, want, kind, n);
    free_extra(&x);
    probe(&w, base, want, kind, n);
    mc_session_free(base);
    CHECK(mem->total - mem->now[MC_MEM_SCRATCH] == first &&
              mem->now[MC_MEM_STATE] == w.kv->n_page * (w.kv->page_bytes + 8),
          "kind %d: %lld bytes left", kind, (long long)(mem->total - first));
    close_world(&w);
}

/* Opening all from nothing, at every budget up to one that is enough: nothing is left behind. */
static void check_open(const model *m, bool budget) {
    int64_t n, room = 1;
    for (n = 1; n < 400; n++, room += room / 3 + 64) {
        world w = {.m = m, .set = PLAIN};
        OK(open_engine(m, PLAIN, &w.e, &err) >= 0 ? MC_OK : -1);
        mc_engine *e = w.e;
        mci_engine_retain(e);
        e->mem.fail_after = budget ? 0 : n;
        e->mem.budget = budget ? room : 0;
        int rc = open_blocks(&w, &err);
        CHECK(rc == MC_OK || rc == (budget ? MC_EBUDGET : MC_ENOMEM), "%d %s", rc, err.message);
        close_world(&w);
        CHECK(e->refs == 1 && e->mem.total == e->scratch_size, "%lld: %lld refs, %lld bytes",
              (long long)n, (long long)e->refs, (long long)e->mem.total);
        mci_engine_release(e);
        if (rc == MC_OK) break;
    }
    CHECK(n > 20 && n < 400, "opened after %lld refusals", (long long)n - 1);
}

/* ---- descriptions that make no sense ---- */

/* All must fail, whatever is created from d (attn, delta, moe) or experts. */
typedef struct target {
    mc_engine *e;
    const model *m;
    int kind; /* 0 attention, 1 delta rule, 2 MoE */
    mc_attn_desc attn;
    mc_delta_desc delta;
    mc_moe_desc moe;
    mc_expert expert[EXPERTS];
} target;

static int create_target(target *t) {
    mc_attn *a = NULL;
    mc_delta *d = NULL;
    mc_moe *m = NULL;
    mc_store *s = NULL;
    int rc;
    err.message[0] = 0;
    if (t->kind == 0) {
        rc = mc_attn_create(t->e, &t->attn, &a, &err);
    } else if (t->kind == 1) {
        rc = mc_delta_create(t->e, &t->delta, &d, &err);
    } else {
        OK(mc_store_create(t->e, 2, EXPERTS, TOP_K, MC_POLICY_AUTO, &s, NULL));
        rc = mc_moe_create(t->e, s, &t->moe, t->expert, &m, &err);
    }
    if (rc < 0) CHECK(!a && !d && !m, "a handle for a failure");
    mc_attn_free(a);
    mc_delta_free(d);
    mc_moe_free(m);
    mc_store_free(s);
    return rc;
}

static void must_fail(target *t, const char *what, int64_t at) {
    int64_t total = t->e->mem.total;
    int rc = create_target(t);
    CHECK(rc < 0 && rc != MC_ENOMEM && err.code == rc && err.message[0],
          "kind %d, %s %lld: %d \"%s\"", t->kind, what, (long long)at, rc, err.message);
    CHECK(t->e->mem.total == total, "kind %d, %s %lld: leak", t->kind, what, (long long)at);
}

static void reset(target *t) {
    t->attn = t->m->attn[0];
    t->delta = t->m->delta[0];
    t->moe = t->m->moe[0];
    memcpy(t->expert, t->m->expert[0], sizeof t->expert);
}

static void bad_tensors(target *t, mc_tensor *x, int64_t sizes[2], bool optional) {
    static const int64_t no_file[] = {99, INT32_MAX}, no_dtype[] = {-1, 8, INT32_MAX, INT32_MIN},
                         no_size[] = {0, -1, INT64_MIN, INT64_MAX, 1ll << 62, 1ll << 33};
    const mc_tensor good = *x;
    const bool scaled = good.dtype == MC_F8E4M3;
    const int64_t far[] = {-1,
                           INT64_MIN,
                           INT64_MAX,
                           INT64_MAX - 4096,
                           1ll << 62,
                           sizes[good.file],
                           sizes[good.file] + 4096};
#define BAD(field, value, type)                                                                    \
    do {                                                                                           \
        x->field = (type)(value);                                                                  \
        must_fail(t, #field, (int64_t)(value));                                                    \
        *x = good;                                                                                 \
    } while (0)
    for (int i = 0; i < 2; i++) BAD(file, no_file[i], int32_t);
    for (int i = 0; i < 4; i++) BAD(dtype, no_dtype[i], int32_t);
    for (int i = 0; i < 6; i++) {
        BAD(rows, no_size[i], int64_t);
        BAD(cols, no_size[i], int64_t);
    }
    BAD(rows, good.rows + 1, int64_t);
    BAD(cols, good.cols - 1, int64_t);
    for (int i = 0; i < 7; i++) BAD(offset, far[i], int64_t);
    if (!optional) {
        BAD(file, -1, int32_t);
        BAD(file, INT32_MIN, int32_t);
    }
    BAD(scale_file, scaled ? -1 : 0, int32_t);
    BAD(scale_file, 99, int32_t);
    for (int i = 0; scaled && i < 7; i++) BAD(scale_offset, far[i], int64_t);
    for (int i = 0; scaled && i < 4; i++) BAD(scale_dtype, no_dtype[i], int32_t);
    if (scaled) BAD(scale_dtype, MC_F16, int32_t);
    BAD(dtype, MC_F8E8M0, int32_t);
    BAD(dtype, scaled ? MC_F4E2M1 : MC_INT8, int32_t);
    BAD(block_rows, scaled ? 1 : 128, int32_t);
    BAD(block_cols, scaled ? 64 : 32, int32_t);
    x->rows = x->cols = 1ll << 32; /* the product overflows */
    must_fail(t, "rows * cols", 0);
    *x = good;
#undef BAD
}

static void bad_ints(target *t, int32_t *field, const char *name, bool zero_too) {
    static const int32_t bad[] = {-1, INT32_MIN, INT32_MAX, (1 << 20) + 1};
    int32_t good = *field;
    for (int i = 0; i < 4; i++) {
        *field = bad[i];
        must_fail(t, name, bad[i]);
    }
    for (int i = 1; i > -2 && zero_too; i -= 2) { /* no longer what the tensors say */
        *field = good + i;
        must_fail(t, name, good + i);
    }
    if (zero_too) {
        *field = 0;
        must_fail(t, name, 0);
    }
    *field = good;
}

static void bad_longs(target *t, int64_t *field, const char *name) {
    static const int64_t bad[] = {0, -1, INT64_MIN, INT64_MAX, (1ll << 31) + 1, 1ll << 20};
    int64_t good = *field;
    for (int i = 0; i < 6; i++) { /* the last one is allowed, and takes more than the budget */
        *field = bad[i] == 1 << 20 && field == &t->attn.ctx ? 1ll << 31 : bad[i];
        must_fail(t, name, *field);
    }
    *field = good;
}

#define INT(field, zero_too) bad_ints(&t, &t.field, #field, zero_too)

static void check_descriptions(const model *m) {
    target t = {.m = m};
    int64_t sizes[2];
    OK(open_engine(m, PLAIN, &t.e, &err) >= 0 ? MC_OK : -1);
    for (int i = 0; i < 2; i++) sizes[i] = mci_io_size(t.e->io, i);
    reset(&t);
    for (t.kind = 0; t.kind < 3; t.kind++) OK(create_target(&t)); /* as they are they are good */
    t.e->mem.budget = 32 << 20;
    t.kind = 0;
    for (int i = 0; i < 2; i++) {
        t.attn = m->attn[i];
        mc_attn_desc *d = &t.attn;
        mc_tensor *need[] = {&d->q, &d->k, &d->v, &d->o, &d->norm.weight},
                  *may[] = {&d->q_norm.weight, &d->k_norm.weight, &d->q_bias,
                            &d->k_bias,        &d->v_bias,        &d->o_bias};
        for (int k = 0; k < 5; k++) bad_tensors(&t, need[k], sizes, false);
        for (int k = 0; k < 6; k++)
            if (may[k]->file >= 0) bad_tensors(&t, may[k], sizes, true);
        INT(attn.layer, false);
        INT(attn.hidden, true);
        INT(attn.n_head, true);
        INT(attn.n_kv_head, true);
        INT(attn.head_dim, true);
        INT(attn.rope_dim, false);
        INT(attn.gate, false);
        d->gate ^= 1;
        must_fail(&t, "the other gate", 0);
        d->gate ^= 1;
        d->rope_dim--;
        must_fail(&t, "odd rope_dim", 0);
        d->rope_dim++;
        const double theta[] = {0, -1, 0.5, (double)NAN, (double)-INFINITY};
        for (int k = 0; k < 5; k++) d->rope_theta = theta[k], must_fail(&t, "theta", k);
        d->rope_theta = 1e4;
        bad_longs(&t, &d->ctx, "ctx");
        bad_longs(&t, &d->max_tok, "max_tok");
        OK(create_target(&t));
    }
    t.kind = 1;
    mc_delta_desc *d = &t.delta;
    mc_tensor *parts[] = {
        &d->norm.weight,     &d->qkv, &d->z, &d->b, &d->a, &d->conv, &d->a_log, &d->dt_bias,
        &d->out_norm.weight, &d->out};
    for (int k = 0; k < 10; k++) bad_tensors(&t, parts[k], sizes, false);
    INT(delta.layer, false);
    INT(delta.hidden, true);
    INT(delta.n_k_head, true);
    INT(delta.n_v_head, true);
    INT(delta.dk, true);
    INT(delta.dv, true);
    INT(delta.conv_kernel, true);
    bad_longs(&t, &d->max_tok, "max_tok");
    OK(create_target(&t));
    t.kind = 2;
    mc_moe_desc *o = &t.moe;
    mc_tensor *of[] = {
        &o->norm.weight, &o->router,        &o->shared.gate, &o->shared.up,
        &o->shared.down, &t.expert[0].gate, &t.expert[7].up, &t.expert[EXPERTS - 1].down};
    for (int k = 0; k < 8; k++) bad_tensors(&t, of[k], sizes, false);
    bad_tensors(&t, &o->shared_gate, sizes, true);
    INT(moe.layer, false);
    INT(moe.hidden, true);
    INT(moe.n_expert, false);
    INT(moe.top_k, false);
    INT(moe.width, true);
    INT(moe.shared_width, false);
    bad_longs(&t, &o->max_tok, "max_tok");
    for (int k = 0; k < 4; k++) { /* the store was made for others */
        mc_moe_desc good = *o;
        if (k == 0) o->n_expert = (int32_t)(o->router.rows = EXPERTS - 1);
        if (k == 1) o->top_k = TOP_K + 1;
        if (k == 2) o->layer = 2;
        if (k == 3) o->top_k = 0;
        must_fail(&t, "not the store's", k);
        *o = good;
    }
    OK(create_target(&t));
    mc_moe *none = NULL;
    CHECK(mc_moe_create(t.e, NULL, o, t.expert, &none, &err) == MC_EINVAL && !none, "no store");
    CHECK(t.e->mem.total == t.e->scratch_size, "leak");
    mc_engine_free(t.e);
}

static void check_kv_shapes(const model *m) {
    world w = open_world(m, PLAIN);
    mc_kv_desc good = kv_desc(PLAIN), d = good, most = good;
    mc_kv *kv = NULL;
    int32_t *const small[] = {&d.n_attn,   &d.n_kv_head,   &d.head_dim, &d.dtype, &d.n_delta,
                              &d.conv_dim, &d.conv_kernel, &d.n_v_head, &d.dk,    &d.dv};
    static const int32_t bad[] = {-1, INT32_MIN, INT32_MAX, (1 << 24) + 1};
    static const int64_t worse[] = {-1, INT64_MIN, INT64_MAX, (1ll << 31) + 1};
    for (int i = 0; i < 12; i++)
        for (int k = 0; k < 4; k++) {
            d = good;
            if (i < 10) *small[i] = bad[k];
            if (i == 10) d.ctx = worse[k];
            if (i == 11) d.pages = worse[k];
            CHECK(mc_kv_create(w.e, &d, &kv, &err) == MC_EINVAL && !kv && err.message[0],
                  "field %d, value %d", i, k);
            CHECK(mc_kv_pool_bytes(&d, NULL) < 0 && mc_kv_session_bytes(&d, NULL) < 0, "field %d",
                  i);
        }
    most.n_attn = most.n_kv_head = most.head_dim = most.n_v_head = most.dk = most.dv = 4096;
    most.n_delta = 4096, most.conv_dim = 1 << 24, most.conv_kernel = 16;
    most.pages = most.ctx = 1ll << 31; /* each at its limit: the pool alone is 2^77 bytes */
    CHECK(mc_kv_create(w.e, &most, &kv, &err) == MC_EINVAL && !kv, "%s", err.message);
    CHECK(mc_kv_pool_bytes(&most, NULL) < 0, "pool bytes");
    w.e->mem.budget = w.e->mem.total + (1 << 20);
    most.pages = 64;
    CHECK(mc_kv_create(w.e, &most, &kv, &err) == MC_EBUDGET && !kv, "%s", err.message);
    close_world(&w);
}

static void check_rest(const model *m) {
    world w = open_world(m, PLAIN), w2 = open_world(m, PLAIN);
    mc_engine_opts o = {.threads = 1};
    mc_engine *e = NULL;
    mc_store *s = NULL;
    mc_linear *l = NULL;
    mc_head *h = NULL;
    float f[64];
    for (int i = 0; i < 9; i++) {
        static const int32_t threads[] = {0, -1, INT32_MIN, 257}, lanes[] = {-1, 65},
                             io[] = {-1, 5};
        mc_engine_opts bad = o;
        if (i < 4)
            bad.threads = threads[i];
        else if (i < 6)
            bad.lanes = lanes[i - 4];
        else if (i < 8)
            bad.io = io[i - 6];
        else
            bad.isa = "mmx";
        CHECK(mc_engine_create(&bad, &e, &err) == MC_EINVAL && !e && err.message[0], "case %d", i);
    }
    CHECK(mc_engine_file(w.e, "/nowhere/x", &err) < 0 && err.sys == ENOENT, "%s", err.message);
    static const int32_t shape[][4] = {{0, 8, 2, 1},
                                       {-1, 8, 2, 1},
                                       {1, 0, 1, 1},
                                       {1, 8, 9, 1},
                                       {1, 8, 0, 1},
                                       {1, 8, -1, 1},
                                       {INT32_MAX, INT32_MAX, 1, 1},
                                       {1 << 16, 1 << 16, 1, 1},
                                       {1, 8, 2, -1},
                                       {1, 8, 2, 9},
                                       {1, 8, 2, MC_POLICY_BELADY}};
    for (int i = 0; i < 11; i++)
        CHECK(mc_store_create(w.e, shape[i][0], shape[i][1], shape[i][2], shape[i][3], &s, &err) ==
                      MC_EINVAL &&
                  !s,
              "store %d", i);
    static const int64_t slots[] = {0, -1, INT64_MIN, TOP_K - 1};
    for (int i = 0; i < 4; i++)
        CHECK(mc_store_resize(w.store, slots[i], &err) == MC_EBUDGET, "%s", err.message);
    CHECK(mc_store_resize(w.store, INT64_MAX, &err) == MC_EBUDGET, "%s", err.message);
    CHECK(mc_store_open(w.store, TOP_K, 0, &err) == MC_EINVAL, "%s", err.message);
    OK(mc_store_create(w.e, 2, EXPERTS, TOP_K, 0, &s, &err));
    CHECK(mc_store_open(s, TOP_K, 0, &err) == MC_EINVAL, "%s", err.message); /* holes */
    mc_store_free(s);
    for (int i = 0; i < 3; i++) {
        static const int64_t max_tok[] = {0, -1, INT64_MIN};
        CHECK(mc_head_create(w.e, &m->final, w.out, max_tok[i], &h, &err) == MC_EINVAL && !h, "h");
    }
    CHECK(mc_head_create(w.e, &m->final, w.table, 1, &h, &err) == MC_EINVAL && !h, "not resident");
    CHECK(mc_head_create(w.e, &m->final, w2.out, 1, &h, &err) == MC_EINVAL && !h, "other engine");
    mc_norm narrow = m->final;
    narrow.weight.cols--;
    CHECK(mc_head_create(w.e, &narrow, w.out, 1, &h, &err) == MC_EFORMAT && !h, "%s", err.message);
    CHECK(mc_linear_create(w.e, &m->head, 0, &l, &err) == MC_EINVAL && !l, "rows with scales");
    CHECK(mc_linear_create(w.e, &ABSENT, 1, &l, &err) < 0 && !l, "absent");
    mc_tensor other = m->head;
    other.record = MC_CRC_TENSOR;
    other.crc = 1;
    CHECK(mc_linear_create(w.e, &other, 1, &l, &err) == MC_EFORMAT && !l &&
              strstr(err.message, "linear of ") && strstr(err.message, "is damaged"),
          "%s", err.message);
    uint32_t *crc = calloc((size_t)m->table.rows, sizeof *crc);
    CHECK(mc_linear_row_crc(w.out, crc, &err) == MC_EINVAL, "%s", err.message); /* resident */
    OK(mc_linear_create(w.e, &m->table, 0, &l, &err));
    CHECK(mc_linear_row_crc(l, NULL, &err) == MC_EINVAL, "%s", err.message);
    OK(mc_linear_row_crc(l, crc, &err));
    CHECK(mc_linear_row_crc(l, crc, &err) == MC_EINVAL, "%s", err.message);
    float *row = calloc((size_t)m->table.cols, sizeof *row);
    CHECK(mc_linear_rows(l, &(int32_t){1}, 1, row, &err) == MC_EFORMAT &&
              strstr(err.message, "row 1 of the embedding"),
          "%s", err.message);
    mc_linear_free(l);
    l = NULL;
    free(row);
    free(crc);
    mc_expert x = m->expert[0][0];
    int64_t scales;
    x.up.rows = 1ll << 60;
    CHECK(mc_expert_slab(&x, 1, &scales, NULL) < 0, "slab");
    x = m->expert[0][0], x.down.offset = INT64_MAX;
    CHECK(mc_expert_slab(&x, 1, &scales, NULL) < 0, "slab");
    CHECK(mc_rope_table(1e4, 3, 0, f, f, f) < 0 && mc_rope_table(1e4, 0, 0, f, f, f) < 0 &&
              mc_rope_table(1e4, 4, -1, f, f, f) < 0 && mc_rope_table(NAN, 4, 0, f, f, f) < 0,
          "rope");
    close_world(&w);
    close_world(&w2);
}

int main(int argc, char **argv) {
    char dir[4096];
    make_dir(argc, argv, dir, sizeof dir);
    alarm(300);
    model *m = make_model(dir);
    snprintf(saved, sizeof saved, "%s/session", dir);
    for (int kind = 0; kind < N_KIND; kind++)
        for (int budget = 0; budget < 2; budget++) check_refusals(m, kind, budget);
    check_open(m, false);
    check_open(m, true);
    check_descriptions(m);
    check_kv_shapes(m);
    check_rest(m);
    unlink(saved);
    free_model(m);
    CHECK(rmdir(dir) == 0, "files left behind");
    return test_end();
}
