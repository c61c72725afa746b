/* bench.h - times the case table, beside what this machine can do at most: plain reads and fused
 * multiply-adds, measured in the same run. It allocates, computes and reports; it prints nothing.
 *
 * The conventions are those of mosaic_c.h. What lies between the two markers is read by cffi: this
 * is the second header of the extension, because the case table is both the unit test and the
 * benchmark, and ships so that users can run it. */
#ifndef BENCH_H
#define BENCH_H
#include "mosaic_c.h"
/* cffi begin */

enum {
    MC_BENCH_RUNS = 9,    /* timed runs of a case, after one to warm up */
    MC_BENCH_ROWS = 3,    /* rows a case gives at most */
    MC_BENCH_READS = 24,  /* ways of reading that are tried */
    MC_BENCH_MIB = 1024   /* MiB that a run may take: the memory read and the largest case */
};

typedef struct mc_bench mc_bench;

typedef struct mc_bench_read {
    char name[40];        /* "avx2 chunks x4 prefetch" */
    double gbs;           /* 1e9 bytes a second, best of 3 */
} mc_bench_read;

typedef struct mc_bench_limits {
    const char *isa;      /* static */
    int32_t threads, n_read;
    int64_t read_bytes;   /* what one read goes through */
    double read_gbs;      /* the best of `read` */
    double fma_gflops;    /* of the kernel set's registers; 0: not known for this CPU */
    mc_bench_read read[MC_BENCH_READS]; /* best first */
} mc_bench_limits;

enum { MC_BENCH_NO_LIMIT = 0, MC_BENCH_READ = 1, MC_BENCH_FMA = 2 };

typedef struct mc_bench_row {
    char name[112];
    int32_t times;        /* cases side by side in a run, for weights from memory; fewer if slow */
    int32_t limit;        /* which limit is nearer, MC_BENCH_... */
    double s[MC_BENCH_RUNS]; /* seconds of one case (a run over times), in the order measured */
    double median_s, min_s;
    double bytes, flops;  /* of one case: read + written, 2 a multiply-add */
    double gbs, gflops;   /* by the median */
    double read_gbs;      /* best plain read just before and after; 0: not from memory */
    double of_read, of_fma; /* 0: does not apply */
    double ratio;         /* yardsticks: our time over this one's, median of rounds; else 0 */
} mc_bench_row;

/* An engine of these threads and kernel set (NULL: the best), and the limits: a second or two. */
int mc_bench_create(int32_t threads, const char *isa, mc_bench **out, mc_error *err);
void mc_bench_free(mc_bench *b);
void mc_bench_clear(mc_bench **p); /* frees *p, see mosaic_c.h */
/* Borrowed until mc_bench_free. */
const mc_bench_limits *mc_bench_limits_of(const mc_bench *b);
/* How many cases there are to time here; the name of one, as its row will have it. */
int32_t mc_bench_cases(void);
int mc_bench_name(int32_t i, char *name, int32_t size, mc_error *err);
/* Times case i, a few seconds at most; fills rows, of which there is room for MC_BENCH_ROWS, and
 * returns how many. MC_ENOMEM: not enough memory. */
int mc_bench_run(mc_bench *b, int32_t i, mc_bench_row *rows, mc_error *err);

/* cffi end */
#endif
