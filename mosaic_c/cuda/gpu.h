/* gpu.h - a GPU as the tier sees it (tier.c), in words that C, C++ and CUDA share. gpu.cu is a real
 * one; compiled for the host by tests/cuda/emulate.h it is an emulated one; tests also have a fake
 * one that fails on purpose. It knows slots and products, nothing of layers, files or policies.
 *
 * An expert in a slot. Rows are read in pieces of MCI_SLOT_PIECE bytes, 16 bytes by each of the 8
 * lanes of the canonical dot product (ops.h), so that the 8 threads of a row read 128 bytes side by
 * side and each finds only columns of its own lane:
 *
 *   FP8     a piece is 128 columns: lane l has c = l, 8+l, .. 120+l, a byte each
 *   MXFP4   256 columns, 8 blocks of 32: lane l has of each block c = l, 8+l, 16+l, 24+l, two in a
 *           byte, the first in its low half
 *   int4    256 columns as they are in the file: sums of integers need no lanes; lane l has the
 *           columns 32 l .. 32 l + 31
 *
 *   slot  | gate: rows x pieces x 128 | up | down | scales of gate | of up | of down |
 *
 * Each part begins at a multiple of 128. Columns up to a whole piece are zero bits. Scales are
 * those of the file, byte for byte; of MXFP4 and int4 each row's are padded with zeros to whole
 * pieces (8 and 4 scales).
 *
 * Activations of a token, one vector after the other (mci_slot_vector bytes each):
 *
 *   FP8, MXFP4   f32, columns up to a whole piece; 32 columns at a time lie as [lane][4]: value i
 *                of lane l is column 8 i + l. Padding is -0, which changes no sum, not even -0.
 *   int4         q (a byte a column, in the order of mci_qact, zeros up to a whole piece), then s
 *                (f32) and q8 (i32) of each group of 64
 */
#ifndef MCI_GPU_H
#define MCI_GPU_H
#include <stdbool.h>

#include "../mosaic_c.h"
#ifdef __cplusplus
extern "C" {
#endif

enum {
    MCI_SLOT_PIECE = 128, /* bytes */
    MCI_GPU_STAGES = 2    /* experts on their way at once */
};

/* Shape of an expert and where its parts begin in a slot: gate, up (width, hidden), down (hidden,
 * width). */
typedef struct mci_slot_shape {
    int32_t dtype, scale_dtype; /* MC_F8E4M3 in 128x128 blocks, MC_F4E2M1, MC_INT4 by 64 */
    int32_t hidden, width;
    int64_t data[3], scale[3], bytes;
} mci_slot_shape;

/* Columns of a piece. */
static inline int32_t mci_slot_columns(int32_t dtype) { return dtype == MC_F8E4M3 ? 128 : 256; }
/* Pieces of a row of `cols`. */
static inline int32_t mci_slot_pieces(int32_t dtype, int32_t cols) {
    return (cols + mci_slot_columns(dtype) - 1) / mci_slot_columns(dtype);
}
/* Bytes of one token's activations, a multiple of 16. */
static inline int64_t mci_slot_vector(int32_t dtype, int32_t cols) {
    const int64_t n = mci_slot_pieces(dtype, cols);
    return dtype == MC_INT4 ? n * (256 + 4 * 8) : n * mci_slot_columns(dtype) * 4;
}

/* One expert of a call: the rows first .. first + n - 1 of the call pass through it. */
typedef struct mci_gpu_item {
    int32_t slot, first, n;
} mci_gpu_item;

/* What a device is asked to have room for. vector_in, vector_act: the most bytes of a token's
 * activations of hidden and of width columns; hidden: the most of them. */
typedef struct mci_gpu_room {
    int64_t slots, slot_bytes;
    int32_t tokens, rows, items, hidden;
    int64_t vector_in, vector_act;
} mci_gpu_room;

typedef struct mci_gpu mci_gpu;

/* Calls of one mci_gpu: stage, upload and uploaded by one thread, input, run and ran by another.
 * Any failure is final: from then on only close is called. */
typedef struct mci_gpu_api {
    /* mc_gpu_probe. */
    int (*probe)(int32_t device, mc_gpu_info *out, mc_error *err);
    /* VRAM of such a room but for the slots, and pinned memory of the host. Pure. */
    int64_t (*vram)(const mci_gpu_room *room);
    int64_t (*host)(const mci_gpu_room *room);
    int (*open)(int32_t device, const mci_gpu_room *room, mci_gpu **out, mc_error *err);
    void (*close)(mci_gpu *g); /* waits for what is under way; NULL: nothing */
    /* Pinned memory of slot_bytes, i < MCI_GPU_STAGES, and the copy of its first `bytes` into a
     * slot, which is not used meanwhile. uploaded: 1 done, 0 still under way. */
    void *(*stage)(mci_gpu *g, int32_t i);
    int (*upload)(mci_gpu *g, int32_t i, int32_t slot, int64_t bytes, mc_error *err);
    int (*uploaded)(mci_gpu *g, int32_t i, mc_error *err);
    /* Pinned memory for the activations of a call, token after token. */
    void *(*input)(mci_gpu *g);
    /* Begins out (n_row, hidden) = down(silu(gate x) * up x): row r of the call is token[r]'s
     * (n_row) activations through the item it belongs to; items ascend in first and cover all rows.
     * ran: 1 and *out (pinned, until the next run) when it is done, waiting for that if asked; 0
     * still under way. */
    int (*run)(mci_gpu *g, const mci_slot_shape *s, const mci_gpu_item *item, int32_t n_item,
               const int32_t *token, int32_t n_row, int32_t n_tok, mc_error *err);
    int (*ran)(mci_gpu *g, bool wait, const float **out, mc_error *err);
} mci_gpu_api;

/* The one of this build, and NULL; or NULL and why there is none. */
const mci_gpu_api *mci_gpu_get(const char **why);
#ifdef __cplusplus
}
#endif
#endif
