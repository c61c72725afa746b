/* control.h - what tests may do to the emulated device. Weak: linked with a real one all of them
 * are NULL. */
#ifndef EMU_CONTROL_H
#define EMU_CONTROL_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#define EMU_WEAK __attribute__((weak))

/* n devices under a driver of this CUDA version (0: none); 2 and the runtime's own at first. */
EMU_WEAK void emu_devices(int n, int driver);
EMU_WEAK void emu_memory(int64_t bytes);        /* of each device; at first 1 GiB */
EMU_WEAK void emu_fail(int64_t nth, int error); /* the nth runtime call from now (1: the next) */
EMU_WEAK void emu_lose(int lost);               /* from now on every call fails */
EMU_WEAK int64_t emu_calls(void);               /* of the runtime so far */
EMU_WEAK int64_t emu_live(void);                /* allocations, streams, events that exist */
EMU_WEAK void emu_seed(uint64_t seed);          /* of the order of threads and blocks */
#ifdef __cplusplus
}
#endif
#endif
