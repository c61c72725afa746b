/* pool.c - worker threads that claim chunks of a region.
 *
 * `left` is the whole protocol: the number of unclaimed chunks. A claim is a compare-and-swap from
 * k > 0 to k - m and means the m chunks from n - k on: many at first, one at a time in the end,
 * since neighbours lie side by side in memory and a kernel that goes on to the next one finds it
 * prefetched. A claim succeeds only while its region is open, and the region stays open until the
 * claimed chunks are counted in `done`; so fn, ctx and n, written before
 * `left` was opened, are stable for whoever holds a claim, and a worker that slept through regions
 * can do no harm.
 *
 *   caller   fn, ctx, n; done = 0;  left = n (release);  claim...;  wait until done == n
 *   worker   spin / sleep until left > 0;                claim...;  done += chunks it ran
 *
 * Sleeping is a futex on `epoch` (workers) or `ended` (caller). A sleeper announces itself, then
 * looks again; a waker publishes, then looks for sleepers. Both sides are sequentially consistent,
 * so one of the two sees the other and no wake is lost. */
#include "pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SPIN_S 20e-6 /* more slows a machine whose cores are busy elsewhere */
#define SHARES 4       /* a claim is this part of a thread's share of what is left */
#define STACK_BYTES (512 << 10)
#define MAX_THREADS 256

typedef struct worker {
    mci_pool *pool;
    pthread_t id;
    int index;
} worker;

struct mci_pool {
    int threads, started; /* the caller included; workers that exist */
    pid_t pid;
    worker *workers;
    /* one region */
    mci_chunk_fn *fn;
    void *ctx;
    int64_t n;
    _Alignas(64) _Atomic int64_t left;
    _Alignas(64) _Atomic int64_t done;
    _Alignas(64) atomic_uint epoch; /* futex of the workers */
    atomic_int sleepers;
    atomic_bool stop;
    _Alignas(64) atomic_uint ended; /* futex of the caller */
    atomic_bool caller_sleeps;
    _Alignas(64) atomic_uchar ran[MAX_THREADS];
};

/* ---- floating point mode --------------------------------------------------------------------- */

uint32_t mci_fp_enter(void) {
#if defined(__x86_64__)
    uint32_t old = _mm_getcsr();
    _mm_setcsr(0x1f80); /* exceptions masked, to nearest, neither FTZ nor DAZ */
    return old;
#elif defined(__aarch64__)
    uint64_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    uint64_t now = old & ~(uint64_t)(1u << 24 | 3u << 22 | 1u << 19); /* FZ, RMode, FZ16 */
    __asm__ volatile("msr fpcr, %0" : : "r"(now));
    return (uint32_t)old;
#else
    return 0;
#endif
}

void mci_fp_restore(uint32_t old) {
#if defined(__x86_64__)
    _mm_setcsr(old);
#elif defined(__aarch64__)
    uint64_t v = old;
    __asm__ volatile("msr fpcr, %0" : : "r"(v));
#else
    (void)old;
#endif
}

/* ---- waiting --------------------------------------------------------------------------------- */

static inline void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex_wait(atomic_uint *word, unsigned seen) {
    syscall(SYS_futex, (void *)word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(atomic_uint *word, int n) {
    syscall(SYS_futex, (void *)word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/* Runs chunks until none is left to claim; returns how many, with the n of their region. */
static int64_t claim_all(mci_pool *p, int thread, int64_t *n) {
    int64_t mine = 0, k = atomic_load_explicit(&p->left, memory_order_relaxed);
    while (k > 0) {
        const int64_t m = MCI_MAX(k / (SHARES * p->threads), 1);
        if (!atomic_compare_exchange_weak_explicit(&p->left, &k, k - m, memory_order_acquire,
                                                   memory_order_relaxed))
            continue;
        if (mine == 0) {
            *n = p->n;
            if (!atomic_load_explicit(&p->ran[thread], memory_order_relaxed))
                atomic_store_explicit(&p->ran[thread], 1, memory_order_relaxed);
        }
        for (int64_t i = 0; i < m; i++) p->fn(p->ctx, *n - k + i, thread);
        mine += m;
        k = atomic_load_explicit(&p->left, memory_order_relaxed);
    }
    return mine;
}

static void *work(void *arg) {
    worker *w = arg;
    mci_pool *p = w->pool;
    mci_fp_enter();
    for (;;) {
        double until = mci_now() + SPIN_S;
        while (atomic_load_explicit(&p->left, memory_order_relaxed) == 0 &&
               !atomic_load_explicit(&p->stop, memory_order_relaxed) && mci_now() < until)
            for (int i = 0; i < 8; i++) relax();
        unsigned seen = atomic_load(&p->epoch);
        if (atomic_load(&p->left) == 0) {
            if (atomic_load(&p->stop)) return NULL;
            atomic_fetch_add(&p->sleepers, 1);
            if (atomic_load(&p->left) == 0 && !atomic_load(&p->stop)) futex_wait(&p->epoch, seen);
            atomic_fetch_sub(&p->sleepers, 1);
        }
        int64_t n = 0, mine = claim_all(p, w->index, &n);
        if (mine > 0 && atomic_fetch_add(&p->done, mine) + mine == n &&
            atomic_load(&p->caller_sleeps)) {
            atomic_fetch_add(&p->ended, 1);
            futex_wake(&p->ended, 1);
        }
    }
}

static void wait_done(mci_pool *p, int64_t n) {
    double until = mci_now() + SPIN_S;
    while (atomic_load(&p->done) != n) {
        for (int i = 0; i < 8; i++) relax();
        if (mci_now() < until) continue;
        atomic_store(&p->caller_sleeps, true);
        unsigned seen = atomic_load(&p->ended);
        while (atomic_load(&p->done) != n) {
            futex_wait(&p->ended, seen);
            seen = atomic_load(&p->ended);
        }
        atomic_store(&p->caller_sleeps, false);
        return;
    }
}

/* ---- public ---------------------------------------------------------------------------------- */

void mci_pool_run(mci_pool *p, mci_chunk_fn *fn, void *ctx, int64_t n) {
    if (n <= 0) return;
    if (p->threads == 1 || n == 1) { /* nothing to share: nobody is woken */
        atomic_store_explicit(&p->ran[0], 1, memory_order_relaxed);
        for (int64_t i = 0; i < n; i++) fn(ctx, i, 0);
        return;
    }
    p->fn = fn;
    p->ctx = ctx;
    p->n = n;
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    atomic_store(&p->left, n);
    atomic_fetch_add(&p->epoch, 1);
    int asleep = atomic_load(&p->sleepers);
    if (asleep > 0) futex_wake(&p->epoch, (int)MCI_MIN(n - 1, (int64_t)asleep));
    int64_t same = 0, mine = claim_all(p, 0, &same);
    if (atomic_fetch_add(&p->done, mine) + mine != n) wait_done(p, n);
}

int mci_pool_create(int threads, mci_pool **out, mc_error *err) {
    *out = NULL;
    if (threads < 1 || threads > MAX_THREADS)
        return mci_fail(err, MC_EINVAL, 0, "threads %d: expected 1..%d", threads, MAX_THREADS);
    mci_pool *p = aligned_alloc(64, sizeof *p);
    if (!p) return mci_fail(err, MC_ENOMEM, ENOMEM, "thread pool: the system refused memory");
    memset(p, 0, sizeof *p);
    p->threads = threads;
    p->pid = getpid();
    p->workers = calloc((size_t)threads, sizeof *p->workers);
    if (!p->workers) {
        free(p);
        return mci_fail(err, MC_ENOMEM, ENOMEM, "thread pool: the system refused memory");
    }
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, MCI_MAX((size_t)PTHREAD_STACK_MIN, (size_t)STACK_BYTES));
    /* signals belong to the threads of the host program */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = 0;
    for (int i = 1; i < threads && rc == 0; i++) {
        worker *w = &p->workers[i];
        w->pool = p;
        w->index = i;
        rc = pthread_create(&w->id, &attr, work, w);
        if (rc == 0) p->started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (rc != 0) {
        int got = p->started + 1;
        mci_pool_free(p);
        return mci_fail(err, MC_ESYS, rc, "thread pool: thread %d of %d could not be started: %s",
                        got + 1, threads, strerror(rc));
    }
    *out = p;
    return MC_OK;
}

void mci_pool_free(mci_pool *p) {
    if (!p) return;
    if (getpid() == p->pid) { /* a forked child has no workers to join */
        atomic_store(&p->stop, true);
        atomic_fetch_add(&p->epoch, 1);
        futex_wake(&p->epoch, INT_MAX);
        for (int i = 1; i <= p->started; i++) pthread_join(p->workers[i].id, NULL);
    }
    free(p->workers);
    free(p);
}

int mci_pool_threads(const mci_pool *p) { return p->threads; }

int mci_pool_ran(const mci_pool *p) {
    int n = 0;
    for (int i = 0; i < p->threads; i++)
        n += atomic_load_explicit(&p->ran[i], memory_order_relaxed) != 0;
    return n;
}
