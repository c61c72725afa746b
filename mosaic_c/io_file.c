/* io_file.c - files and the ways to read a range of one. */
#include "io_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    STEP = 4 << 20, /* of one buffered call: what a reader may have in the page cache */
    BOUNCE = 64 << 10
};

/* ---- reads ----------------------------------------------------------------------------------- */

static int64_t call_read(const mci_shim *shim, int fd, void *buf, int64_t n, int64_t off) {
    int64_t r;
    do {
        errno = 0;
        r = shim->fn ? shim->fn(shim->ctx, fd, buf, n, off) : pread(fd, buf, (size_t)n, off);
    } while (r < 0 && errno == EINTR);
    return r;
}

static int fail_read(const mci_file *f, const mci_run *run, int64_t got, int sys, mc_error *err) {
    return mci_fail(err, MC_EIO, sys, "%s: wanted %lld bytes at offset %lld, got %lld: %s", f->path,
                    (long long)run->bytes, (long long)run->offset, (long long)got,
                    sys ? strerror(sys) : "end of file");
}

/* The kernel drops whole pages only, so the range is rounded outwards. */
static void drop_pages(const mci_file *f, int64_t offset, int64_t bytes, int64_t page) {
    int64_t from = offset & -page;
    posix_fadvise(f->fd, from, mci_round_up(offset + bytes, page) - from, POSIX_FADV_DONTNEED);
}

/* The range from its `got`-th byte on. Every call but the first starts at a page, so that no page
 * is dropped half used and read twice. */
static int read_buffered(mci_file *f, const mci_shim *shim, const mci_run *run, int64_t got,
                         int64_t *taken, mc_error *err) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    while (got < run->bytes) {
        int64_t at = run->offset + got;
        int64_t n = MCI_MIN(run->bytes - got, STEP - at % page);
        int64_t r = call_read(shim, f->fd, run->dst + got, n, at);
        int sys = r < 0 ? errno : 0;
        drop_pages(f, at, n, page);
        if (r <= 0) return fail_read(f, run, got, sys, err);
        got += r;
        *taken += r;
    }
    return MC_OK;
}

int64_t mci_run_span(const mci_run *run) {
    return mci_round_up(run->offset % MCI_IO_BLOCK + run->bytes, MCI_IO_BLOCK);
}

/*   file   |....xxxxxxxx|xxxxxxxxxxxx|xxx.........|
 *          ^start ^offset             need^       ^span
 * A read may end early at the end of the file; that is fine once `need` is covered. */
static int read_direct(mci_file *f, const mci_shim *shim, const mci_run *run, int64_t done,
                       int64_t *taken, mc_error *err) {
    int64_t lead = run->offset % MCI_IO_BLOCK, start = run->offset - lead;
    int64_t need = lead + run->bytes, span = mci_run_span(run);
    uint8_t *base = run->dst - lead;
    while (done < need) {
        int64_t at = done & -MCI_IO_BLOCK; /* a block that came in part is asked for again */
        int64_t n = MCI_MIN(span - at, MCI_IO_CALL);
        int64_t r = call_read(shim, f->direct_fd, base + at, n, start + at);
        if (r < 0 && (errno == EINVAL || errno == EOPNOTSUPP || errno == ENOTSUP)) {
            atomic_store(&f->refusal, errno);
            atomic_store(&f->direct, false);
            break;
        }
        if (r < 0) return fail_read(f, run, MCI_MAX(done - lead, 0), errno, err);
        *taken += r;
        if (at + r <= done) break; /* the end of the file, or a block that never comes whole */
        done = at + r;
    }
    return read_buffered(f, shim, run, MCI_MAX(done - lead, 0), taken, err);
}

/* Brings the range into the page cache, where the mapping finds it: for kernels before 5.14, which
 * cannot be asked to, for tests that inject faults, and to learn what was wrong. */
static int read_through(mci_file *f, const mci_shim *shim, const mci_run *run, mc_error *err) {
    uint8_t *bounce = malloc(BOUNCE);
    int64_t got = 0, r = 1;
    int sys = 0;
    if (!bounce) return mci_fail(err, MC_ENOMEM, 0, "%s: out of memory", f->path);
    while (got < run->bytes && r > 0) {
        r = call_read(shim, f->fd, bounce, MCI_MIN(run->bytes - got, BOUNCE), run->offset + got);
        sys = r < 0 ? errno : 0;
        got += MCI_MAX(r, 0);
    }
    free(bounce);
    return r > 0 || run->bytes == 0 ? MC_OK : fail_read(f, run, got, sys, err);
}

static int read_mapped(mci_file *f, const mci_shim *shim, const mci_run *run, int64_t *taken,
                       mc_error *err) {
    const int64_t page = sysconf(_SC_PAGESIZE), from = run->offset & -page;
    const int64_t bytes = mci_round_up(run->offset + run->bytes, page) - from;
    struct stat st;
    int rc = -1;
    if (fstat(f->fd, &st) < 0) return fail_read(f, run, 0, errno, err);
    int64_t size = f->map ? MCI_MIN(f->size, st.st_size) : 0; /* emulators populate nothing */
    if (run->offset + run->bytes > size)
        return fail_read(f, run, MCI_MAX(size - run->offset, 0), 0, err);
    if (!shim->fn) madvise(f->map + from, (size_t)bytes, MADV_WILLNEED); /* not page by page */
#ifdef MADV_POPULATE_READ
    while (!shim->fn && (rc = madvise(f->map + from, (size_t)bytes, MADV_POPULATE_READ)) < 0 &&
           errno == EINTR) {}
#endif
    if (rc < 0 && (rc = read_through(f, shim, run, err)) < 0) return rc;
    *taken += bytes;
    return MC_OK;
}

bool mci_file_direct(mci_file *f, const mci_run *run) {
    /* memory that is not congruent to the file cannot take a direct read */
    return run->dst && ((uintptr_t)run->dst - (uintptr_t)run->offset) % MCI_IO_BLOCK == 0 &&
           atomic_load(&f->direct);
}

int mci_file_read(mci_file *f, const mci_shim *shim, const mci_run *run, int64_t done,
                  int64_t *taken, mc_error *err) {
    if (!run->dst) return read_mapped(f, shim, run, taken, err);
    if (mci_file_direct(f, run)) return read_direct(f, shim, run, done, taken, err);
    done = MCI_MAX(done - run->offset % MCI_IO_BLOCK, 0);
    return read_buffered(f, shim, run, done, taken, err);
}

int mci_file_fetch(mci_file *f, const mci_shim *shim, const mci_run *run, mc_error *err) {
    int64_t taken = 0;
    return read_buffered(f, shim, run, 0, &taken, err);
}

/* ---- open, close ----------------------------------------------------------------------------- */

/* What the file system says about direct reads, then what it does: 0 or the errno of a refusal. */
static int try_direct(int fd) {
#ifdef STATX_DIOALIGN
    struct statx sx;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &sx) == 0 && (sx.stx_mask & STATX_DIOALIGN) &&
        (sx.stx_dio_offset_align == 0 || sx.stx_dio_offset_align > MCI_IO_BLOCK ||
         sx.stx_dio_mem_align > MCI_IO_BLOCK))
        return EOPNOTSUPP;
#endif
    void *block = aligned_alloc(MCI_IO_BLOCK, MCI_IO_BLOCK);
    ssize_t r = -1;
    errno = ENOMEM;
    if (block) do
            r = pread(fd, block, MCI_IO_BLOCK, 0);
        while (r < 0 && errno == EINTR);
    int sys = r < 0 ? errno : 0;
    free(block);
    return sys;
}

/* Once a file is known to be a regular one: on old kernels io_uring gives up a read of a descriptor
 * that must not block instead of waiting for the disk. */
static void may_block(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK); }

/* The path may lead to another file by now, so the two descriptors are compared. */
static void open_direct(mci_file *f, int flags, const struct stat *st) {
    struct stat other;
    int sys = 0;
    f->direct_fd = open(f->path, flags | O_DIRECT);
    if (f->direct_fd < 0 || fstat(f->direct_fd, &other) < 0)
        sys = errno;
    else if (other.st_dev != st->st_dev || other.st_ino != st->st_ino)
        sys = ESTALE;
    else
        sys = try_direct(f->direct_fd);
    if (sys && f->direct_fd >= 0) {
        close(f->direct_fd);
        f->direct_fd = -1;
    }
    if (!sys) may_block(f->direct_fd);
    atomic_store(&f->refusal, sys);
    atomic_store(&f->direct, sys == 0);
}

static int map_file(mci_file *f, mc_error *err) {
    if (f->size == 0) return MC_OK;
    void *p = mmap(NULL, (size_t)f->size, PROT_READ, MAP_SHARED, f->fd, 0);
    if (p == MAP_FAILED)
        return mci_fail(err, MC_ESYS, errno, "%s: cannot be mapped (%lld bytes): %s; use --io auto",
                        f->path, (long long)f->size, strerror(errno));
    f->map = p;
    madvise(p, (size_t)f->size, MADV_RANDOM); /* no readahead around a fault */
    return MC_OK;
}

static void close_file(mci_file *f) {
    if (f->map) munmap(f->map, (size_t)f->size);
    if (f->fd >= 0) close(f->fd);
    if (f->direct_fd >= 0) close(f->direct_fd);
    free(f->path);
    free(f);
}

static int open_file(const mci_files *t, const char *path, mci_file **out, mc_error *err) {
    /* O_NONBLOCK: opening a pipe by mistake must not hang; it means nothing to a regular file */
    int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, rc = MC_OK;
    struct stat st;
    mci_file *f = calloc(1, sizeof *f);
    if (!f) return mci_fail(err, MC_ENOMEM, 0, "%s: out of memory", path);
    f->direct_fd = -1;
    f->fd = open(path, flags);
    if (f->fd < 0 || fstat(f->fd, &st) < 0) {
        rc = mci_fail(err, MC_EIO, errno, "%s: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        rc = mci_fail(err, MC_EINVAL, 0, "%s: not a regular file", path);
    } else if (!(f->path = strdup(path))) {
        rc = mci_fail(err, MC_ENOMEM, 0, "%s: out of memory", path);
    } else {
        f->size = st.st_size;
        may_block(f->fd);
        posix_fadvise(f->fd, 0, 0, POSIX_FADV_RANDOM);
        if (t->direct) open_direct(f, flags, &st);
        if (t->map) rc = map_file(f, err);
    }
    if (rc < 0) {
        close_file(f);
        return rc;
    }
    *out = f;
    return MC_OK;
}

int mci_file_check(const mci_file *f, mc_error *err) {
    struct stat st;
    if (fstat(f->fd, &st) < 0)
        return mci_fail(err, MC_EIO, errno, "%s: %s", f->path, strerror(errno));
    if (st.st_size >= f->size) return MC_OK;
    return mci_fail(err, MC_EIO, 0, "%s: wanted %lld bytes, got %lld: it shrank while mapped",
                    f->path, (long long)f->size, (long long)st.st_size);
}

/* ---- table ----------------------------------------------------------------------------------- */

void mci_files_init(mci_files *t, bool direct, bool map) {
    *t = (mci_files){.direct = direct, .map = map};
    pthread_mutex_init(&t->lock, NULL);
}

void mci_files_close(mci_files *t) {
    for (int32_t i = 0; i < t->n; i++) close_file(t->file[i]);
    free(t->file);
    pthread_mutex_destroy(&t->lock);
}

static bool add_file(mci_files *t, mci_file *f) {
    if (t->n == t->room) {
        int32_t room = t->room ? 2 * t->room : 16;
        mci_file **p = room > INT32_MAX / 2 ? NULL : realloc(t->file, (size_t)room * sizeof *p);
        if (!p) return false;
        t->file = p;
        t->room = room;
    }
    t->file[t->n++] = f;
    return true;
}

int mci_files_open(mci_files *t, const char *path, mc_error *err) {
    mci_file *f = NULL;
    int32_t id;
    pthread_mutex_lock(&t->lock);
    for (id = 0; id < t->n; id++)
        if (!strcmp(t->file[id]->path, path)) break;
    int rc = id < t->n ? MC_OK : open_file(t, path, &f, err);
    if (f && !add_file(t, f)) {
        close_file(f);
        rc = mci_fail(err, MC_ENOMEM, 0, "%s: out of memory", path);
    }
    pthread_mutex_unlock(&t->lock);
    return rc < 0 ? rc : id;
}

mci_file *mci_files_get(mci_files *t, int32_t id) {
    mci_file *f = NULL;
    pthread_mutex_lock(&t->lock);
    if (id >= 0 && id < t->n) f = t->file[id];
    pthread_mutex_unlock(&t->lock);
    return f;
}

int mci_files_find(mci_files *t, const mci_run *run, mci_file **f, mc_error *err) {
    int64_t end;
    if (!(*f = mci_files_get(t, run->file)))
        return mci_fail(err, MC_ERANGE, 0, "read: no file with id %d", run->file);
    if (!mci_add(run->offset, run->bytes, &end) || end > INT64_MAX - MCI_IO_BLOCK)
        return mci_fail(err, MC_ERANGE, 0, "%s: impossible range: %lld bytes at offset %lld",
                        (*f)->path, (long long)run->bytes, (long long)run->offset);
    return MC_OK;
}

void mci_prefault(uint8_t *p, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
    uintptr_t from = (uintptr_t)p & ~(uintptr_t)(MCI_IO_BLOCK - 1);
    if (madvise((void *)from, (size_t)bytes + (size_t)((uintptr_t)p - from), MADV_POPULATE_WRITE) ==
        0)
        return;
#endif
    for (int64_t i = 0; i < bytes; i += MCI_IO_BLOCK) ((volatile uint8_t *)p)[i] = 0;
}
