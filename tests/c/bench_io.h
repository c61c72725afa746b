/* bench_io.h - times the engine's own reader (io.h) at random places of a file, into the memory the
 * expert cache is made of: one anonymous 2 MiB-aligned arena in huge pages that exist before the
 * first timed read. It prints nothing.
 *
 * The conventions are those of mosaic_c.h. What lies between the two markers is read by cffi. */
#ifndef BENCH_IO_H
#define BENCH_IO_H
#include "mosaic_c.h"
/* cffi begin */

typedef struct mc_bench_io_opts {
    int32_t mode;   /* MC_IO_... */
    int32_t lanes;  /* >= 1 */
    int32_t depth;  /* reads handed to the reader at a time, >= lanes */
    int32_t mapped; /* 1: reads have no destination but make pages of a mapped file exist, where
                       they stay; no place is read twice, and the run may end for want of places */
    int64_t align;  /* offsets are multiples of it, and it is one of 4096 */
    int64_t size;   /* bytes of a read, a multiple of 4096; the arena has depth times as many */
    double seconds; /* after which no new read is asked for */
    uint64_t seed;  /* same seed, same offsets */
} mc_bench_io_opts;

typedef struct mc_bench_io_run {
    int64_t reads, bytes; /* complete within wall_s */
    int64_t cached;       /* bytes of the file in the page cache before the run, after it was
                             dropped from there; all of a file one may not write: not known */
    double wall_s, cpu_s; /* from the first read to the last; user and system, all threads */
    int32_t lanes, lanes_ran, direct; /* direct: the page cache was bypassed to the end */
} mc_bench_io_run;

/* Drops the file from the page cache, warms up by one read into every place of the arena (unless
 * mapped), then reads. The first read that fails ends it with its error. MC_EINVAL: opts make no
 * sense, or the file is shorter than a read. */
int mc_bench_io(const char *path, const mc_bench_io_opts *opts, mc_bench_io_run *out,
                mc_error *err);

/* cffi end */
#endif
