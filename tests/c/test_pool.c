/* test_pool.c - many regions on few and on many threads: every chunk runs once, the caller's writes
 * are seen by the workers and theirs by the caller, nothing hangs. */
#include "pool.h"
#include "test.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { MAX_CHUNKS = 64 };

typedef struct region {
    int64_t round, seen[MAX_CHUNKS]; /* plain on purpose: the pool must order them */
    int64_t last[8];                 /* each thread walks upwards, so memory is read forwards */
    atomic_int times[MAX_CHUNKS], per_thread[8];
    int threads;
    atomic_int backwards;
} region;

static void chunk(void *ctx, int64_t i, int thread) {
    region *r = ctx;
    atomic_fetch_add_explicit(&r->times[i], 1, memory_order_relaxed);
    if (thread >= 0 && thread < r->threads) {
        if (i <= r->last[thread]) atomic_fetch_add(&r->backwards, 1);
        r->last[thread] = i;
        atomic_fetch_add_explicit(&r->per_thread[thread], 1, memory_order_relaxed);
    }
    r->seen[i] = r->round;
}

static void many_regions(int threads, int rounds) {
    mci_pool *p;
    mc_error e;
    CHECK(mci_pool_create(threads, &p, &e) == MC_OK, "%s", e.message);
    CHECK(mci_pool_threads(p) == threads && mci_pool_ran(p) == 0, "fresh pool");
    region r = {.threads = threads};
    rng g = {(uint64_t)threads};
    int64_t total = 0, wrong = 0;
    for (int k = 0; k < rounds; k++) {
        int64_t n = (int64_t)rng_below(&g, MAX_CHUNKS + 1);
        r.round = k + 1;
        for (int i = 0; i < MAX_CHUNKS; i++) r.seen[i] = 0, r.times[i] = 0;
        for (int t = 0; t < 8; t++) r.last[t] = -1;
        if (k % 500 == 499) usleep(200); /* long enough for every worker to sleep */
        mci_pool_run(p, chunk, &r, n);
        total += n;
        for (int i = 0; i < MAX_CHUNKS; i++)
            wrong += r.times[i] != (i < n) || r.seen[i] != (i < n ? r.round : 0);
    }
    int64_t sum = 0;
    int took = 0;
    for (int t = 0; t < threads; t++) {
        sum += r.per_thread[t];
        took += r.per_thread[t] > 0;
    }
    CHECK(wrong == 0, "%d threads: %lld chunks missed, repeated or stale", threads,
          (long long)wrong);
    CHECK(r.backwards == 0, "%d threads: %d steps back", threads, r.backwards);
    CHECK(sum == total, "%d threads: thread numbers", threads);
    CHECK(mci_pool_ran(p) == took, "%d threads: ran %d, took %d", threads, mci_pool_ran(p), took);
    mci_pool_free(p);
}

/* A chunk that blocks until another thread has come: both must run at once. */
static void meet(void *ctx, int64_t i, int thread) {
    (void)i, (void)thread;
    atomic_int *here = ctx;
    atomic_fetch_add(here, 1);
    for (int k = 0; k < 20000 && atomic_load(here) < 2; k++) usleep(100);
}

static void shares(void) {
    mci_pool *p;
    CHECK(mci_pool_create(2, &p, NULL) == MC_OK, "create");
    usleep(1000);
    for (int k = 0; k < 20; k++) {
        atomic_int here = 0;
        mci_pool_run(p, meet, &here, 2);
        CHECK(atomic_load(&here) == 2, "round %d", k);
        if (k % 4 == 0) usleep(500);
    }
    CHECK(mci_pool_ran(p) == 2, "%d", mci_pool_ran(p));
    mci_pool_free(p);
}

/* Two pools driven by two threads at once know nothing of each other. */
static void *drive(void *arg) {
    (void)arg;
    many_regions(3, 1500);
    return NULL;
}

typedef struct modes {
    float tiny, half, got[64];
    uint32_t worker_mode;
} modes;

static void multiply(void *ctx, int64_t i, int thread) {
    modes *m = ctx;
    (void)thread;
    volatile float a = m->tiny, b = m->half;
    m->got[i] = a * b;
    usleep(50);
}

/* Workers keep subnormals even when their creator flushes them; enter and restore are inverse. */
static void fp_mode(void) {
    modes m = {.tiny = 0x1p-126f, .half = 0.5f};
#if defined(__x86_64__)
    uint32_t before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* FTZ and DAZ, as other packages set them */
    uint32_t old = mci_fp_enter();
    CHECK((old & 0x8040) == 0x8040, "former setting %x", old);
    CHECK((_mm_getcsr() & 0x8040) == 0, "denormals kept inside");
    mci_fp_restore(old);
    CHECK((_mm_getcsr() & 0x8040) == 0x8040, "restored");
    mci_pool *p;
    CHECK(mci_pool_create(4, &p, NULL) == MC_OK, "create");
    old = mci_fp_enter();
    mci_pool_run(p, multiply, &m, 64);
    mci_fp_restore(old);
    _mm_setcsr(before);
    mci_pool_free(p);
    for (int i = 0; i < 64; i++) CHECK(m.got[i] == 0x1p-127f, "chunk %d: %a", i, (double)m.got[i]);
#else
    (void)m, (void)multiply;
#endif
}

static void forked(void) {
    mci_pool *p;
    CHECK(mci_pool_create(3, &p, NULL) == MC_OK, "create");
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(5);
        mci_pool_free(p); /* its workers do not exist here */
        _exit(0);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "freeing in a child: status %x",
          (unsigned)status);
    mci_pool_free(p);
}

static void nothing(void *ctx, int64_t i, int thread) { (void)ctx, (void)i, (void)thread; }

/* About 2 us, so that both threads take part. */
static void a_little(void *ctx, int64_t i, int thread) {
    (void)ctx, (void)i, (void)thread;
    double until = mci_now() + 2e-6;
    while (mci_now() < until) {}
}

static void cost(void) {
    mci_pool *p;
    CHECK(mci_pool_create(2, &p, NULL) == MC_OK, "create");
    double best = 1;
    for (int k = 0; k < 20; k++) {
        double t = mci_now();
        for (int i = 0; i < 200; i++) mci_pool_run(p, a_little, NULL, 4);
        t = (mci_now() - t) / 200;
        best = MCI_MIN(best, t);
    }
    printf("a warm region of 4 chunks of 2 us on 2 threads: %.2f us\n", best * 1e6);
    mci_pool_free(p);
}

int main(void) {
    mc_error e;
    mci_pool *p;
    CHECK(mci_pool_create(0, &p, &e) == MC_EINVAL && !p, "no threads");
    CHECK(mci_pool_create(257, &p, &e) == MC_EINVAL && !p, "too many");
    mci_pool_free(NULL);
    for (int threads = 1; threads <= 8; threads++) many_regions(threads, 4000);
    shares();
    pthread_t t[2];
    for (int i = 0; i < 2; i++) pthread_create(&t[i], NULL, drive, NULL);
    for (int i = 0; i < 2; i++) pthread_join(t[i], NULL);
    for (int i = 0; i < 200; i++) { /* start and stop at once */
        CHECK(mci_pool_create(1 + i % 8, &p, &e) == MC_OK, "%s", e.message);
        if (i % 3) mci_pool_run(p, nothing, NULL, 5);
        mci_pool_free(p);
    }
    fp_mode();
    forked();
    cost();
    return test_end();
}
