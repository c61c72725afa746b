/* dtype.c - the table of storage types and the exact decode of each to float32.
 *
 * Every decode is arithmetic on the bits and exact, so any instruction set can repeat it. */
#include "dtype.h"
#include "pool.h"

const mci_dtype *mci_dtype_get(int dtype) {
    static const mci_dtype table[] = {
        [MC_F32] = {"F32", 4, false},
        [MC_BF16] = {"BF16", 2, false},
        [MC_F16] = {"F16", 2, false},
        [MC_F8E4M3] = {"F8_E4M3", 1, true},
    };
    return dtype >= 0 && dtype < (int)(sizeof table / sizeof *table) ? &table[dtype] : NULL;
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
    default:
        break; /* validated by the caller */
    }
}

void mci_mat_row(const mci_mat *w, int64_t r, float *dst) {
    mci_decode(w->dtype, w->data + r * w->cols * mci_dtype_get(w->dtype)->bytes, w->cols, dst);
    if (!w->scale) return;
    for (int64_t b = 0; b < mci_mat_blocks(w); b++) {
        float s = mci_mat_scale(w, r, b);
        int64_t end = MCI_MIN((b + 1) * MCI_BLOCK, w->cols);
        for (int64_t c = b * MCI_BLOCK; c < end; c++) dst[c] *= s;
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
