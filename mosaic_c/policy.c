/* policy.c - eviction as arithmetic over counters.
 *
 * All policies are one binary heap whose top leaves next; they differ in the key of an item and in
 * how many heaps there are (one, or one a layer for layer-lru):
 *
 *   lru, layer-lru  (last use, -)
 *   lfu             (count, last use)
 *   belady          (-next use, -item)     never refuses an item: it stays comparable to the rest
 *
 * lfu's details, which make the hit rates of known traces reproducible to their last digit. Counts
 * fade evenly, with a half-life of 16 tokens, also from layer to layer inside a token: instead of
 * shrinking all counts at every line, a touch in layer l of token t adds 2^((t mod 16 + l/L) / 16),
 * and all counts are halved before tokens 17, 33, 49, ... Counts are fixed point with 32 bits of
 * fraction: halving whole numbers would throw away exactly the weak counts that tell the many
 * rarely used experts apart (a hit rate of 0.600 becomes 0.575 on a Zipf trace with 10 % cached).
 * All experts of the line being served are out of the heap until the line is over; a miss that
 * finds the heap empty gets no slot.
 *
 * No randomness and no arithmetic that rounds differently elsewhere: the same touches give the same
 * victims on every machine. */
#include "policy.h"

#include <math.h>
#include <stdlib.h>

enum { OUT = -1, PARKED = -2 }; /* pos of an item that is not held; held but not in the heap */
enum { HALF_LIFE = 16 };        /* tokens */
#define TOUCH 0x1p32            /* a touch at the start of a half-life */

struct mci_policy {
    mci_mem *mem;
    int64_t bytes, slots, items, held;
    int32_t kind, n_layer, n_expert, n_group;
    int64_t clock, tokens;
    uint64_t *major, *minor; /* (items) key, smaller leaves first */
    int32_t *pos;            /* (items) place in its group's heap, OUT or PARKED */
    int32_t *heap;           /* (items) group g owns [g * items / n_group, ...) */
    int32_t *heap_n;         /* (n_group) */
    int32_t *group_held;     /* (n_group) heap and parked */
};

const char *mci_policy_name(int kind) {
    switch (kind) {
    case MC_POLICY_AUTO: /* what it stands for today */
    case MC_POLICY_LFU:
        return "lfu";
    case MC_POLICY_LRU:
        return "lru";
    case MC_POLICY_LAYER_LRU:
        return "layer-lru";
    case MC_POLICY_BELADY:
        return "belady";
    }
    return NULL;
}

/* False when the table cannot be addressed. */
static bool table_bytes(int kind, int32_t n_layer, int32_t n_expert, int64_t *bytes) {
    int64_t items, groups = kind == MC_POLICY_LAYER_LRU ? n_layer : 1;
    if (n_layer < 1 || n_expert < 1 || !mci_mul(n_layer, n_expert, &items) || items > INT32_MAX)
        return false;
    *bytes = (int64_t)sizeof(mci_policy) + items * (8 + 8 + 4 + 4) + groups * (4 + 4);
    return true;
}

int64_t mci_policy_bytes(int kind, int32_t n_layer, int32_t n_expert, int64_t slots) {
    int64_t bytes;
    (void)slots; /* every item is counted, held or not */
    return table_bytes(kind, n_layer, n_expert, &bytes) ? bytes : MC_EINVAL;
}

int mci_policy_create(mci_mem *mem, int kind, int32_t n_layer, int32_t n_expert, int64_t slots,
                      mci_policy **out, mc_error *err) {
    int64_t bytes;
    void *block;
    int rc;
    *out = NULL;
    if (!mci_policy_name(kind))
        return mci_fail(err, MC_EINVAL, 0, "cache policy: unknown kind %d", kind);
    if (!table_bytes(kind, n_layer, n_expert, &bytes))
        return mci_fail(err, MC_EINVAL, 0, "cache policy: impossible shape: %d layers, %d experts",
                        n_layer, n_expert);
    if (slots < 1)
        return mci_fail(err, MC_EINVAL, 0, "cache policy: expected 1 slot or more, got %lld",
                        (long long)slots);
    if (mem) {
        if ((rc = mci_alloc(mem, MC_MEM_META, bytes, "cache policy", &block, err)) < 0) return rc;
    } else if (!(block = calloc(1, (size_t)bytes))) {
        return mci_fail(err, MC_ENOMEM, 0, "cache policy: out of memory");
    }
    mci_policy *p = block;
    p->mem = mem;
    p->bytes = bytes;
    p->slots = slots;
    p->items = (int64_t)n_layer * n_expert;
    p->kind = kind == MC_POLICY_AUTO ? MC_POLICY_LFU : kind;
    p->n_layer = n_layer;
    p->n_expert = n_expert;
    p->n_group = kind == MC_POLICY_LAYER_LRU ? n_layer : 1;
    p->major = (uint64_t *)(p + 1);
    p->minor = p->major + p->items;
    p->pos = (int32_t *)(p->minor + p->items);
    p->heap = p->pos + p->items;
    p->heap_n = p->heap + p->items;
    p->group_held = p->heap_n + p->n_group;
    for (int64_t i = 0; i < p->items; i++) p->pos[i] = OUT;
    *out = p;
    return MC_OK;
}

void mci_policy_free(mci_policy *p) {
    if (!p) return;
    if (p->mem)
        mci_release(p->mem, MC_MEM_META, p, p->bytes);
    else
        free(p);
}

/* ---- heap ---- */

static int32_t group_of(const mci_policy *p, int64_t item) {
    return p->n_group == 1 ? 0 : (int32_t)(item / p->n_expert);
}

static int32_t *heap_of(const mci_policy *p, int32_t g) {
    return p->heap + (int64_t)g * (p->items / p->n_group);
}

static bool before(const mci_policy *p, int32_t a, int32_t b) {
    if (p->major[a] != p->major[b]) return p->major[a] < p->major[b];
    return p->minor[a] < p->minor[b];
}

static void put(mci_policy *p, int32_t *h, int32_t at, int32_t item) {
    h[at] = item;
    p->pos[item] = at;
}

static void sift_up(mci_policy *p, int32_t *h, int32_t at) {
    int32_t item = h[at];
    for (; at > 0 && before(p, item, h[(at - 1) / 2]); at = (at - 1) / 2)
        put(p, h, at, h[(at - 1) / 2]);
    put(p, h, at, item);
}

static void sift_down(mci_policy *p, int32_t *h, int32_t n, int32_t at) {
    int32_t item = h[at];
    for (int32_t kid; (kid = 2 * at + 1) < n; at = kid) {
        if (kid + 1 < n && before(p, h[kid + 1], h[kid])) kid++;
        if (!before(p, h[kid], item)) break;
        put(p, h, at, h[kid]);
    }
    put(p, h, at, item);
}

static void heap_push(mci_policy *p, int32_t g, int32_t item) {
    int32_t *h = heap_of(p, g), at = p->heap_n[g]++;
    put(p, h, at, item);
    sift_up(p, h, at);
}

/* Takes out the item at a place; its pos is the caller's to set. */
static int32_t heap_take(mci_policy *p, int32_t g, int32_t at) {
    int32_t *h = heap_of(p, g), item = h[at], n = --p->heap_n[g];
    if (at < n) {
        put(p, h, at, h[n]);
        sift_down(p, h, n, at);
        sift_up(p, h, at);
    }
    return item;
}

/* The item that leaves next, gone; -1 when all held ones are parked. */
static int64_t evict(mci_policy *p, int32_t g) {
    if (!p->heap_n[g]) return -1;
    int32_t item = heap_take(p, g, 0);
    p->pos[item] = OUT;
    p->group_held[g]--;
    p->held--;
    return item;
}

/* ---- touches ---- */

/* TOUCH * 2^(num / den), 0 <= num < den, from square roots of 2: sqrt and products are rounded
 * exactly by IEEE 754, library powers are not. */
static uint64_t touch_weight(int64_t num, int64_t den) {
    double w = TOUCH, root = 2.0;
    for (int bit = 0; bit < 24; bit++) {
        root = sqrt(root);
        if ((num *= 2) >= den) {
            num -= den;
            w *= root;
        }
    }
    return (uint64_t)w;
}

static void set_key(mci_policy *p, int64_t item, uint64_t weight, int64_t next_use) {
    uint64_t now = (uint64_t)++p->clock;
    if (p->kind == MC_POLICY_LFU) {
        p->major[item] += weight; /* 2^31 touches without a token to overflow */
        p->minor[item] = now;
    } else if (p->kind == MC_POLICY_BELADY) {
        p->major[item] = (uint64_t)(INT64_MAX - next_use);
        p->minor[item] = (uint64_t)(p->items - item);
    } else {
        p->major[item] = now;
    }
}

void mci_policy_line(mci_policy *p, int32_t layer, const int32_t *ids, int32_t n,
                     const int64_t *next_use, mci_touch *out) {
    int64_t base = (int64_t)layer * p->n_expert;
    int32_t g = group_of(p, base);
    bool park = p->kind == MC_POLICY_LFU;
    int64_t token = MCI_MAX(p->tokens - 1, 0) % HALF_LIFE;
    uint64_t weight =
        park ? touch_weight(token * p->n_layer + layer, (int64_t)HALF_LIFE * p->n_layer) : 0;
    for (int32_t i = 0; park && i < n; i++) {
        int32_t at = p->pos[base + ids[i]];
        if (at >= 0) p->pos[heap_take(p, g, at)] = PARKED;
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t item = (int32_t)(base + ids[i]), at = p->pos[item];
        set_key(p, item, weight, next_use ? next_use[i] : INT64_MAX);
        if (at != OUT) {
            if (at >= 0) {
                sift_down(p, heap_of(p, g), p->heap_n[g], at);
                sift_up(p, heap_of(p, g), p->pos[item]);
            }
            out[i] = (mci_touch){.hit = true, .admitted = true, .victim = -1};
            continue;
        }
        out[i] = (mci_touch){.victim = -1};
        if (p->group_held[g] >= p->slots && (out[i].victim = evict(p, g)) < 0) continue;
        out[i].admitted = true;
        p->group_held[g]++;
        p->held++;
        if (park)
            p->pos[item] = PARKED;
        else
            heap_push(p, g, item);
    }
    for (int32_t i = 0; park && i < n; i++)
        if (p->pos[base + ids[i]] == PARKED) heap_push(p, g, (int32_t)(base + ids[i]));
}

void mci_policy_token(mci_policy *p) {
    int64_t t = p->tokens++;
    if (p->kind != MC_POLICY_LFU || t == 0 || t % HALF_LIFE) return;
    for (int64_t i = 0; i < p->items; i++) p->major[i] >>= 1;
    /* counts that became equal are now told apart by their last use: the order may have changed */
    for (int32_t at = p->heap_n[0] / 2; at-- > 0;) sift_down(p, p->heap, p->heap_n[0], at);
}

void mci_policy_forget(mci_policy *p, int64_t item) {
    int32_t g = group_of(p, item);
    if (p->pos[item] < 0) return;
    p->pos[heap_take(p, g, p->pos[item])] = OUT;
    p->group_held[g]--;
    p->held--;
}

bool mci_policy_holds(const mci_policy *p, int64_t item) { return p->pos[item] != OUT; }

int64_t mci_policy_held(const mci_policy *p) { return p->held; }

int64_t mci_policy_resize(mci_policy *p, int64_t slots, int64_t *out) {
    int64_t n = 0;
    p->slots = slots;
    for (int32_t g = 0; g < p->n_group; g++)
        while (p->group_held[g] > slots) out[n++] = evict(p, g);
    return n;
}

/* ---- replay ---- */

static int check_trace(int32_t n_layer, int32_t n_expert, int64_t n_line, const int32_t *layer,
                       const int64_t *start, const int32_t *ids, int64_t *seen, mc_error *err) {
    /* all bounds before the first id is read */
    for (int64_t i = 0; i < n_line; i++) {
        if (layer[i] < 0 || layer[i] >= n_layer)
            return mci_fail(err, MC_ERANGE, 0, "trace line %lld: layer %d of %d", (long long)i,
                            layer[i], n_layer);
        if (start[i] < 0 || start[i + 1] < start[i])
            return mci_fail(err, MC_EINVAL, 0, "trace line %lld: starts at %lld, ends at %lld",
                            (long long)i, (long long)start[i], (long long)start[i + 1]);
    }
    for (int64_t i = 0; i < n_line; i++)
        for (int64_t j = start[i]; j < start[i + 1]; j++) {
            if (ids[j] < 0 || ids[j] >= n_expert)
                return mci_fail(err, MC_ERANGE, 0, "trace line %lld: expert %d of %d", (long long)i,
                                ids[j], n_expert);
            if (seen[ids[j]] == i + 1)
                return mci_fail(err, MC_EINVAL, 0, "trace line %lld: expert %d comes twice",
                                (long long)i, ids[j]);
            seen[ids[j]] = i + 1;
        }
    return MC_OK;
}

/* next[j - start[0]]: the next line that uses the expert of ids[j]. upcoming: one per item. */
static void look_ahead(int32_t n_expert, int64_t n_line, const int32_t *layer, const int64_t *start,
                       const int32_t *ids, int64_t *upcoming, int64_t *next) {
    for (int64_t i = n_line - 1; i >= 0; i--)
        for (int64_t j = start[i]; j < start[i + 1]; j++) {
            int64_t *u = &upcoming[(int64_t)layer[i] * n_expert + ids[j]];
            next[j - start[0]] = *u;
            *u = i;
        }
}

int mc_policy_replay(int32_t policy, int32_t n_layer, int32_t n_expert, int64_t slots,
                     int64_t n_line, const int32_t *layer, const int64_t *token,
                     const int64_t *start, const int32_t *ids, int64_t *hits, int64_t *misses,
                     mc_error *err) {
    mci_policy *p;
    int64_t *seen = NULL, *upcoming = NULL, *next = NULL, count = 0;
    mci_touch *touch = NULL;
    int rc = mci_policy_create(NULL, policy, n_layer, n_expert, slots, &p, err);
    if (rc < 0) return rc;
    *hits = *misses = 0;
    seen = calloc((size_t)n_expert, sizeof *seen);
    touch = malloc((size_t)n_expert * sizeof *touch);
    if (!seen || !touch) goto nomem;
    if (n_line < 0) {
        rc = mci_fail(err, MC_EINVAL, 0, "trace: %lld lines", (long long)n_line);
        goto done;
    }
    rc = check_trace(n_layer, n_expert, n_line, layer, start, ids, seen, err);
    if (rc < 0 || n_line == 0) goto done;
    count = start[n_line] - start[0];
    if (policy == MC_POLICY_BELADY && count) {
        upcoming = malloc((size_t)p->items * sizeof *upcoming);
        next = malloc((size_t)count * sizeof *next);
        if (!upcoming || !next) goto nomem;
        for (int64_t i = 0; i < p->items; i++) upcoming[i] = INT64_MAX;
        look_ahead(n_expert, n_line, layer, start, ids, upcoming, next);
    }
    for (int64_t i = 0; i < n_line; i++) {
        int32_t n = (int32_t)(start[i + 1] - start[i]);
        if (i == 0 || token[i] != token[i - 1]) mci_policy_token(p);
        mci_policy_line(p, layer[i], ids + start[i], n, next ? next + (start[i] - start[0]) : NULL,
                        touch);
        for (int32_t j = 0; j < n; j++) *hits += touch[j].hit;
    }
    *misses = count - *hits;
    goto done;
nomem:
    rc = mci_fail(err, MC_ENOMEM, 0, "trace replay: out of memory");
done:
    free(seen);
    free(touch);
    free(upcoming);
    free(next);
    mci_policy_free(p);
    return rc;
}
