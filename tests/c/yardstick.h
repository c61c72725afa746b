/* yardstick.h - FP8 matrix times vector as others would write it, to measure our kernel by: y[r] of
 * rows r0..r1 of w, of which 128x128 share a BF16 scale. cols a multiple of 128, at most
 * YARD_COLS; r0 and r1 multiples of 128. Neither knows NaN codes. */
#ifndef YARDSTICK_H
#define YARDSTICK_H
#include "dtype.h"

enum { YARD_COLS = 4096 };

typedef void yard_fn(const mci_mat *w, int64_t r0, int64_t r1, const float *x, float *y);

/* Row by row, two accumulators, arithmetic decode, horizontal add. */
yard_fn yard_plain_avx2;
/* The fastest we know with sums in any order. They fold the scale into x, so |x * scale| must
 * stay below 128. */
yard_fn yard_fast_avx2, yard_fast_avx512;
#endif
