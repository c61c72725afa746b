/* dtype.h - the table of storage formats, the size of a matrix in each, and the exact decode of
 * their elements to float32. A new format begins here: docs/design.md section 5. */
#ifndef MCI_DTYPE_H
#define MCI_DTYPE_H
#include "base.h"

/* K block of the canonical dot product where the format has none of its own; the largest of all */
#define MCI_BLOCK 128
#define MCI_SCALE_ROWS 128 /* block_rows where it is not 1 */
#define MCI_MAX_SHAPES 4

typedef struct mci_dtype {
    const char *name;    /* as safetensors writes it, where it knows the type */
    int32_t bits;        /* per element; rows begin at whole bytes */
    bool integer;        /* multiplied by quantised activations: mci_ops.qgemm, not gemm */
    uint32_t scale_types; /* 1 << MC_... each; 0: the type takes no scale */
    struct {
        int32_t rows, cols; /* elements that share a scale; cols 0: the whole row */
    } shape[MCI_MAX_SHAPES]; /* those allowed; rows 0 ends the list */
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
/* E8M0: 2^(b - 127), the exponent field of an f32; 0 is the subnormal 2^-127, 0xff is NaN. */
static inline float mci_e8m0_to_f32(uint8_t b) {
    return mci_f32(b == 0xff ? 0x7fc00000u : b ? (uint32_t)b << 23 : 0x00400000u);
}
float mci_f16_to_f32(uint16_t h);
uint16_t mci_f32_to_bf16(float f); /* round to nearest even; NaN stays NaN */

/* A matrix in memory, at any byte alignment. scale (ceil(rows/block_rows), ceil(cols/block_cols))
 * of scale_dtype, or NULL; block_cols 0: one scale a row. */
typedef struct mci_mat {
    const uint8_t *data, *scale;
    int64_t rows, cols;
    int32_t dtype, scale_dtype;
    int32_t block_rows, block_cols;
    bool no_nan; /* FP8 whose bytes were searched (mci_ops.f8_has_nan): kernels need not watch */
} mci_mat;

/* Checks shape and format of a tensor, not whether its bytes and scales lie inside their files.
 * bytes, scale_bytes: what they take, 0 on failure. name: for the error (MC_EFORMAT). */
int mci_format_check(const mc_tensor *t, const char *name, int64_t *bytes, int64_t *scale_bytes,
                     mc_error *err);
/* The checked tensor t, now in memory. */
static inline mci_mat mci_mat_of(const mc_tensor *t, const void *data, const void *scale) {
    return (mci_mat){.data = data, .scale = scale, .rows = t->rows, .cols = t->cols,
                     .dtype = t->dtype, .scale_dtype = t->scale_dtype,
                     .block_rows = t->block_rows, .block_cols = t->block_cols};
}

/* Bytes of `cols` elements of an existing dtype, rounded up. */
int64_t mci_row_bytes(int dtype, int64_t cols);

/* Columns of a K block, and how many blocks a row has. */
static inline int64_t mci_mat_block(const mci_mat *w) {
    return w->block_cols ? w->block_cols : MCI_BLOCK;
}
static inline int64_t mci_mat_blocks(const mci_mat *w) {
    return (w->cols + mci_mat_block(w) - 1) / mci_mat_block(w);
}
/* Scales of a row: one for each K block, or one for all. */
static inline int64_t mci_mat_scales(const mci_mat *w) {
    return w->block_cols ? mci_mat_blocks(w) : 1;
}

static inline float mci_scale_at(int scale_dtype, const uint8_t *scale, int64_t i) {
    switch (scale_dtype) {
    case MC_BF16: return mci_bf16_to_f32(mci_u16(scale + 2 * i));
    case MC_F16: return mci_f16_to_f32(mci_u16(scale + 2 * i));
    case MC_F8E8M0: return mci_e8m0_to_f32(scale[i]);
    default: return mci_f32(mci_u32(scale + 4 * i));
    }
}

static inline int mci_scale_size(const mci_mat *w) {
    return w->scale_dtype == MC_F32 ? 4 : w->scale_dtype == MC_F8E8M0 ? 1 : 2;
}

/* Bytes of all scales of a matrix that has any. */
static inline int64_t mci_scales_bytes(const mci_mat *w) {
    return (w->rows + w->block_rows - 1) / w->block_rows * mci_mat_scales(w) * mci_scale_size(w);
}

/* The scales of row r, for a matrix that has any, and that of its K block b. */
static inline const uint8_t *mci_scale_row(const mci_mat *w, int64_t r) {
    /* block_rows is 1 or 128, and a division by what the compiler does not know costs 20 cycles */
    if (w->block_rows != 1) r /= MCI_SCALE_ROWS;
    return w->scale + r * mci_mat_scales(w) * mci_scale_size(w);
}
static inline float mci_scale_of(const mci_mat *w, const uint8_t *row, int64_t b) {
    return mci_scale_at(w->scale_dtype, row, w->block_cols ? b : 0);
}
/* The same in one; 1 where the type has none. */
static inline float mci_mat_scale(const mci_mat *w, int64_t r, int64_t b) {
    return w->scale ? mci_scale_of(w, mci_scale_row(w, r), b) : 1.0f;
}

/* dst[0..n) = the unscaled values of n elements; src at a whole byte. */
void mci_decode(int dtype, const void *src, int64_t n, float *dst);
/* dst[0..cols) = row r, scaled (one rounding: value * scale). */
void mci_mat_row(const mci_mat *w, int64_t r, float *dst);
#endif
