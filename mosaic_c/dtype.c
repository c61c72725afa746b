/* dtype.c - the table of storage types and the exact decode of each to float32.
 *
 * Every decode is arithmetic on the bits and exact, so any instruction set can repeat it. */
#include "dtype.h"
#include "pool.h"

#define TYPE(t) (1u << (t))

/* Kernels rely on: block_cols 0 or at most MCI_BLOCK and a multiple of 32, block_rows 1 or
 * MCI_SCALE_ROWS (see also mci_mat_ref in expert.h, where both are a byte). */
const mci_dtype *mci_dtype_get(int dtype) {
    static const mci_dtype table[] = {
        [MC_F32] = {"F32", 32, false, 0, {{0, 0}}},
        [MC_BF16] = {"BF16", 16, false, 0, {{0, 0}}},
        [MC_F16] = {"F16", 16, false, 0, {{0, 0}}},
        [MC_F8E4M3] = {"F8_E4M3", 8, false, TYPE(MC_F32) | TYPE(MC_BF16) | TYPE(MC_F8E8M0),
                       {{128, 128}, {1, 0}}},
        [MC_F4E2M1] = {"F4", 4, false, TYPE(MC_F8E8M0), {{1, 32}}},
        [MC_INT4] = {"INT4", 4, true, TYPE(MC_F32) | TYPE(MC_BF16) | TYPE(MC_F16),
                     {{1, 0}, {1, 32}, {1, 64}, {1, 128}}},
        [MC_INT8] = {"I8", 8, false, TYPE(MC_F32) | TYPE(MC_BF16) | TYPE(MC_F16),
                     {{1, 0}, {1, 32}, {1, 64}, {1, 128}}},
        [MC_F8E8M0] = {"F8_E8M0", 8, false, 0, {{0, 0}}},
    };
    return dtype >= 0 && dtype < (int)(sizeof table / sizeof *table) ? &table[dtype] : NULL;
}

int64_t mci_row_bytes(int dtype, int64_t cols) {
    return (cols * mci_dtype_get(dtype)->bits + 7) / 8;
}

/* The largest sum of an integer row, 8 * 127 a column, stays an int32. */
#define MAX_INTEGER_COLS (INT32_MAX / (8 * 127))

static bool shape_allowed(const mci_dtype *d, int32_t rows, int32_t cols) {
    for (int i = 0; i < MCI_MAX_SHAPES && d->shape[i].rows; i++)
        if (d->shape[i].rows == rows && d->shape[i].cols == cols) return true;
    return false;
}

int mci_format_check(const mc_tensor *t, const char *name, int64_t *bytes, int64_t *scale_bytes,
                     mc_error *err) {
    const mci_dtype *d = mci_dtype_get(t->dtype), *s = mci_dtype_get(t->scale_dtype);
    int64_t count, end;
    *bytes = *scale_bytes = 0;
    if (!d || t->dtype == MC_F8E8M0)
        return mci_fail(err, MC_EFORMAT, 0, "%s: %s %d", name,
                        d ? "not a type of weights: dtype" : "unknown dtype", t->dtype);
    if (t->rows < 1 || t->cols < 1 || !mci_mul(t->rows, t->cols, &count) ||
        !mci_mul(count, 32, &count) || (d->integer && t->cols > MAX_INTEGER_COLS))
        return mci_fail(err, MC_EFORMAT, 0, "%s: impossible shape (%lld, %lld) for %s", name,
                        (long long)t->rows, (long long)t->cols, d->name);
    *bytes = t->rows * mci_row_bytes(t->dtype, t->cols);
    if (t->offset < 0 || !mci_add(t->offset, *bytes, &end) || end > INT64_MAX / 4)
        return mci_fail(err, MC_EFORMAT, 0, "%s: impossible offset %lld for %lld bytes", name,
                        (long long)t->offset, (long long)*bytes);
    if (!d->scale_types != (t->scale_file < 0) ||
        (!d->scale_types && (t->block_rows || t->block_cols)))
        return mci_fail(err, MC_EFORMAT, 0, "%s: %s %s", name, d->name,
                        d->scale_types ? "needs a scale tensor" : "takes no scale tensor");
    if (!d->scale_types) return MC_OK;
    if (!s || !(d->scale_types & TYPE(t->scale_dtype)))
        return mci_fail(err, MC_EFORMAT, 0, "%s: %s takes no scales of %s", name, d->name,
                        s ? s->name : "an unknown dtype");
    if (!shape_allowed(d, t->block_rows, t->block_cols))
        return mci_fail(err, MC_EFORMAT, 0,
                        "%s: %s takes no scale for each %d x %d elements (0: a whole row)", name,
                        d->name, t->block_rows, t->block_cols);
    const mci_mat m = mci_mat_of(t, NULL, NULL);
    *scale_bytes = mci_scales_bytes(&m);
    return MC_OK;
}

/*  f16  s eeeee mmmmmmmmmm      exponent bias 15
 *  f32  s eeeeeeee mmmmmmmmmm0000000000000, bias 127: shifted by 13 the value is 2^-112 of the
 *  right one, for subnormals too, and the product by 2^112 is exact */
float mci_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff;
    if (mag >= 0x7c00) return mci_f32(sign | 0x7f800000u | mag << 13); /* infinity, NaN */
    return mci_f32(sign | mag << 13) * 0x1p+112f;
}

uint16_t mci_f32_to_bf16(float f) {
    uint32_t u = mci_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40); /* stays a NaN */
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

/* Two elements a byte, the first in the low half. */
static uint32_t nibble(const uint8_t *p, int64_t i) {
    return (uint32_t)p[i / 2] >> (i % 2 * 4) & 15;
}

/*  E2M1 s ee m                          exponent bias 1: 0 0.5 1 1.5 2 3 4 6
 *  f32  s 000000ee m0000000000000000000000, bias 127: the product by 2^126 is exact */
static float f4_to_f32(uint32_t n) {
    return mci_f32((n & 8) << 28 | (n & 7) << 22) * 0x1p+126f;
}

void mci_decode(int dtype, const void *src, int64_t n, float *dst) {
    const uint8_t *p = src;
    switch (dtype) {
    case MC_F32:
        memcpy(dst, p, (size_t)n * 4);
        break;
    case MC_BF16:
        for (int64_t i = 0; i < n; i++) dst[i] = mci_bf16_to_f32(mci_u16(p + 2 * i));
        break;
    case MC_F16:
        for (int64_t i = 0; i < n; i++) dst[i] = mci_f16_to_f32(mci_u16(p + 2 * i));
        break;
    case MC_F8E4M3:
        for (int64_t i = 0; i < n; i++) dst[i] = mci_f8_to_f32(p[i]);
        break;
    case MC_F4E2M1:
        for (int64_t i = 0; i < n; i++) dst[i] = f4_to_f32(nibble(p, i));
        break;
    case MC_INT4:
        for (int64_t i = 0; i < n; i++) dst[i] = (float)((int)nibble(p, i) - 8);
        break;
    case MC_INT8:
        for (int64_t i = 0; i < n; i++) dst[i] = (float)(int8_t)p[i];
        break;
    case MC_F8E8M0:
        for (int64_t i = 0; i < n; i++) dst[i] = mci_e8m0_to_f32(p[i]);
        break;
    default:
        break; /* validated by the caller */
    }
}

void mci_mat_row(const mci_mat *w, int64_t r, float *dst) {
    const int64_t block = mci_mat_block(w);
    mci_decode(w->dtype, w->data + r * mci_row_bytes(w->dtype, w->cols), w->cols, dst);
    if (!w->scale) return;
    for (int64_t c0 = 0; c0 < w->cols; c0 += block) {
        float s = mci_mat_scale(w, r, c0 / block);
        for (int64_t c = c0; c < MCI_MIN(c0 + block, w->cols); c++) dst[c] *= s;
    }
}

int mc_decode(int32_t dtype, const void *src, int64_t n, float *dst, mc_error *err) {
    if (!mci_dtype_get(dtype)) return mci_fail(err, MC_EINVAL, 0, "no dtype %d", (int)dtype);
    if (n < 0 || (n > 0 && (!src || !dst)))
        return mci_fail(err, MC_EINVAL, 0, "decode of %lld values: bad count or NULL pointer",
                        (long long)n);
    if (n == 0) return MC_OK;
    uint32_t fp = mci_fp_enter();
    mci_decode(dtype, src, n, dst);
    mci_fp_restore(fp);
    return MC_OK;
}
