/* peaks.h - what this machine can do at most: reading memory in several ways, multiplying and
 * adding in registers. */
#ifndef PEAKS_H
#define PEAKS_H
#include "pool.h"

enum { PEAK_WAYS = 24, PEAK_CHUNK = 1 << 20 };

typedef struct peak_way {
    bool shares;  /* one share a thread; else chunks of 1 MiB, claimed */
    int streams;  /* read side by side */
    bool ahead;   /* prefetched by software */
    const char *isa;
    void (*read)(const uint8_t *p, int64_t n, int streams, bool ahead);
} peak_way;

/* The ways this CPU knows; returns how many. */
int peak_ways(peak_way *ways);
/* Bytes a second, the best of `times`; n a multiple of PEAK_CHUNK. */
double peak_read(mci_pool *pool, const peak_way *w, const uint8_t *mem, int64_t n, int times);
/* Floating point operations a second of all threads with 512 (wide) or 256 bit registers; 0: not
 * known for this CPU. */
double peak_fma(mci_pool *pool, bool wide, int times);
#endif
