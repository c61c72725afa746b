/* error.c - status codes and messages, checked sizes, accounted memory, the clock.
 *
 * One table gives a status its name and text. Memory is counted in bytes as asked, by kind and in
 * all; a request over the budget is refused before the system hears of it, and a refused request
 * leaves every counter as it was. */
#include "base.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* ---- status ---------------------------------------------------------------------------------- */

#define STATUS_MAP(X)                                                                              \
    X(MC_OK, "success")                                                                            \
    X(MC_EINVAL, "invalid argument")                                                               \
    X(MC_ENOMEM, "the system refused memory")                                                      \
    X(MC_EBUDGET, "memory budget exceeded")                                                        \
    X(MC_EIO, "read or write failed")                                                              \
    X(MC_EFORMAT, "malformed data")                                                                \
    X(MC_ERANGE, "index out of range")                                                             \
    X(MC_EFULL, "no room left")                                                                    \
    X(MC_EBUSY, "session is in another step")                                                      \
    X(MC_EFORK, "called in a forked child")                                                        \
    X(MC_ECANCEL, "cancelled")                                                                     \
    X(MC_ESYS, "system call failed")

const char *mc_status_name(int code) {
    switch (code > 0 ? MC_OK : code) {
#define CASE(c, t)                                                                                 \
    case c:                                                                                        \
        return #c;
        STATUS_MAP(CASE)
#undef CASE
    }
    return "MC_E?";
}

const char *mc_status_text(int code) {
    switch (code > 0 ? MC_OK : code) {
#define CASE(c, t)                                                                                 \
    case c:                                                                                        \
        return t;
        STATUS_MAP(CASE)
#undef CASE
    }
    return "unknown status";
}

int mci_fail(mc_error *err, int code, int sys, const char *fmt, ...) {
    if (!err) return code;
    err->code = code;
    err->sys = sys;
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(err->message, sizeof err->message, fmt, ap);
    va_end(ap);
    if (n < 0) err->message[0] = 0;
    size_t room = sizeof err->message;
    if (n >= 0 && (size_t)n >= room) {
        size_t at = room - 4; /* never cut a UTF-8 character of a path in two */
        while (at > 0 && ((unsigned char)err->message[at] & 0xc0) == 0x80) at--;
        memcpy(err->message + at, "...", 4);
    }
    /* one line, whatever a file name holds */
    for (char *c = err->message; *c; c++)
        if (*c == '\n' || *c == '\r') *c = ' ';
    return code;
}

/* ---- checked sizes --------------------------------------------------------------------------- */

bool mci_mul(int64_t a, int64_t b, int64_t *out) {
    return a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, out);
}

bool mci_add(int64_t a, int64_t b, int64_t *out) {
    return a >= 0 && b >= 0 && !__builtin_add_overflow(a, b, out);
}

int64_t mci_round_up(int64_t n, int64_t to) { return (n + to - 1) & -to; }

/* ---- accounted memory ------------------------------------------------------------------------ */

enum { MAP_FROM = 1 << 20, HUGE = 2 << 20 };

/* Takes `bytes` out of the budget; false, with *used set, when they do not fit. */
static bool reserve(mci_mem *m, int64_t bytes, int64_t *used) {
    int64_t t = atomic_load(&m->total);
    do {
        *used = t;
        if (bytes > INT64_MAX - MCI_MAX(t, 0)) return false;
        if (m->budget > 0 && bytes > m->budget - t) return false;
    } while (!atomic_compare_exchange_weak(&m->total, &t, t + bytes));
    return true;
}

static bool injected_failure(mci_mem *m) {
    int64_t left = atomic_load(&m->fail_after);
    do {
        if (left <= 0) return false;
    } while (!atomic_compare_exchange_weak(&m->fail_after, &left, left - 1));
    return left == 1;
}

static size_t mapped_size(int64_t bytes) {
    return (size_t)mci_round_up(bytes, (int64_t)sysconf(_SC_PAGESIZE));
}

/* A mapping that starts at a 2 MiB boundary, so that whole huge pages can back it:
 *
 *   raw |..head..|== size, aligned ==|..tail..|   head and tail go back at once
 */
static void *map_aligned(size_t size) {
    size_t raw = size + HUGE;
    uint8_t *p = mmap(NULL, raw, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    size_t head = (size_t)(-(uintptr_t)p & (HUGE - 1)), tail = raw - head - size;
    if (head) munmap(p, head);
    if (tail) munmap(p + head + size, tail);
    madvise(p + head, size, MADV_HUGEPAGE); /* a wish: without it all still works, slower */
    return p + head;
}

/* Adds to the total, or refuses by the budget. */
static int take(mci_mem *m, int64_t bytes, const char *what, mc_error *err) {
    int64_t used = 0;
    if (reserve(m, bytes, &used)) return MC_OK;
    return mci_fail(err, MC_EBUDGET, 0,
                    "%s: %lld bytes asked with %lld in use would pass the budget of %lld", what,
                    (long long)bytes, (long long)used, (long long)m->budget);
}

static void count(mci_mem *m, int kind, int64_t bytes) {
    int64_t now = atomic_fetch_add(&m->now[kind], bytes) + bytes;
    int64_t peak = atomic_load(&m->peak[kind]);
    while (peak < now && !atomic_compare_exchange_weak(&m->peak[kind], &peak, now)) {}
}

int mci_alloc(mci_mem *m, int kind, int64_t bytes, const char *what, void **out, mc_error *err) {
    *out = NULL;
    if (kind < 0 || kind >= MC_MEM_KINDS || bytes < 0 || bytes > INT64_MAX - 2 * HUGE)
        return mci_fail(err, MC_EINVAL, 0, "%s: cannot allocate %lld bytes of kind %d", what,
                        (long long)bytes, kind);
    if (bytes == 0) return MC_OK;
    if (injected_failure(m))
        return mci_fail(err, MC_ENOMEM, ENOMEM, "%s: allocation of %lld bytes made to fail", what,
                        (long long)bytes);
    int rc = take(m, bytes, what, err);
    if (rc < 0) return rc;
    void *p;
    if (bytes >= MAP_FROM) {
        p = map_aligned(mapped_size(bytes));
    } else {
        size_t size = (size_t)mci_round_up(bytes, MCI_ALIGN);
        p = aligned_alloc(MCI_ALIGN, size);
        if (p) memset(p, 0, size);
    }
    if (!p) {
        atomic_fetch_sub(&m->total, bytes);
        return mci_fail(err, MC_ENOMEM, ENOMEM, "%s: the system refused %lld bytes (%lld in use)",
                        what, (long long)bytes, (long long)atomic_load(&m->total));
    }
    count(m, kind, bytes);
    *out = p;
    return MC_OK;
}

int mci_recount(mci_mem *m, int kind, int64_t delta, const char *what, mc_error *err) {
    if (delta <= 0) {
        atomic_fetch_add(&m->total, delta);
    } else {
        int rc = take(m, delta, what, err);
        if (rc < 0) return rc;
    }
    count(m, kind, delta);
    return MC_OK;
}

void mci_release(mci_mem *m, int kind, void *p, int64_t bytes) {
    if (!p) return;
    if (bytes >= MAP_FROM)
        munmap(p, mapped_size(bytes));
    else
        free(p);
    atomic_fetch_sub(&m->now[kind], bytes);
    atomic_fetch_sub(&m->total, bytes);
}

/* ---- clock ----------------------------------------------------------------------------------- */

double mci_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
