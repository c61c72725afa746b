/* cpu.h - what this CPU and its operating system can run, asked once per call by CPUID + XGETBV. */
#ifndef MCI_CPU_H
#define MCI_CPU_H
#include "base.h"

enum { MCI_CPU_AVX2 = 1, MCI_CPU_FMA = 2, MCI_CPU_F16C = 4, MCI_CPU_AVX512 = 8 /* F BW DQ VL */,
       MCI_CPU_AVX512_VNNI = 16, MCI_CPU_AVX_VNNI = 32 };

uint32_t mci_cpu_features(void);
#endif
