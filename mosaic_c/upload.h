/* upload.h - the thread that copies experts to VRAM: from their slabs into pinned memory, in the
 * order of the GPU (slot.h), and on. One caller asks and takes; it never waits unless it says so.
 */
#ifndef MCI_UPLOAD_H
#define MCI_UPLOAD_H
#include "engine.h"
#include "slot.h"

enum { MCI_UPLOAD_DONE, MCI_UPLOAD_REFUSED /* a NaN code */, MCI_UPLOAD_FAILED };

/* An expert on its way. item, slab: the caller's. The bytes of mat must stay until it is taken. */
typedef struct mci_upload {
    int64_t item;
    int32_t slot, slab;
    const mci_slot_shape *shape;
    mci_mat mat[3];
    int result;
    mc_error error; /* of MCI_UPLOAD_FAILED: then all that follow fail */
} mci_upload;

typedef struct mci_uploads mci_uploads;

int mci_uploads_open(const mci_gpu_api *api, mci_gpu *gpu, mci_uploads **out, mc_error *err);
/* Ends the thread when all that was asked is done. NULL: nothing, as for close and take. */
void mci_uploads_stop(mci_uploads *u);
void mci_uploads_close(mci_uploads *u);
/* Whether one more may be asked for: MCI_GPU_STAGES are under way or not taken at most. */
bool mci_uploads_room(mci_uploads *u);
void mci_uploads_ask(mci_uploads *u, const mci_upload *what);
/* One that is over, in any order; false: none is. */
bool mci_uploads_take(mci_uploads *u, mci_upload *out);
/* Until all that was asked is over. */
void mci_uploads_wait(mci_uploads *u);
#endif
