/* gpu_case.c - see gpu_case.h. */
#include "gpu_case.h"

#include <stdio.h>
#include <stdlib.h>

static void *want(int64_t n, size_t size) {
    void *p = calloc((size_t)MCI_MAX(n, 1), size);
    if (!p) {
        printf("FAIL test ran out of memory\n");
        exit(1);
    }
    return p;
}

const mci_gpu_api *gpu_api(void) {
    const char *why;
    return mci_gpu_get(&why);
}

void gpu_case_name(const gpu_case *c, char *out, size_t size) {
    static const char *const fills[] = {"unit", "wide", "tiny", "special"};
    snprintf(out, size, "%s/%s %dx%d, %d tokens, %d experts, %s", mci_dtype_get(c->dtype)->name,
             mci_dtype_get(c->scale)->name, c->hidden, c->width, c->tokens, c->experts,
             fills[c->in]);
}

static mci_mat matrix(gpu_run *r, int32_t i, int which) {
    const gpu_case *c = &r->c;
    kcase *k = &r->from[3 * i + which];
    *k = (kcase){
        .n = {which < 2 ? c->width : c->hidden, which < 2 ? c->hidden : c->width, 0, i, which},
        .dtype = c->dtype,
        .scale = c->scale,
        .in = c->in,
        .block = c->dtype == MC_F8E4M3   ? 128
                 : c->dtype == MC_F4E2M1 ? 32
                                         : 64};
    mci_mat m = case_weights(k);
    if (k->failed) want(INT64_MAX, 1);
    uint8_t *data = (uint8_t *)k->buf[2] + (m.data - (const uint8_t *)k->buf[2]);
    for (int64_t b = 0; c->dtype == MC_F8E4M3 && b < m.rows * m.cols; b++)
        if ((data[b] & 0x7f) == 0x7f) data[b] &= 0xf0;
    m.no_nan = false;
    return m;
}

void gpu_make(const gpu_case *c, gpu_run *r) {
    *r = (gpu_run){.c = *c};
    if (!r->c.slots) r->c.slots = c->experts + 2;
    r->from = want(3 * c->experts, sizeof *r->from);
    r->m = want(c->experts, sizeof *r->m);
    r->item = want(c->experts, sizeof *r->item);
    r->token = want((int64_t)c->experts * c->tokens, sizeof *r->token);
    for (int32_t i = 0; i < c->experts; i++) {
        for (int which = 0; which < 3; which++) r->m[i][which] = matrix(r, i, which);
        const int32_t n = MCI_MAX(1, c->tokens - i);
        r->item[i] = (mci_gpu_item){.slot = r->c.slots - 1 - i, .first = r->rows, .n = n};
        for (int32_t k = 0; k < n; k++) r->token[r->rows++] = (k + 3 * i) % c->tokens;
    }
    if (!mci_slot_of(r->m[0], &r->shape)) {
        printf("FAIL no slot for such an expert\n");
        exit(1);
    }
    kcase x = {.n = {c->hidden, c->width, c->tokens}, .dtype = c->dtype, .in = c->in};
    const int64_t n = (int64_t)c->tokens * c->hidden;
    const float *from = case_floats(&x, 0, n, c->in);
    r->x = want(n, 4);
    if (from) memcpy(r->x, from, (size_t)n * 4);
    case_free(&x);
    r->got = want((int64_t)r->rows * c->hidden, 4);
    r->want = want((int64_t)r->rows * c->hidden, 4);
}

void gpu_free(gpu_run *r) {
    for (int32_t i = 0; i < 3 * r->c.experts; i++) case_free(&r->from[i]);
    void *const mine[] = {r->from, r->m, r->item, r->token, r->x, r->got, r->want};
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++) free(mine[i]);
}

mci_gpu_room gpu_room(const gpu_run *r) {
    return (mci_gpu_room){.slots = r->c.slots,
                          .slot_bytes = r->shape.bytes,
                          .tokens = r->c.tokens,
                          .rows = r->rows,
                          .items = r->c.experts,
                          .hidden = r->c.hidden,
                          .vector_in = mci_slot_vector(r->c.dtype, r->c.hidden),
                          .vector_act = mci_slot_vector(r->c.dtype, r->c.width)};
}

static void product(const mci_mat *m, const float *x, float *y) {
    const mci_ops *o = &mci_ops_ref;
    if (m->dtype != MC_INT4) {
        o->gemm(m, 0, m->rows, &x, 1, &y);
        return;
    }
    void *mem = want(mci_qact_bytes(m->cols, m->block_cols), 1);
    const mci_qact q = mci_qact_fill(o, x, m->cols, m->block_cols, mem);
    o->qgemm(m, 0, m->rows, &q, 1, &y);
    free(mem);
}

void gpu_reference(gpu_run *r) {
    const int32_t H = r->c.hidden, W = r->c.width;
    float *gate = want(2 * (int64_t)W, 4), *up = gate + W;
    for (int32_t i = 0; i < r->c.experts; i++)
        for (int32_t k = r->item[i].first; k < r->item[i].first + r->item[i].n; k++) {
            const float *x = r->x + (int64_t)r->token[k] * H;
            product(&r->m[i][0], x, gate);
            product(&r->m[i][1], x, up);
            mci_ops_ref.silu_mul(gate, up, W, gate);
            product(&r->m[i][2], gate, r->want + (int64_t)k * H);
        }
    free(gate);
}

int gpu_put(gpu_run *r, mci_gpu *g, int32_t stage, int32_t i, mc_error *err) {
    const mci_gpu_api *api = gpu_api();
    if (!mci_slot_fill(&r->shape, r->m[i], api->stage(g, stage))) return MC_EFORMAT;
    return api->upload(g, stage, r->item[i].slot, r->shape.bytes, err);
}

void gpu_input(gpu_run *r, mci_gpu *g) {
    const int64_t vector = mci_slot_vector(r->c.dtype, r->c.hidden);
    uint8_t *in = gpu_api()->input(g);
    for (int32_t t = 0; t < r->c.tokens; t++)
        mci_slot_input(&mci_ops_ref, &r->shape, r->x + (int64_t)t * r->c.hidden, r->c.hidden,
                       in + t * vector);
}

int gpu_call(gpu_run *r, mci_gpu *g, mc_error *err) {
    const mci_gpu_api *api = gpu_api();
    const float *out;
    int rc;
    for (int32_t i = 0; i < r->c.experts + MCI_GPU_STAGES; i++) {
        const int32_t stage = i % MCI_GPU_STAGES;
        if (i >= MCI_GPU_STAGES) {
            while ((rc = api->uploaded(g, stage, err)) == 0) continue;
            if (rc < 0) return rc;
        }
        if (i < r->c.experts && (rc = gpu_put(r, g, stage, i, err)) < 0) return rc;
    }
    gpu_input(r, g);
    rc = api->run(g, &r->shape, r->item, r->c.experts, r->token, r->rows, r->c.tokens, err);
    if (rc < 0) return rc;
    if ((rc = api->ran(g, false, &out, err)) < 0) return rc;
    if (rc == 0 && (rc = api->ran(g, true, &out, err)) < 0) return rc;
    memcpy(r->got, out, (size_t)r->rows * (size_t)r->c.hidden * 4);
    return MC_OK;
}

int gpu_compute(gpu_run *r, int32_t device, mc_error *err) {
    const mci_gpu_room room = gpu_room(r);
    mci_gpu *g = NULL;
    int rc = gpu_api()->open(device, &room, &g, err);
    if (rc == MC_OK) rc = gpu_call(r, g, err);
    gpu_api()->close(g);
    return rc;
}

int64_t gpu_differs(const gpu_run *r) {
    for (int64_t i = 0; i < (int64_t)r->rows * r->c.hidden; i++) {
        const float a = r->got[i], b = r->want[i];
        if (mci_bits(a) != mci_bits(b) && !(a != a && b != b)) return i;
    }
    return -1;
}
