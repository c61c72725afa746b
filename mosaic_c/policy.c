/* policy.c - eviction as arithmetic over counters.
 *
 * All policies are binary heaps whose top leaves next; they differ in the key of an item and in how
 * many heaps there are (one, or one a layer for layer-lru and auto):
 *
 *   lru, layer-lru  (last use, -)
 *   lfu             (count, last use)
 *   belady          (-next use, -item)     never refuses an item: it stays comparable to the rest
 *   auto            (worth, last use)      refuses an item worth less than all that are held
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
 * auto's worth of an expert is the share that it is forecast to have of its layer's lines to come,
 * near ones first (forecast.c), less the price of a slot until then. Layers follow each other in a
 * cycle, so the one that was served last comes last. A slot costs a token what an average expert is
 * worth; far, 0..1, is how much the line after the next counts beside the next one:
 *
 *   worth = share - (1 - far) * (token + layer / L) / E,   token, layer: of the layer's latest line
 *
 * It changes with lines of its own layer only, so a line orders one heap anew, and the victim is
 * the worst of the L tops. An expert that came in stays for slots / (misses a token) tokens on
 * average; the forecast looks 1 / (1 - far) lines ahead: one, and an eighth of that stay. A cache
 * that turns over with every token is helped by the next line alone (olmoe at 10 %: .43 against .38
 * for a long view); where sequences take turns the line after it is as good (a large cache that
 * looks at the next one only falls up to 17 points behind lru).
 *
 * Hits are out of the heap until the line is over; misses compete by worth, whichever comes first:
 * one that came in may leave again for a later one of the same line. A layer that a token left out
 * would look ever more due, and its experts never leave: its clock is moved on.
 *
 * No randomness and no arithmetic that rounds differently elsewhere: the same touches give the same
 * victims on every machine. */
#include "policy.h"

#include <math.h>
#include <stdlib.h>

#include "forecast.h"
#include "replay.h"

enum { OUT = -1, PARKED = -2 }; /* pos of an item that is not held; held but not in the heap */
enum { HALF_LIFE = 16 };        /* tokens */
#define TOUCH 0x1p32            /* a touch at the start of a half-life */
#define WORTH 0x1p32            /* a share of 1; prices of 2^31 * n_expert tokens fit */
#define ELSEWHERE (-0x1p62)     /* below all that is worth something */
#define AHEAD 8                 /* of how long experts stay, this part is looked ahead */
#define MISS_FADE 0x1.f50765b6e4540p-1 /* 2^(-1/32) */

struct mci_policy {
    mci_mem *mem;
    int64_t bytes, slots, items, held;
    int32_t kind, n_layer, n_expert, n_group;
    int64_t clock, tokens;    /* tokens: not of auto */
    uint64_t *major, *minor;  /* (items) key, smaller leaves first */
    int32_t *pos;             /* (items) place in its group's heap, OUT or PARKED */
    int32_t *heap;            /* (items) group g owns [g * items / n_group, ...) */
    int32_t *heap_n;          /* (n_group) */
    int32_t *group_held;      /* (n_group) heap and parked */
    mci_forecast *forecast;   /* auto only */
    uint64_t *served;         /* auto only: (n_layer) price of a slot up to its latest line */
    uint64_t paid, price;     /* auto only: up to this token; for a line of it */
    double misses, of_tokens; /* auto only: misses in so many tokens, both fading */
    const bool *elsewhere;    /* auto only, of the line to come: mci_policy_elsewhere */
    const int32_t *called;
    int32_t n_called;
    int32_t *whole;           /* auto only: (n_expert) all ids of a line */
};

const char *mci_policy_name(int kind) {
    switch (kind) {
    case MC_POLICY_AUTO:
        return "auto";
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

static int32_t groups_of(int kind, int32_t n_layer) {
    return kind == MC_POLICY_LAYER_LRU || kind == MC_POLICY_AUTO ? n_layer : 1;
}

/* False when the table cannot be addressed. */
static bool table_bytes(int kind, int32_t n_layer, int32_t n_expert, int64_t *bytes) {
    int64_t items, groups = groups_of(kind, n_layer);
    if (n_layer < 1 || n_expert < 1 || !mci_mul(n_layer, n_expert, &items) || items > INT32_MAX)
        return false;
    *bytes = (int64_t)sizeof(mci_policy) + items * (8 + 8 + 4 + 4) + groups * (4 + 4);
    if (kind == MC_POLICY_AUTO)
        *bytes += mci_forecast_bytes(n_layer, n_expert) + n_layer * (int64_t)sizeof(uint64_t) +
                  n_expert * (int64_t)sizeof(int32_t);
    return true;
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
    p->kind = kind;
    p->n_layer = n_layer;
    p->n_expert = n_expert;
    p->n_group = groups_of(kind, n_layer);
    p->major = (uint64_t *)(p + 1);
    p->minor = p->major + p->items;
    p->pos = (int32_t *)(p->minor + p->items);
    p->heap = p->pos + p->items;
    p->heap_n = p->heap + p->items;
    p->group_held = p->heap_n + p->n_group;
    for (int64_t i = 0; i < p->items; i++) p->pos[i] = OUT;
    if (kind == MC_POLICY_AUTO) { /* the tables before are a multiple of 8 bytes */
        p->served = (uint64_t *)(p->group_held + p->n_group);
        p->forecast = mci_forecast_init(p->served + n_layer, n_layer, n_expert);
        p->whole = (int32_t *)((uint8_t *)(p->served + n_layer) +
                               mci_forecast_bytes(n_layer, n_expert));
    }
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

/* The keys of any number of items have changed. */
static void heapify(mci_policy *p, int32_t g) {
    for (int32_t at = p->heap_n[g] / 2; at-- > 0;) sift_down(p, heap_of(p, g), p->heap_n[g], at);
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

/* The group whose top leaves next; -1 when all held items are parked. */
static int32_t worst_group(const mci_policy *p) {
    int32_t worst = -1;
    for (int32_t g = 0; g < p->n_group; g++)
        if (p->heap_n[g] && (worst < 0 || before(p, heap_of(p, g)[0], heap_of(p, worst)[0])))
            worst = g;
    return worst;
}

/* The item of a group that leaves next, gone; -1 when all held ones are parked. */
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

/* auto: new keys for the layer, then the line's misses against all that is held. */
static void auto_line(mci_policy *p, int32_t layer, const int32_t *ids, int32_t n, mci_touch *out) {
    const bool *elsewhere = p->elsewhere;
    const int32_t all = n + p->n_called;
    if (n) memcpy(p->whole, ids, (size_t)n * sizeof *ids);
    if (p->n_called) memcpy(p->whole + n, p->called, (size_t)p->n_called * sizeof *ids);
    p->elsewhere = NULL;
    p->n_called = 0;
    if (all < 1) return;
    const double *share = mci_forecast_line(p->forecast, layer, p->whole, all);
    int64_t base = (int64_t)layer * p->n_expert;
    for (int32_t i = 0; i < n; i++) {
        int32_t at = p->pos[base + ids[i]];
        p->minor[base + ids[i]] = (uint64_t)++p->clock;
        out[i] = (mci_touch){.hit = at != OUT, .admitted = at != OUT, .victim = -1};
        if (at != OUT) p->pos[heap_take(p, layer, at)] = PARKED;
    }
    p->served[layer] = p->paid + p->price * (uint64_t)layer;
    uint64_t zero = (UINT64_C(1) << 63) - p->served[layer];
    for (int32_t e = 0; e < p->n_expert; e++) {
        const double worth = elsewhere && elsewhere[e] ? ELSEWHERE : share[e] * WORTH;
        p->major[base + e] = zero + (uint64_t)(int64_t)worth;
    }
    heapify(p, layer);
    for (int32_t i = 0; i < n; i++) {
        int32_t item = (int32_t)(base + ids[i]);
        if (out[i].hit) continue;
        p->misses++;
        if (p->held >= p->slots) {
            int32_t g = worst_group(p);
            if (g < 0 || before(p, item, heap_of(p, g)[0])) continue;
            out[i].victim = evict(p, g);
        }
        out[i].admitted = true;
        p->group_held[layer]++;
        p->held++;
        heap_push(p, layer, item);
    }
    for (int32_t i = 0; i < n; i++)
        if (out[i].hit) heap_push(p, layer, (int32_t)(base + ids[i]));
}

/* auto: a token is over, another begins. */
static void auto_token(mci_policy *p) {
    for (int32_t l = 0; l < p->n_layer; l++) { /* those it left out come a token later */
        uint64_t due = p->paid + p->price * (uint64_t)l, cost = due - p->served[l];
        uint64_t *key = p->major + (int64_t)l * p->n_expert;
        for (int32_t e = 0; cost && e < p->n_expert; e++) key[e] -= cost;
        p->served[l] = due;
    }
    double stay = (double)p->slots * p->of_tokens;
    double far = p->of_tokens > 0 ? stay / (stay + AHEAD * p->misses) : 0;
    mci_forecast_token(p->forecast, far);
    p->paid += p->price * (uint64_t)p->n_layer;
    p->price = (uint64_t)((1 - far) * WORTH / (double)p->items);
    p->misses *= MISS_FADE;
    p->of_tokens = p->of_tokens * MISS_FADE + 1;
}

void mci_policy_elsewhere(mci_policy *p, const bool *held, const int32_t *called, int32_t n) {
    p->elsewhere = held;
    p->called = called;
    p->n_called = p->kind == MC_POLICY_AUTO ? n : 0;
}

void mci_policy_line(mci_policy *p, int32_t layer, const int32_t *ids, int32_t n,
                     const int64_t *next_use, mci_touch *out) {
    if (p->kind == MC_POLICY_AUTO) {
        auto_line(p, layer, ids, n, out);
        return;
    }
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
    if (p->kind == MC_POLICY_AUTO) {
        auto_token(p);
        return;
    }
    int64_t t = p->tokens++;
    if (p->kind != MC_POLICY_LFU || t == 0 || t % HALF_LIFE) return;
    for (int64_t i = 0; i < p->items; i++) p->major[i] >>= 1;
    /* counts that became equal are now told apart by their last use: the order may have changed */
    heapify(p, 0);
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
    while (p->kind == MC_POLICY_AUTO && p->held > slots) out[n++] = evict(p, worst_group(p));
    for (int32_t g = 0; g < p->n_group; g++)
        while (p->group_held[g] > slots) out[n++] = evict(p, g);
    return n;
}

/* ---- replay ---- */

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
                     int32_t *line_misses, mc_error *err) {
    mci_policy *p;
    int64_t *upcoming = NULL, *next = NULL, count = 0;
    mci_touch *touch = NULL;
    int rc = mci_policy_create(NULL, policy, n_layer, n_expert, slots, &p, err);
    if (rc < 0) return rc;
    *hits = *misses = 0;
    touch = malloc((size_t)n_expert * sizeof *touch);
    if (!touch) goto nomem;
    rc = mci_check_trace(n_layer, n_expert, n_line, layer, start, ids, err);
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
        int32_t n = (int32_t)(start[i + 1] - start[i]), hit = 0;
        if (i == 0 || token[i] != token[i - 1]) mci_policy_token(p);
        mci_policy_line(p, layer[i], ids + start[i], n, next ? next + (start[i] - start[0]) : NULL,
                        touch);
        for (int32_t j = 0; j < n; j++) hit += touch[j].hit;
        if (line_misses) line_misses[i] = n - hit;
        *hits += hit;
    }
    *misses = count - *hits;
    goto done;
nomem:
    rc = mci_fail(err, MC_ENOMEM, 0, "trace replay: out of memory");
done:
    free(touch);
    free(upcoming);
    free(next);
    mci_policy_free(p);
    return rc;
}
