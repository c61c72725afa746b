/* gpu_bench.c - how fast the kernels and copies are, beside what the device does without an engine
 * in the same run. Experts are changed from call to call, so that none is still in the L2. */
#include "control.h"
#include "gpu_case.h"
#include "yard.h"

#include <stdio.h>
#include <stdlib.h>

enum { TIMES = 9, WARM = 3, PAIRS = 64 };
#define BAR 0.75 /* of the bandwidth of a copy, at 8 tokens over 64 experts */

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median seconds of a call of `experts` experts, the next ones of r's slots each time. Its one
 * expert lies in all slots. */
static double time_call(gpu_run *r, mci_gpu *g, int32_t experts, int32_t tokens, mc_error *err) {
    mci_gpu_item item[PAIRS];
    int32_t token[PAIRS];
    double t[TIMES];
    const float *out;
    for (int k = -WARM, slot = 0; k < TIMES; k++) {
        for (int32_t i = 0; i < experts; i++) {
            item[i] = (mci_gpu_item){.slot = slot, .first = i, .n = 1};
            token[i] = i % tokens;
            slot = (slot + 1) % r->c.slots;
        }
        const double from = mci_now();
        if (gpu_api()->run(g, &r->shape, item, experts, token, experts, tokens, err) < 0 ||
            gpu_api()->ran(g, true, &out, err) < 0)
            return -1;
        if (k >= 0) t[k] = mci_now() - from;
    }
    qsort(t, TIMES, sizeof *t, compare);
    return t[TIMES / 2];
}

/* Uploads r's expert into every slot; median seconds of one upload, the filling not included. */
static double time_upload(gpu_run *r, mci_gpu *g, mc_error *err) {
    double *t = calloc((size_t)r->c.slots, sizeof *t), result = -1;
    int rc = t ? MC_OK : MC_ENOMEM;
    if (t && !mci_slot_fill(&r->shape, r->m[0], gpu_api()->stage(g, 0))) rc = MC_EFORMAT;
    for (int32_t i = 0; rc >= 0 && i < r->c.slots; i++) {
        const double from = mci_now();
        rc = gpu_api()->upload(g, 0, i, r->shape.bytes, err);
        while (rc >= 0 && (rc = gpu_api()->uploaded(g, 0, err)) == 0) continue;
        t[i] = mci_now() - from;
    }
    if (rc >= 0) {
        qsort(t, (size_t)r->c.slots, sizeof *t, compare);
        result = t[r->c.slots / 2];
    }
    free(t);
    return result;
}

/* copy: bytes a second of a copy on the device, read + written. */
static int bench_format(int32_t device, int64_t l2, double copy, int32_t dtype, int32_t scale,
                        mc_error *err) {
    const bool tiny = emu_calls != NULL;
    const int32_t pairs = tiny ? 4 : PAIRS, few = tiny ? 2 : 8, H = tiny ? 64 : 2048,
                  W = tiny ? 64 : 512;
    gpu_case c = {.dtype = dtype,
                  .scale = scale,
                  .hidden = H,
                  .width = W,
                  .tokens = 8,
                  .experts = 1,
                  .in = UNIT};
    gpu_run r;
    gpu_make(&c, &r);
    const int64_t bytes = r.shape.bytes, slots = 8 * l2 / bytes + 1;
    r.c.slots = (int32_t)MCI_MAX(slots, 2 * pairs);
    mci_gpu_room room = gpu_room(&r);
    room.rows = room.items = PAIRS;
    mci_gpu *g = NULL;
    int rc = gpu_api()->open(device, &room, &g, err);
    if (rc == MC_OK) {
        gpu_input(&r, g);
        const double up = time_upload(&r, g, err), plain = yard_upload(device, bytes);
        const double many = time_call(&r, g, pairs, 8, err), one = time_call(&r, g, few, 1, err);
        const double empty = yard_empty(device, room.vector_in, (int64_t)few * H * 4);
        if (up < 0 || many < 0 || one < 0) rc = MC_ESYS;
        const double rate = (double)(bytes * pairs) / many;
        printf("%-8s %7.3f MB | %d experts %9.1f us %8.1f GB/s, %.2f of copy%s | %d experts %8.1f "
               "us (empty call %.1f) | upload %6.1f GB/s, %.2f of pinned copy\n",
               mci_dtype_get(dtype)->name, (double)bytes / 1e6, (int)pairs, many * 1e6, rate / 1e9,
               rate / copy, tiny ? "" : rate / copy < BAR ? " (bar 0.75: MISSED)" : " (bar 0.75)",
               (int)few, one * 1e6, empty * 1e6, (double)bytes / up / 1e9, plain / up);
    }
    gpu_api()->close(g);
    gpu_free(&r);
    return rc;
}

int gpu_bench(int32_t device) {
    static const int32_t formats[][2] = {
        {MC_F8E4M3, MC_BF16}, {MC_F4E2M1, MC_F8E8M0}, {MC_INT4, MC_F16}};
    mc_gpu_info info;
    mc_error err = {0};
    if (gpu_api()->probe(device, &info, &err) < 0) {
        printf("test_gpu bench: %s\n", err.message);
        return 1;
    }
    const int64_t l2 = yard_l2(device), copy = emu_calls ? 1 << 16 : 1 << 30;
    printf("%s, capability %d.%d, L2 %.1f MB, driver %d, runtime %d\n", info.name,
           info.capability / 10, info.capability % 10, (double)l2 / 1e6, info.driver, info.runtime);
    if (emu_calls) printf("AN EMULATION: sizes are tiny and the figures mean nothing\n");
    const double t = yard_copy(device, copy);
    const double rate = 2.0 * (double)copy / t;
    printf("copy on the device: %.1f GB/s, read + written\n", rate / 1e9);
    printf("medians of %d; 8 tokens, each expert its own row; then 1 token\n", TIMES);
    for (int f = 0; f < 3; f++)
        if (bench_format(device, l2, rate, formats[f][0], formats[f][1], &err) < 0) {
            printf("test_gpu bench: %s\n", err.message);
            return 1;
        }
    return 0;
}
