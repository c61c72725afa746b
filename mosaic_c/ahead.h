/* ahead.h - experts read ahead of the line that may name them ("guesses"), each into a slab of its
 * own that the line takes over. A guess never changes what the cache holds. Whether guessing goes
 * on is decided by trying it (trial.h). Called under the engine's lock. */
#ifndef MCI_AHEAD_H
#define MCI_AHEAD_H
#include "expert.h"
#include "slabs.h"
#include "trial.h"

enum { MCI_GUESS_NONE, MCI_GUESS_READING, MCI_GUESS_READY };

typedef struct mci_guess mci_guess;

typedef struct mci_ahead {
    mc_engine *e;
    mci_slabs *slabs;
    mci_guess *guess; /* (n) */
    int64_t bytes;
    int32_t n, reading; /* reads on their way */
    mci_trial trial;
    bool allowed; /* in this token */
    double start; /* of this token */
} mci_ahead;

/* Starts the read of an expert into a slab; there must be a free one. On failure it is free
 * again and *slab -1. */
int mci_fetch(mc_engine *e, mci_slabs *slabs, const mci_experts *x, int32_t expert, int64_t tag,
              mci_read *r, int32_t *slab, mc_error *err);
/* A finished read: what the lane found in the slab. */
void mci_fetched(mci_slabs *slabs, const mci_read *r, int32_t slab);

/* Room for n guesses; the arena must have n slabs for them. 0: never ahead. */
int mci_ahead_open(mci_ahead *a, mc_engine *e, mci_slabs *slabs, int32_t n, mc_error *err);
/* Waits for what is on its way. No other reads may be. */
void mci_ahead_close(mci_ahead *a);
/* A token begins, at its first line; one that is not allowed to guess is not part of a trial. */
void mci_ahead_token(mci_ahead *a, bool allowed);
/* Its last line has ended. */
void mci_ahead_token_end(mci_ahead *a);
bool mci_ahead_wanted(const mci_ahead *a);
/* Guesses that x's expert will be needed; item names it. false: no room. */
bool mci_ahead_guess(mci_ahead *a, const mci_experts *x, int32_t expert, int64_t item);
/* Hands over the slab of a guess: ready, or still read into, and then its arrival is reported with
 * `place`. */
int mci_ahead_take(mci_ahead *a, int64_t item, int32_t place, int32_t *slab);
/* A finished read with a negative tag; returns the place that took it, or -1. */
int32_t mci_ahead_arrived(mci_ahead *a, const mci_read *r);
/* Gives up what nobody took: at once, or when its read ends; wait: and until that is so. */
void mci_ahead_drop(mci_ahead *a, bool wait);
#endif
