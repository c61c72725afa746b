/* engine.h - struct mc_engine, the context that every block is created from: kernels, threads,
 * files, accounted memory, one scratch arena, one lock. It knows nothing of blocks.
 *
 * Every public call that computes is bracketed by mci_enter / mci_leave: fork check, lock, floating
 * point mode, scratch reset. So one call runs at a time and scratch needs no owner. */
#ifndef MCI_ENGINE_H
#define MCI_ENGINE_H
#include <pthread.h>
#include <sys/types.h>

#include "base.h"
#include "io.h"
#include "ops.h"
#include "pool.h"

struct mc_engine {
    _Atomic int64_t refs;
    pid_t pid;
    const mci_ops *ops;
    mci_pool *pool;
    mci_io *io;
    mci_mem mem;
    pthread_mutex_t lock;
    uint32_t fp; /* the caller's floating point mode, while inside */
    atomic_int cancel;
    uint8_t *scratch;
    int64_t scratch_size, scratch_used;
    uint8_t *thread_scratch; /* thread_size bytes for each thread */
    int64_t thread_size;
    int64_t region; /* counts parallel regions that use it: see acts.c */
    /* written by the blocks and the store under the lock, read by mc_engine_stats */
    mc_stats stats;
};

void mci_engine_retain(mc_engine *e);
void mci_engine_release(mc_engine *e);

/* MC_EFORK in a forked child; otherwise takes the lock. */
int mci_enter(mc_engine *e, mc_error *err);
void mci_leave(mc_engine *e);

/* Grows the scratch arena to at least `bytes` (at bind, under the lock). */
int mci_scratch_reserve(mc_engine *e, int64_t bytes, mc_error *err);
/* The next `n` elements of `size` bytes of scratch, MCI_ALIGN-aligned, until mci_leave; the block
 * reserved enough when it was bound. */
void *mci_scratch(mc_engine *e, int64_t n, int64_t size);
/* What mci_scratch(n, size) takes. */
static inline int64_t mci_scratch_bytes(int64_t n, int64_t size) {
    return mci_round_up(n * size, MCI_ALIGN);
}

/* The same for each thread apart: at least `bytes`, MCI_ALIGN-aligned, zero when it was grown; it
 * keeps its contents. */
int mci_thread_reserve(mc_engine *e, int64_t bytes, mc_error *err);
static inline void *mci_thread_scratch(mc_engine *e, int thread) {
    return e->thread_scratch + thread * e->thread_size;
}

/* MC_ECANCEL when cancellation is asked for. */
int mci_check_cancel(mc_engine *e, mc_error *err);
#endif
