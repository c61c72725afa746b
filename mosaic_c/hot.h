/* hot.h - which experts earn a slot in VRAM: pure arithmetic over calls, like policy.h. The tier
 * obeys; replays of traces go through the same code.
 *
 * An item is layer * n_expert + expert. A line is what a layer calls in one token (a step of the
 * model, a chunk of a prompt too). */
#ifndef MCI_HOT_H
#define MCI_HOT_H
#include "base.h"

typedef struct mci_hot mci_hot;

/* after: calls within the last `window` lines of its layer (1..32) from which an item is hot. mem
 * may be NULL (plain malloc without accounting). */
int mci_hot_create(mci_mem *mem, int32_t n_layer, int32_t n_expert, int64_t slots, int32_t after,
                   int32_t window, mci_hot **out, mc_error *err);
void mci_hot_free(mci_hot *h);
/* The n distinct experts of the layer's next line. Before mci_hot_wants is asked about them. */
void mci_hot_line(mci_hot *h, int32_t layer, const int32_t *ids, int32_t n);
/* Whether an item that is not held deserves a slot now; *victim: the item that leaves for it, -1: a
 * slot is free. */
bool mci_hot_wants(const mci_hot *h, int64_t item, int64_t *victim);
void mci_hot_put(mci_hot *h, int64_t item);
void mci_hot_drop(mci_hot *h, int64_t item);
bool mci_hot_holds(const mci_hot *h, int64_t item);
int64_t mci_hot_held(const mci_hot *h);
#endif
