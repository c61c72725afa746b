/* cpu.c - which vector extensions the CPU has AND the operating system saves on a context switch.
 *
 * CPUID says what the silicon can do, XGETBV which registers the kernel keeps: a feature counts
 * only when both agree. */
#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t xgetbv0(void) {
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

uint32_t mci_cpu_features(void) {
    uint32_t a, b, c, d, f = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const uint32_t osxsave = 1u << 27, avx = 1u << 28;
    if (!(c & osxsave) || !(c & avx)) return 0;
    uint64_t kept = xgetbv0();
    const uint64_t ymm = 0x6, zmm = 0xe6; /* XMM and YMM; with opmask and both halves of ZMM */
    if ((kept & ymm) != ymm) return 0;
    if (c & 1u << 12) f |= MCI_CPU_FMA;
    if (c & 1u << 29) f |= MCI_CPU_F16C;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
    uint32_t leaves = a;
    if (b & 1u << 5) f |= MCI_CPU_AVX2;
    const uint32_t fbwdqvl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    if ((kept & zmm) == zmm && (b & fbwdqvl) == fbwdqvl) {
        f |= MCI_CPU_AVX512;
        if (c & 1u << 11) f |= MCI_CPU_AVX512_VNNI;
    }
    if (leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4))
        f |= MCI_CPU_AVX_VNNI;
    return f;
}
#else
uint32_t mci_cpu_features(void) { return 0; }
#endif

/* All 64 combinations of the six words, as constants: the caller may keep the pointer for ever and
 * nothing is written at run time. The bit of the outermost word is the highest of the index. */
#define W0(s) s
#define W1(s) W0(s), W0(s " avx_vnni")
#define W2(s) W1(s), W1(s " avx512_vnni")
#define W3(s) W2(s), W2(s " avx512")
#define W4(s) W3(s), W3(s " f16c")
#define W5(s) W4(s), W4(s " fma")
#define W6(s) W5(s), W5(s " avx2")

const char *mc_engine_cpu(void) {
    static const char words[64][48] = {W6("")};
    static const uint32_t order[6] = {MCI_CPU_AVX2,   MCI_CPU_FMA,         MCI_CPU_F16C,
                                      MCI_CPU_AVX512, MCI_CPU_AVX512_VNNI, MCI_CPU_AVX_VNNI};
    uint32_t f = mci_cpu_features(), i = 0;
    for (int k = 0; k < 6; k++) i = i << 1 | (f & order[k] ? 1u : 0u);
    return words[i] + (words[i][0] == ' ');
}
