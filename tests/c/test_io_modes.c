/* test_io_modes.c - reads that are withdrawn, counters, changes of mode, and systems that refuse
 * io_uring or direct reads: a filter of system calls in a child stands in for them. */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "io_fixture.h"
#include "io_uring.h"

/* ---- a gate that reads wait at --------------------------------------------------------------- */

typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool open;
    int inside, most; /* reads at the gate; the most there ever were */
} gate;

static int64_t gated(void *ctx, int fd, void *buf, int64_t n, int64_t off) {
    gate *g = ctx;
    pthread_mutex_lock(&g->lock);
    g->inside++;
    g->most = MCI_MAX(g->most, g->inside);
    pthread_cond_broadcast(&g->changed);
    while (!g->open) pthread_cond_wait(&g->changed, &g->lock);
    g->inside--;
    pthread_mutex_unlock(&g->lock);
    return pread(fd, buf, (size_t)n, off);
}

static gate new_gate(void) {
    return (gate){.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
}

static void await_inside(gate *g, int n) {
    pthread_mutex_lock(&g->lock);
    while (g->inside < n) pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void set_open(gate *g, bool open) {
    pthread_mutex_lock(&g->lock);
    g->open = open;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

/* ---- cases ----------------------------------------------------------------------------------- */

enum { N = 12, BYTES = 20000 };

typedef struct batch {
    target t[N];
    mci_read r[N];
} batch;

static void make_batch(mci_io *io, batch *b, int32_t file) {
    for (int i = 0; i < N; i++) {
        b->t[i] = make_target(BYTES);
        b->r[i] = (mci_read){
            .n_run = 1, .tag = i, .run = {run_of(io, &b->t[i], file, 700001 * i + 13, BYTES)}};
    }
}

static void free_batch(batch *b) {
    for (int i = 0; i < N; i++) free(b->t[i].mem);
}

static void submit(mci_io *io, mci_read *r) {
    mc_error err = {0};
    int rc = mci_io_submit(io, r, &err);
    CHECK(rc == MC_OK, "%s", err.message);
}

/* Takes all that is outstanding; bit i: read i came back, whole. */
static unsigned collect(mci_io *io, batch *b) {
    unsigned back = 0;
    for (mci_read *r; (r = mci_io_next(io, true));) {
        CHECK(r->err.code == MC_OK && range_right(io, &b->t[r->tag], &r->run[0]), "read %d: %s",
              (int)r->tag, r->err.message);
        CHECK(!(back >> r->tag & 1), "read %d came back twice", (int)r->tag);
        back |= 1u << r->tag;
    }
    return back;
}

/* Read 0 is held at the gate, the others wait behind it. */
static void check_withdraw(int mode) {
    gate g = new_gate();
    batch b;
    int32_t file;
    mci_io *io = open_io(mode, 1, &file);
    mci_io_stats st;
    make_batch(io, &b, file);
    mci_io_inject(io, gated, &g);
    for (int i = 0; i < 6; i++) submit(io, &b.r[i]);
    await_inside(&g, 1);
    CHECK(!mci_io_withdraw(io, &b.r[0]), "it is being read");
    CHECK(!mci_io_withdraw(io, &b.r[7]), "it was never submitted");
    CHECK(mci_io_withdraw(io, &b.r[1]) && mci_io_withdraw(io, &b.r[3]), "from the middle");
    CHECK(mci_io_withdraw(io, &b.r[5]) && !mci_io_withdraw(io, &b.r[5]), "the last one, once");
    submit(io, &b.r[6]); /* behind what is now the last */
    submit(io, &b.r[1]); /* it may come again */
    mci_io_get_stats(io, &st);
    CHECK(st.depth == 6 && st.reads == 0, "depth %d", st.depth);
    set_open(&g, true);
    unsigned back = collect(io, &b);
    CHECK(back == (1u << 0 | 1u << 1 | 1u << 2 | 1u << 4 | 1u << 6), "%x came back", back);
    CHECK(!mci_io_withdraw(io, &b.r[0]) && !mci_io_next(io, false), "all is over");
    set_open(&g, false);
    submit(io, &b.r[0]);
    await_inside(&g, 1);
    for (int i = 1; i < 4; i++) submit(io, &b.r[i]);
    for (int i = 1; i < 4; i++) CHECK(mci_io_withdraw(io, &b.r[i]), "the whole queue");
    set_open(&g, true);
    CHECK(mci_io_next(io, true) == &b.r[0] && !mci_io_next(io, true), "one was outstanding");
    submit(io, &b.r[2]);
    CHECK(mci_io_next(io, true) == &b.r[2], "an emptied queue takes reads");
    mci_io_get_stats(io, &st);
    CHECK(st.reads == 7, "%lld reads", (long long)st.reads);
    mci_io_free(io);
    free_batch(&b);
}

/* Busy is wall time, read_s the sum over reads; loads and hidden reads count for nothing. */
static void check_counters(int mode) {
    gate g = new_gate();
    batch b;
    int32_t file;
    mc_error err = {0};
    mci_io_stats st, later;
    mci_io *io = open_io(mode, 3, &file);
    make_batch(io, &b, file);
    mci_io_inject(io, gated, &g);
    double t0 = mci_now();
    for (int i = 0; i < N; i++) submit(io, &b.r[i]);
    await_inside(&g, 3); /* injected reads of a ring: in lanes */
    usleep(20000);
    mci_io_get_stats(io, &st);
    CHECK(st.busy_s >= 0.02 && st.depth == N && st.reads == 0, "while busy: %.4f s, depth %d",
          st.busy_s, st.depth);
    set_open(&g, true);
    collect(io, &b);
    double wall = mci_now() - t0;
    mci_io_get_stats(io, &st);
    CHECK(st.busy_s >= 0.02 && st.busy_s <= wall, "%.4f s busy of %.4f", st.busy_s, wall);
    CHECK(st.read_s >= 0.06, "%.4f s in reads", st.read_s);
    usleep(5000);
    mci_io_count(io, false);
    for (int i = 0; i < N; i++) submit(io, &b.r[i]);
    collect(io, &b);
    mci_io_count(io, true);
    target t = make_target(SIZE);
    mci_run run = run_into(&t, file, 0, SIZE);
    CHECK(mci_io_load(io, &run, &err) == MC_OK && range_right(io, &t, &run), "%s", err.message);
    free(t.mem);
    mci_io_get_stats(io, &later);
    CHECK(later.busy_s == st.busy_s && later.reads == N && later.bytes == st.bytes &&
              later.read_s == st.read_s && later.depth == N,
          "idle, hidden and load: %.4f s, %lld reads", later.busy_s, (long long)later.reads);
    mci_io_free(io);
    free_batch(&b);
}

static bool uring(void) { return mci_io_mode(MC_IO_URING, NULL) == MC_OK; }

/* auto goes from mode to mode, with fewer and more lanes. */
static void check_use(void) {
    static const int lanes[] = {1, 4, 2, 3, 1};
    batch b;
    int32_t file;
    mc_error err = {0};
    mci_io_stats st;
    mci_io *io = open_io(MC_IO_AUTO, 4, &file);
    make_batch(io, &b, file);
    for (int i = 0; i < 15; i++) {
        gate g = new_gate();
        int mode = i % 3 == 2 && uring() ? MC_IO_URING : MC_IO_DIRECT, n = lanes[i % 5];
        int rc = mci_io_use(io, mode, n, &err);
        CHECK(rc == MC_OK, "%s", err.message);
        for (int k = 0; k < N; k++) submit(io, &b.r[k]); /* no fault: a true ring */
        CHECK(collect(io, &b) == (1u << N) - 1, "round %d", i);
        mci_io_inject(io, gated, &g);
        for (int k = 0; k < N; k++) submit(io, &b.r[k]);
        await_inside(&g, n);
        CHECK(mci_io_use(io, mode, n, &err) == MC_EINVAL, "reads are outstanding");
        set_open(&g, true);
        CHECK(collect(io, &b) == (1u << N) - 1, "round %d", i);
        CHECK(g.most == n, "%d lanes read at once, expected %d", g.most, n);
        mci_io_inject(io, NULL, NULL);
        mci_io_get_stats(io, &st);
        CHECK(st.lanes == n && (st.mode == mode || st.files_pread), "mode %d, %d lanes", st.mode,
              st.lanes);
    }
    CHECK(mci_io_use(io, MC_IO_DIRECT, 5, &err) == MC_EINVAL, "more lanes than planned");
    CHECK(mci_io_use(io, MC_IO_MMAP, 1, &err) == MC_EINVAL, "nothing is mapped");
    mci_io_free(io);
    free_batch(&b);
}

/* The ring by itself: results and errors as the kernel gives them, wakes, more reads than it has
 * places for at once. */
static void check_ring(void) {
    enum { PLACES = 3 };
    mc_error err = {0};
    mci_ring *ring;
    uint8_t buf[PLACES + 2][100];
    int64_t result;
    int fd = open(big, O_RDONLY), seen = 0;
    int rc = mci_ring_open(PLACES, &ring, &err);
    CHECK(rc == MC_OK, "%s", err.message);
    if (rc < 0) return;
    CHECK(mci_ring_next(ring, &result) == 0, "nothing was asked for");
    for (int round = 0; round < 200; round++) { /* the indices pass every wrap of a small ring */
        for (int i = 0; i < PLACES; i++)
            CHECK(mci_ring_read(ring, fd, buf[i], 100, 1000 * i + round, (uint64_t)(i + 1)),
                  "read %d", i);
        if (round % 3 == 0) mci_ring_wake(ring);
        for (seen = 0; seen < PLACES;) {
            mci_ring_wait(ring);
            for (uint64_t tag; (tag = mci_ring_next(ring, &result)); seen++)
                CHECK(result == 100 &&
                          buf[tag - 1][7] == byte_at(1000 * ((int)tag - 1) + round + 7),
                      "read %d: %lld", (int)tag, (long long)result);
        }
    }
    mci_ring_wake(ring);
    mci_ring_wait(ring); /* returns */
    CHECK(mci_ring_next(ring, &result) == 0, "a wake is no read");
    struct {
        int fd;
        int64_t off, want;
    } odd[] = {{fd, SIZE - 30, 30}, {fd, SIZE + 5, 0}, {-1, 0, -EBADF}};
    for (int i = 0; i < 3; i++) {
        CHECK(mci_ring_read(ring, odd[i].fd, buf[0], 100, odd[i].off, 9), "odd read %d", i);
        uint64_t tag;
        while (!(tag = mci_ring_next(ring, &result))) mci_ring_wait(ring);
        CHECK(tag == 9 && result == odd[i].want, "odd read %d: %lld", i, (long long)result);
    }
    mci_ring_close(ring);
    mci_ring_close(NULL);
    close(fd);
}

/* What the ring brings only in part, or not at all, ends as a plain read would. */
static void check_ring_errors(void) {
    batch b;
    int32_t file;
    mci_io *io = open_io(MC_IO_URING, 4, &file);
    make_batch(io, &b, file);
    void *none = mmap(NULL, 65536, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mci_read bad = {.n_run = 3,
                    .tag = N,
                    .run = {run_of(io, &b.t[0], file, 5000, 100),
                            {file, 8192, 50000, none},
                            run_of(io, &b.t[1], file, 9000, 100)}};
    submit(io, &bad);
    submit(io, &b.r[2]);
    for (mci_read *r; (r = mci_io_next(io, true));)
        if (r == &bad)
            CHECK(bad.err.code == MC_EIO && bad.err.sys == EFAULT &&
                      strstr(bad.err.message, "wanted 50000 bytes at offset 8192, got 0"),
                  "%s", bad.err.message);
        else
            CHECK(r->err.code == MC_OK && range_right(io, &b.t[2], &r->run[0]), "the other one");
    CHECK(!mci_io_next(io, true), "the runs of a failed read are all over");
    mci_io_stats st;
    mci_io_get_stats(io, &st);
    CHECK(st.retried == 1 || st.files_pread, "%lld runs failed", (long long)st.retried);
    munmap(none, 65536);
    /* memory that is not congruent to the file cannot be read directly */
    mci_run run = {file, 100, 5000, b.t[3].base + 1};
    mci_read odd = {.n_run = 1, .run = {run}};
    submit(io, &odd);
    CHECK(mci_io_next(io, true) == &odd && odd.err.code == MC_OK &&
              odd.run[0].dst[4999] == byte_at(5099),
          "%s", odd.err.message);
    mci_io_free(io);
    free_batch(&b);
}

/* No thread reads what the ring can; lanes and ring at once are waited for alike. */
static void check_ring_and_lanes(void) {
    batch b;
    int32_t file;
    mci_io_stats st;
    mci_io *io = open_io(MC_IO_URING, 2, &file);
    make_batch(io, &b, file);
    bool direct = mci_io_direct(io, file);
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < N; i++) {
            b.r[i].fresh = round && (round + i) % 3 == 0 ? b.t[i].base : NULL;
            b.r[i].fresh_bytes = b.t[i].size;
            submit(io, &b.r[i]);
        }
        CHECK(collect(io, &b) == (1u << N) - 1, "round %d", round);
        mci_io_get_stats(io, &st);
        if (!round && direct) CHECK(st.lanes_ran == 0, "%d threads", st.lanes_ran);
    }
    CHECK(st.lanes_ran >= 1 && st.lanes == 2 && st.retried == 0, "%d threads", st.lanes_ran);
    mci_io_free(io);
    free_batch(&b);
}

/* A thread ends, and with it the poll that it armed: the next one still wakes and reads. */
static void *ring_thread(void *p) {
    mci_ring *ring = p;
    mci_ring_wake(ring);
    mci_ring_wait(ring); /* armed, fires */
    int64_t result;
    CHECK(mci_ring_next(ring, &result) == 0, "a wake is no read");
    mci_ring_wake(ring);
    mci_ring_wait(ring);
    uint8_t buf[64];
    int fd = open(big, O_RDONLY);
    CHECK(mci_ring_read(ring, fd, buf, sizeof buf, 0, 7), "read");
    while (mci_ring_next(ring, &result) != 7) mci_ring_wait(ring); /* armed again */
    close(fd);
    return NULL;
}

static void check_ring_threads(void) {
    mc_error err = {0};
    mci_ring *ring;
    int rc = mci_ring_open(2, &ring, &err);
    CHECK(rc == MC_OK, "%s", err.message);
    for (int i = 0; rc == MC_OK && i < 20; i++) {
        pthread_t id;
        pthread_create(&id, NULL, ring_thread, ring);
        pthread_join(id, NULL);
    }
    if (rc == MC_OK) mci_ring_close(ring);
}

typedef struct shift {
    mci_io *io;
    batch *b;
    int first;
    unsigned back; /* reads that came while it was on */
} shift;

/* Hands over half of the reads, takes what has come by then, and ends. */
static void *shift_thread(void *p) {
    shift *s = p;
    for (int i = s->first; i < N; i += 2) submit(s->io, &s->b->r[i]);
    for (mci_read *r; (r = mci_io_next(s->io, false));) {
        CHECK(r->err.code == MC_OK && range_right(s->io, &s->b->t[r->tag], &r->run[0]),
              "read %d: %s", (int)r->tag, r->err.message);
        s->back |= 1u << r->tag;
    }
    return NULL;
}

/* Threads that use a ring in turns and end with reads on their way, which the kernel then gives up
 * or goes on with; a child that is forked meanwhile ends at once. Every read comes back whole, to
 * whoever asks. */
static void check_ring_shifts(void) {
    int32_t file;
    mci_io *io = open_io(MC_IO_URING, 8, &file);
    for (int round = 0; round < 60; round++) {
        batch b;
        shift s = {.io = io, .b = &b};
        make_batch(io, &b, file);
        for (; s.first < 2; s.first++) {
            pthread_t id;
            pthread_create(&id, NULL, shift_thread, &s);
            pthread_join(id, NULL);
        }
        pid_t pid = round % 4 ? 0 : fork();
        if (round % 4 == 0 && pid == 0) _exit(0);
        CHECK((s.back | collect(io, &b)) == (1u << N) - 1, "round %d", round);
        if (pid > 0) waitpid(pid, NULL, 0);
        free_batch(&b);
    }
    mci_io_free(io);
}

/* Freed with reads in the ring: nothing is written into their memory afterwards. */
static void check_ring_end(void) {
    for (int round = 0; round < 20; round++) {
        batch b;
        int32_t file;
        uint8_t *copy[N];
        mci_io *io = open_io(MC_IO_URING, 8, &file);
        make_batch(io, &b, file);
        for (int i = 0; i < N; i++) submit(io, &b.r[i]);
        if (round % 2) usleep((useconds_t)(round * 20));
        mci_io_free(io);
        for (int i = 0; i < N; i++) {
            copy[i] = test_alloc((size_t)b.t[i].size);
            memcpy(copy[i], b.t[i].base, (size_t)b.t[i].size);
        }
        usleep(2000);
        for (int i = 0; i < N; i++) {
            CHECK(!memcmp(copy[i], b.t[i].base, (size_t)b.t[i].size), "written after the end");
            free(copy[i]);
        }
        free_batch(&b);
    }
}

/* Sanitizers have pages of their own for each page touched. */
__attribute__((no_sanitize("address"), no_sanitize("thread"))) static void
touch(const volatile uint8_t *p, int64_t bytes, int64_t page) {
    for (int64_t i = 0; i < bytes; i += page) (void)p[i];
}

/* A read makes the pages of its range exist in the mapping, and of little else. */
static void check_populated(void) {
    enum { AT = 3 << 20, LEN = 1 << 20 };
    const int64_t page = sysconf(_SC_PAGESIZE);
    mc_error err = {0};
    int64_t there = 0, others = 0;
    if (cached_pages(big, true) != 0) {
        printf("note: this file system keeps pages regardless; mapped pages not checked\n");
        return;
    }
    if (madvise((void *)((uintptr_t)big & -(uintptr_t)page), 1, 9999) == 0) {
        printf("note: an emulator that ignores advice; mapped pages not checked\n");
        return;
    }
    mci_io *io = NULL;
    CHECK(mci_io_create(MC_IO_MMAP, 2, &io, &err) == MC_OK, "%s", err.message);
    int32_t file = mci_io_open(io, big, &err);
    mci_read r = {.n_run = 1, .run = {{file, AT + 5, LEN - 10, NULL}}};
    submit(io, &r);
    CHECK(mci_io_next(io, true) == &r && r.err.code == MC_OK && r.bytes == LEN, "%s, %lld bytes",
          r.err.message, (long long)r.bytes);
    size_t pages = (size_t)((SIZE + page - 1) / page);
    uint8_t *seen = test_alloc(pages);
    CHECK(mincore((void *)(uintptr_t)mci_io_at(io, file, 0), SIZE, seen) == 0, "mincore");
    for (size_t i = 0; i < pages; i++) {
        bool inside = (int64_t)i >= AT / page && (int64_t)i < (AT + LEN) / page;
        there += inside && seen[i] & 1;
        others += !inside && seen[i] & 1;
    }
    CHECK(there == LEN / page && others <= 32, "%lld pages of %lld, %lld others", (long long)there,
          (long long)(LEN / page), (long long)others);
    const volatile uint8_t *map = mci_io_at(io, file, 0);
#ifdef MADV_POPULATE_READ
    void *old = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (madvise(old, 4096, MADV_POPULATE_READ) == 0) { /* kernels from 5.14 on */
        struct rusage before, after;
        getrusage(RUSAGE_THREAD, &before);
        touch(map + AT, LEN, page);
        getrusage(RUSAGE_THREAD, &after);
        CHECK(after.ru_minflt - before.ru_minflt <= 4 && after.ru_majflt == before.ru_majflt,
              "%ld faults in pages that exist", after.ru_minflt - before.ru_minflt);
    }
    munmap(old, 4096);
#endif
    there = others;
    (void)map[(7 << 20) + 1]; /* a stray touch reads its page and no more */
    CHECK(mincore((void *)(uintptr_t)map, SIZE, seen) == 0, "mincore");
    others = -LEN / page;
    for (size_t i = 0; i < pages; i++) others += seen[i] & 1;
    CHECK(others <= there + 2, "%lld pages for one", (long long)(others - there));
    free(seen);
    mci_io_free(io);
}

/* A mapped file that shrinks is found before its pages are touched. */
static void check_mapped_check(void) {
    char path[4300];
    mc_error err = {0};
    mci_io *io;
    snprintf(path, sizeof path, "%s/shrinks", dir);
    make_file(path, 50000);
    CHECK(mci_io_create(MC_IO_MMAP, 0, &io, &err) == MC_OK, "%s", err.message);
    int32_t file = mci_io_open(io, path, &err), whole = mci_io_open(io, big, &err);
    CHECK(mci_io_check(io, file, &err) == MC_OK && mci_io_at(io, file, 7)[0] == byte_at(7), "map");
    CHECK(truncate(path, 49999) == 0, "truncate");
    CHECK(mci_io_check(io, file, &err) == MC_EIO &&
              strstr(err.message, "wanted 50000 bytes, got 4"),
          "%s", err.message);
    CHECK(mci_io_check(io, whole, &err) == MC_OK && !mci_io_at(io, 5, 0), "the others are whole");
    mci_io_free(io);
    unlink(path);
    CHECK(mci_io_create(MC_IO_PREAD, 0, &io, &err) == MC_OK, "%s", err.message);
    file = mci_io_open(io, big, &err);
    CHECK(!mci_io_at(io, file, 0) && mci_io_check(io, file, &err) == MC_OK, "nothing is mapped");
    mci_io_free(io);
}

/* ---- systems that refuse --------------------------------------------------------------------- */

/* From now on the call fails with `sys`: always (mask 0), or where its argument has those bits. */
static bool refuse(int call, int arg, uint32_t mask, int sys) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                 (uint32_t)(offsetof(struct seccomp_data, args) + 8 * (size_t)arg)),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, mask, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)sys),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    if (!mask) code[3] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JA, 0, 0, 0);
    struct sock_fprog prog = {sizeof code / sizeof *code, code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) == 0;
}

static void without_uring(int sys) {
    batch b;
    int32_t file;
    mc_error err = {0};
    mci_io *io = (mci_io *)&err;
    CHECK(mci_io_mode(MC_IO_URING, &err) == MC_ESYS && err.sys == sys, "%s", err.message);
    CHECK(strstr(err.message, sys == EPERM ? "io_uring_disabled" : "kernel has no"), "%s",
          err.message);
    for (int mode = MC_IO_AUTO; mode <= MC_IO_MMAP; mode++)
        if (mode != MC_IO_URING) CHECK(mci_io_mode(mode, &err) == MC_OK, "%s", err.message);
    CHECK(mci_io_create(MC_IO_URING, 0, &io, &err) == MC_ESYS && !io, "%s", err.message);
    io = open_io(MC_IO_AUTO, 0, &file);
    make_batch(io, &b, file);
    CHECK(mci_io_use(io, MC_IO_URING, 2, &err) == MC_ESYS, "no ring to use");
    for (int k = 0; k < N; k++) submit(io, &b.r[k]);
    CHECK(collect(io, &b) == (1u << N) - 1, "auto reads on");
    mci_io_free(io);
    free_batch(&b);
}

/* A ring can be made, but takes nothing: the probe finds out. */
static void without_reads(void) {
    mc_error err = {0};
    if (!refuse(SYS_io_uring_enter, 0, 0, EPERM)) return;
    CHECK(mci_io_mode(MC_IO_URING, &err) == MC_ESYS && err.sys == EPERM, "%s", err.message);
}

static void without_uring_enosys(void) {
    if (refuse(SYS_io_uring_setup, 0, 0, ENOSYS)) without_uring(ENOSYS);
}

static void without_uring_eperm(void) {
    if (refuse(SYS_io_uring_setup, 0, 0, EPERM)) without_uring(EPERM);
}

/* A ring that stops taking reads after it was made. */
static void without_enter(void) {
    batch b;
    int32_t file;
    mci_io *io = open_io(MC_IO_URING, 4, &file);
    make_batch(io, &b, file);
    if (!refuse(SYS_io_uring_enter, 0, 0, EAGAIN)) return;
    for (int k = 0; k < N; k++) submit(io, &b.r[k]);
    CHECK(collect(io, &b) == (1u << N) - 1, "read in the thread");
    mci_io_free(io);
    free_batch(&b);
}

static void without_direct(void) {
    if (!refuse(SYS_openat, 2, O_DIRECT, EINVAL)) return;
    for (int mode = MC_IO_AUTO; mode <= MC_IO_MMAP; mode++) {
        batch b;
        int32_t file;
        gate g = new_gate();
        mci_io_stats st;
        if (mode == MC_IO_URING && !uring()) continue;
        mci_io *io = open_io(mode, 0, &file);
        make_batch(io, &b, file);
        mci_io_inject(io, gated, &g);
        for (int k = 0; k < N; k++) submit(io, &b.r[k]);
        await_inside(&g, 4); /* as many lanes as pread has */
        set_open(&g, true);
        CHECK(collect(io, &b) == (1u << N) - 1, "mode %d", mode);
        mci_io_inject(io, NULL, NULL);
        for (int k = 0; k < N; k++) submit(io, &b.r[k]);
        CHECK(collect(io, &b) == (1u << N) - 1, "mode %d", mode);
        mci_io_get_stats(io, &st);
        CHECK(st.mode == (mode == MC_IO_MMAP ? mode : MC_IO_PREAD) && st.lanes == 4 &&
                  st.files_pread == 1 && st.files_direct == 0,
              "mode %d is %d with %d lanes", mode, st.mode, st.lanes);
        CHECK(mode == MC_IO_PREAD
                  ? !st.note[0]
                  : strstr(st.note, "refused (Invalid argument)") && strstr(st.note, big),
              "mode %d: \"%s\"", mode, st.note);
        mci_io_free(io);
        free_batch(&b);
    }
}

/* In a child, whose filter ends with it. */
static void in_child(void (*body)(void)) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        test_passed = test_failed = 0;
        body();
        if (!test_passed) printf("note: no filters of system calls here; a refusal not checked\n");
        fflush(stdout);
        _exit(test_failed ? 1 : 0);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK(pid > 0 && status == 0, "the child ended with %d", status);
}

int main(int argc, char **argv) {
    if (!begin_files(argc, argv)) return 1;
    bool ring = uring();
    in_child(without_direct);
    in_child(without_uring_enosys);
    in_child(without_uring_eperm);
    if (ring) {
        in_child(without_enter);
        in_child(without_reads);
        check_ring();
        check_ring_errors();
        check_ring_end();
        check_ring_and_lanes();
        check_ring_threads();
        check_ring_shifts();
    } else {
        printf("note: no io_uring here; it is not checked\n");
    }
    for (int mode = MC_IO_AUTO; mode <= MC_IO_MMAP; mode++) {
        if (mode == MC_IO_URING && !ring) continue;
        check_withdraw(mode);
        check_counters(mode);
    }
    check_use();
    check_mapped_check();
    check_populated();
    return end_files();
}
