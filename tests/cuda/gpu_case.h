/* gpu_case.h - experts, rows and their products by a device and by ops_ref.c. Prints nothing. */
#ifndef GPU_CASE_H
#define GPU_CASE_H
#include "cases.h"
#include "slot.h"

typedef struct gpu_case {
    int32_t dtype, scale, hidden, width, tokens, experts;
    fill in;       /* of activations and weights; no FP8 code is a NaN */
    int32_t slots; /* of the device; 0: two more than experts */
} gpu_case;

typedef struct gpu_run {
    gpu_case c;
    kcase *from; /* 3 an expert: who owns its weights */
    mci_mat (*m)[3];
    mci_slot_shape shape;
    mci_gpu_item *item;
    int32_t *token, rows; /* token: of each row */
    float *x, *got, *want;
} gpu_run;

void gpu_case_name(const gpu_case *c, char *out, size_t size);
/* Item i passes max(1, tokens - i) of the tokens, in another order each, through expert i; the
 * slots of the experts are the last ones, backwards. Ends the program when memory runs out. */
void gpu_make(const gpu_case *c, gpu_run *r);
void gpu_free(gpu_run *r);
/* What a device needs for r. */
mci_gpu_room gpu_room(const gpu_run *r);
/* want by ops_ref.c. */
void gpu_reference(gpu_run *r);
/* got by the device: opened, experts uploaded, run, closed. gpu_call: all but open and close;
 * gpu_put: expert i into its slot. */
int gpu_compute(gpu_run *r, int32_t device, mc_error *err);
int gpu_call(gpu_run *r, mci_gpu *g, mc_error *err);
int gpu_put(gpu_run *r, mci_gpu *g, int32_t stage, int32_t i, mc_error *err);
void gpu_input(gpu_run *r, mci_gpu *g);
/* Index of the first value that differs, or -1. */
int64_t gpu_differs(const gpu_run *r);
const mci_gpu_api *gpu_api(void);

int gpu_bench(int32_t device); /* gpu_bench.c */
#endif
