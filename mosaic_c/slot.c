/* slot.c - brings experts and activations into the order in which a GPU reads them (cuda/gpu.h
 * draws it). An expert is filled into staging memory on its way to the GPU, so this runs about as
 * fast as a copy. It changes no weight, no scale and no activation, only where they lie. */
#include "slot.h"

enum { PIECE = MCI_SLOT_PIECE, BLOCK4 = 32, GROUP = 64 };

static int32_t scale_columns(int32_t dtype) {
    return dtype == MC_F8E4M3 ? MCI_BLOCK : dtype == MC_F4E2M1 ? BLOCK4 : GROUP;
}

/* Bytes of the scales of a row in a slot; of FP8 of 128 rows, as in the file. */
static int64_t scale_row(int32_t dtype, const mci_mat *m) {
    const int64_t n = dtype == MC_F8E4M3
                          ? mci_mat_scales(m)
                          : mci_slot_pieces(dtype, (int32_t)m->cols) *
                                (int64_t)(mci_slot_columns(dtype) / scale_columns(dtype));
    return n * mci_scale_size(m);
}

bool mci_slot_of(const mci_mat m[3], mci_slot_shape *out) {
    const int32_t type = m[0].dtype, scale = m[0].scale_dtype;
    if (type != MC_F8E4M3 && type != MC_F4E2M1 && type != MC_INT4) return false;
    if (scale < 0 || !(mci_dtype_get(type)->scale_types >> scale & 1)) return false;
    const int64_t hidden = m[0].cols, width = m[0].rows;
    if (hidden < 1 || width < 1 || hidden > INT32_MAX / 2 || width > INT32_MAX / 2) return false;
    *out = (mci_slot_shape){
        .dtype = type, .scale_dtype = scale, .hidden = (int32_t)hidden, .width = (int32_t)width};
    int64_t at = 0;
    for (int i = 0; i < 3; i++) {
        if (m[i].dtype != type || m[i].scale_dtype != scale ||
            m[i].rows != (i < 2 ? width : hidden) || m[i].cols != (i < 2 ? hidden : width) ||
            m[i].block_cols != scale_columns(type) ||
            m[i].block_rows != (type == MC_F8E4M3 ? MCI_SCALE_ROWS : 1))
            return false;
        out->data[i] = at;
        at += m[i].rows * mci_slot_pieces(type, (int32_t)m[i].cols) * PIECE;
    }
    for (int i = 0; i < 3; i++) {
        out->scale[i] = at;
        const int64_t rows = (m[i].rows + m[i].block_rows - 1) / m[i].block_rows;
        at = mci_round_up(at + rows * scale_row(type, &m[i]), PIECE);
    }
    out->bytes = at;
    return true;
}

/* ---- data ------------------------------------------------------------------------------------ */

/* Two 8-byte rows side by side: vector code on any CPU, without its intrinsics. */
typedef uint64_t pair __attribute__((vector_size(16)));

static inline void swap(pair *a, pair *b, int shift, uint64_t mask) {
    const pair t = ((*a >> shift) ^ *b) & mask;
    *b ^= t;
    *a ^= t << shift;
}

/* 16 rows of 8 bytes become 8 rows of 16: dst[16 l + i] = src[8 i + l]. Two 8 x 8 transpositions at
 * once, which swap the halves, quarters and eighths of rows 4, 2 and 1 apart. *nan gets bit 7 of
 * some byte if any is 0x7f or 0xff. */
static inline void lanes(const uint8_t *src, uint8_t *dst, pair *nan) {
    pair v[8];
    for (int i = 0; i < 8; i++) {
        uint64_t lo, hi;
        memcpy(&lo, src + 8 * i, 8);
        memcpy(&hi, src + 8 * i + 64, 8);
        v[i] = (pair){lo, hi};
    }
    if (nan)
        for (int i = 0; i < 8; i++) *nan |= (v[i] & 0x7f7f7f7f7f7f7f7fu) + 0x0101010101010101u;
    for (int i = 0; i < 4; i++) swap(&v[i], &v[i + 4], 32, 0x00000000ffffffffu);
    for (int i = 0; i < 4; i++)
        swap(&v[i + i / 2 * 2], &v[i + i / 2 * 2 + 2], 16, 0x0000ffff0000ffffu);
    for (int i = 0; i < 4; i++) swap(&v[2 * i], &v[2 * i + 1], 8, 0x00ff00ff00ff00ffu);
    memcpy(dst, v, sizeof v);
}

static bool fill_f8(const mci_mat *m, uint8_t *dst) {
    pair nan = {0, 0};
    for (int64_t r = 0; r < m->rows; r++) {
        const uint8_t *row = m->data + r * m->cols;
        int64_t c = 0;
        for (; c + PIECE <= m->cols; c += PIECE, dst += PIECE)
            lanes(row + c, dst, m->no_nan ? NULL : &nan);
        if (c < m->cols) {
            uint8_t rest[PIECE] = {0};
            memcpy(rest, row + c, (size_t)(m->cols - c));
            lanes(rest, dst, m->no_nan ? NULL : &nan);
            dst += PIECE;
        }
    }
    return !((nan[0] | nan[1]) & 0x8080808080808080u);
}

/* The 8 nibbles of w, a byte each. */
static inline uint64_t spread(uint32_t w) {
    uint64_t x = w;
    x = (x | x << 16) & 0x0000ffff0000ffffu;
    x = (x | x << 8) & 0x00ff00ff00ff00ffu;
    return (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
}

/* Columns 8 k .. 8 k + 7 of a block and the 8 after them become 8 bytes, one a lane; what is left
 * is the order of FP8. */
static void lanes_f4(const uint8_t *src, uint8_t *dst) {
    uint64_t rows[PIECE / 8];
    for (int i = 0; i < PIECE / 8; i++)
        rows[i] = spread(mci_u32(src + 8 * i)) | spread(mci_u32(src + 8 * i + 4)) << 4;
    lanes((const uint8_t *)rows, dst, NULL);
}

static void fill_halves(const mci_mat *m, uint8_t *dst) {
    const int64_t bytes = mci_row_bytes(m->dtype, m->cols);
    for (int64_t r = 0; r < m->rows; r++) {
        const uint8_t *row = m->data + r * bytes;
        for (int64_t b = 0; b < bytes; b += PIECE, dst += PIECE) {
            uint8_t rest[PIECE];
            const uint8_t *src = row + b;
            if (b + PIECE >= bytes) {
                memset(rest, 0, sizeof rest);
                memcpy(rest, src, (size_t)(bytes - b));
                if (m->cols & 1) rest[bytes - b - 1] &= 15; /* what lies after the last column */
                src = rest;
            }
            if (m->dtype == MC_F4E2M1)
                lanes_f4(src, dst);
            else
                memcpy(dst, src, PIECE);
        }
    }
}

static void fill_scales(int32_t dtype, const mci_mat *m, uint8_t *dst) {
    const int64_t file = mci_mat_scales(m) * mci_scale_size(m), slot = scale_row(dtype, m);
    const int64_t rows = (m->rows + m->block_rows - 1) / m->block_rows;
    for (int64_t r = 0; r < rows; r++, dst += slot) {
        memcpy(dst, m->scale + r * file, (size_t)file);
        memset(dst + file, 0, (size_t)(slot - file));
    }
}

bool mci_slot_fill(const mci_slot_shape *s, const mci_mat m[3], uint8_t *slot) {
    for (int i = 0; i < 3; i++) {
        if (s->dtype != MC_F8E4M3)
            fill_halves(&m[i], slot + s->data[i]);
        else if (!fill_f8(&m[i], slot + s->data[i]))
            return false;
        fill_scales(s->dtype, &m[i], slot + s->scale[i]);
    }
    return true;
}

/* ---- activations ----------------------------------------------------------------------------- */

void mci_slot_input(const mci_ops *ops, const mci_slot_shape *s, const float *x, int32_t cols,
                    void *vector) {
    const int64_t padded = (int64_t)mci_slot_pieces(s->dtype, cols) * mci_slot_columns(s->dtype);
    float *out = vector;
    if (s->dtype == MC_INT4) {
        int8_t *q = vector;
        float *scale = (float *)(void *)(q + padded);
        memset(q, 0, (size_t)mci_slot_vector(s->dtype, cols));
        ops->quantise(x, cols, GROUP, q, scale, (int32_t *)(void *)(scale + padded / GROUP));
        return;
    }
    int64_t c = 0;
    for (; c + 32 <= cols; c += 32)
        for (int l = 0; l < 8; l++)
            for (int i = 0; i < 4; i++) out[c + 4 * l + i] = x[c + 8 * i + l];
    for (int64_t p = c; p < padded; p++) { /* position p holds column at */
        const int64_t at = (p & ~31) + p % 4 * 8 + p % 32 / 4;
        out[p] = at < cols ? x[at] : -0.0f;
    }
}
