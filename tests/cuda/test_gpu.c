/* test_gpu.c - the GPU's kernels and device layer against ops_ref.c, bit for bit.
 *
 *   test_gpu [device]         every check
 *   test_gpu small [device]   a few of every format, for sanitizers of a device
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
    {64, 64}, {512, 128}, {24, 136}, {200, 144}, {129, 257},
    {1, 1},   {300, 65},  {63, 33},  {72, 384},  {1184, 72},
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

/* Every seventh combination of tokens, experts and fill with every format and shape, others each
 * time; large ones where they are cheap. */
static void check_table(void) {
    const int combos = COUNT(tokens) * 2 * 4;
    for (int f = 0; f < COUNT(formats); f++)
        for (int s = 0; s < COUNT(shapes); s++)
            for (int k = 0; k < combos; k++) {
                if ((k + 5 * s + 3 * f) % 7) continue;
                const gpu_case c = {.dtype = formats[f][0],
                                    .scale = formats[f][1],
                                    .hidden = shapes[s][0],
                                    .width = shapes[s][1],
                                    .tokens = tokens[k / 8],
                                    .experts = k % 8 / 4 ? 5 : 1,
                                    .in = (fill)(k % 4)};
                if ((int64_t)c.hidden * c.width * c.tokens * c.experts < 400000) check_case(&c);
            }
    for (int f = 0; f < COUNT(formats); f++) { /* rows of more than 4 pieces of each format */
        gpu_case c = {.dtype = formats[f][0],
                      .scale = formats[f][1],
                      .hidden = 2048,
                      .width = 80,
                      .tokens = 1,
                      .experts = 1,
                      .in = UNIT};
        check_case(&c);
        c.hidden = 80;
        c.width = 2000;
        c.tokens = 2;
        check_case(&c);
    }
}

/* ---- edges ----------------------------------------------------------------------------------- */

/* Computes r, whose weights or activations were changed, and compares. */
static void check_run(gpu_run *r, const char *name) {
    mc_error err = {0};
    const int rc = gpu_compute(r, device, &err);
    CHECK(rc == MC_OK, "%s: %s", name, err.message);
    gpu_reference(r);
    const int64_t at = rc == MC_OK ? gpu_differs(r) : -1;
    CHECK(at < 0, "%s: %lld: %a, not %a", name, (long long)at, (double)r->got[at],
          (double)r->want[at]);
}

static uint8_t *data_of(gpu_run *r, int which) {
    return (uint8_t *)r->from[which].buf[2] +
           (r->m[0][which].data - (const uint8_t *)r->from[which].buf[2]);
}

/* Row i of down is code i and zeros, so the outputs are all codes times one number. */
static void check_codes(void) {
    for (int f = 0; f < 2; f++) {
        const gpu_case c = {.dtype = f ? MC_F4E2M1 : MC_F8E4M3,
                            .scale = MC_F8E8M0,
                            .hidden = 256,
                            .width = 32,
                            .tokens = 2,
                            .experts = 1,
                            .in = UNIT};
        gpu_run r;
        gpu_make(&c, &r);
        uint8_t *down = data_of(&r, 2);
        const int64_t row = mci_row_bytes(c.dtype, c.width);
        memset(down, 0, (size_t)(row * c.hidden));
        for (int i = 0; i < 256; i++)
            down[i * row + i % row] = (uint8_t)(!f && (i & 0x7f) == 0x7f ? 0 : i);
        check_run(&r, f ? "every MXFP4 code" : "every FP8 code");
        gpu_free(&r);
    }
}

/* Outputs that are -0, as products of 140 columns underflow; columns past them must not make them
 * +0. act = silu(gate) up is 64 * 2^-146 for 128 columns and about 1 * 2^-149 for 12. */
static void check_negative_zero(void) {
    const gpu_case c = {.dtype = MC_F8E4M3,
                        .scale = MC_F32,
                        .hidden = 40,
                        .width = 140,
                        .tokens = 9,
                        .experts = 1,
                        .in = UNIT};
    gpu_run r;
    gpu_make(&c, &r);
    for (int w = 0; w < 3; w++) {
        memset(data_of(&r, w), w < 2 ? 0 : 0x81, 40 * 140); /* -2^-9 */
        float *scale = (float *)r.from[w].buf[3], one[2] = {1, 1};
        memcpy((uint8_t *)scale + (r.m[0][w].scale - (const uint8_t *)scale), one, 8);
    }
    const float down_scale[2] = {0x1p-10f, 1};
    memcpy((uint8_t *)r.from[2].buf[3] + (r.m[0][2].scale - (const uint8_t *)r.from[2].buf[3]),
           down_scale, 8);
    for (int i = 0; i < 140; i++) {
        data_of(&r, 0)[i * 40] = i < 128 ? 0x38 : 0x0a;     /* 1, 1.25 * 2^-6 */
        data_of(&r, 1)[i * 40 + 1] = i < 128 ? 0x38 : 0x20; /* 1, 2^-3 */
    }
    memset(r.x, 0, 9 * 40 * 4);
    for (int t = 0; t < 9; t++) {
        r.x[t * 40] = 64;
        r.x[t * 40 + 1] = 0x1p-146f;
    }
    check_run(&r, "negative zero");
    for (int i = 0; i < 9 * 40; i++)
        CHECK(mci_bits(r.got[i]) == 0x80000000u, "negative zero: %a", (double)r.got[i]);
    gpu_free(&r);
}

/* The same of MXFP4, where whole blocks follow the columns: act is 2^-149 everywhere, a block's sum
 * -4 * 2^-149, and -0 when it is scaled by 2^-4. */
static void check_negative_zero_f4(void) {
    const gpu_case c = {.dtype = MC_F4E2M1,
                        .scale = MC_F8E8M0,
                        .hidden = 40,
                        .width = 64,
                        .tokens = 3,
                        .experts = 1,
                        .in = UNIT};
    gpu_run r;
    gpu_make(&c, &r);
    for (int w = 0; w < 3; w++) {
        memset(data_of(&r, w), w < 2 ? 0 : 0xaa, 64 * 20); /* -1 */
        uint8_t *scale = r.from[w].buf[3];
        memset(scale + (r.m[0][w].scale - scale), w < 2 ? 127 : 123, w < 2 ? 64 * 2 : 40 * 2);
    }
    for (int i = 0; i < 64; i++) {
        data_of(&r, 0)[i * 20] = 0x02; /* column 0: 1 */
        data_of(&r, 1)[i * 20] = 0x20; /* column 1: 1 */
    }
    memset(r.x, 0, 3 * 40 * 4);
    for (int t = 0; t < 3; t++) {
        r.x[t * 40] = 1.25f;
        r.x[t * 40 + 1] = 0x1p-149f;
    }
    check_run(&r, "negative zero of MXFP4");
    for (int i = 0; i < 3 * 40; i++)
        CHECK(mci_bits(r.got[i]) == 0x80000000u, "negative zero of MXFP4: %a", (double)r.got[i]);
    gpu_free(&r);
}

/* NaN codes are found wherever they are, and no scale or other code is taken for one. */
static void check_nan(void) {
    const gpu_case c = {.dtype = MC_F8E4M3,
                        .scale = MC_F8E8M0,
                        .hidden = 200,
                        .width = 136,
                        .tokens = 1,
                        .experts = 1,
                        .in = WIDE};
    gpu_run r;
    gpu_make(&c, &r);
    uint8_t *slot = test_alloc((size_t)r.shape.bytes);
    CHECK(mci_slot_fill(&r.shape, r.m[0], slot), "no code is a NaN");
    for (int w = 0; w < 3; w++)
        for (int64_t i = 0; i < 200 * 136; i += i < 300 || i > 200 * 136 - 300 ? 1 : 97) {
            uint8_t *p = data_of(&r, w) + i, was = *p;
            *p = i & 1 ? 0x7f : 0xff;
            CHECK(!mci_slot_fill(&r.shape, r.m[0], slot), "matrix %d: NaN at %d", w, (int)i);
            *p = was;
        }
    free(slot);
    gpu_free(&r);
}

/* What the kernels do not multiply has no slot; parts of a slot lie one after the other. */
static void check_shapes(void) {
    static const mci_mat ok[3] = {{.rows = 64,
                                   .cols = 300,
                                   .dtype = MC_INT4,
                                   .scale_dtype = MC_F16,
                                   .block_rows = 1,
                                   .block_cols = 64},
                                  {.rows = 64,
                                   .cols = 300,
                                   .dtype = MC_INT4,
                                   .scale_dtype = MC_F16,
                                   .block_rows = 1,
                                   .block_cols = 64},
                                  {.rows = 300,
                                   .cols = 64,
                                   .dtype = MC_INT4,
                                   .scale_dtype = MC_F16,
                                   .block_rows = 1,
                                   .block_cols = 64}};
    mci_slot_shape s;
    mci_mat m[3];
    CHECK(mci_slot_of(ok, &s), "int4 by 64");
    CHECK(s.hidden == 300 && s.width == 64, "%d x %d", s.hidden, s.width);
    CHECK(s.data[0] == 0 && s.data[1] == 64 * 256 && s.data[2] == 2 * 64 * 256, "data");
    CHECK(s.scale[0] == 2 * 64 * 256 + 300 * 128 && s.scale[1] == s.scale[0] + 64 * 16 &&
              s.scale[2] == s.scale[1] + 64 * 16 && s.bytes == s.scale[2] + 2432,
          "scales at %d", (int)s.scale[0]); /* 300 rows of 4 scales: 2400, to a multiple of 128 */
    for (int bad = 0; bad < 9; bad++) {
        memcpy(m, ok, sizeof m);
        mci_mat *one = &m[bad % 3];
        if (bad == 0) one->dtype = MC_F4E2M1;
        if (bad == 1) one->rows++;
        if (bad == 2) one->cols++;
        if (bad == 3) one->scale_dtype = MC_F32;
        if (bad == 4) one->block_cols = 32;
        if (bad == 5) one->block_cols = 0;
        for (int i = 0; i < 3; i++) {
            if (bad == 6) m[i].dtype = MC_INT8;
            if (bad == 7) m[i].scale_dtype = MC_F8E8M0;
            if (bad == 8) m[i].dtype = MC_F8E4M3;
        }
        CHECK(!mci_slot_of(m, &s), "mismatch %d has a slot", bad);
    }
}

/* An expert that begins more than 4 GiB into the slots. */
static void check_far(void) {
    const gpu_case c = {.dtype = MC_INT4,
                        .scale = MC_F16,
                        .hidden = 300,
                        .width = 65,
                        .tokens = 2,
                        .experts = 2,
                        .in = UNIT};
    gpu_run r;
    mc_error err = {0};
    mci_gpu *g = NULL;
    gpu_make(&c, &r);
    mci_gpu_room room = gpu_room(&r);
    room.slot_bytes = 24 << 20;
    room.slots = 190; /* 4.45 GiB */
    for (int i = 0; i < 2; i++) r.item[i].slot = (int32_t)room.slots - 1 - i;
    if (emu_memory) emu_memory(5LL << 30);
    int rc = gpu_api()->open(device, &room, &g, &err);
    if (rc == MC_ENOMEM && !emu_memory) {
        printf("test_gpu: less than 4.5 GiB of VRAM are free, far slots not checked\n");
    } else {
        if (rc == MC_OK) rc = gpu_call(&r, g, &err);
        CHECK(rc == MC_OK, "far slots: %s", err.message);
        gpu_reference(&r);
        CHECK(gpu_differs(&r) < 0, "far slots differ");
    }
    gpu_api()->close(g);
    if (emu_memory) emu_memory(1LL << 30);
    gpu_free(&r);
}

/* One device used again and again with other shapes and formats than before, while another thread
 * uploads: what a call leaves behind must not reach the next. */
typedef struct uploads {
    gpu_run *r;
    mci_gpu *g;
    int32_t at;
    int rc;
} uploads;

static void *upload_all(void *arg) {
    uploads *u = arg;
    for (int k = 0; k < 40 && u->rc >= 0; k++) {
        gpu_run one = *u->r;
        mci_gpu_item item = {.slot = u->at + k % 2};
        one.item = &item;
        u->rc = gpu_put(&one, u->g, k % 2, 0, NULL);
        while (u->rc >= 0 && (u->rc = gpu_api()->uploaded(u->g, k % 2, NULL)) == 0) continue;
    }
    return NULL;
}

static void check_again(void) {
    const gpu_case cases[] = {
        {MC_INT4, MC_F16, 300, 144, 9, 3, UNIT, 0},
        {MC_F8E4M3, MC_F32, 72, 136, 1, 4, UNIT, 0},
        {MC_F4E2M1, MC_F8E8M0, 200, 65, 17, 2, UNIT, 0},
        {MC_F8E4M3, MC_BF16, 129, 64, 3, 5, UNIT, 0},
    };
    gpu_run r[4];
    mci_gpu_room room = {0};
    mc_error err = {0};
    for (int i = 0; i < 4; i++) {
        gpu_make(&cases[i], &r[i]);
        gpu_reference(&r[i]);
        const mci_gpu_room one = gpu_room(&r[i]);
        room.slots += one.slots;
        room.slot_bytes = MCI_MAX(room.slot_bytes, one.slot_bytes);
        room.tokens = MCI_MAX(room.tokens, one.tokens);
        room.rows = MCI_MAX(room.rows, one.rows);
        room.items = MCI_MAX(room.items, one.items);
        room.hidden = MCI_MAX(room.hidden, one.hidden);
        room.vector_in = MCI_MAX(room.vector_in, one.vector_in);
        room.vector_act = MCI_MAX(room.vector_act, one.vector_act);
    }
    uploads u = {.r = &r[0], .at = (int32_t)room.slots - 2};
    /* not the device that a new thread has at first */
    int rc = gpu_api()->open(emu_devices ? 1 : device, &room, &u.g, &err);
    CHECK(rc == MC_OK, "%s", err.message);
    if (rc) return;
    for (int i = 0; i < 4; i++) { /* each leaves its experts in slots of its own */
        for (int32_t k = 0, base = 5 * i; k < cases[i].experts; k++) r[i].item[k].slot = base + k;
        rc = gpu_call(&r[i], u.g, &err);
        CHECK(rc == MC_OK && gpu_differs(&r[i]) < 0, "case %d: %s", i, err.message);
    }
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, upload_all, &u), "no thread");
    for (int k = 0; k < 12; k++) {
        gpu_run *one = &r[(k * 3 + 1) % 4];
        const float *out;
        gpu_input(one, u.g);
        rc = gpu_api()->run(u.g, &one->shape, one->item, one->c.experts, one->token, one->rows,
                            one->c.tokens, &err);
        while (rc >= 0 && (rc = gpu_api()->ran(u.g, k % 2, &out, &err)) == 0) continue;
        if (rc == 1) memcpy(one->got, out, (size_t)one->rows * (size_t)one->c.hidden * 4);
        CHECK(rc == 1 && gpu_differs(one) < 0, "again %d: %s", k, err.message);
    }
    pthread_join(thread, NULL);
    CHECK(u.rc == 1, "uploads: %d", u.rc);
    gpu_api()->close(u.g);
    for (int i = 0; i < 4; i++) gpu_free(&r[i]);
}

int main(int argc, char **argv) {
    const bool bench = argc > 1 && !strcmp(argv[1], "bench");
    const bool small = argc > 1 && !strcmp(argv[1], "small");
    if (argc > 1 + (bench || small)) device = atoi(argv[1 + (bench || small)]);
    if (bench) return gpu_bench(device);
    mc_gpu_info info;
    mc_error err = {0};
    if (gpu_api()->probe(device, &info, &err) < 0) {
        printf("FAIL test_gpu: %s\n", err.message);
        return 1;
    }
    check_negative_zero();
    check_again();
    if (small) return test_end();
    check_table();
    check_codes();
    check_negative_zero_f4();
    check_nan();
    check_shapes();
    check_far();
    return test_end();
}
