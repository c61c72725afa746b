/* store.h - experts on disk and the slabs that hold some of them. moe.c asks for one line (the
 * distinct experts that a layer needs now) and takes them as they become ready: cached ones at
 * once, the rest as they arrive. Called under the engine's lock.
 *
 * Slabs: `slots` for the cache and as many transit slabs as lanes. policy.c decides a whole line
 * first; an expert that a later one of the same line pushes out, or that gets no slot, is computed
 * from its slab and the slab is freed when it is done. A slab is never reused while pinned.
 *
 * Experts that are held in VRAM (tier.h) are none of the store's: they are not part of its lines.
 */
#ifndef MCI_STORE_H
#define MCI_STORE_H
#include "tier.h"

typedef struct mci_expert_view {
    int32_t index;         /* into the ids given to mci_store_begin */
    mci_mat gate, up, down;
} mci_expert_view;

/* Checks and records the experts of layer d->layer, reads their scales. The store's own number of
 * experts, and at most its top-k; gate, up (width, hidden), down (hidden, width), bytes inside
 * their files. */
int mci_store_bind(mc_store *s, const mc_moe_desc *d, const mc_expert *experts, mc_error *err);
void mci_store_retain(mc_store *s);
void mci_store_release(mc_store *s);

/* Experts in VRAM, or NULL. */
mci_tier *mci_store_tier(const mc_store *s);

/* A token step begins (policy clock). decode: one that may read ahead. */
void mci_store_token(mc_store *s, bool decode);
/* Decides hits and misses of a line of n distinct ids, in order of importance, and starts reads.
 * n <= n_expert. */
int mci_store_begin(mc_store *s, int32_t layer, const int32_t *ids, int32_t n, mc_error *err);
/* Up to max experts that are ready and not yet taken. wait: block when none is ready but some are
 * still to come (that time is counted); otherwise return 0. 0 with wait: all of the line have been
 * taken. After a failed read every call returns its error until mci_store_end, so that a line with
 * a hole never looks complete. A caller that waits must be done with what it took. */
int mci_store_next(mc_store *s, mci_expert_view *out, int32_t max, bool wait, mc_error *err);
/* The expert is computed: the tier may want it, its slab may be reused, and reads that waited for a
 * slab go out. */
void mci_store_done(mc_store *s, int32_t index);
/* Ends the line in any state: waits for reads and products in progress, unpins, drops failed items.
 * Always call it; without a line it does nothing. */
void mci_store_end(mc_store *s);

/* ---- reading ahead ---- */

/* The caller's object of a layer, for whoever runs the router of the next layer; NULL: none. */
void mci_store_set_peer(mc_store *s, int32_t layer, void *peer);
void *mci_store_peer(const mc_store *s, int32_t layer);
/* Whether guesses are wanted now: there are slabs for them, and reading ahead pays or is on trial.
 */
bool mci_store_ahead(const mc_store *s);
/* Between lines: starts to read an expert that the next line of `layer` may need, unless it is
 * held, here or in VRAM. A guess never changes what the cache holds; one that the next line does
 * not name is dropped, whatever its layer. false: no slab is left. */
bool mci_store_foresee(mc_store *s, int32_t layer, int32_t expert);
#endif
