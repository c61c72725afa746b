/* test_session.c - the life of sessions and steps: every order of use and of freeing, refusals that
 * leave all as it was, shared pages, random operations against fresh runs. */
#include "blocks.h"

static mc_error err;

#define OK(call) CHECK((call) == MC_OK, "%s", err.message)
#define FAILS(call, rc)                                                                            \
    do {                                                                                           \
        err.message[0] = 0, err.code = 0;                                                          \
        int rc_ = (int)(call);                                                                     \
        CHECK(rc_ == (rc) && err.code == (rc) && err.message[0], "got %d \"%s\"", rc_,             \
              err.message);                                                                        \
    } while (0)

/* Activations of the last of n tokens of texts given by position, in a session of its own. */
static void fresh_run(const world *w, const uint8_t *tag, int64_t n, float *last) {
    mc_session *s = new_session(w);
    for (int64_t i = 0, j; i < n; i = j) {
        for (j = i; j < n && tag[j] == tag[i]; j++) {}
        OK(run(w, w->st, s, tag[i], j - i, CHUNK, last, &err));
    }
    mc_session_free(s);
}

static bool as_fresh(const world *w, const uint8_t *tag, int64_t n, const float *got) {
    float want[H];
    fresh_run(w, tag, n, want);
    return same_bits(want, got, H);
}

/* No session is left: every page is free and only the pool is counted. */
static bool pool_at_rest(const world *w) {
    for (int64_t i = 0; i < w->kv->n_page; i++)
        if (w->kv->page_refs[i]) return false;
    mc_kv_desc k = kv_desc(w->set);
    return w->kv->n_free == w->kv->n_page &&
           w->e->mem.now[MC_MEM_STATE] == mc_kv_pool_bytes(&k, NULL);
}

/* ---- misuse ---- */

static void check_step_rules(const model *m) {
    world w = open_world(m, PLAIN), w2 = open_world(m, PLAIN);
    mc_kv *kv = NULL;
    mc_kv_desc other = kv_desc(PLAIN);
    mc_session *s = new_session(&w), *far = new_session(&w2), *odd = NULL;
    mc_step *st = w.st, *st2 = NULL;
    float x[2 * H], last[H];
    uint8_t tag[CTX] = {0};
    int64_t one = 1, zero = 0, neg = -1, many = CHUNK + 1, least = INT64_MIN, huge = INT64_MAX;
    embed(0, 0, 2, x);
    OK(mc_step_create(w.e, &st2, &err));
    FAILS(mc_step_chunk(st, &one, &err), MC_EINVAL);
    FAILS(mc_step_commit(st, &err), MC_EINVAL);
    FAILS(mc_step_begin(st, &s, 0, &err), MC_EINVAL);
    FAILS(mc_step_begin(st, &s, -3, &err), MC_EINVAL);
    FAILS(mc_step_begin(st, &far, 1, &err), MC_EINVAL); /* of another engine */
    mc_step_abort(st);
    mc_step_abort(NULL);
    mc_step_free(NULL);
    for (int i = 0; i < N_BLOCK; i++) { /* layers without a chunk, with a step of another engine */
        FAILS(block_forward(&w, st, i, x, NULL, &err), MC_EINVAL);
        OK(mc_step_begin(st, &s, 1, &err));
        FAILS(block_forward(&w, st, i, x, NULL, &err), MC_EINVAL);
        OK(mc_step_chunk(st, &one, &err));
        FAILS(block_forward(&w2, st, i, x, NULL, &err), MC_EINVAL);
        mc_step_abort(st);
        mc_step_abort(st);
        FAILS(block_forward(&w, st, i, x, NULL, &err), MC_EINVAL);
    }
    const int64_t *bad[] = {&neg, &zero, &least};
    for (int i = 0; i < 3; i++) { /* a refused chunk ends the step */
        OK(mc_step_begin(st, &s, 1, &err));
        FAILS(mc_step_chunk(st, bad[i], &err), MC_EINVAL);
        FAILS(mc_step_commit(st, &err), MC_EINVAL);
        CHECK(!s->busy && mc_session_position(s) == 0, "case %d", i);
    }
    OK(mc_step_begin(st, &s, 1, &err));
    FAILS(mc_step_chunk(st, &huge, &err), MC_EFULL);
    OK(mc_step_begin(st, &s, 1, &err));
    OK(mc_step_chunk(st, &many, &err)); /* more than the layers were bound for */
    for (int i = 0; i < N_BLOCK; i++) FAILS(block_forward(&w, st, i, x, NULL, &err), MC_EINVAL);
    mc_step_abort(st);

    /* busy: in a step, whoever asks; also for the second place in one step */
    OK(mc_step_begin(st, &s, 1, &err));
    FAILS(mc_step_begin(st2, &s, 1, &err), MC_EBUSY);
    FAILS(mc_session_snapshot(s, &err), MC_EBUSY);
    FAILS(mc_session_rewind(s, 0, &err), MC_EBUSY);
    FAILS(mc_session_forget(s, 0, &err), MC_EBUSY);
    FAILS(mc_session_rest(s, &err), MC_EBUSY);
    FAILS(mc_session_fork(s, &odd, &err), MC_EBUSY);
    FAILS(mc_session_save(s, "/nowhere/x", tag, NULL, 0, &err), MC_EBUSY);
    OK(mc_step_begin(st, &s, 1, &err)); /* the next begin drops the work */
    mc_step_abort(st);
    mc_session *twice[2] = {s, s};
    FAILS(mc_step_begin(st, twice, 2, &err), MC_EBUSY);
    CHECK(!s->busy && s->refs == 1, "left busy");

    /* a session of another shape: with fewer layers, other heads, a longer context */
    for (int i = 0; i < 6; i++) {
        int32_t *const field[6] = {&other.n_attn,  &other.n_kv_head, &other.head_dim,
                                   &other.n_delta, &other.dk,        &other.conv_dim};
        int32_t was = *field[i];
        *field[i] = was - 1;
        OK(mc_kv_create(w.e, &other, &kv, &err));
        OK(mc_session_create(kv, &odd, &err));
        mc_session *mixed[2] = {s, odd};
        FAILS(mc_step_begin(st, mixed, 2, &err), MC_EINVAL);
        OK(mc_step_begin(st, &odd, 1, &err));
        OK(mc_step_chunk(st, &one, &err));
        int layer = i == 0 ? 4 : i < 3 ? 0 : i == 3 ? 6 : 2;
        FAILS(block_forward(&w, st, layer, x, NULL, &err), MC_EINVAL);
        mc_kv_free(kv);
        mc_session_free(odd); /* the step still holds it */
        mc_step_abort(st);
        *field[i] = was;
    }
    other.ctx = CTX + 1;
    OK(mc_kv_create(w.e, &other, &kv, &err));
    OK(mc_session_create(kv, &odd, &err));
    OK(mc_step_begin(st, &odd, 1, &err));
    OK(mc_step_chunk(st, &one, &err));
    FAILS(block_forward(&w, st, 0, x, NULL, &err), MC_EINVAL);
    mc_step_free(st2);
    mc_kv_free(kv);
    mc_session_free(odd);
    mc_step_abort(st);

    OK(run(&w, st, s, 0, 3, 2, last, &err)); /* after all that it still computes */
    CHECK(as_fresh(&w2, tag, 3, last), "other bits");
    mc_session_free(s);
    mc_session_free(far);
    CHECK(pool_at_rest(&w), "pages lost");
    close_world(&w);
    close_world(&w2);
}

/* A layer that failed has left the chunk half done: such a step must not be committed. */
static void check_failed_layer(const model *m) {
    world w = open_world(m, PLAIN);
    mc_session *s = new_session(&w);
    float *x = test_alloc(9 * H * 4), last[H];
    uint8_t tag[CTX] = {0};
    for (int bad = 0; bad < N_BLOCK; bad++) {
        int64_t n = 9, pos = mc_session_position(s), one = 1;
        OK(mc_step_begin(w.st, &s, 1, &err));
        OK(mc_step_chunk(w.st, &n, &err));
        embed(0, pos, n, x);
        for (int i = 0; i < N_BLOCK; i++) {
            mc_engine_cancel(w.e, i == bad);
            int rc = block_forward(&w, w.st, i, x, NULL, &err);
            CHECK(i > bad || rc == (i == bad ? MC_ECANCEL : MC_OK), "%d %s", rc, err.message);
        }
        mc_engine_cancel(w.e, 0);
        if (bad % 2) { /* a further chunk heals nothing */
            int rc = mc_step_chunk(w.st, &one, &err);
            if (rc == MC_OK) all_blocks(&w, w.st, x, &err);
        }
        CHECK(mc_step_commit(w.st, &err) < 0, "block %d failed, committed all the same", bad);
        CHECK(mc_session_position(s) == pos, "block %d: moved", bad);
        mc_step_abort(w.st);
        OK(run(&w, w.st, s, 0, 2, 2, last, &err));
        CHECK(as_fresh(&w, tag, mc_session_position(s), last), "block %d: other bits", bad);
    }
    mc_session_free(s);
    free(x);
    CHECK(pool_at_rest(&w), "pages lost");
    close_world(&w);
}

/* ---- room ---- */

static void check_full(const model *m) {
    setting set = PLAIN;
    set.pages = 4;
    world w = open_world(m, set);
    mc_session *s = new_session(&w), *b = new_session(&w), *f = NULL, *both[2] = {s, b};
    float last[H];
    uint8_t tag[CTX] = {0};
    int64_t most = CTX, over = CTX + 1, two[2] = {65, 129}, fit[2] = {65, 64};
    OK(mc_step_begin(w.st, &s, 1, &err));
    FAILS(mc_step_chunk(w.st, &over, &err), MC_EFULL);
    CHECK(strstr(err.message, "200"), "%s", err.message);
    OK(mc_step_begin(w.st, &s, 1, &err));
    OK(mc_step_chunk(w.st, &most, &err));
    CHECK(w.kv->n_free == 0, "%lld pages free", (long long)w.kv->n_free);
    FAILS(mc_step_begin(w.st, both, 0, &err), MC_EINVAL); /* and gives the pages back */
    CHECK(pool_at_rest(&w) || w.kv->n_free == 4, "pages lost");
    OK(mc_step_begin(w.st, both, 2, &err));
    FAILS(mc_step_chunk(w.st, two, &err), MC_EFULL); /* the first had room, the second has not */
    CHECK(w.kv->n_free == 4 && !s->busy && !b->busy, "pages kept");
    OK(mc_step_begin(w.st, both, 2, &err));
    OK(mc_step_chunk(w.st, fit, &err));
    mc_step_abort(w.st);
    CHECK(w.kv->n_free == 4, "pages kept");

    /* a fork needs a page of its own for the partial one */
    OK(run(&w, w.st, s, 0, 150, CHUNK, last, &err));
    CHECK(w.kv->n_free == 1, "%lld pages free", (long long)w.kv->n_free);
    OK(mc_session_fork(s, &f, &err));
    OK(run(&w, w.st, f, 0, 1, 1, last, &err));
    CHECK(w.kv->n_free == 0 && w.kv->page_refs[s->pages[0]] == 2 &&
              w.kv->page_refs[s->pages[2]] == 1,
          "not copied");
    OK(run(&w, w.st, s, 0, CTX - 150 - 8, CHUNK, last, &err)); /* its own page has room */
    FAILS(run(&w, w.st, s, 0, 1, 1, last, &err), MC_EFULL);
    FAILS(run(&w, w.st, b, 0, 1, 1, last, &err), MC_EFULL);
    mc_session_free(f);
    OK(run(&w, w.st, s, 0, 8, 3, last, &err));
    FAILS(run(&w, w.st, s, 0, 1, 1, last, &err), MC_EFULL);
    mc_session_free(s);
    mc_session_free(b);
    CHECK(as_fresh(&w, tag, CTX, last), "other bits");
    CHECK(pool_at_rest(&w), "pages lost");
    close_world(&w);
}

/* Two forks of one partial page, each writing its own text; the parent last, or freed first. */
static void check_shared_pages(const model *m) {
    for (int order = 0; order < 4; order++) {
        world w = open_world(m, PLAIN), w2 = open_world(m, PLAIN);
        mc_session *s = new_session(&w), *f[2] = {NULL, NULL};
        float last[H];
        uint8_t tag[CTX] = {0};
        OK(run(&w, w.st, s, 0, 40, CHUNK, last, &err));
        OK(mc_session_snapshot(s, &err));
        OK(run(&w, w.st, s, 0, 50, CHUNK, last, &err));
        for (int i = 0; i < 2; i++) OK(mc_session_fork(s, &f[i], &err));
        if (order == 1) mc_session_free(s);
        for (int i = 0; i < 2; i++) {
            memset(tag + 90, i + 1, 5);
            OK(run(&w, w.st, f[i], (uint64_t)i + 1, 5, 3, last, &err));
            CHECK(as_fresh(&w2, tag, 95, last), "order %d, fork %d: other bits", order, i);
            if (order == 2 && i == 0) mc_session_free(f[0]);
        }
        if (order == 3) { /* the snapshot is shared too, and its owner may go first */
            mc_session_free(s);
            mc_session_free(f[1]);
            mc_session *g = NULL;
            OK(mc_session_fork(f[0], &g, &err)); /* what one gives up the other keeps */
            FAILS(mc_session_forget(g, 41, &err), MC_ERANGE);
            OK(mc_session_forget(g, 40, &err));
            FAILS(mc_session_forget(g, 40, &err), MC_ERANGE);
            FAILS(mc_session_rewind(g, 40, &err), MC_ERANGE);
            int64_t half = w.kv->state_floats * 4, now = w.e->mem.now[MC_MEM_STATE];
            for (int i = 0; i < 2; i++) OK(mc_session_rest(g, &err)); /* twice is fine */
            CHECK(w.e->mem.now[MC_MEM_STATE] == now - half, "at rest: not half");
            w.e->mem.budget = w.e->mem.total;
            FAILS(mc_step_begin(w.st, &g, 1, &err), MC_EBUDGET);
            CHECK(!g->busy, "kept");
            w.e->mem.budget = 0;
            OK(mc_step_begin(w.st, &g, 1, &err));
            mc_step_abort(w.st);
            CHECK(w.e->mem.now[MC_MEM_STATE] == now, "awake: not whole");
            OK(mc_session_rest(g, &err));
            mc_session_free(g);
            OK(mc_session_rest(f[0], &err)); /* which a rewind and a run do not show */
            OK(mc_session_rewind(f[0], 40, &err));
            memset(tag + 40, 2, 4);
            OK(run(&w, w.st, f[0], 2, 4, 4, last, &err));
            CHECK(as_fresh(&w2, tag, 44, last), "rewound: other bits");
        } else if (order != 1) {
            memset(tag + 90, 0, 6);
            OK(run(&w, w.st, s, 0, 6, 6, last, &err));
            CHECK(as_fresh(&w2, tag, 96, last), "order %d: parent: other bits", order);
            mc_session_free(s);
        }
        if (order != 2) mc_session_free(f[0]);
        if (order != 3) mc_session_free(f[1]);
        CHECK(pool_at_rest(&w), "order %d: pages lost", order);
        close_world(&w);
        close_world(&w2);
    }
}

/* Without recurrent state any position will do. */
static void check_rewind_anywhere(const model *m) {
    world w = open_world(m, PLAIN);
    mc_kv_desc d = kv_desc(PLAIN);
    mc_kv *kv = NULL;
    mc_session *s = NULL, *f = NULL;
    d.n_delta = 0;
    OK(mc_kv_create(w.e, &d, &kv, &err));
    OK(mc_session_create(kv, &s, &err));
    int64_t n = 150;
    float *x = test_alloc(2 * CHUNK * H * 4), keep[H];
    OK(mc_step_begin(w.st, &s, 1, &err));
    OK(mc_step_chunk(w.st, &n, &err)); /* content does not matter: no layer runs */
    OK(mc_step_commit(w.st, &err));
    OK(mc_session_rewind(s, 129, &err));
    OK(mc_session_fork(s, &f, &err));
    OK(mc_session_rewind(s, 128, &err));
    CHECK(s->n_page == 2 && f->n_page == 3, "pages");
    FAILS(mc_session_rewind(s, 129, &err), MC_ERANGE);
    FAILS(mc_session_rewind(s, -1, &err), MC_ERANGE);
    FAILS(mc_session_rewind(s, INT64_MIN, &err), MC_ERANGE);
    OK(mc_session_rewind(s, 0, &err));
    for (int i = 0; i < 2; i++) { /* positions left behind leave no trace */
        n = 7;
        embed(3, 0, n, x);
        OK(mc_step_begin(w.st, &s, 1, &err));
        OK(mc_step_chunk(w.st, &n, &err));
        OK(block_forward(&w, w.st, 0, x, NULL, &err));
        OK(mc_step_commit(w.st, &err));
        CHECK(!i || same_bits(keep, x + 6 * H, H), "other bits");
        memcpy(keep, x + 6 * H, H * 4);
        OK(mc_session_rewind(s, 0, &err));
    }
    mc_session_free(f);
    mc_session_free(s);
    mc_kv_free(kv);
    free(x);
    close_world(&w);
}

/* ---- freeing in every order ---- */

static void check_free_orders(const model *m) {
    rng r = {3};
    for (int round = 0; round < 24; round++) {
        setting set = PLAIN;
        set.threads = 1 + round % 2;
        world w = open_world(m, set);
        mc_engine *e = w.e;
        mc_session *s = new_session(&w), *f = NULL, *g = NULL, *both[2];
        int64_t n[2] = {70, 1};
        float *x = test_alloc(CHUNK * H * 4);
        mci_engine_retain(e); /* so that the counters outlive everything */
        OK(run(&w, w.st, s, 0, 10, CHUNK, NULL, &err));
        OK(mc_session_snapshot(s, &err));
        OK(mc_session_fork(s, &f, &err));
        OK(run(&w, w.st, f, 1, 3, CHUNK, NULL, &err));
        OK(mc_session_fork(f, &g, &err));
        both[0] = s, both[1] = f;
        embed(0, 10, n[0], x);
        OK(mc_step_begin(w.st, both, 2, &err));
        OK(mc_step_chunk(w.st, n, &err));
        if (round % 3) OK(block_forward(&w, w.st, 0, x, NULL, &err));
        int order[17];
        for (int i = 0; i < 17; i++) {
            int j = (int)rng_below(&r, (uint64_t)i + 1);
            order[i] = order[j], order[j] = i;
        }
        for (int i = 0; i < 17; i++) switch (order[i]) {
            case 0:
                mc_engine_free(w.e);
                break;
            case 1:
                mc_kv_free(w.kv);
                break;
            case 2:
                mc_store_free(w.store);
                break;
            case 3:
                mc_attn_free(w.attn[0]);
                break;
            case 4:
                mc_attn_free(w.attn[1]);
                break;
            case 5:
                mc_delta_free(w.delta[0]);
                break;
            case 6:
                mc_delta_free(w.delta[1]);
                break;
            case 7:
                mc_moe_free(w.moe[0]);
                break;
            case 8:
                mc_moe_free(w.moe[1]);
                break;
            case 9:
                mc_moe_free(w.moe[2]);
                break;
            case 10:
                mc_linear_free(w.out);
                break;
            case 11:
                mc_linear_free(w.table);
                break;
            case 12:
                mc_head_free(w.head);
                break;
            case 13:
                mc_session_free(s);
                break;
            case 14:
                mc_session_free(f);
                break;
            case 15:
                mc_session_free(g);
                break;
            default:
                if (round % 4 == 0) mc_step_abort(w.st);
                if (round % 4 == 1) mc_step_commit(w.st, &err);
                mc_step_free(w.st);
            }
        CHECK(e->refs == 1 && e->mem.total == e->scratch_size, "round %d: %lld refs, %lld bytes",
              round, (long long)e->refs, (long long)e->mem.total);
        mci_engine_release(e);
        free(x);
    }
}

/* ---- random operations ---- */

enum { SEQS = 4 };

typedef struct seq {
    mc_session *s; /* NULL: no such sequence */
    uint8_t tag[CTX];
    int64_t pos, snap[CTX];
    int n_snap;
} seq;

static void check_seq(const world *w2, const seq *q, const float *last, int round) {
    CHECK(mc_session_position(q->s) == q->pos && !q->s->busy && q->s->n_snap == q->n_snap,
          "round %d: position %lld of %lld", round, (long long)mc_session_position(q->s),
          (long long)q->pos);
    CHECK(!last || as_fresh(w2, q->tag, q->pos, last), "round %d: other bits", round);
}

static void random_rewind(seq *q, rng *r) {
    int64_t to = (int64_t)rng_below(r, (uint64_t)q->pos + 2);
    bool known = to == 0 || to == q->pos;
    if (q->n_snap && rng_below(r, 2)) to = q->snap[rng_below(r, (uint64_t)q->n_snap)];
    for (int i = 0; i < q->n_snap; i++) known |= q->snap[i] == to;
    known |= to == 0;
    if (!known) {
        FAILS(mc_session_rewind(q->s, to, &err), MC_ERANGE);
        return;
    }
    OK(mc_session_rewind(q->s, to, &err));
    q->pos = to;
    while (q->n_snap && q->snap[q->n_snap - 1] > to) q->n_snap--;
}

static void check_random(const model *m, const char *dir, uint64_t seed, int kv) {
    rng r = {seed};
    setting set = PLAIN, roomy = PLAIN;
    set.kv = roomy.kv = kv;
    set.pages = 9;
    world w = open_world(m, set), w2 = open_world(m, roomy);
    seq *q = test_alloc(SEQS * sizeof *q);
    char path[4200];
    uint8_t id[32] = {1}, meta[4];
    float last[H];
    memset(q, 0, SEQS * sizeof *q);
    snprintf(path, sizeof path, "%s/session", dir);
    for (int round = 0; round < 120; round++) {
        seq *a = &q[rng_below(&r, SEQS)], *b = &q[rng_below(&r, SEQS)];
        int op = (int)rng_below(&r, 10);
        if (!a->s) {
            memset(a, 0, sizeof *a);
            a->s = new_session(&w);
        }
        int64_t n = 1 + (int64_t)rng_below(&r, 50), chunk = 1 + (int64_t)rng_below(&r, 50);
        uint8_t tag = (uint8_t)rng_below(&r, 3);
        if (op < 5) {
            int rc = run(&w, w.st, a->s, tag, n, chunk, last, &err);
            CHECK(rc == MC_OK || rc == MC_EFULL, "round %d: %s", round, err.message);
            if (rc == MC_OK) memset(a->tag + a->pos, tag, (size_t)n), a->pos += n;
            check_seq(&w2, a, rc == MC_OK ? last : NULL, round);
        } else if (op == 5) {
            OK(mc_session_snapshot(a->s, &err));
            if (!a->n_snap || a->snap[a->n_snap - 1] != a->pos) a->snap[a->n_snap++] = a->pos;
        } else if (op == 6) {
            random_rewind(a, &r);
        } else if (op == 7 && a != b) { /* fork, over what is there */
            mc_session_free(b->s);
            *b = *a;
            OK(mc_session_fork(a->s, &b->s, &err));
        } else if (op == 8 && a != b) { /* the same by way of a file; the pool may be full */
            mc_session_free(b->s);
            *b = *a;
            b->n_snap = 0;
            OK(mc_session_save(a->s, path, id, "abc", 3, &err));
            int64_t rc = mc_session_load(w.kv, path, id, meta, 4, &b->s, &err);
            CHECK(rc == MC_EFULL || (rc == 3 && !memcmp(meta, "abc", 3)), "%s", err.message);
            CHECK((b->s != NULL) == (rc == 3), "round %d", round);
            unlink(path);
        } else if (op == 9) {
            if (round % 2) mc_session_free(a->s), a->s = NULL;
        }
        for (int i = 0; i < SEQS; i++)
            if (q[i].s) check_seq(&w2, &q[i], NULL, round);
    }
    for (int i = 0; i < SEQS; i++) mc_session_free(q[i].s);
    CHECK(pool_at_rest(&w), "pages lost");
    free(q);
    close_world(&w);
    close_world(&w2);
}

int main(int argc, char **argv) {
    char dir[4096];
    make_dir(argc, argv, dir, sizeof dir);
    alarm(300);
    model *m = make_model(dir);
    check_step_rules(m);
    check_failed_layer(m);
    check_full(m);
    check_shared_pages(m);
    check_rewind_anywhere(m);
    check_free_orders(m);
    check_random(m, dir, 1, MC_F32);
    check_random(m, dir, 2, MC_BF16);
    free_model(m);
    rmdir(dir);
    return test_end();
}
