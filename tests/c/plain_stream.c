/* plain_stream.c - a plain program that streams experts from disk, to compare the engine with: one
 * thread, an LRU of a fixed number of experts for each layer, pread and POSIX_FADV_DONTNEED of one
 * expert at a time, scalar loops. It shares no code with the engine; tests/sweep.py runs both.
 *
 *   plain_stream TRACE FILE [--make] [--record BYTES] [--hidden N] [--width N] [SLOTS ...]
 *
 * TRACE gives layers, experts and top-k, and the experts of every token. FILE holds one record for
 * each expert, layer by layer, BYTES apart (default: they touch):
 *
 *   | gate (W, H/2) | up (W, H/2) | down (H, W/2) | scales f32: gate W, up W, down H |
 *
 * Weights are int4 by row: two in a byte, the even column in the low nibble, nibble - 8 times the
 * row's scale. Of the simple ways to write it this is the fastest: two sums a row, and the kernel's
 * readahead as it is (which leaves neighbours of an expert in the page cache; they are not in the
 * resident memory it prints). --make writes FILE with random weights (fixed seed). A line is
 * printed for every number of slots, each from a child process, so that its resident memory is its
 * own. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "rng.h"

static void die(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "plain_stream: ");
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(1);
}

static void *need(size_t n) {
    void *p = calloc(1, n ? n : 1);
    if (!p) die("out of memory: %zu bytes", n);
    return p;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- trace ----------------------------------------------------------------------------------- */

typedef struct trace {
    int layers, experts, top_k, tokens;
    int *ids; /* (tokens, layers, top_k) */
} trace;

/* Decode lines, in order of step and layer: tests/sweep.py passes only traces that are. */
static trace read_trace(const char *path) {
    trace t = {0};
    char line[4096];
    int step, layer, at, n;
    FILE *f = fopen(path, "r");
    if (!f) die("%s: %s", path, strerror(errno));
    for (long lines = 0, room = 0; fgets(line, sizeof line, f);) {
        sscanf(line, "# n_layer=%d", &t.layers);
        sscanf(line, "# n_expert=%d", &t.experts);
        sscanf(line, "# n_expert_used=%d", &t.top_k);
        if (sscanf(line, "decode,%d,%d,%n", &step, &layer, &at) < 2) continue;
        if (t.layers < 1 || t.experts < 1 || t.top_k < 1 || layer != lines % t.layers)
            die("%s: step %d, layer %d: expected headers, then layers in order", path, step, layer);
        if (lines == room) {
            room = room ? 2 * room : 1024;
            t.ids = realloc(t.ids, (size_t)(room * t.top_k) * sizeof *t.ids);
            if (!t.ids) die("out of memory");
        }
        for (int i = 0; i < t.top_k; i++, at += n) {
            int *id = &t.ids[lines * t.top_k + i];
            if (sscanf(line + at, "%d%n", id, &n) != 1 || *id < 0 || *id >= t.experts)
                die("%s: step %d, layer %d: expected %d experts", path, step, layer, t.top_k);
        }
        t.tokens = (int)(++lines / t.layers);
    }
    fclose(f);
    if (!t.tokens) die("%s: no decode lines", path);
    return t;
}

/* ---- experts --------------------------------------------------------------------------------- */

typedef struct shape {
    int hidden, width;
    size_t codes, bytes, record; /* of the nibbles; of all; from one expert to the next */
} shape;

static void make(const char *path, const trace *t, const shape *s) {
    uint8_t *e = need(s->bytes);
    rng r = {1};
    FILE *f = fopen(path, "wb");
    if (!f) die("%s: %s", path, strerror(errno));
    for (long i = 0; i < (long)t->layers * t->experts; i++) {
        for (size_t j = 0; j + 8 <= s->codes; j += 8) {
            uint64_t v = rng_next(&r);
            memcpy(e + j, &v, 8);
        }
        for (size_t j = s->codes; j < s->bytes; j += 4) {
            float scale = 0.01f + 0.002f * rng_unit(&r);
            memcpy(e + j, &scale, 4);
        }
        if (fwrite(e, 1, s->bytes, f) != s->bytes) die("%s: %s", path, strerror(errno));
    }
    if (fflush(f) || fsync(fileno(f)) || fclose(f)) die("%s: %s", path, strerror(errno));
    free(e);
}

/* y (rows) = W (rows, cols) x */
static void multiply(const uint8_t *w, const float *scale, const float *x, int rows, int cols,
                     float *y) {
    for (int r = 0; r < rows; r++) {
        float even = 0, odd = 0;
        for (int c = 0; c < cols / 2; c++) {
            int byte = w[(size_t)r * (size_t)(cols / 2) + (size_t)c];
            even += (float)((byte & 15) - 8) * x[2 * c];
            odd += (float)((byte >> 4) - 8) * x[2 * c + 1];
        }
        y[r] = (even + odd) * scale[r];
    }
}

/* y (hidden) += weight * down(silu(gate x) * up x); a, b: (width), out: (hidden) scratch */
static void run_expert(const shape *s, const uint8_t *e, const float *x, float weight, float *a,
                       float *b, float *out, float *y) {
    size_t matrix = (size_t)s->width * (size_t)s->hidden / 2;
    const float *scale = (const float *)(const void *)(e + s->codes);
    multiply(e, scale, x, s->width, s->hidden, a);
    multiply(e + matrix, scale + s->width, x, s->width, s->hidden, b);
    for (int i = 0; i < s->width; i++) a[i] = a[i] / (1.0f + expf(-a[i])) * b[i];
    multiply(e + 2 * matrix, scale + 2 * s->width, a, s->hidden, s->width, out);
    for (int i = 0; i < s->hidden; i++) y[i] += weight * out[i];
}

/* ---- one run --------------------------------------------------------------------------------- */

typedef struct slot {
    int expert; /* -1: empty */
    long used;
    uint8_t *data;
} slot;

/* The expert's slot: where it is, or the least recently used one after a read. */
static slot *find(slot *lru, int slots, int expert, long tick, bool *hit) {
    slot *old = lru;
    *hit = true;
    for (int i = 0; i < slots; i++) {
        if (lru[i].expert == expert) {
            lru[i].used = tick;
            return &lru[i];
        }
        if (lru[i].used < old->used) old = &lru[i];
    }
    *hit = false;
    old->expert = expert;
    old->used = tick;
    return old;
}

static void read_expert(int fd, const char *path, const shape *s, long number, uint8_t *to) {
    off_t from = (off_t)(s->record * (size_t)number);
    size_t got = 0;
    while (got < s->bytes) {
        ssize_t n = pread(fd, to + got, s->bytes - got, from + (off_t)got);
        if (n <= 0) die("%s: expert %ld: %s", path, number, n ? strerror(errno) : "end of file");
        got += (size_t)n;
    }
    posix_fadvise(fd, from, (off_t)s->bytes, POSIX_FADV_DONTNEED);
}

static int by_time(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double resident_mb(void) {
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%*s %ld", &pages) != 1) die("/proc/self/statm: unreadable");
    fclose(f);
    return (double)pages * (double)sysconf(_SC_PAGESIZE) * 1e-6;
}

static void run(const char *path, const trace *t, const shape *s, int slots) {
    size_t H = (size_t)s->hidden;
    float *x = need(H * 4), *y = need(H * 4), *out = need(H * 4);
    float *a = need((size_t)s->width * 4), *b = need((size_t)s->width * 4);
    double *times = need((size_t)t->tokens * sizeof *times), total = 0, sum = 0;
    slot *cache = need((size_t)(t->layers * slots) * sizeof *cache);
    long hits = 0, misses = 0, tick = 0;
    rng r = {2};
    for (int i = 0; i < t->layers * slots; i++)
        cache[i] = (slot){.expert = -1, .data = need(s->bytes)};
    int fd = open(path, O_RDONLY);
    if (fd < 0) die("%s: %s", path, strerror(errno));
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    for (int token = 0; token < t->tokens; token++) {
        double start = now();
        for (int i = 0; i < s->hidden; i++) x[i] = rng_unit(&r);
        for (int layer = 0; layer < t->layers; layer++) {
            const int *ids = t->ids + ((long)token * t->layers + layer) * t->top_k;
            memset(y, 0, H * 4);
            for (int i = 0; i < t->top_k; i++) {
                bool hit;
                slot *e = find(cache + layer * slots, slots, ids[i], ++tick, &hit);
                if (!hit) read_expert(fd, path, s, (long)layer * t->experts + ids[i], e->data);
                hits += hit;
                misses += !hit;
                run_expert(s, e->data, x, 1.0f / (float)t->top_k, a, b, out, y);
            }
            for (int i = 0; i < s->hidden; i++) x[i] += y[i];
        }
        times[token] = now() - start;
        total += times[token];
        sum += x[token % s->hidden];
    }
    qsort(times, (size_t)t->tokens, sizeof *times, by_time);
    printf("slots %d, cache %.1f MB, hits %ld, misses %ld, %.2f MB/token, RSS %.1f MB, %.2f tok/s "
           "(median), %.2f (mean), sum %g\n",
           slots, (double)(t->layers * slots) * (double)s->bytes * 1e-6, hits, misses,
           (double)misses * (double)s->bytes * 1e-6 / t->tokens, resident_mb(),
           1 / times[t->tokens / 2], t->tokens / total, sum);
}

int main(int argc, char **argv) {
    static const char usage[] = "usage: plain_stream TRACE FILE [--make] [--record BYTES] "
                                "[--hidden N] [--width N] [SLOTS ...]";
    shape s = {.hidden = 512, .width = 144};
    int slots[64], n = 0;
    bool fresh = false;
    if (argc < 3) die(usage);
    trace t = read_trace(argv[1]);
    for (int i = 3; i < argc; i++) {
        bool more = i + 1 < argc;
        if (!strcmp(argv[i], "--make"))
            fresh = true;
        else if (!strcmp(argv[i], "--record") && more)
            s.record = (size_t)atol(argv[++i]);
        else if (!strcmp(argv[i], "--hidden") && more)
            s.hidden = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--width") && more)
            s.width = atoi(argv[++i]);
        else if (atoi(argv[i]) > 0 && n < 64)
            slots[n++] = atoi(argv[i]);
        else
            die(usage);
    }
    if (s.hidden < 2 || s.width < 2 || s.hidden % 2 || s.width % 2) die("even sizes are needed");
    s.codes = 3 * (size_t)s.hidden * (size_t)s.width / 2;
    s.bytes = s.codes + (size_t)(2 * s.width + s.hidden) * 4;
    if (!s.record) s.record = s.bytes;
    if (s.record < s.bytes || s.codes % 8) die("a record takes %zu bytes", s.bytes);
    if (fresh) make(argv[2], &t, &s);
    for (int i = 0; !n && i < 6; i++) slots[i] = 2 << i;
    for (int i = 0; i < (n ? n : fresh ? 0 : 6); i++) {
        fflush(stdout);
        pid_t child = fork();
        int status = 0;
        if (child == 0) {
            run(argv[2], &t, &s, slots[i]);
            return 0;
        }
        if (child < 0 || waitpid(child, &status, 0) < 0 || status) die("a run failed");
    }
    return 0;
}
