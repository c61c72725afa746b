/* hot.h - which experts earn a slot in VRAM: pure arithmetic over calls, like policy.h. The tier
 * obeys; replays of traces go through the same code.
 *
 * An item is layer * n_expert + expert. A line is what a layer calls in one token (a step of the
 * model, a chunk of a prompt too). The calls of an item are the lines of its layer, of the last
 * `window`, that hold it. Slots are shared by all layers. */
#ifndef MCI_HOT_H
#define MCI_HOT_H
#include "base.h"

typedef struct mci_hot mci_hot;

/* after (1..window): calls that an item needs beyond those of the one that leaves for it; one less,
 * at least 1, where a slot is free. window: 1..32. mem may be NULL (plain malloc without
 * accounting). MC_EINVAL: anything else. */
int mci_hot_create(mci_mem *mem, int32_t n_layer, int32_t n_expert, int64_t slots, int32_t after,
                   int32_t window, mci_hot **out, mc_error *err);
void mci_hot_free(mci_hot *h);
/* The n distinct experts of the layer's next line; those that are held become the most recently
 * used, in this order. Before mci_hot_wants is asked about them. */
void mci_hot_line(mci_hot *h, int32_t layer, const int32_t *ids, int32_t n);
/* Whether an item that is not held deserves a slot now; *victim: the item that leaves for it (the
 * caller drops it), -1: a slot is free. The victim is the least recently used: one of the line
 * itself only where nothing else is held. */
bool mci_hot_wants(const mci_hot *h, int64_t item, int64_t *victim);
/* The item has a slot from now on, as the most recently used. A slot is free. */
void mci_hot_put(mci_hot *h, int64_t item);
void mci_hot_drop(mci_hot *h, int64_t item); /* it has none any more; its calls stay */
bool mci_hot_holds(const mci_hot *h, int64_t item);
int64_t mci_hot_held(const mci_hot *h);
#endif
