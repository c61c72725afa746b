/* pool.h - worker threads. A region runs fn over chunks 0..n-1; threads claim chunks dynamically,
 * the caller takes part. A region ends when every chunk is finished (chunks are counted, not
 * threads, so a worker that never woke cannot stall it). Idle workers spin at most 20 us, then
 * sleep, so that a busy machine slows us in proportion and no more. */
#ifndef MCI_POOL_H
#define MCI_POOL_H
#include "base.h"

typedef struct mci_pool mci_pool;
/* thread: 0..threads-1, constant during the call, 0 is the caller. */
typedef void mci_chunk_fn(void *ctx, int64_t chunk, int thread);

/* threads >= 1, the caller included. Workers run with round-to-nearest and denormals kept. */
int mci_pool_create(int threads, mci_pool **out, mc_error *err);
void mci_pool_free(mci_pool *p); /* joins the workers */
/* One region at a time (the engine's lock sees to it). n 0 returns at once. */
void mci_pool_run(mci_pool *p, mci_chunk_fn *fn, void *ctx, int64_t n);
int mci_pool_threads(const mci_pool *p);
int mci_pool_ran(const mci_pool *p); /* threads that have taken at least one chunk so far */

/* Sets round-to-nearest, denormals kept; returns the former setting for mci_fp_restore. Other
 * packages switch on flush-to-zero in the caller's thread. */
uint32_t mci_fp_enter(void);
void mci_fp_restore(uint32_t old);
#endif
