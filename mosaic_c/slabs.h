/* slabs.h - an arena of equal slabs of memory, each room for one expert. It knows which are free
 * and two facts about each; whose slab is whose is the store's business. */
#ifndef MCI_SLABS_H
#define MCI_SLABS_H
#include "engine.h"

typedef struct mci_slabs {
    mc_engine *e;
    int64_t bytes;      /* of a slab */
    int32_t n, limit;   /* slabs in the arena; those of them in use by the present capacity */
    int32_t n_free;
    int32_t *free;      /* (n) stack */
    uint16_t *flags;    /* (n) */
    uint8_t *arena;     /* MCI_IO_BLOCK-aligned */
    void *arena_mem, *table;
    int64_t arena_bytes, table_bytes;
    bool eager;         /* what comes stays: the lane that reads it may search it for NaN codes */
    int64_t given_back; /* bytes of the arena that a shrink returned to the system */
} mci_slabs;

/* n slabs of `bytes` each, in huge pages, none touched. mapped: no memory, the slabs stand for
 * bytes of mapped files, which count as if they were, and mci_slabs_at gives NULL. On failure
 * nothing is owned. */
int mci_slabs_open(mci_slabs *s, mc_engine *e, int64_t n, int64_t bytes, bool mapped,
                   mc_error *err);
void mci_slabs_close(mci_slabs *s);
uint8_t *mci_slabs_at(const mci_slabs *s, int32_t slab);
/* A free slab, -1: none. *fresh: nothing came into it yet, its pages may not exist. */
int32_t mci_slabs_take(mci_slabs *s, bool *fresh);
void mci_slabs_give(mci_slabs *s, int32_t slab);
/* While a slab is held, giving it only takes effect when it is let go. */
void mci_slabs_hold(mci_slabs *s, int32_t slab);
void mci_slabs_let(mci_slabs *s, int32_t slab);
/* Another expert lies in the slab. Nothing is known of it. */
void mci_slabs_filled(mci_slabs *s, int32_t slab);
/* Its expert is used. true: it was so often that to search it for NaN codes now pays. */
bool mci_slabs_used(mci_slabs *s, int32_t slab);
void mci_slabs_searched(mci_slabs *s, int32_t slab, bool has_nan);
/* No FP8 code in the slab is a NaN, as far as a search has shown. */
bool mci_slabs_no_nan(const mci_slabs *s, int32_t slab);
/* Keeps the first `limit` slabs: owned ones that lie beyond move into free ones, what is left over
 * goes back to the system, or is taken from the budget again (MC_EBUDGET: nothing changed). owner
 * (n_owner): slab of each item or -1, updated; no other slab may be taken, none held, and at most
 * `limit` owned. */
int mci_slabs_count(mci_slabs *s, int64_t limit, mc_error *err);
void mci_slabs_settle(mci_slabs *s, int32_t *owner, int64_t n_owner);
#endif
