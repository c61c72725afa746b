/* slot.h - experts and activations as a GPU reads them: cuda/gpu.h draws both. */
#ifndef MCI_SLOT_H
#define MCI_SLOT_H
#include "cuda/gpu.h"
#include "ops.h"

/* Where an expert's parts lie in a slot. m: gate, up, down; their data and scales are not looked
 * at. false: there is no kernel for such an expert (other formats or blocks, or not one format and
 * type of scale for all three). */
bool mci_slot_of(const mci_mat m[3], mci_slot_shape *out);
/* Fills a slot (s->bytes). false: an FP8 code is a NaN, which the kernels do not watch for. */
bool mci_slot_fill(const mci_slot_shape *s, const mci_mat m[3], uint8_t *slot);
/* Fills one token's activations of `cols` columns (mci_slot_vector bytes). */
void mci_slot_input(const mci_ops *ops, const mci_slot_shape *s, const float *x, int32_t cols,
                    void *vector);
#endif
