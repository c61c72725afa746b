/* faults.h - a system that fails on demand. The linker puts these functions in the place of those
 * of the C library and of the ring (--wrap, see the Makefile), so nothing in the engine knows. They
 * also count what is taken and not given back: blocks, mapped bytes, threads. */
#ifndef FAULTS_H
#define FAULTS_H
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io_uring.h"
#include "test.h"

/* ---- memory and threads: the n-th request from now is refused, or all from it on ---- */

static atomic_llong refuse_at; /* 0: never; counts down to 1, the one that is refused */
static atomic_bool refuse_on;  /* and every one after it */
static atomic_int refused;
static atomic_llong blocks, mapped_bytes, threads;

static inline bool refuse_now(void) {
    long long left = atomic_load(&refuse_at);
    do {
        if (left <= 0) return false;
    } while (
        !atomic_compare_exchange_weak(&refuse_at, &left, left == 1 && refuse_on ? left : left - 1));
    if (left > 1) return false;
    refused++;
    errno = ENOMEM;
    return true;
}

static inline void refuse(long long n, bool on) {
    refused = 0;
    refuse_on = on;
    refuse_at = n;
}

/* ---- reads ---- */

enum { GOOD, FAIL, SHORT, INTERRUPT, STALL };

static atomic_int fault, faulted; /* how reads go; how many did not go as asked */
static atomic_int good_each;      /* every so many are good all the same; 0: none */
static atomic_int stall_ms, reads;

static inline void let_reads(int how, int each) {
    good_each = each;
    faulted = 0;
    fault = how;
}

/* What becomes of this read. */
static inline int fault_now(void) {
    int how = fault;
    int each = good_each;
    if (how == GOOD || (each && reads++ % each == 0)) return GOOD;
    faulted++;
    if (how == STALL) usleep((useconds_t)stall_ms * 1000);
    return how;
}

/* ---- in the place of others ---- */

#define WRAP(type, name, args)                                                                     \
    type __real_##name args;                                                                       \
    type __wrap_##name args;                                                                       \
    type __wrap_##name args

#define COUNTED(call)                                                                              \
    void *p_ = refuse_now() ? NULL : call;                                                         \
    blocks += p_ != NULL;                                                                          \
    return p_

WRAP(void *, malloc, (size_t n)) { COUNTED(__real_malloc(n)); }
WRAP(void *, calloc, (size_t n, size_t size)) { COUNTED(__real_calloc(n, size)); }
WRAP(void *, aligned_alloc, (size_t to, size_t n)) { COUNTED(__real_aligned_alloc(to, n)); }
WRAP(char *, strdup, (const char *s)) {
    size_t n = strlen(s) + 1;
    char *p = __wrap_malloc(n);
    return p ? memcpy(p, s, n) : NULL;
}
WRAP(void *, realloc, (void *p, size_t n)) {
    if (refuse_now()) return NULL;
    void *q = __real_realloc(p, n);
    blocks += q && !p;
    return q;
}
WRAP(void, free, (void *p)) {
    blocks -= p != NULL;
    __real_free(p);
}
WRAP(void *, mmap, (void *at, size_t n, int prot, int flags, int fd, off_t offset)) {
    if (refuse_now()) return MAP_FAILED;
    void *p = __real_mmap(at, n, prot, flags, fd, offset);
    if (p != MAP_FAILED) mapped_bytes += (long long)n;
    return p;
}
WRAP(int, munmap, (void *p, size_t n)) {
    mapped_bytes -= (long long)n;
    return __real_munmap(p, n);
}
WRAP(int, pthread_create,
     (pthread_t * id, const pthread_attr_t *attr, void *(*f)(void *), void *arg)) {
    if (refuse_now()) return EAGAIN;
    int rc = __real_pthread_create(id, attr, f, arg);
    threads += rc == 0;
    return rc;
}
WRAP(int, pthread_join, (pthread_t id, void **out)) {
    threads--;
    return __real_pthread_join(id, out);
}

WRAP(ssize_t, pread, (int fd, void *buf, size_t n, off_t offset)) {
    int how = fault_now();
    if (how == FAIL || how == INTERRUPT) {
        errno = how == FAIL ? EIO : EINTR;
        return -1;
    }
    if (how == SHORT && n > 1) n = (n + 1) / 2;
    ssize_t got = __real_pread(fd, buf, n, offset);
    return how == SHORT && got > 1 ? got - 1 : got;
}

/* The reads of mapped files. A disk error is EFAULT here, and the read that asks why tells EIO. */
WRAP(int, madvise, (void *p, size_t n, int advice)) {
#ifdef MADV_POPULATE_READ
    int how = advice == MADV_POPULATE_READ ? fault_now() : GOOD;
    if (how == FAIL || how == INTERRUPT || how == SHORT) {
        errno = how == INTERRUPT ? EINTR : EFAULT;
        return -1;
    }
#endif
    return __real_madvise(p, n, advice);
}

/* What the ring brings: nothing, a part, or late. */
WRAP(uint64_t, mci_ring_next, (mci_ring * ring, int64_t *result)) {
    uint64_t tag = __real_mci_ring_next(ring, result);
    int how = tag ? fault_now() : GOOD;
    if (how == FAIL) *result = -EIO;
    if (how == INTERRUPT) *result = -EINTR;
    if (how == SHORT && *result > 1) *result /= 2;
    return tag;
}

/* ---- what this process holds ---- */

typedef struct holding {
    long long blocks, mapped, threads;
    int file; /* the lowest number that is free */
} holding;

static inline holding held_now(void) {
    int file = open("/dev/null", O_RDONLY);
    close(file);
    return (holding){blocks, mapped_bytes, threads, file};
}

#endif
