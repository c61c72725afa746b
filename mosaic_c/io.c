/* io.c - reads of byte ranges by reader threads ("lanes").
 *
 * One mutex guards the queue, the done list, the file table and the counters; lanes hold it only to
 * take and hand back a read. A file keeps a buffered descriptor for ever and a direct one where
 * direct reads work. It promises that a range arrives complete or the read carries an error, and
 * that the page cache holds nothing of it afterwards. */
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    CALL_MAX = 1 << 30, /* of one system call: the kernel stops a little under 2 GiB */
    STEP = 4 << 20,     /* of one buffered call: what a lane may have in the page cache */
    PIECE = 4 << 20,    /* of a range that mci_io_load spreads over the lanes */
    LANE_STACK = 256 << 10
};

typedef struct io_file {
    char *path;
    int fd, direct_fd;   /* direct_fd -1: direct reads were refused */
    _Atomic bool direct; /* in use; goes off for good when a direct read is refused */
    int64_t size;
} io_file;

struct mci_io {
    int mode, lanes, started;
    pthread_t *thread;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    mci_read *queue, **queue_end, *finished, **finished_end;
    int64_t outstanding; /* submitted and not handed back */
    bool stop, loading;
    io_file **files; /* pointers: they stay where they are when the table grows */
    int32_t n_file, room;
    mci_io_stats stats;
    mci_read *pieces; /* (2 * lanes) of mci_io_load */
    int64_t page;
    mci_pread_fn *fn;
    void *fn_ctx;
};

/* ---- one range ------------------------------------------------------------------------------- */

static int64_t call_read(mci_io *io, int fd, void *buf, int64_t n, int64_t off) {
    int64_t r;
    do {
        errno = 0;
        r = io->fn ? io->fn(io->fn_ctx, fd, buf, n, off) : pread(fd, buf, (size_t)n, off);
    } while (r < 0 && errno == EINTR);
    return r;
}

static int fail_read(const io_file *f, const mci_run *run, int64_t got, int sys, mc_error *err) {
    return mci_fail(err, MC_EIO, sys, "%s: wanted %lld bytes at offset %lld, got %lld: %s", f->path,
                    (long long)run->bytes, (long long)run->offset, (long long)got,
                    sys ? strerror(sys) : "end of file");
}

/* The kernel drops whole pages only, so the range is rounded outwards. */
static void drop_pages(const mci_io *io, const io_file *f, int64_t offset, int64_t bytes) {
    int64_t from = offset & -io->page;
    posix_fadvise(f->fd, from, mci_round_up(offset + bytes, io->page) - from, POSIX_FADV_DONTNEED);
}

/* The range from its `got`-th byte on. Every call but the first starts at a page, so that no page
 * is dropped half used and read twice. */
static int read_buffered(mci_io *io, io_file *f, const mci_run *run, int64_t got, int64_t *taken,
                         mc_error *err) {
    while (got < run->bytes) {
        int64_t at = run->offset + got;
        int64_t n = MCI_MIN(run->bytes - got, STEP - at % io->page);
        int64_t r = call_read(io, f->fd, run->dst + got, n, at);
        int sys = r < 0 ? errno : 0;
        drop_pages(io, f, at, n);
        if (r <= 0) return fail_read(f, run, got, sys, err);
        got += r;
        *taken += r;
    }
    return MC_OK;
}

/*   file   |....xxxxxxxx|xxxxxxxxxxxx|xxx.........|
 *          ^start ^offset             need^       ^span
 * A read may end early at the end of the file; that is fine once `need` is covered. */
static int read_direct(mci_io *io, io_file *f, const mci_run *run, int64_t *taken, mc_error *err) {
    int64_t lead = run->offset % MCI_IO_BLOCK, start = run->offset - lead;
    int64_t need = lead + run->bytes, span = mci_round_up(need, MCI_IO_BLOCK), done = 0;
    uint8_t *base = run->dst - lead;
    while (done < need) {
        int64_t at = done & -MCI_IO_BLOCK; /* a block that came in part is asked for again */
        int64_t n = MCI_MIN(span - at, CALL_MAX);
        int64_t r = call_read(io, f->direct_fd, base + at, n, start + at);
        if (r < 0 && (errno == EINVAL || errno == EOPNOTSUPP || errno == ENOTSUP)) {
            atomic_store(&f->direct, false);
            break;
        }
        if (r < 0) return fail_read(f, run, MCI_MAX(done - lead, 0), errno, err);
        *taken += r;
        if (at + r <= done) break; /* the end of the file, or a block that never comes whole */
        done = at + r;
    }
    return read_buffered(io, f, run, MCI_MAX(done - lead, 0), taken, err);
}

static io_file *get_file(mci_io *io, int32_t file) {
    io_file *f = NULL;
    pthread_mutex_lock(&io->lock);
    if (file >= 0 && file < io->n_file) f = io->files[file];
    pthread_mutex_unlock(&io->lock);
    return f;
}

static int find_range(mci_io *io, const mci_run *run, io_file **f, mc_error *err) {
    int64_t end;
    if (!(*f = get_file(io, run->file)))
        return mci_fail(err, MC_ERANGE, 0, "read: no file with id %d", run->file);
    if (!mci_add(run->offset, run->bytes, &end) || end > INT64_MAX - MCI_IO_BLOCK)
        return mci_fail(err, MC_ERANGE, 0, "%s: impossible range: %lld bytes at offset %lld",
                        (*f)->path, (long long)run->bytes, (long long)run->offset);
    return MC_OK;
}

static int read_run(mci_io *io, const mci_run *run, int64_t *taken, mc_error *err) {
    io_file *f;
    int rc = find_range(io, run, &f, err);
    if (rc < 0) return rc;
    /* memory that is not congruent to the file cannot take a direct read */
    bool congruent = ((uintptr_t)run->dst - (uintptr_t)run->offset) % MCI_IO_BLOCK == 0;
    if (congruent && atomic_load(&f->direct)) return read_direct(io, f, run, taken, err);
    return read_buffered(io, f, run, 0, taken, err);
}

/* ---- lanes ----------------------------------------------------------------------------------- */

static void append(mci_read *r, mci_read ***end) {
    r->next = NULL;
    **end = r;
    *end = &r->next;
}

static mci_read *take(mci_read **list, mci_read ***end) {
    mci_read *r = *list;
    if (r && !(*list = r->next)) *end = list;
    return r;
}

/* Huge pages that exist before the read make direct reads several times faster than pages that
 * appear one by one. Clearing them takes as long as reading on some virtual machines, so it is done
 * here and not in the thread that computes. */
static void prefault(uint8_t *p, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
    uintptr_t from = (uintptr_t)p & ~(uintptr_t)(MCI_IO_BLOCK - 1);
    if (madvise((void *)from, (size_t)bytes + (size_t)((uintptr_t)p - from), MADV_POPULATE_WRITE) ==
        0)
        return;
#endif
    for (int64_t i = 0; i < bytes; i += MCI_IO_BLOCK) ((volatile uint8_t *)p)[i] = 0;
}

static void *lane_main(void *arg) {
    mci_io *io = arg;
    bool ran = false;
    pthread_mutex_lock(&io->lock);
    for (;;) {
        while (!io->stop && !io->queue) pthread_cond_wait(&io->work, &io->lock);
        if (io->stop) break;
        mci_read *r = take(&io->queue, &io->queue_end);
        io->stats.lanes_ran += !ran;
        ran = true;
        pthread_mutex_unlock(&io->lock);

        double t0 = mci_now();
        r->err.code = MC_OK;
        r->bytes = 0;
        if (r->fresh) prefault(r->fresh, r->fresh_bytes);
        for (int32_t i = 0; i < r->n_run && r->err.code == MC_OK; i++)
            read_run(io, &r->run[i], &r->bytes, &r->err);
        t0 = mci_now() - t0;
        r->found = false;
        for (int32_t i = 0; r->scan && i < r->n_run && r->err.code == MC_OK; i++)
            r->found |= r->scan(r->run[i].dst, r->run[i].bytes);

        pthread_mutex_lock(&io->lock);
        if (!io->loading) {
            io->stats.reads++;
            io->stats.bytes += r->bytes;
            io->stats.read_s += t0;
        }
        append(r, &io->finished_end);
        pthread_cond_signal(&io->done);
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

/* Under the lock. Lanes take no signals: Ctrl-C belongs to the program's own threads. */
static int start_lanes(mci_io *io, mc_error *err) {
    pthread_attr_t attr;
    sigset_t all, old;
    int rc = 0;
    if (io->started == io->lanes) return MC_OK;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, (size_t)MCI_MAX(LANE_STACK, sysconf(_SC_THREAD_STACK_MIN)));
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (io->started < io->lanes && rc == 0) {
        rc = pthread_create(&io->thread[io->started], &attr, lane_main, io);
        if (rc == 0) io->started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (rc)
        return mci_fail(err, MC_ESYS, rc, "reader thread %d of %d: %s", io->started + 1, io->lanes,
                        strerror(rc));
    return MC_OK;
}

int mci_io_create(int mode, int lanes, mci_io **out, mc_error *err) {
    mci_io *io;
    *out = NULL;
    if (mode < MC_IO_AUTO || mode > MC_IO_DIRECT || lanes < 0)
        return mci_fail(err, MC_EINVAL, 0, "io: unknown mode %d or %d lanes", mode, lanes);
    if (!(io = calloc(1, sizeof *io))) return mci_fail(err, MC_ENOMEM, 0, "io: out of memory");
    io->mode = mode;
    io->lanes = lanes ? lanes : mode == MC_IO_PREAD ? 4 : 2;
    io->page = sysconf(_SC_PAGESIZE);
    io->queue_end = &io->queue;
    io->finished_end = &io->finished;
    io->thread = calloc((size_t)io->lanes, sizeof *io->thread);
    io->pieces = calloc((size_t)io->lanes * 2, sizeof *io->pieces);
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->work, NULL);
    pthread_cond_init(&io->done, NULL);
    if (!io->thread || !io->pieces) {
        mci_io_free(io);
        return mci_fail(err, MC_ENOMEM, 0, "io: out of memory");
    }
    *out = io;
    return MC_OK;
}

static void free_file(io_file *f) {
    if (f->fd >= 0) close(f->fd);
    if (f->direct_fd >= 0) close(f->direct_fd);
    free(f->path);
    free(f);
}

void mci_io_free(mci_io *io) {
    if (!io) return;
    pthread_mutex_lock(&io->lock);
    io->stop = true;
    pthread_cond_broadcast(&io->work);
    pthread_mutex_unlock(&io->lock);
    for (int i = 0; i < io->started; i++) pthread_join(io->thread[i], NULL);
    /* only now: a lane might have been inside pread on these */
    for (int32_t i = 0; i < io->n_file; i++) free_file(io->files[i]);
    pthread_cond_destroy(&io->work);
    pthread_cond_destroy(&io->done);
    pthread_mutex_destroy(&io->lock);
    free(io->files);
    free(io->thread);
    free(io->pieces);
    free(io);
}

int mci_io_lanes(mci_io *io) { return io->lanes; }

int mci_io_submit(mci_io *io, mci_read *r, mc_error *err) {
    pthread_mutex_lock(&io->lock);
    int rc = start_lanes(io, err);
    if (rc == MC_OK) {
        append(r, &io->queue_end);
        io->outstanding++;
        pthread_cond_signal(&io->work);
    }
    pthread_mutex_unlock(&io->lock);
    return rc;
}

bool mci_io_withdraw(mci_io *io, mci_read *r) {
    bool found = false;
    pthread_mutex_lock(&io->lock);
    for (mci_read **p = &io->queue; *p && !found; p = found ? p : &(*p)->next)
        if (*p == r) {
            found = true;
            if (!(*p = r->next)) io->queue_end = p;
            io->outstanding--;
        }
    pthread_mutex_unlock(&io->lock);
    return found;
}

mci_read *mci_io_next(mci_io *io, bool wait) {
    pthread_mutex_lock(&io->lock);
    while (wait && !io->finished && io->outstanding) pthread_cond_wait(&io->done, &io->lock);
    mci_read *r = take(&io->finished, &io->finished_end);
    if (r) io->outstanding--;
    pthread_mutex_unlock(&io->lock);
    return r;
}

/* ---- files ----------------------------------------------------------------------------------- */

/* What the file system says about direct reads, then what it does. */
static bool direct_works(int fd) {
#ifdef STATX_DIOALIGN
    struct statx sx;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &sx) == 0 && (sx.stx_mask & STATX_DIOALIGN) &&
        (sx.stx_dio_offset_align == 0 || sx.stx_dio_offset_align > MCI_IO_BLOCK ||
         sx.stx_dio_mem_align > MCI_IO_BLOCK))
        return false;
#endif
    void *block = aligned_alloc(MCI_IO_BLOCK, MCI_IO_BLOCK);
    ssize_t r = -1;
    if (block) do
            r = pread(fd, block, MCI_IO_BLOCK, 0);
        while (r < 0 && errno == EINTR);
    free(block);
    return r >= 0;
}

/* -1: no. The path may lead to another file by now, so the two descriptors are compared. */
static int open_direct(const char *path, int flags, const struct stat *st) {
    struct stat other;
    int fd = open(path, flags | O_DIRECT);
    if (fd < 0) return -1;
    if (fstat(fd, &other) == 0 && other.st_dev == st->st_dev && other.st_ino == st->st_ino &&
        direct_works(fd))
        return fd;
    close(fd);
    return -1;
}

static int open_file(const mci_io *io, const char *path, io_file **out, mc_error *err) {
    /* O_NONBLOCK: opening a pipe by mistake must not hang; it means nothing to a regular file */
    int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, rc = MC_OK;
    struct stat st;
    io_file *f = calloc(1, sizeof *f);
    if (!f) return mci_fail(err, MC_ENOMEM, 0, "%s: out of memory", path);
    f->direct_fd = -1;
    f->fd = open(path, flags);
    if (f->fd < 0 || fstat(f->fd, &st) < 0)
        rc = mci_fail(err, MC_EIO, errno, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = mci_fail(err, MC_EINVAL, 0, "%s: not a regular file", path);
    else if (!(f->path = strdup(path)))
        rc = mci_fail(err, MC_ENOMEM, 0, "%s: out of memory", path);
    if (rc < 0) {
        free_file(f);
        return rc;
    }
    f->size = st.st_size;
    posix_fadvise(f->fd, 0, 0, POSIX_FADV_RANDOM);
    if (io->mode != MC_IO_PREAD) f->direct_fd = open_direct(path, flags, &st);
    atomic_init(&f->direct, f->direct_fd >= 0);
    *out = f;
    return MC_OK;
}

/* Under the lock. */
static bool add_file(mci_io *io, io_file *f) {
    if (io->n_file == io->room) {
        int32_t room = io->room ? 2 * io->room : 16;
        io_file **t = room > INT32_MAX / 2 ? NULL : realloc(io->files, (size_t)room * sizeof *t);
        if (!t) return false;
        io->files = t;
        io->room = room;
    }
    io->files[io->n_file++] = f;
    return true;
}

int mci_io_open(mci_io *io, const char *path, mc_error *err) {
    io_file *f = NULL;
    int32_t id;
    pthread_mutex_lock(&io->lock);
    for (id = 0; id < io->n_file; id++)
        if (!strcmp(io->files[id]->path, path)) break;
    int rc = id < io->n_file ? MC_OK : open_file(io, path, &f, err);
    if (f && !add_file(io, f)) {
        free_file(f);
        rc = mci_fail(err, MC_ENOMEM, 0, "%s: out of memory", path);
    }
    pthread_mutex_unlock(&io->lock);
    return rc < 0 ? rc : id;
}

int64_t mci_io_size(mci_io *io, int32_t file) {
    const io_file *f = get_file(io, file);
    return f ? f->size : -1;
}

const char *mci_io_path(mci_io *io, int32_t file) {
    const io_file *f = get_file(io, file);
    return f ? f->path : "(no file)";
}

/* ---- reads that wait ------------------------------------------------------------------------- */

/* Pieces end at multiples of PIECE in the file, so that no two lanes write one block of memory. */
int mci_io_load(mci_io *io, const mci_run *run, mc_error *err) {
    io_file *f;
    mci_read *r, *spare = NULL, **spare_end = &spare;
    int64_t worst = INT64_MAX;
    int rc = find_range(io, run, &f, err);
    if (rc < 0) return rc;
    for (int i = 0; i < 2 * io->lanes; i++) append(&io->pieces[i], &spare_end);
    pthread_mutex_lock(&io->lock);
    io->loading = true; /* the counters are about experts */
    pthread_mutex_unlock(&io->lock);
    for (int64_t at = run->offset, end = at + run->bytes;;) {
        while (at < end && rc == MC_OK && (r = take(&spare, &spare_end))) {
            int64_t n = MCI_MIN(end, (at / PIECE + 1) * PIECE) - at;
            *r = (mci_read){
                .run = {{run->file, at, n, run->dst + (at - run->offset)}}, .n_run = 1, .tag = at};
            if ((rc = mci_io_submit(io, r, err)) == MC_OK) at += n;
        }
        if (!(r = mci_io_next(io, true))) break;
        if (r->err.code < 0 && r->tag < worst) { /* the lowest offset, whatever came first */
            worst = r->tag;
            rc = r->err.code;
            if (err) *err = r->err;
        }
        append(r, &spare_end);
    }
    pthread_mutex_lock(&io->lock);
    io->loading = false;
    pthread_mutex_unlock(&io->lock);
    return rc;
}

int mci_io_fetch(mci_io *io, int32_t file, int64_t offset, int64_t bytes, void *dst,
                 mc_error *err) {
    mci_run run = {file, offset, bytes, dst};
    int64_t taken = 0;
    io_file *f;
    int rc = find_range(io, &run, &f, err);
    return rc < 0 ? rc : read_buffered(io, f, &run, 0, &taken, err);
}

void mci_io_get_stats(mci_io *io, mci_io_stats *out) {
    pthread_mutex_lock(&io->lock);
    *out = io->stats;
    out->lanes = io->lanes;
    for (int32_t i = 0; i < io->n_file; i++)
        if (atomic_load(&io->files[i]->direct))
            out->files_direct++;
        else
            out->files_pread++;
    pthread_mutex_unlock(&io->lock);
}

void mci_io_inject(mci_io *io, mci_pread_fn *fn, void *ctx) {
    pthread_mutex_lock(&io->lock);
    io->fn = fn;
    io->fn_ctx = ctx;
    pthread_mutex_unlock(&io->lock);
}
