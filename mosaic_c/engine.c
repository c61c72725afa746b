/* engine.c - the context of everything: kernels, threads, files, accounted memory, one lock. */
#include "engine.h"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

/* What a compiler tells of itself and of the flags that all files share. */
#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "gcc " __VERSION__
#else
#define COMPILER "unknown compiler"
#endif
#ifdef __OPTIMIZE__
#define OPTIMIZED ", optimized"
#else
#define OPTIMIZED ", not optimized"
#endif
#ifdef __FAST_MATH__
#define FAST_MATH ", fast-math"
#else
#define FAST_MATH ""
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED ", sanitized"
#else
#define SANITIZED ""
#endif
#ifdef __AVX__
#define NATIVE ", AVX everywhere"
#else
#define NATIVE ""
#endif

int mc_engine_create(const mc_engine_opts *opts, mc_engine **out, mc_error *err) {
    int rc;
    mc_engine *e;
    *out = NULL;
    if (opts->threads < 1 || opts->threads > 256)
        return mci_fail(err, MC_EINVAL, 0, "threads: expected 1..256, got %d", opts->threads);
    if (opts->lanes < 0 || opts->lanes > 64 || opts->most < 0 || opts->most > 64)
        return mci_fail(err, MC_EINVAL, 0, "lanes: expected 0..64, got %d, at most %d", opts->lanes,
                        opts->most);
    if (opts->budget < 0)
        return mci_fail(err, MC_EINVAL, 0, "budget: expected bytes, got %lld",
                        (long long)opts->budget);
    e = calloc(1, sizeof *e);
    if (!e) return mci_fail(err, MC_ENOMEM, 0, "engine: out of memory");
    atomic_init(&e->refs, 1);
    e->pid = getpid();
    e->mem.budget = opts->budget;
    pthread_mutex_init(&e->lock, NULL);
    if ((rc = mci_ops_get(opts->isa, &e->ops, err)) < 0) goto fail;
    if ((rc = mci_pool_create(opts->threads, &e->pool, err)) < 0) goto fail;
    if ((rc = mci_io_create(opts->io, opts->lanes, &e->io, err)) < 0) goto fail;
    if ((rc = mci_io_allow(e->io, opts->most, err)) < 0) goto fail;
    *out = e;
    return MC_OK;
fail:
    mci_engine_release(e);
    return rc;
}

void mci_engine_retain(mc_engine *e) { atomic_fetch_add(&e->refs, 1); }

void mci_engine_release(mc_engine *e) {
    if (!e || atomic_fetch_sub(&e->refs, 1) != 1) return;
    /* In a forked child the worker threads do not exist and cannot be joined; the child's copy of
     * the memory goes with the process. */
    if (getpid() != e->pid) return;
    const int64_t n = e->thread_size ? e->thread_size * mci_pool_threads(e->pool) : 0;
    mci_pool_free(e->pool);
    mci_io_free(e->io);
    mci_release(&e->mem, MC_MEM_SCRATCH, e->scratch, e->scratch_size);
    mci_release(&e->mem, MC_MEM_SCRATCH, e->thread_scratch, n);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

void mc_engine_free(mc_engine *e) { mci_engine_release(e); }

int mci_enter(mc_engine *e, mc_error *err) {
    if (getpid() != e->pid)
        return mci_fail(err, MC_EFORK, 0,
                        "engine: used in a forked child; open the model again in this process");
    pthread_mutex_lock(&e->lock);
    e->fp = mci_fp_enter();
    e->scratch_used = 0;
    return MC_OK;
}

void mci_leave(mc_engine *e) {
    mci_fp_restore(e->fp);
    pthread_mutex_unlock(&e->lock);
}

/* Replaces *p of `old` bytes by a larger block, so the budget sees the difference alone; what
 * earlier blocks rely on stays when the new one is refused. Its pages are untouched until then:
 * both at once cost no memory. */
static int grow(mc_engine *e, uint8_t **p, int64_t old, int64_t bytes, const char *what,
                mc_error *err) {
    void *new;
    mci_recount(&e->mem, MC_MEM_SCRATCH, -old, what, NULL);
    int rc = mci_alloc(&e->mem, MC_MEM_SCRATCH, bytes, what, &new, err);
    if (rc == MC_OK) {
        mci_release(&e->mem, MC_MEM_SCRATCH, *p, old);
        *p = new;
    }
    mci_recount(&e->mem, MC_MEM_SCRATCH, old, what, NULL);
    return rc;
}

int mci_scratch_reserve(mc_engine *e, int64_t bytes, mc_error *err) {
    if (bytes <= e->scratch_size) return MC_OK;
    int rc = grow(e, &e->scratch, e->scratch_size, bytes, "scratch", err);
    if (rc == MC_OK) e->scratch_size = bytes;
    return rc;
}

int mci_thread_reserve(mc_engine *e, int64_t bytes, mc_error *err) {
    const int64_t n = mci_pool_threads(e->pool);
    bytes = mci_round_up(bytes, MCI_ALIGN);
    if (bytes <= e->thread_size) return MC_OK;
    int rc = grow(e, &e->thread_scratch, n * e->thread_size, n * bytes, "scratch of threads", err);
    if (rc < 0) return rc;
    e->thread_size = bytes;
    memset(e->thread_scratch, 0, (size_t)(n * bytes));
    return MC_OK;
}

void *mci_scratch(mc_engine *e, int64_t n, int64_t size) {
    int64_t bytes = mci_scratch_bytes(n, size);
    void *p = e->scratch + e->scratch_used;
    if (bytes > e->scratch_size - e->scratch_used) return NULL; /* a block reserved too little */
    e->scratch_used += bytes;
    return p;
}

int mci_check_cancel(mc_engine *e, mc_error *err) {
    if (atomic_load_explicit(&e->cancel, memory_order_relaxed))
        return mci_fail(err, MC_ECANCEL, 0, "cancelled");
    return MC_OK;
}

void mc_engine_cancel(mc_engine *e, int on) {
    atomic_store_explicit(&e->cancel, on != 0, memory_order_relaxed);
}

int mc_io_mode(int32_t mode, mc_error *err) { return mci_io_mode(mode, err); }

int mc_io_most(int32_t mode, int64_t bytes) { return mci_io_most(mode, bytes); }

int mc_engine_file(mc_engine *e, const char *path, mc_error *err) {
    int rc = mci_enter(e, err);
    if (rc < 0) return rc;
    rc = mci_io_open(e->io, path, err);
    mci_leave(e);
    return rc;
}

const char *mc_engine_build(void) { return COMPILER OPTIMIZED FAST_MATH SANITIZED NATIVE; }

int mc_engine_stats(mc_engine *e, mc_stats *out, mc_error *err) {
    mci_io_stats io;
    int rc = mci_enter(e, err);
    if (rc < 0) return rc;
    *out = e->stats;
    for (int i = 0; i < MC_MEM_KINDS; i++) {
        out->mem_now[i] = atomic_load(&e->mem.now[i]);
        out->mem_peak[i] = atomic_load(&e->mem.peak[i]);
    }
    mci_io_get_stats(e->io, &io);
    out->budget = e->mem.budget;
    out->reads = io.reads;
    out->bytes_read = io.bytes;
    out->read_s = io.read_s;
    out->busy_s = io.busy_s;
    out->io = io.mode;
    out->depth = io.depth;
    memcpy(out->io_note, io.note, sizeof out->io_note);
    out->lanes = io.lanes;
    out->lanes_ran = io.lanes_ran;
    out->files_direct = io.files_direct;
    out->files_pread = io.files_pread;
    out->threads = mci_pool_threads(e->pool);
    out->threads_ran = mci_pool_ran(e->pool);
    out->isa = e->ops->name;
    mci_leave(e);
    return MC_OK;
}
