/* io_fixture.h - what tests of the reader share: a file of known bytes beside the program, memory
 * with canaries, a pread that misbehaves on demand. */
#ifndef IO_FIXTURE_H
#define IO_FIXTURE_H
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"
#include "test.h"

enum { BLOCK = MCI_IO_BLOCK, SIZE = (9 << 20) + 1234, CANARY = 0x5a };

static char dir[4096], big[4200];

static inline uint8_t byte_at(int64_t i) {
    uint64_t z = (uint64_t)i * 0x9e3779b97f4a7c15u;
    return (uint8_t)(z >> 56 ^ z >> 40 ^ (uint64_t)i);
}

static inline void make_file(const char *path, int64_t size) {
    FILE *f = fopen(path, "w");
    for (int64_t i = 0; f && i < size; i++) putc(byte_at(i), f);
    /* dirty pages cannot be dropped: the large file, whose pages are counted, is clean */
    if (!f || fflush(f) || (size == SIZE && fsync(fileno(f))) || fclose(f)) {
        printf("FAIL cannot write %s: %s\n", path, strerror(errno));
        exit(1);
    }
}

/* Pages of a file in the page cache; drop: throw them out first. */
static inline int64_t cached_pages(const char *path, bool drop) {
    int fd = open(path, O_RDONLY);
    struct stat st;
    int64_t n = 0, page = sysconf(_SC_PAGESIZE);
    if (fd < 0 || fstat(fd, &st) < 0) return -1;
    if (drop) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    size_t pages = (size_t)((st.st_size + page - 1) / page);
    uint8_t *seen = test_alloc(pages);
    void *map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED || mincore(map, (size_t)st.st_size, seen) < 0) n = -1;
    for (size_t i = 0; n >= 0 && i < pages; i++) n += seen[i] & 1;
    if (map != MAP_FAILED) munmap(map, (size_t)st.st_size);
    free(seen);
    close(fd);
    return n;
}

/* Memory for a range: room around its superset, filled with canaries. */
typedef struct target {
    uint8_t *mem, *base;
    int64_t size;
} target;

static inline target make_target(int64_t bytes) {
    target t = {.size = bytes + 5 * BLOCK};
    t.mem = test_alloc((size_t)t.size + BLOCK);
    t.base = t.mem + (BLOCK - (uintptr_t)t.mem % BLOCK) % BLOCK;
    memset(t.base, CANARY, (size_t)t.size);
    return t;
}

static inline mci_run run_into(const target *t, int32_t file, int64_t offset, int64_t bytes) {
    return (mci_run){file, offset, bytes, t->base + BLOCK + offset % BLOCK};
}

/* The same for a read that is submitted, which needs no memory when files are mapped. */
static inline mci_run run_of(mci_io *io, const target *t, int32_t file, int64_t offset,
                             int64_t bytes) {
    mci_run run = run_into(t, file, offset, bytes);
    if (mci_io_asked(io) == MC_IO_MMAP) run.dst = NULL;
    return run;
}

/* io: NULL for a run with memory. */
static inline bool range_right(mci_io *io, const target *t, const mci_run *run) {
    int64_t lead = run->offset % BLOCK, span = mci_round_up(lead + run->bytes, BLOCK);
    const uint8_t *p = run->dst ? run->dst : mci_io_at(io, run->file, run->offset);
    for (int64_t i = 0; i < run->bytes; i++)
        if (p[i] != byte_at(run->offset + i)) return false;
    if (!run->dst) span = -BLOCK; /* all of t is as it was */
    for (int64_t i = 0; i < t->size; i++)
        if ((i < BLOCK || i >= BLOCK + span) && t->base[i] != CANARY) return false;
    return true;
}

static inline mci_io *open_io(int mode, int lanes, int32_t *file) {
    mc_error err = {0};
    mci_io *io = NULL;
    int rc = mci_io_create(mode, lanes, &io, &err);
    CHECK(rc == MC_OK, "%s", err.message);
    *file = mci_io_open(io, big, &err);
    CHECK(*file >= 0, "%s", err.message);
    return io;
}

/* ---- injected pread -------------------------------------------------------------------------- */

typedef struct inject {
    pthread_mutex_t lock;
    rng r;
    bool shorten, interrupt, delay, refuse_direct;
    int64_t fail_at; /* EIO for a call that covers this offset; -1: never */
    bool pretend;    /* claims success without a read */
    int64_t calls, largest, total;
} inject;

static inline int64_t injected(void *ctx, int fd, void *buf, int64_t n, int64_t off) {
    inject *j = ctx;
    pthread_mutex_lock(&j->lock);
    uint64_t dice = rng_next(&j->r);
    j->calls++;
    j->largest = MCI_MAX(j->largest, n);
    j->total += n;
    pthread_mutex_unlock(&j->lock);
    if (j->delay) usleep((useconds_t)(dice % 100));
    if (j->interrupt && dice >> 8 & 1) {
        errno = EINTR;
        return -1;
    }
    if (j->refuse_direct && fcntl(fd, F_GETFL) & O_DIRECT) {
        errno = EINVAL;
        return -1;
    }
    if (j->fail_at >= off && j->fail_at < off + n) {
        errno = EIO;
        return -1;
    }
    if (j->pretend) return n;
    int64_t r = pread(fd, buf, (size_t)n, off);
    if (r > 1 && j->shorten && dice >> 9 & 3) r = 1 + (int64_t)(dice >> 16) % r;
    return r;
}

static inline inject new_inject(uint64_t seed) {
    return (inject){.lock = PTHREAD_MUTEX_INITIALIZER, .r = {seed}, .fail_at = -1};
}

/* The folder and its large file; the first argument: where, in place of beside the program. */
static inline bool begin_files(int argc, char **argv) {
    char at[4000];
    snprintf(at, sizeof at, "%s", argc > 1 ? argv[1] : argv[0]);
    snprintf(dir, sizeof dir, "%s/io_XXXXXX", argc > 1 ? at : dirname(at));
    if (!mkdtemp(dir)) {
        printf("FAIL cannot make a folder %s: %s\n", dir, strerror(errno));
        return false;
    }
    snprintf(big, sizeof big, "%s/big", dir);
    make_file(big, SIZE);
    return true;
}

static inline int end_files(void) {
    unlink(big);
    rmdir(dir);
    return test_end();
}

#endif
