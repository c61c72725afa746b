/* io.c - reads of byte ranges: a queue and the threads that serve it ("lanes"), and a ring.
 *
 *   submit --> queue ----> a lane: pages, pread, scan -----> finished --> next
 *         \-> waiting ---> ring: the kernel, then the caller -^
 *
 * The ring is served by the caller's thread: where all cores compute, a lane waits for one twice a
 * read (1.5 MB: 0.56 ms, not 0.44). What a ring cannot take goes to lanes. One mutex guards all;
 * lanes hold it only to take and hand back a read. A range arrives complete or the read carries an
 * error, and the page cache holds nothing of it afterwards (mmap apart). */
#include "io.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "io_uring.h"

enum {
    LANES_DIRECT = 2,
    LANES_BUFFERED = 4,
    UNDER_WAY = 2 << 20, /* bytes that keep a disk busy */
    RUNS = 3,            /* of a read: places in the ring */
    LANE_STACK = 256 << 10
};

typedef struct lane {
    mci_io *io;
    int index;
    pthread_t thread;
} lane;

typedef struct list {
    mci_read *first, **end; /* end: of no meaning while empty */
} list;

struct mci_io {
    int asked, mode;  /* given to create; in use, never MC_IO_AUTO */
    bool given;       /* the number of lanes was given */
    int most, active; /* reads that may be under way: ever, now */
    int started;      /* lanes that have a thread */
    lane *lane;       /* (most) */
    mci_ring *ring;   /* where mode is MC_IO_URING */
    int in_ring;      /* reads that it has begun */
    pthread_mutex_t lock;
    pthread_cond_t work, parked, done; /* parked: lanes that are too many at present */
    list queue, waiting, finished;     /* for a lane, for the ring, to be handed back */
    int64_t outstanding;               /* submitted and not handed back */
    bool stop, count;                  /* count: reads enter the counters */
    int32_t under_way;                 /* of those counted: submitted and not finished */
    double busy_from;                  /* since when there are any */
    mci_files files;
    mci_io_stats stats;
    mci_shim shim;
};

/* ---- one read -------------------------------------------------------------------------------- */

static void begin(mci_read *r) {
    r->began = mci_now();
    r->err.code = MC_OK;
    r->bytes = 0;
    r->found = false;
    if (r->fresh) mci_prefault(r->fresh, r->fresh_bytes);
}

/* The k-th run in this thread, after `done` bytes of its superset. */
static void read_run(mci_io *io, mci_read *r, int k, int64_t done) {
    mci_file *f;
    if (mci_files_find(&io->files, &r->run[k], &f, &r->err) == MC_OK)
        mci_file_read(f, &io->shim, &r->run[k], done, &r->bytes, &r->err);
}

/* All runs have come or failed; the seconds that took. */
static double finish(mci_io *io, mci_read *r) {
    double seconds = mci_now() - r->began;
    bool mapped = r->n_run && !r->run[0].dst;
    for (int32_t i = 0; mapped && i < r->n_run; i++) /* the scan looks where they lie */
        r->run[i].dst = (uint8_t *)(uintptr_t)mci_io_at(io, r->run[i].file, r->run[i].offset);
    r->found = r->scan && r->err.code == MC_OK && r->scan(r);
    for (int32_t i = 0; mapped && i < r->n_run; i++) r->run[i].dst = NULL;
    return seconds;
}

/* ---- queue ---- */

static void append(list *l, mci_read *r) {
    if (!l->first) l->end = &l->first;
    r->next = NULL;
    *l->end = r;
    l->end = &r->next;
}

/* r, or with NULL the first. NULL: it is not there. */
static mci_read *take(list *l, const mci_read *r) {
    mci_read **at = &l->first, *got;
    while (r && *at && *at != r) at = &(*at)->next;
    if (!(got = *at)) return NULL;
    if (!(*at = got->next)) l->end = at;
    return got;
}

/* Under the lock: a counted read goes. */
static void end_one(mci_io *io) {
    if (io->count && --io->under_way == 0) io->stats.busy_s += mci_now() - io->busy_from;
}

/* Under the lock. */
static void hand_back(mci_io *io, mci_read *r, double seconds) {
    if (io->count) {
        io->stats.reads++;
        io->stats.bytes += r->bytes;
        io->stats.read_s += seconds;
    }
    end_one(io);
    append(&io->finished, r);
}

static void *lane_main(void *arg) {
    const lane *me = arg;
    mci_io *io = me->io;
    bool ran = false;
    pthread_mutex_lock(&io->lock);
    while (!io->stop) {
        if (me->index >= io->active) {
            pthread_cond_wait(&io->parked, &io->lock);
            continue;
        }
        mci_read *r = take(&io->queue, NULL);
        if (!r) {
            pthread_cond_wait(&io->work, &io->lock);
            continue;
        }
        io->stats.lanes_ran += io->count && !ran;
        ran |= io->count;
        pthread_mutex_unlock(&io->lock);
        begin(r);
        for (int32_t i = 0; i < r->n_run && r->err.code == MC_OK; i++) read_run(io, r, i, 0);
        double seconds = finish(io, r);
        pthread_mutex_lock(&io->lock);
        hand_back(io, r, seconds);
        pthread_cond_signal(&io->done);
        if (io->ring) mci_ring_wake(io->ring);
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

/* ---- ring: all under the lock ---------------------------------------------------------------- */

/* Not with a stand-in for pread, nor where pages must come into being first: the call that hands
 * over a read would clear them, in the caller's time. */
static bool for_ring(mci_io *io, const mci_read *r) {
    bool can = io->ring && !io->shim.fn && !r->fresh;
    mci_file *f;
    for (int32_t i = 0; i < r->n_run && can; i++)
        can = mci_files_find(&io->files, &r->run[i], &f, NULL) == MC_OK &&
              mci_file_direct(f, &r->run[i]);
    return can;
}

/* Hands the runs to the kernel; what it does not take is read here. true: nothing is under way. */
static bool ring_begin(mci_io *io, mci_read *r) {
    mci_file *f;
    begin(r);
    r->left = 0;
    for (int32_t k = 0; k < r->n_run && r->err.code == MC_OK; k++) {
        const mci_run *run = &r->run[k];
        int64_t lead = run->offset % MCI_IO_BLOCK, n = MCI_MIN(mci_run_span(run), MCI_IO_CALL);
        if (mci_files_find(&io->files, run, &f, &r->err) < 0) break;
        if (run->bytes && mci_ring_read(io->ring, f->direct_fd, run->dst - lead, n,
                                        run->offset - lead, (uint64_t)(uintptr_t)r | (uint64_t)k))
            r->left++;
        else
            read_run(io, r, k, 0);
    }
    return r->left == 0;
}

static void ring_fill(mci_io *io) {
    for (mci_read *r; io->in_ring < io->active && (r = take(&io->waiting, NULL));) {
        if (ring_begin(io, r))
            hand_back(io, r, finish(io, r));
        else
            io->in_ring++;
    }
}

/* A run came, whole, in part or not at all: the ordinary way gets the rest or the reason. true:
 * nothing of the read is under way. */
static bool ring_landed(mci_io *io, mci_read *r, int k, int64_t result) {
    const mci_run *run = &r->run[k];
    result = MCI_MAX(result, 0);
    r->bytes += result;
    if (result < run->offset % MCI_IO_BLOCK + run->bytes) {
        io->stats.retried++;
        if (r->err.code == MC_OK) read_run(io, r, k, result);
    }
    return --r->left == 0;
}

static void ring_collect(mci_io *io) {
    int64_t result;
    for (uint64_t tag; (tag = mci_ring_next(io->ring, &result));) {
        mci_read *r = (mci_read *)(uintptr_t)(tag & ~(uint64_t)RUNS);
        if (!ring_landed(io, r, (int)(tag & RUNS), result)) continue;
        io->in_ring--;
        hand_back(io, r, finish(io, r));
    }
    ring_fill(io);
}

/* Until something ends, in the ring or in a lane. */
static void ring_wait(mci_io *io) {
    pthread_mutex_unlock(&io->lock);
    mci_ring_wait(io->ring);
    pthread_mutex_lock(&io->lock);
    ring_collect(io);
}

static int open_ring(mci_io *io, mc_error *err) {
    mci_ring *ring;
    if (io->ring) return MC_OK;
    int rc = mci_ring_open(RUNS * io->most, &ring, err);
    pthread_mutex_lock(&io->lock);
    io->ring = ring;
    pthread_mutex_unlock(&io->lock);
    return rc;
}

/* The reads that it has begun end first. */
static void close_ring(mci_io *io) {
    pthread_mutex_lock(&io->lock);
    io->waiting.first = NULL;
    while (io->in_ring) ring_wait(io);
    mci_ring_close(io->ring);
    io->ring = NULL;
    pthread_mutex_unlock(&io->lock);
}

/* ---- create, threads, free ------------------------------------------------------------------- */

int mci_io_mode(int mode, mc_error *err) {
    mci_ring *ring = NULL;
    if (mode < MC_IO_AUTO || mode > MC_IO_MMAP)
        return mci_fail(err, MC_EINVAL, 0, "io: unknown mode %d", mode);
    int rc = mode == MC_IO_URING ? mci_ring_open(1, &ring, err) : MC_OK;
    mci_ring_close(ring);
    return rc;
}

/* Small reads need more of them to keep a disk busy. */
int mci_io_most(int mode, int64_t bytes) {
    if (mode == MC_IO_PREAD || mode == MC_IO_MMAP || bytes < 1) return LANES_BUFFERED;
    return (int)MCI_MAX(LANES_BUFFERED, MCI_MIN(MCI_IO_LANES_MOST, UNDER_WAY / bytes));
}

/* Under the lock. They take no signals: Ctrl-C is the program's. Fewer than wanted do as well. */
static int start_threads(mci_io *io, mc_error *err) {
    pthread_attr_t attr;
    sigset_t all, old;
    int rc = 0;
    if (io->started >= io->active) return MC_OK;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, (size_t)MCI_MAX(LANE_STACK, sysconf(_SC_THREAD_STACK_MIN)));
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (io->started < io->active && rc == 0) {
        lane *l = &io->lane[io->started];
        *l = (lane){.io = io, .index = io->started};
        rc = pthread_create(&l->thread, &attr, lane_main, l);
        if (rc == 0) io->started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (io->started) return MC_OK;
    return mci_fail(err, MC_ESYS, rc, "no thread that reads: %s", strerror(rc));
}

int mci_io_create(int mode, int lanes, mci_io **out, mc_error *err) {
    mci_io *io;
    int rc = MC_OK;
    *out = NULL;
    if (mode < MC_IO_AUTO || mode > MC_IO_MMAP || lanes < 0)
        return mci_fail(err, MC_EINVAL, 0, "io: unknown mode %d or %d lanes", mode, lanes);
    if (!(io = calloc(1, sizeof *io))) return mci_fail(err, MC_ENOMEM, 0, "io: out of memory");
    io->asked = mode;
    io->mode = mode == MC_IO_AUTO ? MC_IO_DIRECT : mode;
    io->given = lanes > 0;
    io->most = lanes ? lanes : LANES_BUFFERED;
    io->active = lanes || mode == MC_IO_PREAD || mode == MC_IO_MMAP ? io->most : LANES_DIRECT;
    io->count = true;
    io->lane = calloc((size_t)io->most, sizeof *io->lane);
    mci_files_init(&io->files, mode != MC_IO_PREAD, mode == MC_IO_MMAP);
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->work, NULL);
    pthread_cond_init(&io->parked, NULL);
    pthread_cond_init(&io->done, NULL);
    if (!io->lane)
        rc = mci_fail(err, MC_ENOMEM, 0, "io: out of memory");
    else if (mode == MC_IO_URING)
        rc = open_ring(io, err);
    if (rc < 0) {
        mci_io_free(io);
        return rc;
    }
    *out = io;
    return MC_OK;
}

int mci_io_allow(mci_io *io, int most, mc_error *err) {
    if (io->given || most <= io->most) return MC_OK;
    lane *more = realloc(io->lane, (size_t)most * sizeof *more);
    if (!more) return mci_fail(err, MC_ENOMEM, 0, "io: out of memory");
    io->lane = more;
    io->most = most;
    if (!io->ring) return MC_OK;
    close_ring(io);
    return open_ring(io, err);
}

void mci_io_free(mci_io *io) {
    if (!io) return;
    close_ring(io);
    pthread_mutex_lock(&io->lock);
    io->stop = true;
    pthread_cond_broadcast(&io->work);
    pthread_cond_broadcast(&io->parked);
    pthread_mutex_unlock(&io->lock);
    for (int i = 0; i < io->started; i++) pthread_join(io->lane[i].thread, NULL);
    /* only now: a lane might have been inside pread on these */
    mci_files_close(&io->files);
    pthread_cond_destroy(&io->work);
    pthread_cond_destroy(&io->parked);
    pthread_cond_destroy(&io->done);
    pthread_mutex_destroy(&io->lock);
    free(io->lane);
    free(io);
}

int mci_io_use(mci_io *io, int mode, int lanes, mc_error *err) {
    int rc = MC_OK;
    if (!mci_io_idle(io) || lanes < 1 || lanes > io->most ||
        (mode != MC_IO_DIRECT && mode != MC_IO_URING))
        return mci_fail(err, MC_EINVAL, 0, "io: mode %d with %d lanes, %lld reads outstanding",
                        mode, lanes, (long long)io->outstanding);
    if (mode != MC_IO_URING)
        close_ring(io);
    else if ((rc = open_ring(io, err)) < 0)
        return rc;
    pthread_mutex_lock(&io->lock);
    io->mode = mode;
    io->active = lanes;
    pthread_cond_broadcast(&io->work);
    pthread_cond_broadcast(&io->parked);
    pthread_mutex_unlock(&io->lock);
    return rc;
}

bool mci_io_idle(mci_io *io) {
    pthread_mutex_lock(&io->lock);
    bool idle = io->outstanding == 0;
    pthread_mutex_unlock(&io->lock);
    return idle;
}

int mci_io_lanes(mci_io *io) { return io->most; }
int mci_io_asked(const mci_io *io) { return io->asked; }
bool mci_io_lanes_given(const mci_io *io) { return io->given; }

/* ---- submit, next ---------------------------------------------------------------------------- */

int mci_io_submit(mci_io *io, mci_read *r, mc_error *err) {
    pthread_mutex_lock(&io->lock);
    bool ring = for_ring(io, r);
    int rc = ring ? MC_OK : start_threads(io, err);
    if (rc == MC_OK) {
        append(ring ? &io->waiting : &io->queue, r);
        io->outstanding++;
        if (io->count && io->under_way++ == 0) io->busy_from = mci_now();
        io->stats.depth = MCI_MAX(io->stats.depth, io->under_way);
        if (ring)
            ring_collect(io);
        else
            pthread_cond_signal(&io->work);
    }
    pthread_mutex_unlock(&io->lock);
    return rc;
}

mci_read *mci_io_withdraw(mci_io *io, mci_read *r) {
    pthread_mutex_lock(&io->lock);
    mci_read *got = take(&io->queue, r);
    if (!got) got = take(&io->waiting, r);
    if (got) {
        mci_fail(&got->err, MC_ECANCEL, 0, "read: given up");
        end_one(io);
        io->outstanding--;
    }
    pthread_mutex_unlock(&io->lock);
    return got;
}

void mci_io_look(mci_io *io) {
    pthread_mutex_lock(&io->lock);
    if (io->ring) ring_collect(io);
    pthread_mutex_unlock(&io->lock);
}

mci_read *mci_io_next(mci_io *io, bool wait) {
    pthread_mutex_lock(&io->lock);
    if (io->ring) ring_collect(io);
    while (wait && !io->finished.first && io->outstanding) {
        if (io->ring)
            ring_wait(io);
        else
            pthread_cond_wait(&io->done, &io->lock);
    }
    mci_read *r = take(&io->finished, NULL);
    if (r) io->outstanding--;
    pthread_mutex_unlock(&io->lock);
    return r;
}

/* ---- files ----------------------------------------------------------------------------------- */

int mci_io_open(mci_io *io, const char *path, mc_error *err) {
    int id = mci_files_open(&io->files, path, err);
    if (id < 0 || io->given || mci_io_direct(io, id)) return id;
    pthread_mutex_lock(&io->lock); /* buffered reads gain from more lanes than direct ones */
    if (io->active == LANES_DIRECT) io->active = LANES_BUFFERED;
    pthread_mutex_unlock(&io->lock);
    return id;
}

int64_t mci_io_size(mci_io *io, int32_t file) {
    const mci_file *f = mci_files_get(&io->files, file);
    return f ? f->size : -1;
}

const char *mci_io_path(mci_io *io, int32_t file) {
    const mci_file *f = mci_files_get(&io->files, file);
    return f ? f->path : "(no file)";
}

bool mci_io_direct(mci_io *io, int32_t file) {
    mci_file *f = mci_files_get(&io->files, file);
    return f && atomic_load(&f->direct);
}

const uint8_t *mci_io_at(mci_io *io, int32_t file, int64_t offset) {
    const mci_file *f = mci_files_get(&io->files, file);
    return f && f->map ? f->map + offset : NULL;
}

int mci_io_check(mci_io *io, int32_t file, mc_error *err) {
    const mci_file *f = mci_files_get(&io->files, file);
    return f && f->map ? mci_file_check(f, err) : MC_OK;
}

void mci_io_count(mci_io *io, bool count) {
    pthread_mutex_lock(&io->lock);
    io->count = count;
    pthread_mutex_unlock(&io->lock);
}

int mci_io_fetch(mci_io *io, int32_t file, int64_t offset, int64_t bytes, void *dst,
                 mc_error *err) {
    mci_run run = {file, offset, bytes, dst};
    mci_file *f;
    int rc = mci_files_find(&io->files, &run, &f, err);
    return rc < 0 ? rc : mci_file_fetch(f, &io->shim, &run, err);
}

void mci_io_get_stats(mci_io *io, mci_io_stats *out) {
    pthread_mutex_lock(&io->lock);
    *out = io->stats;
    if (io->under_way) out->busy_s += mci_now() - io->busy_from;
    out->lanes = io->active;
    mci_file *f;
    for (int32_t i = 0; (f = mci_files_get(&io->files, i)); i++) {
        bool direct = atomic_load(&f->direct);
        out->files_direct += direct;
        out->files_pread += !direct;
        if (!direct && io->asked != MC_IO_PREAD && !out->note[0])
            snprintf(out->note, sizeof out->note, "direct reads refused (%s), read by pread: %s",
                     strerror(atomic_load(&f->refusal)), f->path);
    }
    out->mode = io->mode;
    if (out->mode != MC_IO_MMAP && out->files_pread && !out->files_direct) out->mode = MC_IO_PREAD;
    pthread_mutex_unlock(&io->lock);
}

void mci_io_inject(mci_io *io, mci_pread_fn *fn, void *ctx) {
    pthread_mutex_lock(&io->lock);
    io->shim = (mci_shim){fn, ctx};
    pthread_mutex_unlock(&io->lock);
}
