/* store_line.c - a line of a store served: hits and misses decided, reads sent out, experts handed
 * over as they come. store.c says why no line can get stuck. */
#include "store.h"
#include "store_parts.h"

static int64_t item_of(const mc_store *s, const entry *en) {
    return (int64_t)s->layer * s->n_expert + en->expert;
}

static void free_slab(mc_store *s, entry *en) {
    if (en->slab != NONE) mci_slabs_give(&s->slabs, en->slab);
    en->slab = NONE;
}

/* An expert whose slab holds it may be taken. */
static void ready(mc_store *s, entry *en) {
    en->state = READY;
    if (en->keep) s->slab_of[item_of(s, en)] = en->slab;
    s->ready[s->ready_tail++] = (int32_t)(en - s->line);
}

static void fail_line(mc_store *s, entry *en, const mc_error *error) {
    free_slab(s, en);
    if (en->keep) mci_policy_forget(s->policy, item_of(s, en));
    en->keep = false;
    en->state = FAILED;
    if (!s->failed) s->error = *error;
    s->failed = true;
}

/* Sends out reads of the line's misses, in order, while there are slabs to read into. */
static void issue(mc_store *s) {
    while (!s->failed && s->next_wait < s->n_line && s->slabs.n_free && s->spare) {
        entry *en = &s->line[s->next_wait++];
        if (en->state != WAITING) continue;
        mci_read *r = s->spare;
        mc_error error;
        s->spare = r->next;
        if (mci_fetch(s->e, &s->slabs, &s->layers[s->layer], en->expert, en - s->line, r, &en->slab,
                      &error) < 0) {
            r->next = s->spare;
            s->spare = r;
            fail_line(s, en, &error);
            return;
        }
        en->state = READING;
        s->reading++;
    }
}

static void arrived(mc_store *s, mci_read *r) {
    int32_t place = (int32_t)r->tag;
    if (r->tag < 0) {
        if ((place = mci_ahead_arrived(&s->ahead, r)) < 0) return;
    } else {
        r->next = s->spare;
        s->spare = r;
    }
    entry *en = &s->line[place];
    s->reading--;
    if (r->err.code < 0) {
        fail_line(s, en, &r->err);
        return;
    }
    mci_fetched(&s->slabs, r, en->slab);
    ready(s, en);
    issue(s);
}

bool mci_store_ahead(const mc_store *s) { return !s->active && mci_ahead_wanted(&s->ahead); }

bool mci_store_foresee(mc_store *s, int32_t layer, int32_t expert) {
    int64_t item = (int64_t)layer * s->n_expert + expert;
    return s->slab_of[item] != NONE ||
           (s->tier && mci_tier_holds(s->tier, layer, expert)) ||
           mci_ahead_guess(&s->ahead, &s->layers[layer], expert, item);
}

void mci_store_set_peer(mc_store *s, int32_t layer, void *peer) { s->peer[layer] = peer; }

void *mci_store_peer(const mc_store *s, int32_t layer) {
    return layer < s->n_layer ? s->peer[layer] : NULL;
}

void mci_store_token(mc_store *s, bool decode) {
    if (!s->policy) return;
    mci_policy_token(s->policy);
    mci_ahead_token(&s->ahead, decode);
}

static int check_line(mc_store *s, int32_t layer, const int32_t *ids, int32_t n, mc_error *err) {
    int rc = MC_OK;
    int32_t i = 0;
    if (!s->policy || s->active)
        return mci_fail(err, MC_EINVAL, 0, "store: %s",
                        s->active ? "the line before is not ended" : "not open");
    if (layer < 0 || layer >= s->n_layer || n < 0 || n > s->n_expert)
        return mci_fail(err, MC_ERANGE, 0, "store: layer %d of %d, a line of %d experts of %d",
                        layer, s->n_layer, n, s->n_expert);
    for (; i < n && rc == MC_OK; i++) {
        if (ids[i] < 0 || ids[i] >= s->n_expert)
            rc = mci_fail(err, MC_ERANGE, 0, "store: expert %d of %d", ids[i], s->n_expert);
        else if (s->place[ids[i]] != NONE)
            rc = mci_fail(err, MC_EINVAL, 0, "store: expert %d comes twice in a line", ids[i]);
        else
            s->place[ids[i]] = i;
    }
    for (i--; rc < 0 && i-- > 0;) s->place[ids[i]] = NONE;
    return rc;
}

/* The item's slab is free at once, unless an expert that came earlier in this line needs it. */
static void evict(mc_store *s, int64_t victim, int32_t now) {
    int32_t *slab = &s->slab_of[victim], at = NONE;
    if (victim / s->n_expert == s->layer) at = s->place[victim % s->n_expert];
    if (at != NONE && at < now)
        s->line[at].keep = false;
    else
        mci_slabs_give(&s->slabs, *slab);
    *slab = NONE;
}

/* Files that shrank since they were mapped; one call for each change of file. */
static int check_mapped(mc_store *s, int32_t layer, const int32_t *ids, int32_t n, mc_error *err) {
    int32_t last = NONE;
    int rc = MC_OK;
    for (int32_t i = 0; i < 3 * n && rc == MC_OK && mapped(s); i++) {
        int32_t file = s->layers[layer].ref[ids[i / 3]].mat[i % 3].file;
        if (file != last) rc = mci_io_check(s->e->io, file, err);
        last = file;
    }
    for (int32_t i = 0; i < n && rc < 0; i++) s->place[ids[i]] = NONE;
    return rc;
}

int mci_store_begin(mc_store *s, int32_t layer, const int32_t *ids, int32_t n, mc_error *err) {
    mc_stats *st = &s->e->stats;
    int rc = check_line(s, layer, ids, n, err);
    if (rc < 0 || (rc = check_mapped(s, layer, ids, n, err)) < 0) return rc;
    s->active = true;
    s->failed = false;
    s->layer = layer;
    s->n_line = n;
    s->next_wait = s->ready_head = s->ready_tail = 0;
    if (s->tier) {
        const int32_t *hot;
        int32_t n_hot;
        const bool *held = mci_tier_line(s->tier, &hot, &n_hot);
        mci_policy_elsewhere(s->policy, held, hot, n_hot);
    }
    mci_policy_line(s->policy, layer, ids, n, NULL, s->touch);
    for (int32_t i = 0; i < n; i++) {
        const mci_touch *t = &s->touch[i];
        entry *en = &s->line[i];
        *en = (entry){.expert = ids[i], .slab = NONE, .state = WAITING, .keep = t->admitted};
        if (t->victim >= 0) evict(s, t->victim, i);
        st->evictions += t->victim >= 0;
        st->hits += t->hit;
        st->misses += !t->hit;
        if (t->hit) {
            en->slab = s->slab_of[item_of(s, en)];
            ready(s, en);
            continue;
        }
        int guess = mci_ahead_take(&s->ahead, item_of(s, en), i, &en->slab);
        if (guess == MCI_GUESS_READY) ready(s, en);
        if (guess == MCI_GUESS_READING) {
            en->state = READING;
            s->reading++;
        }
    }
    mci_ahead_drop(&s->ahead, false);
    issue(s);
    return MC_OK;
}

int mci_store_next(mc_store *s, mci_expert_view *out, int32_t max, bool wait, mc_error *err) {
    const mci_experts *x = &s->layers[s->layer];
    int32_t n = 0;
    if (!s->active) return mci_fail(err, MC_EINVAL, 0, "store: no line is being served");
    for (;;) {
        for (mci_read *r; (s->reading || s->ahead.reading) && (r = mci_io_next(s->e->io, false));)
            arrived(s, r);
        if (s->failed) {
            if (err) *err = s->error;
            return s->error.code;
        }
        for (; n < max && s->ready_head < s->ready_tail; n++) {
            int32_t i = s->ready[s->ready_head++];
            entry *en = &s->line[i];
            const uint8_t *slab = mci_slabs_at(&s->slabs, en->slab);
            mci_mat m[3];
            if (mci_slabs_used(&s->slabs, en->slab))
                mci_slabs_searched(&s->slabs, en->slab, mci_experts_have_nan(x, en->expert, slab));
            mci_experts_mats(x, en->expert, slab, mci_slabs_no_nan(&s->slabs, en->slab), m);
            out[n] = (mci_expert_view){.index = i, .gate = m[0], .up = m[1], .down = m[2]};
            en->state = TAKEN;
        }
        if (n || !wait || max < 1) return n;
        if (!s->reading) break;
        double t0 = mci_now();
        mci_read *r = mci_io_next(s->e->io, true);
        s->e->stats.wait_s += mci_now() - t0;
        if (r) arrived(s, r);
    }
    while (s->next_wait < s->n_line && s->line[s->next_wait].state != WAITING) s->next_wait++;
    if (s->next_wait < s->n_line)
        return mci_fail(err, MC_EINVAL, 0, "store: experts taken and not done hold every slab");
    return 0;
}

/* Its slab holds it for as long as nobody gives it back. */
static void offer(mc_store *s, const entry *en) {
    mci_mat m[3];
    if (!s->tier || !mci_tier_wants(s->tier, en->expert)) return;
    mci_experts_mats(&s->layers[s->layer], en->expert, mci_slabs_at(&s->slabs, en->slab), false, m);
    mci_tier_offer(s->tier, en->expert, m, en->slab);
}

void mci_store_done(mc_store *s, int32_t index) {
    if (!s->active || index < 0 || index >= s->n_line || s->line[index].state != TAKEN) return;
    s->line[index].state = DONE;
    offer(s, &s->line[index]);
    if (!s->line[index].keep) free_slab(s, &s->line[index]);
    issue(s);
}

void mci_store_end(mc_store *s) {
    if (s->tier) mci_tier_end(s->tier);
    if (!s->active) return;
    s->next_wait = s->n_line; /* no new reads; what no lane has begun may take long on a bad disk */
    for (mci_read *r; s->reading && (r = mci_io_withdraw(s->e->io, NULL));) arrived(s, r);
    while (s->reading) arrived(s, mci_io_next(s->e->io, true));
    for (int32_t i = 0; i < s->n_line; i++) {
        entry *en = &s->line[i];
        s->place[en->expert] = NONE;
        if (en->state == WAITING && en->keep) mci_policy_forget(s->policy, item_of(s, en));
        if (!en->keep) free_slab(s, en);
    }
    s->active = false;
    s->e->stats.held = mci_policy_held(s->policy);
    if (s->layer == s->n_layer - 1) mci_ahead_token_end(&s->ahead);
}
