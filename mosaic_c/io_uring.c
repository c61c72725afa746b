/* io_uring.c - io_uring by its system calls.
 *
 * The kernel shares two rings with us in one mapping, and the array of requests in another:
 *
 *   submission  head: the kernel's | tail: ours         each entry: index of a request
 *   completion  head: ours         | tail: the kernel's each entry: tag, result
 *
 * A wake is a poll of an eventfd that always waits in the ring, with tag 0. */
#include "io_uring.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#ifdef IORING_FEAT_FAST_POLL /* headers of Linux 5.7: they have all that is used here */
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#define SPIN_S 20e-6 /* as pool.c's */

struct mci_ring {
    int fd, event;
    bool armed; /* the poll of the eventfd is in the ring */
    uint32_t *sq_tail, *cq_head, *cq_tail, *sq_array;
    uint32_t sq_mask, cq_mask;
    struct io_uring_sqe *sqe;
    struct io_uring_cqe *cqe;
    void *rings;
    size_t rings_bytes, sqe_bytes;
};

static int enter(const mci_ring *ring, unsigned submit, unsigned wait) {
    unsigned flags = wait ? IORING_ENTER_GETEVENTS : 0;
    return (int)syscall(SYS_io_uring_enter, ring->fd, submit, wait, flags, NULL, 0);
}

/* One request at a time: an entry that the kernel does not take is taken back. */
static bool submit(mci_ring *ring, const struct io_uring_sqe *sqe) {
    uint32_t tail = *ring->sq_tail, at = tail & ring->sq_mask;
    int n;
    ring->sqe[at] = *sqe;
    ring->sq_array[at] = at;
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    while ((n = enter(ring, 1, 0)) < 0 && errno == EINTR) {}
    if (n == 1) return true;
    __atomic_store_n(ring->sq_tail, tail, __ATOMIC_RELEASE);
    return false;
}

bool mci_ring_read(mci_ring *ring, int fd, void *buf, int64_t n, int64_t off, uint64_t tag) {
    return submit(ring, &(struct io_uring_sqe){.opcode = IORING_OP_READ,
                                               .fd = fd,
                                               .addr = (uint64_t)(uintptr_t)buf,
                                               .len = (uint32_t)n,
                                               .off = (uint64_t)off,
                                               .user_data = tag});
}

/* A thread that sleeps wakes some 8 us late, when a small read takes 60. */
static bool soon(const mci_ring *ring) {
    for (double until = mci_now() + SPIN_S; mci_now() < until;)
        if (*ring->cq_head != __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE)) return true;
    return false;
}

void mci_ring_wait(mci_ring *ring) {
    if (soon(ring)) return;
    if (!ring->armed)
        ring->armed = submit(ring, &(struct io_uring_sqe){.opcode = IORING_OP_POLL_ADD,
                                                          .fd = ring->event,
                                                          .poll_events = POLLIN});
    if (ring->armed)
        enter(ring, 0, 1); /* an interrupted wait is one that ended early */
    else
        usleep(1000); /* the kernel is short of memory: look again */
}

uint64_t mci_ring_next(mci_ring *ring, int64_t *result) {
    for (;;) {
        uint32_t head = *ring->cq_head;
        if (head == __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE)) return 0;
        struct io_uring_cqe cqe = ring->cqe[head & ring->cq_mask];
        __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
        *result = cqe.res;
        if (cqe.user_data) return cqe.user_data;
        uint64_t count; /* 0 where the poll ended with the thread that armed it */
        ring->armed = false;
        while (read(ring->event, &count, sizeof count) < 0 && errno == EINTR) {}
    }
}

void mci_ring_wake(mci_ring *ring) {
    uint64_t one = 1; /* a full counter wakes as well: nothing to do about a failure */
    while (write(ring->event, &one, sizeof one) < 0 && errno == EINTR) {}
}

static int map_rings(mci_ring *ring, const struct io_uring_params *p) {
    size_t sq = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    size_t cq = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    int prot = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    void *map = mmap(NULL, MCI_MAX(sq, cq), prot, flags, ring->fd, IORING_OFF_SQ_RING);
    if (map == MAP_FAILED) return errno;
    ring->rings = map;
    ring->rings_bytes = MCI_MAX(sq, cq);
    size_t bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    map = mmap(NULL, bytes, prot, flags, ring->fd, IORING_OFF_SQES);
    if (map == MAP_FAILED) return errno;
    ring->sqe = map;
    ring->sqe_bytes = bytes;
    uint8_t *base = ring->rings;
    ring->sq_tail = (uint32_t *)(void *)(base + p->sq_off.tail);
    ring->sq_mask = *(uint32_t *)(void *)(base + p->sq_off.ring_mask);
    ring->sq_array = (uint32_t *)(void *)(base + p->sq_off.array);
    ring->cq_head = (uint32_t *)(void *)(base + p->cq_off.head);
    ring->cq_tail = (uint32_t *)(void *)(base + p->cq_off.tail);
    ring->cq_mask = *(uint32_t *)(void *)(base + p->cq_off.ring_mask);
    ring->cqe = (struct io_uring_cqe *)(void *)(base + p->cq_off.cqes);
    return 0;
}

/* Reads the eventfd's counter through the ring: 0 or an errno. */
static int probe(mci_ring *ring) {
    uint64_t count = 0;
    int64_t result = 0;
    mci_ring_wake(ring);
    if (!mci_ring_read(ring, ring->event, &count, sizeof count, 0, 1)) return errno;
    while (enter(ring, 0, 1) < 0)
        if (errno != EINTR) return errno;
    if (mci_ring_next(ring, &result) != 1 || result < 0) return result < 0 ? (int)-result : EIO;
    return count == 1 ? 0 : EIO;
}

int mci_ring_open(int entries, mci_ring **out, mc_error *err) {
    struct io_uring_params p = {0};
    const char *why = "";
    int sys = 0;
    mci_ring *ring = calloc(1, sizeof *ring);
    *out = NULL;
    if (!ring) return mci_fail(err, MC_ENOMEM, 0, "io_uring: out of memory");
    ring->fd = (int)syscall(SYS_io_uring_setup, (unsigned)entries + 1, &p); /* and the wake */
    if (ring->fd < 0) sys = errno;
    ring->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!sys && ring->event < 0) sys = errno;
    if (!sys && !(p.features & IORING_FEAT_SINGLE_MMAP)) sys = ENOSYS;
    if (!sys) sys = map_rings(ring, &p);
    if (!sys) sys = probe(ring);
    if (!sys) {
        *out = ring;
        return MC_OK;
    }
    if (sys == EPERM) why = ": kernel.io_uring_disabled, or a filter of this container";
    if (sys == ENOSYS || sys == EINVAL) why = ": this kernel has no io_uring that reads";
    if (sys == ENOMEM) why = ": see ulimit -l";
    mci_ring_close(ring);
    return mci_fail(err, MC_ESYS, sys, "io_uring: %s%s", strerror(sys), why);
}

void mci_ring_close(mci_ring *ring) {
    if (!ring) return;
    if (ring->sqe) munmap(ring->sqe, ring->sqe_bytes);
    if (ring->rings) munmap(ring->rings, ring->rings_bytes);
    if (ring->fd >= 0) close(ring->fd);
    if (ring->event >= 0) close(ring->event);
    free(ring);
}

#else

int mci_ring_open(int entries, mci_ring **out, mc_error *err) {
    (void)entries;
    *out = NULL;
    return mci_fail(err, MC_ESYS, ENOSYS, "io_uring: not in this build (older kernel headers)");
}
void mci_ring_close(mci_ring *ring) { (void)ring; }
bool mci_ring_read(mci_ring *ring, int fd, void *buf, int64_t n, int64_t off, uint64_t tag) {
    return (void)ring, (void)fd, (void)buf, (void)n, (void)off, (void)tag, false;
}
void mci_ring_wait(mci_ring *ring) { (void)ring; }
uint64_t mci_ring_next(mci_ring *ring, int64_t *result) { return (void)ring, (void)result, 0; }
void mci_ring_wake(mci_ring *ring) { (void)ring; }

#endif
