/* store.c - the slabs of memory that hold some of the experts.
 *
 * An item is layer * n_expert + expert. The policy decides, the store obeys: an item is resident
 * exactly when the policy holds it, except between mci_store_begin and mci_store_end, when reads
 * may still be on their way.
 *
 * Why no line can get stuck, for any capacity: there are `lanes` slabs more than the policy may
 * hold, and every slab belongs to a resident item, or to an expert of the line that is being read,
 * ready or taken. The last ones give theirs back when they are done, so whenever nothing of the
 * line is under way a slab is free for its next miss. A guess has a slab more, its own until a line
 * takes it over. */
#include "store.h"

#include <stdlib.h>

#include "ahead.h"
#include "measure.h"
#include "policy.h"

enum {
    QUEUE = 64, /* reads queued at once: enough that lanes never starve */
    NONE = -1
};

enum { WAITING, READING, READY, TAKEN, DONE, FAILED };

/* One expert of the line being served. */
typedef struct entry {
    int32_t expert, slab;
    uint8_t state;
    bool keep; /* the policy holds it when the line is over */
} entry;

struct mc_store {
    _Atomic int64_t refs;
    mc_engine *e;
    int32_t n_layer, n_expert, top_k, kind;
    void *tables; /* one allocation: */
    int64_t table_bytes;
    mci_experts *layers; /* (n_layer) */
    mci_expert_ref *ref; /* (n_layer * n_expert) */
    int32_t *slab_of;    /* (n_layer * n_expert) of resident items, or NONE */
    int64_t *gone;       /* (n_layer) scratch of resize */
    void **peer;         /* (n_layer) the callers' */

    /* set by open */
    mci_policy *policy;
    int64_t slots, slots_max; /* as asked: in all, or per layer */
    mci_slabs slabs;
    void *queue; /* (n_queue) */
    int64_t queue_bytes;
    mci_read *spare;
    mci_ahead ahead;

    /* the line */
    bool active, failed;
    mc_error error;
    int32_t layer, n_line, next_wait, reading, ready_head, ready_tail;
    entry *line;      /* (n_expert) */
    int32_t *ready;   /* (n_expert) indices in order of arrival */
    int32_t *place;   /* (n_expert) index in the line, or NONE */
    mci_touch *touch; /* (n_expert) */
};

/* ---- create, bind ---------------------------------------------------------------------------- */

/* All tables in one block, widest elements first so that each is aligned. */
static int alloc_tables(mc_store *s, mc_error *err) {
    int64_t items = (int64_t)s->n_layer * s->n_expert, L = s->n_layer, E = s->n_expert;
    s->table_bytes = L * (int64_t)(sizeof *s->layers + sizeof *s->gone + sizeof *s->peer) +
                     items * (int64_t)(sizeof *s->ref + sizeof *s->slab_of) +
                     E * (int64_t)(sizeof *s->touch + sizeof *s->line + 2 * sizeof *s->place);
    int rc = mci_alloc(&s->e->mem, MC_MEM_META, s->table_bytes, "expert table", &s->tables, err);
    if (rc < 0) return rc;
    s->layers = s->tables;
    s->ref = (mci_expert_ref *)(s->layers + L);
    s->gone = (int64_t *)(s->ref + items);
    s->peer = (void **)(s->gone + L);
    s->touch = (mci_touch *)(s->peer + L);
    s->line = (entry *)(s->touch + E);
    s->ready = (int32_t *)(s->line + E);
    s->place = s->ready + E;
    s->slab_of = s->place + E;
    for (int64_t i = 0; i < E; i++) s->place[i] = NONE;
    for (int64_t i = 0; i < items; i++) s->slab_of[i] = NONE;
    return MC_OK;
}

int mc_store_create(mc_engine *e, int32_t n_layer, int32_t n_expert, int32_t top_k, int32_t policy,
                    mc_store **out, mc_error *err) {
    int64_t items;
    mc_store *s;
    int rc;
    *out = NULL;
    if (n_layer < 1 || n_expert < 1 || top_k < 1 || top_k > n_expert ||
        !mci_mul(n_layer, n_expert, &items) || items > INT32_MAX)
        return mci_fail(err, MC_EINVAL, 0, "store: impossible shape: %d layers, %d experts, top %d",
                        n_layer, n_expert, top_k);
    if (!mci_policy_name(policy) || policy == MC_POLICY_BELADY)
        return mci_fail(err, MC_EINVAL, 0, "store: unknown cache policy %d", policy);
    if ((rc = mci_enter(e, err)) < 0) return rc;
    if (!(s = calloc(1, sizeof *s))) {
        rc = mci_fail(err, MC_ENOMEM, 0, "store: out of memory");
        goto done;
    }
    atomic_init(&s->refs, 1);
    s->e = e;
    s->n_layer = n_layer;
    s->n_expert = n_expert;
    s->top_k = top_k;
    s->kind = policy;
    if ((rc = alloc_tables(s, err)) < 0) {
        free(s);
        goto done;
    }
    mci_engine_retain(e);
    e->stats.policy = mci_policy_name(policy);
    *out = s;
done:
    mci_leave(e);
    return rc;
}

static void close_cache(mc_store *s) {
    mci_ahead_close(&s->ahead);
    mci_policy_free(s->policy);
    mci_slabs_close(&s->slabs);
    mci_release(&s->e->mem, MC_MEM_META, s->queue, s->queue_bytes);
    s->policy = NULL;
    s->queue = NULL;
}

void mci_store_retain(mc_store *s) { atomic_fetch_add(&s->refs, 1); }

void mci_store_release(mc_store *s) {
    if (!s || atomic_fetch_sub(&s->refs, 1) != 1) return;
    mc_engine *e = s->e;
    close_cache(s);
    for (int32_t i = 0; i < s->n_layer; i++) mci_experts_free(e, &s->layers[i]);
    mci_release(&e->mem, MC_MEM_META, s->tables, s->table_bytes);
    free(s);
    mci_engine_release(e);
}

void mc_store_free(mc_store *s) { mci_store_release(s); }

int mci_store_bind(mc_store *s, const mc_moe_desc *d, const mc_expert *experts, mc_error *err) {
    int32_t layer = d->layer, hidden = d->hidden, width = d->width;
    if (layer < 0 || layer >= s->n_layer)
        return mci_fail(err, MC_ERANGE, 0, "store: layer %d of %d", layer, s->n_layer);
    if (d->n_expert != s->n_expert || d->top_k > s->top_k)
        return mci_fail(err, MC_EINVAL, 0,
                        "store: layer %d: %d experts, top-%d: the store was made for %d, top-%d",
                        layer, d->n_expert, d->top_k, s->n_expert, s->top_k);
    mci_experts *x = &s->layers[layer];
    if (s->policy || x->slab_bytes)
        return mci_fail(err, MC_EINVAL, 0, "store: layer %d: %s", layer,
                        x->slab_bytes ? "bound before" : "the store is open");
    if (hidden < 1 || width < 1)
        return mci_fail(err, MC_EINVAL, 0, "store: layer %d: hidden %d, width %d", layer, hidden,
                        width);
    *x = (mci_experts){.ref = s->ref + (int64_t)layer * s->n_expert,
                       .n = s->n_expert,
                       .hidden = hidden,
                       .width = width};
    return mci_experts_bind(s->e, x, layer, experts, err);
}

/* ---- open, resize ---------------------------------------------------------------------------- */

static bool per_layer(const mc_store *s) { return s->kind == MC_POLICY_LAYER_LRU; }

/* Experts the cache may hold in all. */
static int64_t capacity(const mc_store *s, int64_t slots) {
    return per_layer(s) ? slots * s->n_layer : slots;
}

static bool mapped(const mc_store *s) { return mci_io_asked(s->e->io) == MC_IO_MMAP; }

/* Slabs for so many slots: mapped experts have no place to come to, they are where they are. */
static int64_t slabs_for(const mc_store *s, int64_t slots) {
    return capacity(s, slots) + (mapped(s) ? 0 : mci_io_lanes(s->e->io) + s->ahead.n);
}

static int check_slots(const mc_store *s, int64_t slots, mc_error *err) {
    int64_t floor = per_layer(s) ? 1 : s->top_k, all = (int64_t)s->n_layer * s->n_expert;
    if (mapped(s) && capacity(s, slots) < all)
        return mci_fail(err, MC_EBUDGET, 0,
                        "expert cache: mmap holds all %lld experts, %lld slots given",
                        (long long)all, (long long)capacity(s, slots));
    if (slots >= floor) return MC_OK;
    return mci_fail(err, MC_EBUDGET, 0,
                    "expert cache: %lld slots%s given, at least %lld needed (%s)", (long long)slots,
                    per_layer(s) ? " per layer" : "", (long long)floor,
                    per_layer(s) ? "one per layer" : "the experts of one token in one layer");
}

static int open_cache(mc_store *s, int64_t slots, int32_t ahead, int64_t slab_bytes,
                      mc_error *err) {
    mci_mem *mem = &s->e->mem;
    int rc = mci_ahead_open(&s->ahead, s->e, &s->slabs, mapped(s) ? 0 : ahead, err);
    if (rc < 0) return rc;
    int64_t n = slabs_for(s, slots);
    int64_t queue = MCI_MIN(MCI_MIN(n, s->n_expert), MCI_MAX(QUEUE, 2 * mci_io_lanes(s->e->io)));
    rc = mci_policy_create(mem, s->kind, s->n_layer, s->n_expert, slots, &s->policy, err);
    if (rc < 0) return rc;
    s->queue_bytes = queue * (int64_t)sizeof(mci_read);
    if ((rc = mci_alloc(mem, MC_MEM_META, s->queue_bytes, "read queue", &s->queue, err)) < 0)
        return rc;
    s->spare = NULL;
    for (mci_read *r = s->queue; r < (mci_read *)s->queue + queue; r++) {
        r->next = s->spare;
        s->spare = r;
    }
    s->slots = s->slots_max = slots;
    rc = mci_slabs_open(&s->slabs, s->e, n, slab_bytes, mapped(s), err);
    s->slabs.eager = capacity(s, slots) == (int64_t)s->n_layer * s->n_expert;
    return rc;
}

int mc_store_open(mc_store *s, int64_t slots, int32_t ahead, mc_error *err) {
    int64_t most = per_layer(s) ? s->n_expert : (int64_t)s->n_layer * s->n_expert, slab = 0;
    int rc = mci_enter(s->e, err);
    if (rc < 0) return rc;
    if (s->policy) rc = mci_fail(err, MC_EINVAL, 0, "store: it is open already");
    for (int32_t i = 0; i < s->n_layer && rc == MC_OK; i++) {
        if (!s->layers[i].slab_bytes)
            rc = mci_fail(err, MC_EINVAL, 0, "store: layer %d of %d is not bound", i, s->n_layer);
        slab = MCI_MAX(slab, s->layers[i].slab_bytes);
    }
    if (rc == MC_OK) rc = check_slots(s, slots, err);
    if (rc == MC_OK && (ahead < 0 || ahead > s->n_expert))
        rc = mci_fail(err, MC_EINVAL, 0, "store: %d experts ahead, of %d a layer", ahead,
                      s->n_expert);
    if (rc == MC_OK) {
        /* more than all experts is all of them */
        if ((rc = open_cache(s, MCI_MIN(slots, most), ahead, slab, err)) < 0) close_cache(s);
    }
    if (rc == MC_OK) {
        s->e->stats.slots = capacity(s, s->slots);
        s->e->stats.slab_bytes = slab;
        mci_measure_reads(s->e, s->layers, s->n_layer, &s->slabs);
    }
    mci_leave(s->e);
    return rc;
}

int mc_store_resize(mc_store *s, int64_t slots, mc_error *err) {
    int rc = mci_enter(s->e, err);
    if (rc < 0) return rc;
    if (!s->policy)
        rc = mci_fail(err, MC_EINVAL, 0, "store: not open");
    else if (s->active)
        rc = mci_fail(err, MC_EBUSY, 0, "store: a line is being served");
    else
        rc = check_slots(s, slots, err);
    if (rc == MC_OK && slots > s->slots_max)
        rc = mci_fail(err, MC_EBUDGET, 0, "expert cache: %lld slots asked, opened with %lld",
                      (long long)slots, (long long)s->slots_max);
    if (rc == MC_OK) mci_ahead_drop(&s->ahead, true);
    if (rc == MC_OK) rc = mci_slabs_count(&s->slabs, slabs_for(s, slots), err);
    if (rc == MC_OK) {
        while (s->slots > slots) { /* a slot at a time: each layer loses one item at most */
            int64_t n = mci_policy_resize(s->policy, --s->slots, s->gone);
            for (int64_t i = 0; i < n; i++) s->slab_of[s->gone[i]] = NONE;
            s->e->stats.evictions += n;
        }
        s->slots = slots;
        mci_policy_resize(s->policy, slots, s->gone);
        mci_slabs_settle(&s->slabs, s->slab_of, (int64_t)s->n_layer * s->n_expert);
        s->e->stats.slots = capacity(s, slots);
        s->e->stats.held = mci_policy_held(s->policy);
    }
    mci_leave(s->e);
    return rc;
}

/* ---- the line -------------------------------------------------------------------------------- */

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

void mci_store_done(mc_store *s, int32_t index) {
    if (!s->active || index < 0 || index >= s->n_line || s->line[index].state != TAKEN) return;
    s->line[index].state = DONE;
    if (!s->line[index].keep) free_slab(s, &s->line[index]);
    issue(s);
}

void mci_store_end(mc_store *s) {
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
