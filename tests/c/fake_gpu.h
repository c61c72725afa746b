/* fake_gpu.h - a GPU that is none: it computes with ops_ref on rows put back into the order of the
 * file, and fails or stalls as it is told. It stands for gpu.cu in the program that includes it. Of
 * experts it takes FP8 alone; what it keeps of calls is checked for order, size and reuse. */
#ifndef FAKE_GPU_H
#define FAKE_GPU_H
#include "cuda/gpu.h"
#include "ops.h"
#include "test.h"

struct mci_gpu {
    mci_gpu_room room;
    uint8_t *slots, *stage[MCI_GPU_STAGES];
    int busy[MCI_GPU_STAGES]; /* looks until the copy is there; 0: no copy */
    int32_t to[MCI_GPU_STAGES];
    int64_t bytes[MCI_GPU_STAGES];
    float *in, *out;
    bool running;
};

/* How it behaves from now on. Written while no thread of a tier runs, but for `stall`. */
static struct {
    atomic_int stall;                 /* looks at a copy that say: not yet */
    atomic_int open, upload, copy, run, ran; /* the n-th such call from now fails; 0: none */
    int code;                         /* with this */
    atomic_int devices, opened, uploads, runs, rows;
} fake = {.code = MC_ESYS};

static int fake_fails(atomic_int *n, const char *what, mc_error *err) {
    if (!*n || --*n) return MC_OK;
    return mci_fail(err, fake.code, 0, "fake GPU: %s refused", what);
}

static int fake_probe(int32_t device, mc_gpu_info *out, mc_error *err) {
    if (device) return mci_fail(err, MC_ERANGE, 0, "no device %d, there is 1", device);
    *out = (mc_gpu_info){.name = "fake", .total = 1 << 30, .free = 1 << 29, .devices = 1};
    return MC_OK;
}

static int64_t fake_vram(const mci_gpu_room *r) { return 64 * r->tokens; }
static int64_t fake_host(const mci_gpu_room *r) {
    return MCI_GPU_STAGES * r->slot_bytes + r->tokens * r->vector_in +
           (int64_t)r->rows * r->hidden * 4;
}

static void fake_close(mci_gpu *g) {
    if (!g) return;
    for (int i = 0; i < MCI_GPU_STAGES; i++) free(g->stage[i]);
    free(g->slots);
    free(g->in);
    free(g->out);
    free(g);
    fake.opened--;
}

static int fake_open(int32_t device, const mci_gpu_room *r, mci_gpu **out, mc_error *err) {
    mc_gpu_info info;
    int rc = fake_probe(device, &info, err);
    if (rc < 0 || (rc = fake_fails(&fake.open, "memory", err)) < 0) return rc;
    mci_gpu *g = test_alloc(sizeof *g);
    memset(g, 0, sizeof *g);
    g->room = *r;
    g->slots = test_alloc((size_t)(r->slots * r->slot_bytes));
    for (int i = 0; i < MCI_GPU_STAGES; i++) g->stage[i] = test_alloc((size_t)r->slot_bytes);
    g->in = test_alloc((size_t)(r->tokens * r->vector_in));
    g->out = test_alloc((size_t)r->rows * (size_t)r->hidden * 4);
    fake.opened++;
    *out = g;
    return MC_OK;
}

static void *fake_stage(mci_gpu *g, int32_t i) {
    CHECK(i >= 0 && i < MCI_GPU_STAGES && !g->busy[i], "stage %d is in use", i);
    return g->stage[i];
}

static int fake_upload(mci_gpu *g, int32_t i, int32_t slot, int64_t bytes, mc_error *err) {
    CHECK(!g->busy[i] && slot >= 0 && slot < g->room.slots && bytes <= g->room.slot_bytes,
          "stage %d to slot %d of %d", i, slot, (int)g->room.slots);
    g->busy[i] = 1 + fake.stall;
    g->to[i] = slot;
    g->bytes[i] = bytes;
    fake.uploads++;
    return fake_fails(&fake.upload, "an upload", err);
}

static int fake_uploaded(mci_gpu *g, int32_t i, mc_error *err) {
    int rc = fake_fails(&fake.copy, "a copy", err);
    CHECK(g->busy[i] > 0, "stage %d has no copy", i);
    if (rc < 0) return rc;
    if (fake.stall && --g->busy[i] > 0) return 0;
    g->busy[i] = 0;
    memcpy(g->slots + g->to[i] * g->room.slot_bytes, g->stage[i], (size_t)g->bytes[i]);
    return 1;
}

static void *fake_input(mci_gpu *g) { return g->in; }

/* Matrix k of an expert as it was in its file. */
static mci_mat fake_mat(const mci_slot_shape *s, const uint8_t *slot, int k, uint8_t *data) {
    const int64_t rows = k < 2 ? s->width : s->hidden, cols = k < 2 ? s->hidden : s->width;
    const int64_t pieces = mci_slot_pieces(s->dtype, (int32_t)cols);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            data[r * cols + c] = slot[s->data[k] + (r * pieces + c / 128) * MCI_SLOT_PIECE +
                                      c % 8 * 16 + c % 128 / 8];
    return (mci_mat){.data = data, .scale = slot + s->scale[k], .rows = rows, .cols = cols,
                     .dtype = s->dtype, .scale_dtype = s->scale_dtype, .block_rows = 128,
                     .block_cols = 128};
}

static int fake_run(mci_gpu *g, const mci_slot_shape *s, const mci_gpu_item *item, int32_t n_item,
                    const int32_t *token, int32_t n_row, int32_t n_tok, mc_error *err) {
    const int64_t vector = mci_slot_vector(s->dtype, s->hidden) / 4;
    uint8_t *data = test_alloc((size_t)(s->hidden * s->width));
    float *x = test_alloc((size_t)s->hidden * 4), *act = test_alloc((size_t)s->width * 8);
    int32_t next = 0, rc = fake_fails(&fake.run, "a product", err);
    CHECK(!g->running && n_tok > 0 && n_tok <= g->room.tokens && n_row <= g->room.rows,
          "%d rows of %d tokens", n_row, n_tok);
    for (int32_t i = 0; i < n_item && rc == MC_OK; i++) {
        const uint8_t *slot = g->slots + item[i].slot * g->room.slot_bytes;
        CHECK(item[i].first == next && item[i].n > 0, "item %d: rows from %d", i, item[i].first);
        for (int32_t r = next; r < next + item[i].n; r++) {
            float *up = act + s->width, *y = g->out + (int64_t)r * s->hidden;
            const float *v = g->in + token[r] * vector, *xp = x;
            CHECK(token[r] >= 0 && token[r] < n_tok, "row %d is of token %d", r, token[r]);
            for (int64_t c = 0; c < s->hidden; c++)
                x[c] = v[c / 32 * 32 + c % 8 * 4 + c % 32 / 8];
            for (int k = 0; k < 2; k++) {
                const mci_mat m = fake_mat(s, slot, k, data);
                mci_ops_ref.gemm(&m, 0, m.rows, &xp, 1, &(float *){k ? up : act});
            }
            mci_ops_ref.silu_mul(act, up, s->width, act);
            const mci_mat m = fake_mat(s, slot, 2, data);
            mci_ops_ref.gemm(&m, 0, m.rows, &(const float *){act}, 1, &y);
        }
        next += item[i].n;
    }
    CHECK(rc < 0 || next == n_row, "%d rows of %d have an expert", next, n_row);
    g->running = rc == MC_OK;
    fake.runs += rc == MC_OK;
    fake.rows += n_row;
    free(data);
    free(x);
    free(act);
    return rc;
}

static int fake_ran(mci_gpu *g, bool wait, const float **out, mc_error *err) {
    static int turn; /* not yet, every other time */
    CHECK(g->running, "nothing runs");
    if (!wait && turn++ % 2 == 0) return 0;
    int rc = fake_fails(&fake.ran, "the end of a product", err);
    g->running = false;
    *out = g->out;
    return rc < 0 ? rc : 1;
}

static const mci_gpu_api fake_api = {
    .probe = fake_probe, .vram = fake_vram, .host = fake_host, .open = fake_open,
    .close = fake_close, .stage = fake_stage, .upload = fake_upload, .uploaded = fake_uploaded,
    .input = fake_input, .run = fake_run, .ran = fake_ran};

const mci_gpu_api *mci_gpu_get(const char **why) {
    *why = NULL;
    return &fake_api;
}
#endif
