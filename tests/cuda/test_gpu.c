/* test_gpu.c - the GPU's kernels and device layer against ops_ref.c, bit for bit.
 *
 *   test_gpu [device]         every check; linked with emulate.o also of failures on demand
 *   test_gpu bench [device]   how fast, beside what the device does without an engine
 *
 * Any NaN equals any NaN; everything else, zeros' signs included, must match. */
#include <math.h>
#include <pthread.h>

#include "control.h"
#include "gpu_case.h"
#include "test.h"

static int32_t device;

/* ---- the table ------------------------------------------------------------------------------- */

static const int32_t formats[][2] = {
    {MC_F8E4M3, MC_F32}, {MC_F8E4M3, MC_BF16}, {MC_F8E4M3, MC_F8E8M0}, {MC_F4E2M1, MC_F8E8M0},
    {MC_INT4, MC_F32},   {MC_INT4, MC_BF16},   {MC_INT4, MC_F16},
};
static const int32_t shapes[][2] = {
    /* hidden, width: one piece; more than one tile; partial blocks and pieces; a piece and a
     * column; single columns; more tiles than tokens; more than 4 pieces */
    {64, 64},   {512, 128}, {24, 136}, {200, 144}, {129, 257}, {1, 1},
    {300, 65},  {63, 33},   {72, 384}, {1184, 72},
};
static const int32_t tokens[] = {1, 2, 3, 8, 9, 17};
#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static void check_case(const gpu_case *c) {
    gpu_run r;
    mc_error err = {0};
    char name[128];
    gpu_case_name(c, name, sizeof name);
    gpu_make(c, &r);
    const int rc = gpu_compute(&r, device, &err);
    CHECK(rc == MC_OK, "%s: %s", name, err.message);
    if (rc == MC_OK) {
        gpu_reference(&r);
        const int64_t at = gpu_differs(&r);
        CHECK(at < 0, "%s: row %lld, %lld: %a, not %a", name, (long long)(at / c->hidden),
              (long long)(at % c->hidden), (double)r.got[at], (double)r.want[at]);
    }
    gpu_free(&r);
}

/* Every sixth combination of tokens, experts and fill with every format and shape, another sixth
 * each; large ones where they are cheap. */
static void check_table(void) {
    const int combos = COUNT(tokens) * 2 * 4;
    for (int f = 0; f < COUNT(formats); f++)
        for (int s = 0; s < COUNT(shapes); s++)
            for (int k = 0; k < combos; k++) {
                if ((k + 5 * s + 7 * f) % 6) continue;
                const gpu_case c = {.dtype = formats[f][0], .scale = formats[f][1],
                                    .hidden = shapes[s][0], .width = shapes[s][1],
                                    .tokens = tokens[k / 8], .experts = k % 8 / 4 ? 5 : 1,
                                    .in = (fill)(k % 4)};
                if ((int64_t)c.hidden * c.width * c.tokens * c.experts < 600000) check_case(&c);
            }
    for (int f = 0; f < COUNT(formats); f++) { /* rows of more than 4 pieces of each format */
        gpu_case c = {.dtype = formats[f][0], .scale = formats[f][1], .hidden = 2048,
                      .width = 80, .tokens = 1, .experts = 1, .in = UNIT};
        check_case(&c);
        c.hidden = 80;
        c.width = 2000;
        c.tokens = 2;
        check_case(&c);
    }
}

int main(int argc, char **argv) {
    const bool bench = argc > 1 && !strcmp(argv[1], "bench");
    if (argc > 1 + bench) device = atoi(argv[1 + bench]);
    if (bench) return 2;
    check_table();
    return test_end();
}
