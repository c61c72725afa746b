/* hot.c - promotion as arithmetic over counters.
 *
 * Lines of an item's layer are bits of its history, the latest lowest:
 *
 *   bit  31 ............... window - 1 ........ 2 1 0
 *        forgotten        | 0 1 0 0 1 ......... 1 0 1    calls: the ones among these
 *
 * A free slot goes to an item of `after - 1` calls (at least 1), a taken one to an item of `after`
 * calls more than its holder has, who is the least recently used. So
 *
 *   - what is called once never crosses the bus (but where after is 1 or 2),
 *   - holders that are called no more count 0 soon: then a newcomer needs just `after` calls,
 *   - items that are called about as often as each other never push each other out in turns.
 *
 * Both differences from a bare threshold come from replays (docs/performance.md): with free slots
 * waiting for another call only loses hits, and with full ones a swap pays when the newcomer is
 * clearly the busier of the two. The lowest count in place of the least recently used as the victim
 * hits a little more often and moves more: a count that has just begun is low.
 *
 * Held items are a ring, most recently used first, whose ends meet at the item past the last. */
#include "hot.h"

#include <stdlib.h>

#include "replay.h"

enum { OUT = -1 }; /* next of an item that is not held */

struct mci_hot {
    mci_mem *mem;
    int64_t bytes, slots, items, held;
    int32_t n_expert, after;
    uint32_t mask;
    uint32_t *history;    /* (items) */
    int32_t *next, *prev; /* (items + 1) to the less and the more recently used */
};

int mci_hot_create(mci_mem *mem, int32_t n_layer, int32_t n_expert, int64_t slots, int32_t after,
                   int32_t window, mci_hot **out, mc_error *err) {
    int64_t items;
    void *block;
    int rc;
    *out = NULL;
    if (n_layer < 1 || n_expert < 1 || !mci_mul(n_layer, n_expert, &items) || items >= INT32_MAX)
        return mci_fail(err, MC_EINVAL, 0, "hot experts: impossible shape: %d layers, %d experts",
                        n_layer, n_expert);
    if (slots < 1)
        return mci_fail(err, MC_EINVAL, 0, "hot experts: expected 1 slot or more, got %lld",
                        (long long)slots);
    if (window < 1 || window > 32)
        return mci_fail(err, MC_EINVAL, 0, "hot experts: expected a window of 1 to 32, got %d",
                        window);
    if (after < 1 || after > window)
        return mci_fail(err, MC_EINVAL, 0, "hot experts: expected 1 to %d calls, got %d", window,
                        after);
    int64_t bytes = (int64_t)sizeof(mci_hot) + items * 4 + (items + 1) * 8;
    if (mem) {
        if ((rc = mci_alloc(mem, MC_MEM_META, bytes, "hot experts", &block, err)) < 0) return rc;
    } else if (!(block = calloc(1, (size_t)bytes))) {
        return mci_fail(err, MC_ENOMEM, 0, "hot experts: out of memory");
    }
    mci_hot *h = block;
    h->mem = mem;
    h->bytes = bytes;
    h->slots = slots;
    h->items = items;
    h->n_expert = n_expert;
    h->after = after;
    h->mask = UINT32_MAX >> (32 - window);
    h->history = (uint32_t *)(h + 1);
    h->next = (int32_t *)(h->history + items);
    h->prev = h->next + items + 1;
    for (int64_t i = 0; i < items; i++) h->next[i] = OUT;
    h->next[items] = h->prev[items] = (int32_t)items;
    *out = h;
    return MC_OK;
}

void mci_hot_free(mci_hot *h) {
    if (!h) return;
    if (h->mem)
        mci_release(h->mem, MC_MEM_META, h, h->bytes);
    else
        free(h);
}

static int calls(const mci_hot *h, int64_t item) {
    return __builtin_popcount(h->history[item] & h->mask);
}

static void unlink_item(mci_hot *h, int64_t item) {
    h->next[h->prev[item]] = h->next[item];
    h->prev[h->next[item]] = h->prev[item];
}

static void link_first(mci_hot *h, int64_t item) {
    int64_t ends = h->items;
    h->prev[item] = (int32_t)ends;
    h->next[item] = h->next[ends];
    h->prev[h->next[ends]] = (int32_t)item;
    h->next[ends] = (int32_t)item;
}

void mci_hot_line(mci_hot *h, int32_t layer, const int32_t *ids, int32_t n) {
    int64_t base = (int64_t)layer * h->n_expert;
    for (int32_t e = 0; e < h->n_expert; e++) h->history[base + e] <<= 1;
    for (int32_t i = 0; i < n; i++) {
        int64_t item = base + ids[i];
        h->history[item] |= 1;
        if (h->next[item] == OUT) continue;
        unlink_item(h, item);
        link_first(h, item);
    }
}

bool mci_hot_wants(const mci_hot *h, int64_t item, int64_t *victim) {
    *victim = -1;
    if (h->next[item] != OUT) return false;
    if (h->held < h->slots) return calls(h, item) >= MCI_MAX(h->after - 1, 1);
    int64_t oldest = h->prev[h->items];
    if (calls(h, item) < calls(h, oldest) + h->after) return false;
    *victim = oldest;
    return true;
}

void mci_hot_put(mci_hot *h, int64_t item) {
    if (h->next[item] != OUT) return;
    link_first(h, item);
    h->held++;
}

void mci_hot_drop(mci_hot *h, int64_t item) {
    if (h->next[item] == OUT) return;
    unlink_item(h, item);
    h->next[item] = OUT;
    h->held--;
}

bool mci_hot_holds(const mci_hot *h, int64_t item) { return h->next[item] != OUT; }

int64_t mci_hot_held(const mci_hot *h) { return h->held; }

/* ---- replay ---- */

int mc_hot_replay(int32_t n_layer, int32_t n_expert, int64_t slots, int32_t after, int32_t window,
                  int64_t n_line, const int32_t *layer, const int64_t *start, const int32_t *ids,
                  mc_hot_counts *out, int32_t *line_served, int32_t *line_loads, mc_error *err) {
    mci_hot *h;
    int rc = mci_hot_create(NULL, n_layer, n_expert, slots, after, window, &h, err);
    if (rc < 0) return rc;
    *out = (mc_hot_counts){0};
    rc = mci_check_trace(n_layer, n_expert, n_line, layer, start, ids, err);
    for (int64_t i = 0; rc == MC_OK && i < n_line; i++) {
        int64_t base = (int64_t)layer[i] * n_expert, victim;
        int32_t n = (int32_t)(start[i + 1] - start[i]), served = 0, loads = 0;
        const int32_t *line = ids + start[i];
        /* a copy that begins in a line arrives after it: all are served, then some promoted */
        for (int32_t j = 0; j < n; j++) served += mci_hot_holds(h, base + line[j]);
        mci_hot_line(h, layer[i], line, n);
        for (int32_t j = 0; j < n; j++) {
            if (!mci_hot_wants(h, base + line[j], &victim)) continue;
            if (victim >= 0) {
                mci_hot_drop(h, victim);
                out->evictions++;
            }
            mci_hot_put(h, base + line[j]);
            loads++;
        }
        out->calls += n;
        out->served += served;
        out->loads += loads;
        if (line_served) line_served[i] = served;
        if (line_loads) line_loads[i] = loads;
    }
    mci_hot_free(h);
    return rc;
}
