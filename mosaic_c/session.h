/* session.h - the mutable state of sequences as the mixers see it: KV pages of a shared pool,
 * conv and recurrent state in two copies, and the chunk of tokens that a step is working on. */
#ifndef MCI_SESSION_H
#define MCI_SESSION_H
#include "engine.h"

/* The page pool (kv.c). One page holds MC_PAGE_TOKENS positions of all attention layers:
 *
 *   | layer 0: K head 0 (64, D) | K head 1 | .. | V head 0 (64, D) | .. | layer 1: ... |
 */
struct mc_kv {
    mc_engine *e;
    _Atomic int64_t refs;
    mc_kv_desc d;
    int64_t page_bytes, n_page;
    uint8_t *pool;
    int32_t *page_refs; /* (n_page) sessions that hold the page */
    int32_t *free_list; /* stack of free pages */
    int64_t n_free;
    int64_t table_len;                /* pages a session of ctx tokens needs */
    int64_t conv_floats, rec_floats;  /* of one delta layer */
    int64_t state_floats;             /* one copy: all delta layers */
};

void mci_kv_retain(mc_kv *kv);
int mci_kv_check(const mc_kv_desc *d, mc_error *err);
/* A free page with one reference; -1: the pool is empty. */
int32_t mci_kv_take(mc_kv *kv);
void mci_kv_drop(mc_kv *kv, int32_t page);
static inline uint8_t *mci_kv_page(const mc_kv *kv, int32_t page) {
    return kv->pool + page * kv->page_bytes;
}
/* Byte offset inside a page of head h of K (which 0) or V (1) of an attention layer. */
static inline int64_t mci_kv_offset(const mc_kv *kv, int32_t layer, int which, int32_t h) {
    int64_t elt = kv->d.dtype == MC_F32 ? 4 : 2;
    return (((int64_t)layer * 2 + which) * kv->d.n_kv_head + h) * MC_PAGE_TOKENS * kv->d.head_dim *
           elt;
}

/* A kept state; forks share it. */
typedef struct mci_snap {
    int64_t pos, refs;
    float *state; /* NULL for a model without recurrent state */
} mci_snap;

struct mc_session {
    mc_kv *kv;
    int64_t refs; /* its owner, and each step that holds it */
    atomic_int busy;
    _Atomic int64_t pos; /* committed tokens */
    int32_t *pages;  /* (table_len); n_page held, enough for the pending tokens */
    int64_t n_page;
    float *state[2]; /* [cur] is committed, the other one is the step's; NULL while at rest */
    int cur;
    mci_snap **snaps; /* by ascending position */
    int64_t n_snap, cap_snap;
};

int mci_session_new(mc_kv *kv, mc_session **out, mc_error *err); /* inside mci_enter */
void mci_session_drop(mc_session *s);                            /* inside mci_enter */
int mci_session_claim(mc_session *s, mc_error *err);             /* MC_EBUSY while in a step */

/* One session's part of the chunk. */
typedef struct mci_seg {
    mc_session *s;
    int64_t first, count; /* rows of the chunk's activations */
    int64_t pos;          /* position of its first token */
    int64_t pending;      /* tokens of earlier chunks of this step */
} mci_seg;

struct mc_step {
    mc_engine *e;
    mci_seg *seg;
    int32_t n, cap;
    int64_t n_tok; /* of the chunk; 0: no chunk is open */
    bool failed;   /* a layer failed: the work is incomplete and must not be committed */
};

/* The step belongs to e, has a chunk of 1..max_tok tokens and its sessions use kv-like state. */
int mci_step_check(const mc_step *st, const mc_engine *e, int64_t max_tok, mc_error *err);

/* Conv (kernel-1, conv_dim) and recurrent (n_v_head, dk, dv) state of a delta layer: what the chunk
 * reads and what it writes; the same memory from the second chunk of a step on. */
void mci_seg_state(const mci_seg *g, int32_t layer, const float **conv_in, float **conv_out,
                   const float **rec_in, float **rec_out);
#endif
