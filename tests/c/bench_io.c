/* bench_io.c - see bench_io.h. */
#include "bench_io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base.h"
#include "io.h"
#include "rng.h"

enum {
    WINDOW = 64 << 20, /* of a file that is looked at in one mapping */
    HUGE_PAGE = 2 << 20
};

typedef struct disk {
    const mc_bench_io_opts *o;
    mci_io *io;
    int32_t file;
    uint64_t places; /* offsets to choose from, in units of align */
    rng rng;
    uint64_t next, stride, left; /* mapped: the next place, to the one after, places left */
    mci_mem mem;
    void *arena;
    mci_read *reads; /* (depth) */
    int64_t bytes;
} disk;

static int check(const mc_bench_io_opts *o, mc_error *err) {
    if (o->lanes < 1 || o->depth < o->lanes || o->align < 1 || o->align % MCI_IO_BLOCK ||
        o->size < 1 || o->size % MCI_IO_BLOCK || !(o->seconds > 0))
        return mci_fail(err, MC_EINVAL, 0,
                        "disk benchmark: %lld bytes at multiples of %lld, %d lanes, depth %d, %g s",
                        (long long)o->size, (long long)o->align, o->lanes, o->depth, o->seconds);
    return MC_OK;
}

/* Pages of a file that stay in the page cache although they were dropped: dirty ones, ones that
 * somebody has mapped, and all of them where the file lives in memory. */
static int cached_bytes(const char *path, int64_t *out, mc_error *err) {
    int64_t page = sysconf(_SC_PAGESIZE), size, count = 0;
    unsigned char *seen = NULL;
    int rc = MC_OK, fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || (size = lseek(fd, 0, SEEK_END)) < 0) {
        rc = mci_fail(err, MC_EIO, errno, "%s: %s", path, strerror(errno));
        goto done;
    }
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (!(seen = malloc((size_t)(WINDOW / page)))) {
        rc = mci_fail(err, MC_ENOMEM, ENOMEM, "disk benchmark: out of memory");
        goto done;
    }
    for (int64_t at = 0; at < size && rc == MC_OK; at += WINDOW) {
        size_t n = (size_t)MCI_MIN(size - at, WINDOW),
               pages = (n + (size_t)page - 1) / (size_t)page;
        void *map = mmap(NULL, n, PROT_READ, MAP_SHARED, fd, at);
        if (map == MAP_FAILED || mincore(map, n, seen) < 0)
            rc = mci_fail(err, MC_ESYS, errno, "%s: what is cached of it: %s", path,
                          strerror(errno));
        for (size_t i = 0; i < pages && rc == MC_OK; i++)
            if (seen[i] & 1) count += MCI_MIN(page, size - at - (int64_t)i * page);
        if (map != MAP_FAILED) munmap(map, n);
    }
    *out = count;
done:
    free(seen);
    if (fd >= 0) close(fd);
    return rc;
}

/* A step that comes to every place before it comes to one again. */
static void choose_order(disk *d) {
    d->left = d->places;
    d->next = rng_below(&d->rng, d->places);
    for (d->stride = 1 + rng_below(&d->rng, d->places);; d->stride++) {
        uint64_t a = d->stride, b = d->places, c;
        while ((c = a % b)) a = b, b = c;
        if (b == 1) return;
    }
}

static int ask(disk *d, mci_read *r, mc_error *err) {
    uint64_t place = d->o->mapped ? d->next : rng_below(&d->rng, d->places);
    int64_t at = (int64_t)place * d->o->align;
    d->next = (d->next + d->stride) % d->places;
    d->left--;
    *r = (mci_read){.run = {{d->file, at, d->o->size, r->run[0].dst}}, .n_run = 1};
    return mci_io_submit(d->io, r, err);
}

/* Reads into every place of the arena, each anew until the time is over (once, where it is over at
 * the start). A failed read is asked for no more; what is in flight is waited for. */
static int pass(disk *d, double end, mc_bench_io_run *out, mc_error *err) {
    int rc = MC_OK;
    mci_read *r;
    for (int32_t i = 0; i < d->o->depth && d->left && rc == MC_OK; i++)
        rc = ask(d, &d->reads[i], err);
    while ((r = mci_io_next(d->io, true))) {
        if (rc == MC_OK && r->err.code < 0) {
            rc = r->err.code;
            if (err) *err = r->err;
        }
        out->reads++;
        out->bytes += d->o->size;
        if (rc == MC_OK && d->left && mci_now() < end) rc = ask(d, r, err);
    }
    return rc;
}

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static int open_disk(disk *d, const char *path, mc_error *err) {
    const mc_bench_io_opts *o = d->o;
    int rc = mci_io_create(o->mode, o->lanes, &d->io, err);
    if (rc < 0 || (rc = d->file = mci_io_open(d->io, path, err)) < 0) return rc;
    int64_t last = mci_io_size(d->io, d->file) - o->size;
    if (last < 0)
        return mci_fail(err, MC_EINVAL, 0, "%s: reads of %lld bytes from a file of %lld", path,
                        (long long)o->size, (long long)(last + o->size));
    d->places = (uint64_t)(last / o->align) + 1;
    choose_order(d);
    if (!o->mapped) d->left = UINT64_MAX;
    if (!(d->reads = calloc((size_t)o->depth, sizeof *d->reads)))
        return mci_fail(err, MC_ENOMEM, ENOMEM, "disk benchmark: out of memory");
    if (o->mapped) return MC_OK;
    if (!mci_mul(o->size, o->depth, &d->bytes))
        return mci_fail(err, MC_EINVAL, 0, "disk benchmark: %d reads of %lld bytes", o->depth,
                        (long long)o->size);
    /* whole huge pages: the rest of a range would be small ones, and reads into it slower */
    d->bytes = mci_round_up(d->bytes, HUGE_PAGE);
    rc = mci_alloc(&d->mem, MC_MEM_CACHE, d->bytes, "memory to read into", &d->arena, err);
    if (rc < 0) return rc;
    uint8_t *p = d->arena;
    memset(p, 1, (size_t)d->bytes);
    for (int32_t i = 0; i < o->depth; i++) d->reads[i].run[0].dst = p + i * o->size;
    return MC_OK;
}

int mc_bench_io(const char *path, const mc_bench_io_opts *o, mc_bench_io_run *out, mc_error *err) {
    disk d = {.o = o, .rng = {o->seed}};
    mci_io_stats stats;
    *out = (mc_bench_io_run){0};
    int rc = check(o, err);
    if (rc < 0 || (rc = open_disk(&d, path, err)) < 0) goto done;
    if ((rc = cached_bytes(path, &out->cached, err)) < 0) goto done;
    if (!o->mapped && (rc = pass(&d, 0, out, err)) < 0) goto done;
    out->reads = out->bytes = 0;
    double cpu = cpu_seconds(), start = mci_now();
    rc = pass(&d, start + o->seconds, out, err);
    out->wall_s = mci_now() - start;
    out->cpu_s = cpu_seconds() - cpu;
    mci_io_get_stats(d.io, &stats);
    out->lanes = stats.lanes;
    out->lanes_ran = stats.lanes_ran;
    out->direct = stats.files_direct;
done:
    mci_io_free(d.io);
    mci_release(&d.mem, MC_MEM_CACHE, d.arena, d.bytes);
    free(d.reads);
    return rc;
}
