/* stub.c - stands for gpu.cu in builds without CUDA, so that nobody above needs to know how this
 * build was made. */
#include <stddef.h>

#include "gpu.h"

const mci_gpu_api *mci_gpu_get(const char **why) {
    *why = "this build has no GPU tier";
    return NULL;
}
