/* tier.h - experts in VRAM: which are there, the thread that brings them, the products of a line.
 * hot.h decides who comes and who leaves, cuda/gpu.h is the device. Owned by the store, called
 * under the engine's lock.
 *
 *   absent -> loading: offered by the store when the CPU has computed it, in a slab that stays
 *             until its copy is made; the CPU computes it as before
 *   loading -> held: at the next line after its copy has arrived; from now on the GPU computes it
 *              and the store neither reads nor keeps it
 *   held -> absent: another one takes its slot; nothing is written back
 *
 * No line waits for a copy. When the device fails, everything is absent for good. */
#ifndef MCI_TIER_H
#define MCI_TIER_H
#include "expert.h"
#include "slabs.h"

typedef struct mci_tier mci_tier;

/* The products of the line's hot experts. Expert i of n has the rows pairs[start[i]] ..
 * pairs[start[i + 1] - 1], each token * top_k + rank, ascending; out of a pair is its row there. */
typedef struct mci_products {
    const int32_t *ids, *start, *pairs;
    int32_t n, top_k;
    int64_t n_tok;
    const float *x; /* (n_tok, hidden) */
    float *out;     /* (n_tok * top_k, hidden) */
} mci_products;

/* max_tok: of a step's chunk, the most of all layers. x: (n_layer), the caller's, as slabs is. */
int mci_tier_open(mc_engine *e, const mc_tier_opts *o, const mci_experts *x, int32_t n_layer,
                  int32_t top_k, int64_t max_tok, mci_slabs *slabs, mci_tier **out, mc_error *err);
void mci_tier_close(mci_tier *t); /* NULL: nothing */
/* Waits until no slab is held. Before slabs are moved or freed. */
void mci_tier_settle(mci_tier *t);

/* A line of a layer begins, with all its distinct experts: those that the CPU computes come first,
 * both kinds in the order they had. Returns how many those are. */
int32_t mci_tier_split(mci_tier *t, int32_t layer, int32_t *ids, int32_t n);
/* Whether the GPU has an expert now. */
bool mci_tier_holds(const mci_tier *t, int32_t layer, int32_t expert);
/* Of the line that was split: flags of all experts that the GPU has of its layer (n_expert), and
 * the n of the line's own among them; both until the line's products are begun. */
const bool *mci_tier_line(const mci_tier *t, const int32_t **ids, int32_t *n);
/* Begins the products of a line's hot experts. step: 1 when all are in `out`, 0 while they are
 * under way; wait: until they are. A failure gives up the tier. */
int mci_tier_run(mci_tier *t, const mci_products *line, mc_error *err);
int mci_tier_step(mci_tier *t, bool wait, mc_error *err);
/* An expert of the line was computed by the CPU. wants: whether it is worth an offer; m: its
 * matrices, in `slab`. */
bool mci_tier_wants(const mci_tier *t, int32_t expert);
void mci_tier_offer(mci_tier *t, int32_t expert, const mci_mat m[3], int32_t slab);
/* Ends the line in any state: nothing of it is under way. */
void mci_tier_end(mci_tier *t);
#endif
