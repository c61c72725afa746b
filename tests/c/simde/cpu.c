/* cpu.c - mosaic_c/cpu.c for `make simde`: this CPU, and all AVX-512 there is. */
#define mci_cpu_features native_features
#include "../../../mosaic_c/cpu.c"
#undef mci_cpu_features

uint32_t mci_cpu_features(void) {
    const uint32_t native = MCI_CPU_AVX2 | MCI_CPU_FMA | MCI_CPU_F16C | MCI_CPU_AVX_VNNI;
    return native_features() | ~native; /* also features that cpu.h does not know yet */
}
