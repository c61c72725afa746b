/* session.c - all mutable state of one sequence, and the step that moves sequences forward.
 *
 * KV pages are only ever appended to, and conv and recurrent state have two copies: a step reads
 * the committed one and writes the other, so dropping a step costs nothing and leaves no trace. */
#include "session.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- sessions ---- */

int mci_session_new(mc_kv *kv, mc_session **out, mc_error *err) {
    mci_mem *m = &kv->e->mem;
    void *pages = NULL, *state[2] = {NULL, NULL};
    mc_session *s = calloc(1, sizeof *s);
    int rc;
    *out = NULL;
    if (!s) return mci_fail(err, MC_ENOMEM, 0, "session: out of memory");
    rc = mci_alloc(m, MC_MEM_STATE, kv->table_len * 4, "session page table", &pages, err);
    for (int i = 0; i < 2 && rc == MC_OK; i++)
        rc = mci_alloc(m, MC_MEM_STATE, kv->state_floats * 4, "session state", &state[i], err);
    s->kv = kv;
    s->refs = 1;
    s->pages = pages;
    s->state[0] = state[0];
    s->state[1] = state[1];
    mci_kv_retain(kv);
    if (rc < 0) {
        mci_session_drop(s);
        return rc;
    }
    *out = s;
    return MC_OK;
}

static void truncate_pages(mc_session *s, int64_t pos) {
    int64_t keep = s->kv->d.n_attn ? (pos + MC_PAGE_TOKENS - 1) / MC_PAGE_TOKENS : 0;
    while (s->n_page > keep) mci_kv_drop(s->kv, s->pages[--s->n_page]);
}

static void snap_drop(mc_kv *kv, mci_snap *p) {
    if (--p->refs) return;
    mci_release(&kv->e->mem, MC_MEM_STATE, p->state, kv->state_floats * 4);
    free(p);
}

static void drop_snaps(mc_session *s, int64_t above) {
    while (s->n_snap && s->snaps[s->n_snap - 1]->pos > above)
        snap_drop(s->kv, s->snaps[--s->n_snap]);
}

void mci_session_drop(mc_session *s) {
    mc_kv *kv = s->kv;
    mci_mem *m = &kv->e->mem;
    if (--s->refs) return;
    truncate_pages(s, 0);
    drop_snaps(s, -1);
    free(s->snaps);
    mci_release(m, MC_MEM_STATE, s->pages, kv->table_len * 4);
    for (int i = 0; i < 2; i++) mci_release(m, MC_MEM_STATE, s->state[i], kv->state_floats * 4);
    free(s);
    mc_kv_free(kv);
}

int mc_session_create(mc_kv *kv, mc_session **out, mc_error *err) {
    int rc = mci_enter(kv->e, err);
    if (rc < 0) return rc;
    rc = mci_session_new(kv, out, err);
    mci_leave(kv->e);
    return rc;
}

void mc_session_free(mc_session *s) {
    if (!s) return;
    mc_engine *e = s->kv->e;
    if (mci_enter(e, NULL) < 0) return; /* forked child: the memory goes with the process */
    mci_engine_retain(e);               /* it may be held by this session alone */
    mci_session_drop(s);
    mci_leave(e);
    mci_engine_release(e);
}

int64_t mc_session_position(const mc_session *s) { return s->pos; }

int mci_session_claim(mc_session *s, mc_error *err) {
    int idle = 0;
    if (atomic_compare_exchange_strong(&s->busy, &idle, 1)) return MC_OK;
    return mci_fail(err, MC_EBUSY, 0, "session: in use by another call");
}

/* Lock and claim, for calls that change a session outside a step. */
static int session_enter(mc_session *s, mc_error *err) {
    int rc = mci_enter(s->kv->e, err);
    if (rc < 0) return rc;
    if ((rc = mci_session_claim(s, err)) < 0) mci_leave(s->kv->e);
    return rc;
}

static void session_leave(mc_session *s) {
    atomic_store(&s->busy, 0);
    mci_leave(s->kv->e);
}

static int snap_room(mc_session *s, int64_t n, mc_error *err) {
    if (n <= s->cap_snap) return MC_OK;
    int64_t cap = MCI_MAX(n, 2 * s->cap_snap + 4);
    mci_snap **p = realloc(s->snaps, (size_t)cap * sizeof *p);
    if (!p) return mci_fail(err, MC_ENOMEM, 0, "session: out of memory");
    s->snaps = p;
    s->cap_snap = cap;
    return MC_OK;
}

int mc_session_snapshot(mc_session *s, mc_error *err) {
    mc_kv *kv = s->kv;
    mci_snap *p = NULL;
    void *state = NULL;
    int rc = session_enter(s, err);
    if (rc < 0) return rc;
    if (s->n_snap && s->snaps[s->n_snap - 1]->pos == s->pos) goto done; /* already kept */
    if ((rc = snap_room(s, s->n_snap + 1, err)) < 0) goto done;
    rc = mci_alloc(&kv->e->mem, MC_MEM_STATE, kv->state_floats * 4, "snapshot", &state, err);
    if (rc < 0) goto done;
    if (!(p = malloc(sizeof *p))) {
        mci_release(&kv->e->mem, MC_MEM_STATE, state, kv->state_floats * 4);
        rc = mci_fail(err, MC_ENOMEM, 0, "snapshot: out of memory");
        goto done;
    }
    *p = (mci_snap){.pos = s->pos, .refs = 1, .state = state};
    if (state) memcpy(state, s->state[s->cur], (size_t)kv->state_floats * 4);
    s->snaps[s->n_snap++] = p;
done:
    session_leave(s);
    return rc;
}

int mc_session_forget(mc_session *s, int64_t n, mc_error *err) {
    int64_t i = 0;
    int rc = session_enter(s, err);
    if (rc < 0) return rc;
    while (i < s->n_snap && s->snaps[i]->pos != n) i++;
    if (i == s->n_snap) {
        rc = mci_fail(err, MC_ERANGE, 0, "forget: no snapshot at position %lld", (long long)n);
    } else {
        snap_drop(s->kv, s->snaps[i]);
        for (s->n_snap--; i < s->n_snap; i++) s->snaps[i] = s->snaps[i + 1];
    }
    session_leave(s);
    return rc;
}

int mc_session_rest(mc_session *s, mc_error *err) {
    int rc = session_enter(s, err);
    if (rc < 0) return rc;
    mci_release(&s->kv->e->mem, MC_MEM_STATE, s->state[s->cur ^ 1], s->kv->state_floats * 4);
    s->state[s->cur ^ 1] = NULL;
    session_leave(s);
    return rc;
}

static int wake(mc_session *s, mc_error *err) {
    if (s->state[s->cur ^ 1]) return MC_OK;
    void *p;
    int rc = mci_alloc(&s->kv->e->mem, MC_MEM_STATE, s->kv->state_floats * 4, "session state", &p,
                       err);
    s->state[s->cur ^ 1] = p;
    return rc;
}

int mc_session_rewind(mc_session *s, int64_t n, mc_error *err) {
    mc_kv *kv = s->kv;
    const mci_snap *p = NULL;
    int rc = session_enter(s, err);
    if (rc < 0) return rc;
    if (n < 0 || n > s->pos) {
        rc = mci_fail(err, MC_ERANGE, 0, "rewind: expected 0..%lld, got %lld", (long long)s->pos,
                      (long long)n);
        goto done;
    }
    for (int64_t i = 0; i < s->n_snap; i++)
        if (s->snaps[i]->pos == n) p = s->snaps[i];
    if (kv->state_floats && n != s->pos) {
        size_t bytes = (size_t)kv->state_floats * 4;
        if (p) {
            memcpy(s->state[s->cur], p->state, bytes);
        } else if (n == 0) {
            memset(s->state[s->cur], 0, bytes);
        } else {
            char kept[160] = "0";
            size_t at = 1;
            for (int64_t i = 0; i < s->n_snap && at < sizeof kept - 24; i++)
                at += (size_t)snprintf(kept + at, sizeof kept - at, ", %lld",
                                       (long long)s->snaps[i]->pos);
            rc = mci_fail(err, MC_ERANGE, 0,
                          "rewind: no snapshot at position %lld; kept: %s, %lld (now)",
                          (long long)n, kept, (long long)s->pos);
            goto done;
        }
    }
    s->pos = n;
    truncate_pages(s, n);
    drop_snaps(s, n);
done:
    session_leave(s);
    return rc;
}

int mc_session_fork(mc_session *s, mc_session **out, mc_error *err) {
    mc_kv *kv = s->kv;
    mc_session *f = NULL;
    int rc = session_enter(s, err);
    *out = NULL;
    if (rc < 0) return rc;
    if ((rc = mci_session_new(kv, &f, err)) < 0) goto done;
    if ((rc = snap_room(f, s->n_snap, err)) < 0) {
        mci_session_drop(f);
        goto done;
    }
    f->pos = s->pos;
    if (kv->state_floats) memcpy(f->state[0], s->state[s->cur], (size_t)kv->state_floats * 4);
    for (; f->n_page < s->n_page; f->n_page++) {
        f->pages[f->n_page] = s->pages[f->n_page];
        kv->page_refs[f->pages[f->n_page]]++;
    }
    for (; f->n_snap < s->n_snap; f->n_snap++) {
        f->snaps[f->n_snap] = s->snaps[f->n_snap];
        f->snaps[f->n_snap]->refs++;
    }
    *out = f;
done:
    session_leave(s);
    return rc;
}

/* ---- steps ---- */

int mc_step_create(mc_engine *e, mc_step **out, mc_error *err) {
    mc_step *st = calloc(1, sizeof *st);
    *out = st;
    if (!st) return mci_fail(err, MC_ENOMEM, 0, "step: out of memory");
    st->e = e;
    mci_engine_retain(e);
    return MC_OK;
}

/* Gives the sessions back; commit: with the step's work. */
static void step_end(mc_step *st, bool commit) {
    for (int32_t i = 0; i < st->n; i++) {
        mci_seg *g = &st->seg[i];
        mc_session *s = g->s;
        int64_t done = g->pending + g->count;
        if (commit && done) {
            s->pos += done;
            s->cur ^= 1;
        }
        truncate_pages(s, s->pos);
        atomic_store(&s->busy, 0);
        mci_session_drop(s);
    }
    st->n = 0;
    st->n_tok = 0;
}

void mc_step_abort(mc_step *st) {
    if (!st || !st->n || mci_enter(st->e, NULL) < 0) return;
    step_end(st, false);
    mci_leave(st->e);
}

void mc_step_free(mc_step *st) {
    if (!st) return;
    mc_step_abort(st);
    free(st->seg);
    mci_engine_release(st->e);
    free(st);
}

int mc_step_begin(mc_step *st, mc_session *const *sessions, int32_t n, mc_error *err) {
    int rc = mci_enter(st->e, err);
    if (rc < 0) return rc;
    step_end(st, false);
    st->failed = false;
    if (n < 1) rc = mci_fail(err, MC_EINVAL, 0, "step: needs at least one session");
    if (rc == MC_OK && n > st->cap) {
        mci_seg *p = realloc(st->seg, (size_t)n * sizeof *p);
        if (!p) rc = mci_fail(err, MC_ENOMEM, 0, "step: out of memory");
        if (p) st->seg = p, st->cap = n;
    }
    for (int32_t i = 0; i < n && rc == MC_OK; i++) {
        mc_session *s = sessions[i];
        if (s->kv->e != st->e || s->kv != sessions[0]->kv)
            rc = mci_fail(err, MC_EINVAL, 0, "step: the sessions belong to different models");
        if (rc == MC_OK) rc = mci_session_claim(s, err);
        if (rc < 0) break;
        if ((rc = wake(s, err)) < 0) {
            atomic_store(&s->busy, 0);
            break;
        }
        s->refs++; /* a session freed by its owner lives until the step ends */
        st->seg[st->n++] = (mci_seg){.s = s, .pos = s->pos};
    }
    if (rc < 0) step_end(st, false);
    mci_leave(st->e);
    return rc;
}

/* Pages for positions pos .. pos+count of a session; the first one written must not be shared. */
static int reserve_pages(mc_session *s, int64_t pos, int64_t count, mc_error *err) {
    mc_kv *kv = s->kv;
    int64_t need, at = pos / MC_PAGE_TOKENS;
    if (count < 0) return mci_fail(err, MC_EINVAL, 0, "step: negative token count");
    if (count > kv->d.ctx - pos)
        return mci_fail(err, MC_EFULL, 0,
                        "context full: %lld tokens held, %lld more wanted, the context is %lld",
                        (long long)pos, (long long)count, (long long)kv->d.ctx);
    if (!kv->d.n_attn || !count) return MC_OK;
    need = (pos + count + MC_PAGE_TOKENS - 1) / MC_PAGE_TOKENS;
    int64_t fresh = need - s->n_page;
    bool shared = at < s->n_page && kv->page_refs[s->pages[at]] > 1;
    if (MCI_MAX(fresh, 0) + shared > kv->n_free)
        return mci_fail(
            err, MC_EFULL, 0,
            "KV pool full: %lld pages of %d tokens wanted, %lld of %lld are free; close "
            "a session, or open the model with a larger ctx",
            (long long)(MCI_MAX(fresh, 0) + shared), MC_PAGE_TOKENS, (long long)kv->n_free,
            (long long)kv->n_page);
    if (shared) {
        int32_t old = s->pages[at], page = mci_kv_take(kv);
        memcpy(mci_kv_page(kv, page), mci_kv_page(kv, old), (size_t)kv->page_bytes);
        s->pages[at] = page;
        mci_kv_drop(kv, old);
    }
    while (s->n_page < need) s->pages[s->n_page++] = mci_kv_take(kv);
    return MC_OK;
}

int mc_step_chunk(mc_step *st, const int64_t *counts, mc_error *err) {
    int64_t first = 0;
    int rc = mci_enter(st->e, err);
    if (rc < 0) return rc;
    if (!st->n) rc = mci_fail(err, MC_EINVAL, 0, "step: not begun");
    st->n_tok = 0;
    for (int32_t i = 0; i < st->n && rc == MC_OK; i++) {
        mci_seg *g = &st->seg[i];
        g->pending += g->count;
        g->pos = g->s->pos + g->pending;
        g->first = first;
        g->count = 0;
        if ((rc = reserve_pages(g->s, g->pos, counts[i], err)) < 0) break;
        g->count = counts[i];
        first += counts[i];
    }
    if (rc == MC_OK && !first) rc = mci_fail(err, MC_EINVAL, 0, "step: a chunk of no tokens");
    if (rc == MC_OK) st->n_tok = first;
    if (rc < 0) step_end(st, false);
    mci_leave(st->e);
    return rc;
}

int mc_step_commit(mc_step *st, mc_error *err) {
    int rc = mci_enter(st->e, err);
    if (rc < 0) return rc;
    if (!st->n) rc = mci_fail(err, MC_EINVAL, 0, "step: not begun");
    if (st->n && st->failed)
        rc = mci_fail(err, MC_EINVAL, 0, "step: a layer of it failed; nothing is committed");
    step_end(st, rc == MC_OK);
    mci_leave(st->e);
    return rc;
}

int mci_step_check(const mc_step *st, const mc_engine *e, int64_t max_tok, mc_error *err) {
    if (st->e != e) return mci_fail(err, MC_EINVAL, 0, "step: belongs to another engine");
    if (!st->n_tok) return mci_fail(err, MC_EINVAL, 0, "step: no chunk is open");
    if (st->n_tok > max_tok)
        return mci_fail(err, MC_EINVAL, 0, "step: a chunk holds at most %lld tokens, got %lld",
                        (long long)max_tok, (long long)st->n_tok);
    return mci_check_cancel((mc_engine *)e, err);
}

void mci_seg_state(const mci_seg *g, int32_t layer, const float **conv_in, float **conv_out,
                   const float **rec_in, float **rec_out) {
    const mc_kv *kv = g->s->kv;
    int64_t at = layer * (kv->conv_floats + kv->rec_floats);
    float *out = g->s->state[g->s->cur ^ 1] + at;
    float *in = g->pending ? out : g->s->state[g->s->cur] + at;
    *conv_in = in;
    *conv_out = out;
    *rec_in = in + kv->conv_floats;
    *rec_out = out + kv->conv_floats;
}
