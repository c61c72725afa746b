/* test_io.c - the reader: exact bytes in every mode, honest errors, injected faults, and nothing
 * left in the page cache. Its files lie beside the program, on a real file system. */
#include "io_fixture.h"

/* ---- cases ----------------------------------------------------------------------------------- */

static void check_open(void) {
    char path[4300];
    mc_error err = {0};
    mci_io *io;
    CHECK(mci_io_create(MC_IO_MMAP + 1, 0, &io, &err) == MC_EINVAL && !io, "mode");
    mci_io_create(MC_IO_AUTO, 0, &io, &err);
    CHECK(mci_io_lanes(io) == 4, "%d lanes", mci_io_lanes(io));
    int file = mci_io_open(io, big, &err);
    CHECK(file == 0 && mci_io_open(io, big, &err) == 0, "same path, same id");
    CHECK(mci_io_size(io, 0) == SIZE && mci_io_size(io, 1) == -1 && mci_io_size(io, -1) == -1,
          "size");
    CHECK(!strcmp(mci_io_path(io, 0), big), "path");
    snprintf(path, sizeof path, "%s/absent", dir);
    CHECK(mci_io_open(io, path, &err) == MC_EIO && err.sys == ENOENT && strstr(err.message, path),
          "%s", err.message);
    CHECK(mci_io_open(io, dir, &err) == MC_EINVAL, "a folder is no file: %s", err.message);
    snprintf(path, sizeof path, "%s/pipe", dir);
    if (mkfifo(path, 0600) == 0) {
        CHECK(mci_io_open(io, path, &err) == MC_EINVAL, "a pipe is no file: %s", err.message);
        unlink(path);
    }
    bool all = true; /* far more than the table's first size */
    for (int i = 1; i <= 100; i++) {
        snprintf(path, sizeof path, "%s/f%d", dir, i);
        make_file(path, i);
        all = all && mci_io_open(io, path, &err) == i;
        unlink(path);
    }
    for (int i = 1; i <= 100; i++) {
        uint8_t last = 0;
        all = all && mci_io_size(io, i) == i &&
              mci_io_fetch(io, i, i - 1, 1, &last, &err) == MC_OK && last == byte_at(i - 1);
    }
    CHECK(all, "100 files: %s", err.message);
    mci_io_stats st;
    mci_io_get_stats(io, &st);
    CHECK(st.files_direct + st.files_pread == 101 && st.lanes_ran == 0 && st.reads == 0, "%d + %d",
          st.files_direct, st.files_pread);
    mci_io_free(io);
    mci_io_create(MC_IO_PREAD, 0, &io, &err);
    CHECK(mci_io_lanes(io) == 4, "%d lanes", mci_io_lanes(io));
    mci_io_free(io);
    mci_io_free(NULL);
}

static int64_t random_offset(rng *r, int64_t *bytes) {
    static const int64_t edge[] = {1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 200000};
    *bytes = rng_below(r, 2) ? edge[rng_below(r, 7)] : 1 + (int64_t)rng_below(r, 300000);
    int64_t at = (int64_t)rng_below(r, (uint64_t)(SIZE - *bytes + 1));
    switch (rng_below(r, 4)) {
    case 0:
        return SIZE - *bytes; /* the tail */
    case 1:
        return at & -BLOCK;
    default:
        return at;
    }
}

/* Many reads of one to three runs at once, under faults that a reader must survive. */
static void check_ranges(int mode, int lanes, const inject *faults) {
    enum { N = 24 };
    inject j = faults ? *faults : new_inject(1);
    rng r = {(uint64_t)(mode * 100 + lanes)};
    mc_error err = {0};
    mci_read reads[N];
    target t[N][3];
    int32_t file;
    int64_t want = 0, got = 0, last = -1;
    bool ordered = true;
    mci_io *io = open_io(mode, lanes, &file);
    if (faults) mci_io_inject(io, injected, &j);
    for (int round = 0; round < 3; round++) {
        int n_back = 0;
        for (int i = 0; i < N; i++) {
            reads[i] = (mci_read){.tag = i, .n_run = 1 + (int32_t)rng_below(&r, 3)};
            for (int k = 0; k < reads[i].n_run; k++) {
                int64_t bytes, offset = random_offset(&r, &bytes);
                t[i][k] = make_target(bytes);
                reads[i].run[k] = run_of(io, &t[i][k], file, offset, bytes);
                want += bytes;
            }
            int rc = mci_io_submit(io, &reads[i], &err);
            CHECK(rc == MC_OK, "%s", err.message);
        }
        for (mci_read *d; (d = mci_io_next(io, true)); n_back++) {
            CHECK(d->err.code == MC_OK, "%s", d->err.message);
            ordered = ordered && (d->tag > last || d->tag == 0);
            last = d->tag;
            got += d->bytes;
            for (int k = 0; k < d->n_run; k++) {
                CHECK(range_right(io, &t[d->tag][k], &d->run[k]),
                      "mode %d, %lld bytes at %lld: wrong bytes", mode, (long long)d->run[k].bytes,
                      (long long)d->run[k].offset);
                free(t[d->tag][k].mem);
            }
        }
        CHECK(n_back == N && !mci_io_next(io, false), "%d reads came back", n_back);
    }
    mci_io_stats st;
    mci_io_get_stats(io, &st);
    if (lanes == 1) CHECK(ordered, "one lane is first in, first out");
    CHECK(st.reads == 3 * N && st.bytes == got && got >= want && st.lanes == lanes &&
              st.lanes_ran >= (mode != MC_IO_URING) && st.lanes_ran <= lanes &&
              st.read_s > 0 && st.busy_s > 0 && st.depth >= 1 && st.depth <= N,
          "%lld reads, %lld bytes of %lld wanted, %d lanes ran", (long long)st.reads,
          (long long)st.bytes, (long long)want, st.lanes_ran);
    if (mode == MC_IO_PREAD && !(faults && faults->shorten))
        CHECK(st.bytes == want, "pread takes exact ranges");
    CHECK(st.retried == 0, "%lld runs failed in the ring", (long long)st.retried);
    if (faults && faults->refuse_direct && mode != MC_IO_MMAP)
        CHECK(st.files_direct == 0 && st.files_pread == 1, "the refusal shows in the stats");
    mci_io_free(io);
}

static void check_faults(int mode) {
    for (int lanes = 1; lanes <= 5; lanes += 2) {
        inject j = new_inject((uint64_t)lanes);
        check_ranges(mode, lanes, NULL);
        j.shorten = true;
        check_ranges(mode, lanes, &j);
        j.interrupt = j.delay = true;
        check_ranges(mode, lanes, &j);
        j = new_inject(3);
        j.refuse_direct = true;
        check_ranges(mode, lanes, &j);
    }
}

/* A failing range takes its own read down, names everything, and leaves the others alone. */
static void check_errors(int mode) {
    inject j = new_inject(9);
    mc_error err = {0};
    target t = make_target(100000);
    char expect[64];
    int32_t file;
    mci_io *io = open_io(mode, 2, &file);

    mci_read r = {.n_run = 1, .run = {run_of(io, &t, file, SIZE - 500, 501)}};
    CHECK(mci_io_submit(io, &r, &err) == MC_OK && mci_io_next(io, true) == &r, "%s", err.message);
    CHECK(r.err.code == MC_EIO && r.err.sys == 0, "%d", r.err.code);
    snprintf(expect, sizeof expect, "wanted 501 bytes at offset %d, got 500", SIZE - 500);
    CHECK(strstr(r.err.message, expect) && strstr(r.err.message, big) &&
              strstr(r.err.message, "end of file"),
          "%s", r.err.message);

    mci_io_inject(io, injected, &j);
    j.fail_at = 70000;
    mci_read bad = {.n_run = 1, .run = {run_of(io, &t, file, 50000, 30000)}}, good = bad;
    target t2 = make_target(100000);
    good.run[0] = run_of(io, &t2, file, 200000, 90000);
    mci_io_submit(io, &bad, &err);
    mci_io_submit(io, &good, &err);
    while (mci_io_next(io, true)) {}
    CHECK(bad.err.code == MC_EIO && bad.err.sys == EIO && good.err.code == MC_OK, "%s",
          bad.err.message);
    CHECK(range_right(io, &t2, &good.run[0]), "the other read is whole");
    j.fail_at = -1;
    memset(t.base, CANARY, (size_t)t.size);
    mci_io_submit(io, &bad, &err);
    CHECK(mci_io_next(io, true) == &bad && bad.err.code == MC_OK &&
              range_right(io, &t, &bad.run[0]),
          "the same read again: %s", bad.err.message);
    mci_io_inject(io, NULL, NULL);

    bad.run[0].file = 5;
    mci_io_submit(io, &bad, &err);
    CHECK(mci_io_next(io, true)->err.code == MC_ERANGE, "no such file");
    bad.run[0] = (mci_run){file, INT64_MAX - 10, 100, t.base};
    mci_io_submit(io, &bad, &err);
    CHECK(mci_io_next(io, true)->err.code == MC_ERANGE, "a range past every size");
    CHECK(mci_io_fetch(io, file, -1, 4, t.base, &err) == MC_ERANGE, "negative offset");
    CHECK(mci_io_fetch(io, file, SIZE - 2, 4, t.base, &err) == MC_EIO &&
              strstr(err.message, "got 2"),
          "%s", err.message);
    mci_io_free(io);
    free(t.mem);
    free(t2.mem);
}

static void check_truncated(int mode) {
    char path[4300];
    mc_error err = {0};
    mci_io *io;
    target t = make_target(100000);
    snprintf(path, sizeof path, "%s/cut", dir);
    make_file(path, 100000);
    mci_io_create(mode, 1, &io, &err);
    int32_t file = mci_io_open(io, path, &err);
    CHECK(truncate(path, 50001) == 0, "truncate");
    mci_read r = {.n_run = 1, .run = {run_of(io, &t, file, 40000, 20000)}};
    mci_io_submit(io, &r, &err);
    mci_io_next(io, true);
    CHECK(r.err.code == MC_EIO &&
              strstr(r.err.message, "wanted 20000 bytes at offset 40000, got 10001"),
          "%s", r.err.message);
    mci_io_free(io);
    unlink(path);
    free(t.mem);
}

static void check_load(int mode, int lanes) {
    static const int64_t range[][2] = {{0, SIZE},          {1, SIZE - 1},    {4 << 20, 1},
                                       {(4 << 20) - 1, 2}, {12345, 5000000}, {77, 0},
                                       {0, 4 << 20}};
    mc_error err = {0};
    int32_t file;
    mci_io *io = open_io(mode, lanes, &file);
    for (size_t i = 0; i < sizeof range / sizeof *range; i++) {
        target t = make_target(range[i][1]);
        mci_run run = run_into(&t, file, range[i][0], range[i][1]);
        int rc = mci_io_load(io, &run, &err);
        CHECK(rc == MC_OK && range_right(io, &t, &run), "load %zu: %s", i, err.message);
        free(t.mem);
        uint8_t *odd = test_alloc((size_t)range[i][1] + 3);
        rc = mci_io_fetch(io, file, range[i][0], range[i][1], odd + 3, &err);
        bool same = true;
        for (int64_t k = 0; k < range[i][1]; k++)
            same = same && odd[3 + k] == byte_at(range[i][0] + k);
        CHECK(rc == MC_OK && same, "fetch %zu: %s", i, err.message);
        free(odd);
    }
    target t = make_target(SIZE);
    mci_run run = run_into(&t, file, 100, SIZE);
    CHECK(mci_io_load(io, &run, &err) == MC_EIO && strstr(err.message, "end of file"), "%s",
          err.message);
    inject j = new_inject(1);
    j.fail_at = 10;
    j.delay = true;
    mci_io_inject(io, injected, &j);
    run = run_into(&t, file, 0, SIZE);
    CHECK(mci_io_load(io, &run, &err) == MC_EIO && err.sys == EIO &&
              strstr(err.message, "at offset 0,"),
          "%s", err.message);
    mci_io_inject(io, NULL, NULL);
    CHECK(mci_io_load(io, &run, &err) == MC_OK, "after a failure: %s", err.message);
    mci_io_stats st;
    mci_io_get_stats(io, &st);
    CHECK(st.reads == 0 && st.bytes == 0, "loads are not expert reads");
    free(t.mem);
    mci_io_free(io);
}

/* A range over 2 GiB: no call asks for more than 1 GiB, all of it is asked for. The memory is
 * address space only and the reads are pretended. */
static void check_huge(int mode) {
    char path[4300];
    mc_error err = {0};
    mci_io *io;
    int64_t size = 3LL << 30;
    snprintf(path, sizeof path, "%s/sparse", dir);
    int fd = open(path, O_CREAT | O_RDWR, 0600);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *mem = mmap(NULL, (size_t)size, PROT_NONE, flags, -1, 0);
    if (fd >= 0 && ftruncate(fd, size) == 0 && mem != MAP_FAILED) {
        inject j = new_inject(1);
        j.pretend = true;
        mci_io_create(mode, 1, &io, &err);
        int32_t file = mci_io_open(io, path, &err);
        mci_io_inject(io, injected, &j);
        uint8_t *dst = mode == MC_IO_MMAP ? NULL : (uint8_t *)mem + 7;
        mci_read r = {.n_run = 1, .run = {{file, 4096 + 7, size - 9999, dst}}};
        mci_io_submit(io, &r, &err);
        mci_io_next(io, true);
        CHECK(r.err.code == MC_OK, "%s", r.err.message);
        CHECK(j.largest <= 1 << 30 && j.total >= size - 9999 && j.total < size, "largest call %lld",
              (long long)j.largest);
        mci_io_free(io);
    }
    if (mem != MAP_FAILED) munmap(mem, (size_t)size);
    close(fd);
    unlink(path);
}

static void check_page_cache(int mode) {
    mc_error err = {0};
    rng r = {5};
    int32_t file;
    if (mode == MC_IO_MMAP) return; /* its pages are to stay */
    if (cached_pages(big, true) != 0) {
        printf("note: this file system keeps pages regardless; leftovers not checked\n");
        return;
    }
    target t = make_target(SIZE);
    mci_io *io = open_io(mode, 3, &file);
    for (int i = 0; i < 60; i++) {
        int64_t bytes, offset = random_offset(&r, &bytes);
        mci_read rd = {.n_run = 1, .run = {run_of(io, &t, file, offset, bytes)}};
        mci_io_submit(io, &rd, &err);
        mci_io_next(io, true);
        CHECK(rd.err.code == MC_OK, "%s", rd.err.message);
        offset = random_offset(&r, &bytes);
        CHECK(mci_io_fetch(io, file, offset, bytes, t.base, &err) == MC_OK, "%s", err.message);
    }
    CHECK(cached_pages(big, false) == 0, "mode %d: %lld pages left by reads", mode,
          (long long)cached_pages(big, false));
    mci_run run = run_into(&t, file, 3, SIZE - 3);
    CHECK(mci_io_load(io, &run, &err) == MC_OK, "%s", err.message);
    CHECK(mci_io_fetch(io, file, 5, SIZE - 5, t.base, &err) == MC_OK, "%s", err.message);
    CHECK(cached_pages(big, false) == 0, "mode %d: %lld pages left by loads", mode,
          (long long)cached_pages(big, false));
    mci_io_free(io);
    free(t.mem);
}

/* Files are opened while lanes read; then the whole thing is freed with reads still queued. */
static void check_shutdown(int mode) {
    enum { N = 30 };
    char path[4300];
    inject j = new_inject(2);
    mc_error err = {0};
    mci_read reads[N];
    target t[N];
    int32_t file;
    mci_io *io = open_io(mode, 4, &file);
    j.delay = true;
    mci_io_inject(io, injected, &j);
    for (int i = 0; i < N; i++) {
        t[i] = make_target(5000);
        reads[i] = (mci_read){.n_run = 1, .run = {run_of(io, &t[i], file, 1000 * i, 5000)}};
        mci_io_submit(io, &reads[i], &err);
        snprintf(path, sizeof path, "%s/s%d", dir, i);
        make_file(path, 10);
        CHECK(mci_io_open(io, path, &err) == i + 1, "%s", err.message);
        unlink(path);
        mci_io_next(io, false);
    }
    mci_io_free(io);
    for (int i = 0; i < N; i++) free(t[i].mem);
}

int main(int argc, char **argv) {
    if (!begin_files(argc, argv)) return 1;
    check_open();
    for (int mode = MC_IO_AUTO; mode <= MC_IO_MMAP; mode++) {
        mc_error err;
        if (mci_io_mode(mode, &err) < 0) {
            printf("note: mode %d is not checked: %s\n", mode, err.message);
            continue;
        }
        check_faults(mode);
        check_errors(mode);
        check_truncated(mode);
        check_load(mode, 1);
        check_load(mode, 4);
        check_huge(mode);
        check_page_cache(mode);
        check_shutdown(mode);
    }
    return end_files();
}
