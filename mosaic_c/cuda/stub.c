/* stub.c - stands where the GPU tier will stand, in builds without it. It answers why there is
 * none, so that nobody above needs to know how this build was made. */
#include <stddef.h>

#include "../mosaic_c.h"

const char *mc_engine_gpu(void) { return "this build has no GPU tier"; }
