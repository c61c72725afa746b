/* base.h - what every file of the engine may use: status and errors, checked sizes, accounted
 * memory, little-endian loads. It knows nothing of tensors, threads or models.
 *
 * Private names start with mci_; nothing here is part of the public interface. */
#ifndef MCI_BASE_H
#define MCI_BASE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "mosaic_c.h"

#define MCI_ALIGN 64 /* of every accounted allocation: a cache line, two AVX2 registers */
#define MCI_MIN(a, b) ((a) < (b) ? (a) : (b))
#define MCI_MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---- errors (error.c) ---- */

/* Fills err (may be NULL) and returns code, so that `return mci_fail(err, MC_EIO, ...)` reads well.
 * sys: errno or 0. A message longer than the field ends in "...". */
int mci_fail(mc_error *err, int code, int sys, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* ---- checked sizes (error.c) ---- */

/* *out = a * b (a + b) for sizes >= 0; false on overflow or a negative operand. */
bool mci_mul(int64_t a, int64_t b, int64_t *out);
bool mci_add(int64_t a, int64_t b, int64_t *out);
int64_t mci_round_up(int64_t n, int64_t to); /* to: a power of two; n < 2^62 */

/* ---- accounted memory (error.c) ---- */

/* Counters of one engine. A request that would pass `budget` (> 0) is refused with MC_EBUDGET
 * before the system is asked. fail_after is for tests: the n-th allocation from now fails. */
typedef struct mci_mem {
    _Atomic int64_t now[MC_MEM_KINDS], peak[MC_MEM_KINDS], total;
    int64_t budget;
    _Atomic int64_t fail_after; /* 0: never */
} mci_mem;

/* Zeroed, MCI_ALIGN-aligned memory; from 1 MiB on its own mapping, 2 MiB-aligned, with huge pages
 * asked for and no page touched. what: for the error ("KV pages"). bytes 0 gives NULL and MC_OK. */
int mci_alloc(mci_mem *m, int kind, int64_t bytes, const char *what, void **out, mc_error *err);
void mci_release(mci_mem *m, int kind, void *p, int64_t bytes); /* bytes as asked; NULL: nothing */
/* Counts delta bytes more (fewer) without allocating: part of an allocation whose pages were given
 * back to the system, or are about to be used again. Growth is checked against the budget. */
int mci_recount(mci_mem *m, int kind, int64_t delta, const char *what, mc_error *err);

/* ---- loads from unaligned little-endian bytes ---- */

static inline uint16_t mci_u16(const void *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static inline uint32_t mci_u32(const void *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline float mci_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t mci_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

double mci_now(void); /* seconds, monotonic (error.c) */

#endif
