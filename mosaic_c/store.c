/* store.c - the slabs of memory that hold some of the experts: from create to free. store_line.c
 * serves them.
 *
 * An item is layer * n_expert + expert. The policy decides, the store obeys: an item is resident
 * exactly when the policy holds it, except between mci_store_begin and mci_store_end, when reads
 * may still be on their way.
 *
 * Why no line can get stuck, for any capacity: there are `lanes` slabs more than the policy may
 * hold, and every slab belongs to a resident item, or to an expert of the line that is being read,
 * ready or taken. The last ones give theirs back when they are done, so whenever nothing of the
 * line is under way a slab is free for its next miss. A guess has a slab more, its own until a line
 * takes it over, and so has each expert that is being copied to VRAM. */
#include "store.h"

#include <stdlib.h>
#include <unistd.h>

#include "measure.h"
#include "store_parts.h"

enum { QUEUE = 64 }; /* reads queued at once: enough that lanes never starve */

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
    mci_tier_close(s->tier);
    s->tier = NULL;
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
    /* in a forked child: reads on their way are the parent's, the ring is shared with it */
    if (getpid() != e->pid) return;
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
    s->max_tok = MCI_MAX(s->max_tok, d->max_tok);
    return mci_experts_bind(s->e, x, layer, experts, err);
}

mci_tier *mci_store_tier(const mc_store *s) { return s->tier; }

static int check_bound(const mc_store *s, mc_error *err) {
    if (s->policy) return mci_fail(err, MC_EINVAL, 0, "store: it is open already");
    for (int32_t i = 0; i < s->n_layer; i++)
        if (!s->layers[i].slab_bytes)
            return mci_fail(err, MC_EINVAL, 0, "store: layer %d of %d is not bound", i, s->n_layer);
    return MC_OK;
}

int mc_store_tier(mc_store *s, const mc_tier_opts *o, mc_error *err) {
    int rc = mci_enter(s->e, err);
    if (rc < 0) return rc;
    rc = check_bound(s, err);
    if (rc == MC_OK && s->tier) rc = mci_fail(err, MC_EINVAL, 0, "store: it has a GPU tier");
    if (rc == MC_OK)
        rc = mci_tier_open(s->e, o, s->layers, s->n_layer, s->top_k, s->max_tok, &s->slabs,
                           &s->tier, err);
    mci_leave(s->e);
    return rc;
}

/* ---- open, resize ---------------------------------------------------------------------------- */

static bool per_layer(const mc_store *s) { return s->kind == MC_POLICY_LAYER_LRU; }

/* Experts the cache may hold in all. */
static int64_t capacity(const mc_store *s, int64_t slots) {
    return per_layer(s) ? slots * s->n_layer : slots;
}

/* Slabs for so many slots: mapped experts have no place to come to, they are where they are. */
static int64_t slabs_for(const mc_store *s, int64_t slots) {
    if (mapped(s)) return capacity(s, slots);
    return capacity(s, slots) + mci_io_lanes(s->e->io) + s->ahead.n + (s->tier ? MC_TIER_SLABS : 0);
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
    rc = check_bound(s, err);
    for (int32_t i = 0; i < s->n_layer; i++) slab = MCI_MAX(slab, s->layers[i].slab_bytes);
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
    if (rc == MC_OK && s->tier) mci_tier_settle(s->tier);
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
