/* ops_avx512.c - the AVX-512 kernel sets.
 *
 * Matrix products, quantisation and the delta rule are their own; all else keeps its AVX2 kernel,
 * which gives the same bits and runs wherever these sets do. avx512vnni differs in the product of
 * int4 weights, for which such a CPU has an instruction. */
#include "ops.h"

#include "cpu.h"

#if defined(__x86_64__)
#include "ops_avx512.h"

enum { FEATURES = MCI_CPU_AVX2 | MCI_CPU_FMA | MCI_CPU_F16C | MCI_CPU_AVX512 };

#define SHARED                                                                                     \
    .gemm = mci_avx512_gemm, .quantise = mci_avx512_quantise,          \
    .f8_has_nan = mci_avx2_f8_has_nan,                                      \
    .rmsnorm = mci_avx2_rmsnorm, .l2norm = mci_avx2_l2norm, .silu_mul = mci_avx2_silu_mul,         \
    .sigmoid_mul = mci_avx2_sigmoid_mul, .axpy = mci_avx2_axpy, .add = mci_avx2_add,               \
    .softmax = mci_avx2_softmax, .rope = mci_avx2_rope, .attn = mci_avx2_attn,                     \
    .delta = mci_avx512_delta, .conv = mci_avx2_conv, .vexp = mci_avx2_vexp,                       \
    .vsigmoid = mci_avx2_vsigmoid, .vsoftplus = mci_avx2_vsoftplus, .to_bf16 = mci_avx2_to_bf16

const mci_ops mci_ops_avx512 = {
    .name = "avx512", .features = FEATURES, .qgemm = mci_avx512_qgemm, SHARED};

/* The same but for the product that VNNI has an instruction for. */
const mci_ops mci_ops_avx512vnni = {
    .name = "avx512vnni", .features = FEATURES | MCI_CPU_AVX512_VNNI,
    .qgemm = mci_avx512vnni_qgemm, SHARED};
#else
const mci_ops mci_ops_avx512 = {.name = "avx512"};
const mci_ops mci_ops_avx512vnni = {.name = "avx512vnni"};
#endif
