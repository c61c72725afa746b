/* policy.h - which experts the cache holds: pure arithmetic over counters, no memory of experts, no
 * I/O. The store follows its decisions; simulate replays traces through the same code.
 *
 * An item is layer * n_expert + expert. `lru` and `lfu` share all slots among layers; `layer-lru`
 * gives each layer its own. lfu: every touch adds 1 to a count that fades with a half-life of 16
 * tokens and is kept after eviction, the victim is the lowest count (ties: least recently used),
 * experts of the line being served are never victims. belady evicts the item whose next use lies
 * farthest away and takes in every miss. These are fixed for ever; policy.c has the details that
 * make known hit rates reproducible to the last digit. auto shares all slots, too, and does what
 * measures best: it keeps the experts that are forecast to be called most (forecast.h), those of
 * sooner layers first, and refuses a miss that is worth less than all that is held. */
#ifndef MCI_POLICY_H
#define MCI_POLICY_H
#include "base.h"

typedef struct mci_policy mci_policy;

typedef struct mci_touch {
    bool hit;       /* the item was held */
    bool admitted;  /* it is held now (a hit always is; a miss may be refused a slot) */
    int64_t victim; /* the item that left to make room; -1: none */
} mci_touch;

/* slots: in all, or per layer for MC_POLICY_LAYER_LRU. mem may be NULL (plain malloc without
 * accounting). */
int mci_policy_create(mci_mem *mem, int kind, int32_t n_layer, int32_t n_expert, int64_t slots,
                      mci_policy **out, mc_error *err);
void mci_policy_free(mci_policy *p);
const char *mci_policy_name(int kind); /* "lfu"; NULL: no such kind */

/* Touches the n distinct experts of a line in order; out[i] tells what each did. An item admitted
 * early in a line may be the victim of a later one (lru with few slots, auto). next_use: for
 * belady, the index of the next line that uses each expert (INT64_MAX: never); NULL otherwise. */
void mci_policy_line(mci_policy *p, int32_t layer, const int32_t *ids, int32_t n,
                     const int64_t *next_use, mci_touch *out);
/* What a line's touches do not tell: experts of its layer that are kept elsewhere as well (held,
 * n_expert flags), and the n of those that it calls, which are no part of its ids. They are served
 * there: auto learns the calls all the same and lets what is held go first. Before
 * mci_policy_line, which forgets it; both stay the caller's until then. */
void mci_policy_elsewhere(mci_policy *p, const bool *held, const int32_t *called, int32_t n);
/* A token step begins (the clock of what fades in lfu and auto). */
void mci_policy_token(mci_policy *p);
/* Drops an item whose read failed; its count stays. */
void mci_policy_forget(mci_policy *p, int64_t item);
bool mci_policy_holds(const mci_policy *p, int64_t item);
/* New capacity. Items that must leave are written to out (room for `held` many) and counted. */
int64_t mci_policy_resize(mci_policy *p, int64_t slots, int64_t *out);
int64_t mci_policy_held(const mci_policy *p);
#endif
