/* stub.c - stands for gpu.cu in builds without CUDA, so that nobody above needs to know how this
 * build was made. The build says why it chose this file: MOSAIC_CUDA_WHY, a string. */
#include <stddef.h>

#include "gpu.h"

#ifdef MOSAIC_CUDA_WHY
#define WHY ": " MOSAIC_CUDA_WHY
#else
#define WHY
#endif

const mci_gpu_api *mci_gpu_get(const char **why) {
    *why = "this build has no GPU tier" WHY;
    return NULL;
}
