/* store_parts.h - what a store is made of, for store.c and store_line.c alone. */
#ifndef MCI_STORE_PARTS_H
#define MCI_STORE_PARTS_H
#include "ahead.h"
#include "policy.h"
#include "tier.h"

enum { NONE = -1 }; /* slab, place */
enum { WAITING, READING, READY, TAKEN, DONE, FAILED };

/* One expert of the line being served. */
typedef struct entry {
    int32_t expert, slab;
    uint8_t state;
    bool keep; /* the policy holds it when the line is over */
} entry;

struct mc_store {
    _Atomic int64_t refs;
    mc_engine *e;
    int32_t n_layer, n_expert, top_k, kind;
    void *tables; /* one allocation: */
    int64_t table_bytes;
    mci_experts *layers; /* (n_layer) */
    mci_expert_ref *ref; /* (n_layer * n_expert) */
    int32_t *slab_of;    /* (n_layer * n_expert) of resident items, or NONE */
    int64_t *gone;       /* (n_layer) scratch of resize */
    void **peer;         /* (n_layer) the callers' */
    int64_t max_tok;     /* of a chunk, the most of the layers bound */
    mci_tier *tier;      /* NULL: none */

    /* set by open */
    mci_policy *policy;
    int64_t slots, slots_max; /* as asked: in all, or per layer */
    mci_slabs slabs;
    void *queue; /* (n_queue) */
    int64_t queue_bytes;
    mci_read *spare;
    mci_ahead ahead;

    /* the line */
    bool active, failed;
    mc_error error;
    int32_t layer, n_line, next_wait, reading, ready_head, ready_tail;
    entry *line;      /* (n_expert) */
    int32_t *ready;   /* (n_expert) indices in order of arrival */
    int32_t *place;   /* (n_expert) index in the line, or NONE */
    mci_touch *touch; /* (n_expert) */
};

static inline bool mapped(const mc_store *s) { return mci_io_asked(s->e->io) == MC_IO_MMAP; }
#endif
