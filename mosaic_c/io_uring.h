/* io_uring.h - a ring of reads that the kernel does while the caller goes on: io_uring by its
 * system calls, no library. For one thread at a time, which alone submits and collects; any thread
 * may wake it. It knows nothing of files' ways to be read, of errors' words or of experts. */
#ifndef MCI_IO_URING_H
#define MCI_IO_URING_H
#include "base.h"

typedef struct mci_ring mci_ring;

/* Room for `entries` reads at once (1..4096). One read is done as a probe. MC_ESYS: this kernel has
 * no io_uring, has it switched off, or cannot read by it; the message says which. */
int mci_ring_open(int entries, mci_ring **out, mc_error *err);
/* No read may be under way. NULL is fine. */
void mci_ring_close(mci_ring *ring);
/* Starts a read of n bytes (at most 1 GiB) of fd at offset `off` into buf; tag is not 0. false: the
 * kernel did not take it, read otherwise. */
bool mci_ring_read(mci_ring *ring, int fd, void *buf, int64_t n, int64_t off, uint64_t tag);
/* Sleeps until a read is complete or mci_ring_wake was called. */
void mci_ring_wait(mci_ring *ring);
/* The next completed read: its tag, and bytes or -errno in *result. 0: none. */
uint64_t mci_ring_next(mci_ring *ring, int64_t *result);
/* The present or the next mci_ring_wait returns. From any thread. */
void mci_ring_wake(mci_ring *ring);
#endif
