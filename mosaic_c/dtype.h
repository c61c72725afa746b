/* dtype.h - the table of storage types and the exact decode of each to float32. */
#ifndef MCI_DTYPE_H
#define MCI_DTYPE_H
#include "base.h"

#define MCI_BLOCK 128 /* K block of the canonical dot product, and the FP8 scale block both ways */

typedef struct mci_dtype {
    const char *name; /* "F8_E4M3", as safetensors writes it */
    int32_t bytes;    /* per element */
    bool scaled;      /* needs a 128x128 scale matrix */
} mci_dtype;

const mci_dtype *mci_dtype_get(int dtype); /* NULL: no such type */

/* FP8 E4M3FN: value of one code by arithmetic; 0x7f and 0xff are NaN, no infinities. */
static inline float mci_f8_to_f32(uint8_t b) {
    uint32_t sign = (uint32_t)(b & 0x80) << 24, mag = b & 0x7f;
    if (mag == 0x7f) return mci_f32(sign | 0x7fc00000u);
    /* exponent field of f32 is 120 short; the product is exact, also for the subnormals */
    return mci_f32(sign | mag << 20) * 0x1p+120f;
}
static inline float mci_bf16_to_f32(uint16_t h) { return mci_f32((uint32_t)h << 16); }
float mci_f16_to_f32(uint16_t h);
uint16_t mci_f32_to_bf16(float f); /* round to nearest even; NaN stays NaN */

/* A matrix in memory, at any byte alignment. scale (ceil(rows/128), ceil(cols/128)) of scale_dtype
 * (MC_F32 or MC_BF16) or NULL. */
typedef struct mci_mat {
    const uint8_t *data, *scale;
    int64_t rows, cols;
    int32_t dtype, scale_dtype;
} mci_mat;

static inline int64_t mci_mat_blocks(const mci_mat *w) { return (w->cols + MCI_BLOCK - 1) / MCI_BLOCK; }
/* The scale of row r in K block b; 1 where the type has none. */
static inline float mci_mat_scale(const mci_mat *w, int64_t r, int64_t b) {
    if (!w->scale) return 1.0f;
    int64_t i = r / MCI_BLOCK * mci_mat_blocks(w) + b;
    return w->scale_dtype == MC_BF16 ? mci_bf16_to_f32(mci_u16(w->scale + 2 * i))
                                     : mci_f32(mci_u32(w->scale + 4 * i));
}

/* dst[0..n) = the unscaled values of n elements. */
void mci_decode(int dtype, const void *src, int64_t n, float *dst);
/* dst[0..cols) = row r, scaled (one rounding: value * scale). */
void mci_mat_row(const mci_mat *w, int64_t r, float *dst);
#endif
