/* test_record.c - experts as records: every format gives the bytes and the products of the same
 * weights with resident scales; whatever differs from the CRC, or lies in the place of another
 * record, fails that read and no other. */
#include <fcntl.h>
#include <libgen.h>
#include <stdlib.h>
#include <unistd.h>

#include "crc.h"
#include "linear.h"
#include "store.h"
#include "test.h"

enum { HID = 200, WID = 96, L = 2, E = 5, TOP = 2, BLOCK = MCI_IO_BLOCK, TOKENS = 3 };

typedef struct form {
    int dtype, scale, rows, cols;
} form;

static const form forms[][3] = {
#define THRICE(...) {__VA_ARGS__, __VA_ARGS__, __VA_ARGS__}
    THRICE({MC_F32, 0, 0, 0}),
    THRICE({MC_BF16, 0, 0, 0}),
    THRICE({MC_F16, 0, 0, 0}),
    THRICE({MC_F8E4M3, MC_F32, 128, 128}),
    THRICE({MC_F8E4M3, MC_BF16, 128, 128}),
    THRICE({MC_F8E4M3, MC_F8E8M0, 128, 128}),
    THRICE({MC_F8E4M3, MC_F32, 1, 0}),
    THRICE({MC_F4E2M1, MC_F8E8M0, 1, 32}),
    THRICE({MC_INT4, MC_F32, 1, 0}),
    THRICE({MC_INT4, MC_F16, 1, 32}),
    THRICE({MC_INT4, MC_F16, 1, 64}),
    THRICE({MC_INT4, MC_BF16, 1, 128}),
    THRICE({MC_INT8, MC_F32, 1, 0}),
    THRICE({MC_INT8, MC_F16, 1, 64}),
    {{MC_INT4, MC_F32, 1, 0}, {MC_F4E2M1, MC_F8E8M0, 1, 32}, {MC_F8E4M3, MC_BF16, 128, 128}},
};
enum { FORMS = (int)(sizeof forms / sizeof *forms) };

/* Layout 0: records in file 0. Layout 1: file 1 holds the weights, file 2 their scales. gap: bytes
 * between the parts of a record, so that their alignment varies. */
typedef struct model {
    char path[3][4300];
    uint8_t *bytes[3];
    int64_t size[3], record; /* bytes of a record */
    mc_expert x[2][L][E];
} model;

static char dir[4096];

static void put(model *m, int file, const uint8_t *p, int64_t n) {
    memcpy(m->bytes[file] + m->size[file], p, (size_t)n);
    m->size[file] += n;
}

static void write_file(const model *m, int f) {
    FILE *out = fopen(m->path[f], "w");
    if (!out || fwrite(m->bytes[f], 1, (size_t)m->size[f], out) != (size_t)m->size[f] ||
        fclose(out)) {
        printf("FAIL cannot write %s\n", m->path[f]);
        exit(1);
    }
}

static uint32_t crc_of(const model *m, int l, int e) {
    const uint32_t where[2] = {(uint32_t)l, (uint32_t)e};
    const mc_tensor *gate = &m->x[0][l][e].gate;
    return mci_crc32c(mci_crc32c(0, where, 8), m->bytes[0] + gate->offset, m->record);
}

static mc_tensor *part(mc_expert *x, int k) {
    return k == 0 ? &x->gate : k == 1 ? &x->up : &x->down;
}

static void set_crcs(model *m) {
    for (int l = 0; l < L; l++)
        for (int e = 0; e < E; e++)
            for (int k = 0; k < 3; k++) {
                mc_tensor *t = part(&m->x[0][l][e], k);
                t->record = 1;
                t->crc = crc_of(m, l, e);
            }
}

static void make(model *m, const form *f, int gap, bool nan) {
    rng r = {(uint64_t)gap + 3};
    uint8_t *tmp = test_alloc(1 << 20);
    memset(m, 0, sizeof *m);
    for (int i = 0; i < 3; i++) {
        snprintf(m->path[i], sizeof m->path[i], "%s/rec%d", dir, i);
        m->bytes[i] = test_alloc(8 << 20);
    }
    m->size[2] = 13;
    for (int l = 0; l < L; l++)
        for (int e = 0; e < E; e++) {
            int64_t bytes, scales[3], start = m->size[0];
            uint8_t *scale[3];
            for (int k = 0; k < 3; k++) {
                mc_tensor *t = part(&m->x[0][l][e], k), *apart = part(&m->x[1][l][e], k);
                *t = (mc_tensor){.dtype = f[k].dtype,
                                 .rows = k < 2 ? WID : HID,
                                 .cols = k < 2 ? HID : WID,
                                 .offset = m->size[0],
                                 .scale_file = mci_dtype_get(f[k].dtype)->scale_types ? 0 : -1,
                                 .scale_dtype = f[k].scale,
                                 .block_rows = f[k].rows,
                                 .block_cols = f[k].cols};
                CHECK(mci_format_check(t, "t", &bytes, &scales[k], NULL) == MC_OK, "form");
                for (int64_t b = 0; b < bytes; b++) /* exponents near 1, no NaN */
                    tmp[b] = (uint8_t)(rng_next(&r) & (f[k].dtype < MC_F8E4M3 ? 0x3b : 0xbf));
                if (nan && f[k].dtype == MC_F8E4M3 && e == 1) tmp[bytes / 2] = 0xff;
                *apart = *t;
                apart->file = 1;
                apart->offset = m->size[1];
                put(m, 0, tmp, bytes);
                put(m, 1, tmp, bytes);
                m->size[0] += gap;
                scale[k] = tmp + (512 << 10) + (k << 16);
                for (int64_t b = 0; b < scales[k]; b++)
                    scale[k][b] = (uint8_t)(f[k].scale == MC_F8E8M0 ? 120 + rng_below(&r, 9)
                                                                    : 0x2c + rng_below(&r, 8));
            }
            for (int k = 0; k < 3; k++) { /* 0x7f bytes that are no codes: nothing to be found */
                mc_tensor *t = part(&m->x[0][l][e], k), *apart = part(&m->x[1][l][e], k);
                if (!scales[k]) continue;
                if (f[k].scale == MC_F32) scale[k][0] = 0x7f;
                t->scale_offset = m->size[0];
                put(m, 0, scale[k], scales[k]);
                m->size[0] += gap;
                apart->scale_file = 2;
                apart->scale_offset = m->size[2];
                put(m, 2, scale[k], scales[k]);
            }
            m->record = mci_round_up(m->size[0] - gap, BLOCK) - start;
            m->size[0] = start + m->record;
        }
    free(tmp);
    set_crcs(m);
    for (int i = 0; i < 3; i++) write_file(m, i);
}

static void drop(model *m) {
    for (int i = 0; i < 3; i++) {
        unlink(m->path[i]);
        free(m->bytes[i]);
    }
}

/* ---- a store over one layout ---- */

typedef struct world {
    mc_engine *e;
    mc_store *s;
} world;

static int open_world(const model *m, int layout, int io, world *w, mc_error *err) {
    const mc_engine_opts o = {.threads = 1, .lanes = 2, .io = io};
    int rc = mc_engine_create(&o, &w->e, err);
    for (int f = 0; f < 3 && rc >= 0; f++) rc = mc_engine_file(w->e, m->path[f], err);
    w->s = NULL;
    if (rc >= 0) rc = mc_store_create(w->e, L, E, TOP, MC_POLICY_LRU, &w->s, err);
    for (int l = 0; l < L && rc == MC_OK; l++)
        rc = mci_store_bind(w->s, LAYER(l, E, TOP, HID, WID), m->x[layout][l], err);
    if (rc == MC_OK) rc = mc_store_open(w->s, TOP, 0, err);
    return rc;
}

static void close_world(world *w) {
    mc_store_free(w->s);
    mc_engine_free(w->e);
}

/* One expert, held until mci_store_end. */
static int take(world *w, int layer, int expert, mci_expert_view *v, mc_error *err) {
    int32_t id = expert;
    int rc = mci_store_begin(w->s, layer, &id, 1, err);
    if (rc == MC_OK) rc = mci_store_next(w->s, v, 1, true, err);
    return rc;
}

static int try_read(const model *m, int io, int layer, int expert, mc_error *err) {
    world w;
    mci_expert_view v;
    int rc = open_world(m, 0, io, &w, err);
    CHECK(rc == MC_OK, "%s", err->message);
    rc = take(&w, layer, expert, &v, err);
    mci_store_end(w.s);
    close_world(&w);
    return rc;
}

/* ---- checks ---- */

static void same_products(const mci_ops *ops, const mci_mat *a, const mci_mat *b, int id) {
    static float x[TOKENS * HID], y[2][TOKENS * HID];
    static uint8_t mem[TOKENS][16 << 10] __attribute__((aligned(64)));
    const float *xp[TOKENS];
    mci_qact q[TOKENS];
    float *yp[TOKENS];
    rng r = {9};
    for (int i = 0; i < TOKENS * HID; i++) x[i] = rng_unit(&r);
    for (int i = 0; i < 2; i++) {
        const mci_mat *w = i ? b : a;
        for (int t = 0; t < TOKENS; t++) {
            xp[t] = x + t * HID;
            yp[t] = y[i] + t * HID;
            if (mci_dtype_get(w->dtype)->integer)
                q[t] = mci_qact_fill(ops, xp[t], w->cols, w->block_cols ? w->block_cols : w->cols,
                                     mem[t]);
        }
        if (mci_dtype_get(w->dtype)->integer)
            ops->qgemm(w, 0, w->rows, q, TOKENS, yp);
        else
            ops->gemm(w, 0, w->rows, xp, TOKENS, yp);
    }
    for (int t = 0; t < TOKENS; t++)
        CHECK(!memcmp(y[0] + t * HID, y[1] + t * HID, (size_t)a->rows * 4), "form %d, %s", id,
              ops->name);
}

static void check_views(const model *m, int io, int id, bool nan) {
    world w[2];
    mc_error err = {0};
    for (int i = 0; i < 2; i++)
        CHECK(open_world(m, i, io, &w[i], &err) == MC_OK, "%s", err.message);
    int64_t resident = -1, slab = mc_expert_slab(m->x[0][0], E, &resident, NULL);
    CHECK(slab == m->record && resident == 0, "slab %lld of %lld, %lld resident", (long long)slab,
          (long long)m->record, (long long)resident);
    CHECK(w[0].e->mem.now[MC_MEM_WEIGHTS] == 0, "scales stayed");
    mc_expert_slab(m->x[1][0], E, &resident, NULL);
    CHECK(w[1].e->mem.now[MC_MEM_WEIGHTS] == L * resident, "scales apart are resident");
    for (int l = 0; l < L; l++)
        for (int e = 0; e < E; e++) {
            mci_expert_view v[2];
            for (int i = 0; i < 2; i++)
                CHECK(take(&w[i], l, e, &v[i], &err) == 1, "form %d: %s", id, err.message);
            const mci_mat *const mat[2][3] = {{&v[0].gate, &v[0].up, &v[0].down},
                                              {&v[1].gate, &v[1].up, &v[1].down}};
            for (int k = 0; k < 3; k++) {
                const mci_mat *a = mat[0][k], *b = mat[1][k];
                mc_expert x = m->x[0][l][e];
                const mc_tensor *t = part(&x, k);
                int64_t bytes = a->rows * mci_row_bytes(a->dtype, a->cols);
                CHECK(!memcmp(a->data, m->bytes[0] + t->offset, (size_t)bytes) &&
                          !memcmp(a->data, b->data, (size_t)bytes) && a->no_nan == b->no_nan,
                      "form %d, expert %d.%d, part %d", id, l, e, k);
                CHECK(!a->scale == (t->scale_file < 0) &&
                          (!a->scale || !memcmp(a->scale, b->scale, (size_t)mci_scales_bytes(a))),
                      "form %d, expert %d.%d, scale %d", id, l, e, k);
                CHECK(!a->no_nan, "form %d: a cache that evicts searches later", id);
                for (int i = 0; mci_ops_set(i); i++) {
                    const mci_ops *ops;
                    if (mci_ops_get(mci_ops_set(i)->name, &ops, NULL) == MC_OK)
                        same_products(ops, a, b, id);
                }
            }
            for (int i = 0; i < 2; i++) mci_store_end(w[i].s);
        }
    for (int e = 0; e < 2; e++) /* used often, it is searched */
        for (int n = 0; n < 20; n++) {
            mci_expert_view v;
            CHECK(take(&w[0], 0, e, &v, &err) == 1, "form %d: %s", id, err.message);
            const mci_mat *const mat[3] = {&v.gate, &v.up, &v.down};
            for (int k = 0; k < 3; k++)
                CHECK(mat[k]->no_nan == (n >= 14 && mat[k]->dtype == MC_F8E4M3 && !(nan && e)),
                      "form %d, expert %d, use %d: no_nan", id, e, n);
            mci_store_end(w[0].s);
        }
    CHECK(w[0].e->stats.evictions > 0, "the cache is small");
    for (int i = 0; i < 2; i++) close_world(&w[i]);
}

/* Every byte of a record counts, those of no part too; its neighbours are read as before. */
static void check_damage(model *m, int io) {
    mc_error err = {0};
    char who[64];
    for (int64_t at = 0; at < m->record;
         at = at == m->record - 1 ? m->record : MCI_MIN(at + 977, m->record - 1)) {
        int l = (int)(at % L), e = (int)(at % E);
        uint8_t *byte = m->bytes[0] + m->x[0][l][e].gate.offset + at;
        *byte ^= (uint8_t)(1 << at % 8);
        write_file(m, 0);
        snprintf(who, sizeof who, "layer %d, expert %d: its record", l, e);
        CHECK(try_read(m, io, l, e, &err) == MC_EFORMAT && strstr(err.message, who) &&
                  strstr(err.message, m->path[0]) && strstr(err.message, "CRC-32C expected"),
              "byte %lld: %s", (long long)at, err.message);
        CHECK(try_read(m, io, l, (e + 1) % E, &err) == 1, "the next one: %s", err.message);
        *byte ^= (uint8_t)(1 << at % 8);
    }
    write_file(m, 0);
    CHECK(try_read(m, io, 0, 0, &err) == 1, "restored: %s", err.message);
}

/* One store sees the damage come and go. */
static void check_recovery(model *m) {
    world w;
    mc_error err = {0};
    mci_expert_view v;
    CHECK(open_world(m, 0, MC_IO_PREAD, &w, &err) == MC_OK, "%s", err.message);
    for (int good = 0; good < 2; good++) {
        m->bytes[0][m->record - 1] ^= 1;
        write_file(m, 0);
        int rc = take(&w, 0, 0, &v, &err);
        CHECK(rc == (good ? 1 : MC_EFORMAT), "%d: %s", rc, err.message);
        mci_store_end(w.s);
    }
    close_world(&w);
}

/* A file that ends early is that, whatever its bytes add up to. */
static void check_short(const model *m, int io) {
    world w;
    mc_error err = {0};
    mci_expert_view v;
    CHECK(open_world(m, 0, io, &w, &err) == MC_OK, "%s", err.message);
    CHECK(truncate(m->path[0], m->size[0] - BLOCK) == 0, "truncate");
    CHECK(take(&w, L - 1, E - 1, &v, &err) == MC_EIO && strstr(err.message, "wanted"), "%s",
          err.message);
    mci_store_end(w.s);
    write_file(m, 0);
    CHECK(take(&w, L - 1, E - 1, &v, &err) == 1, "%s", err.message);
    mci_store_end(w.s);
    close_world(&w);
}

static void swap_bytes(uint8_t *a, uint8_t *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint8_t t = a[i];
        a[i] = b[i];
        b[i] = t;
    }
}

static void swap_crcs(mc_expert *a, mc_expert *b) {
    for (int k = 0; k < 3; k++) {
        uint32_t t = part(a, k)->crc;
        part(a, k)->crc = part(b, k)->crc;
        part(b, k)->crc = t;
    }
}

static void check_swaps(model *m) {
    static const int place[][2] = {{0, 1}, {1, 0}, {1, 1}};
    mc_error err = {0};
    for (int with_crc = 0; with_crc < 2; with_crc++)
        for (int i = 0; i < 3; i++) {
            mc_expert *a = &m->x[0][0][0], *b = &m->x[0][place[i][0]][place[i][1]];
            for (int turn = 0; turn < 2; turn++) {
                swap_bytes(m->bytes[0] + a->gate.offset, m->bytes[0] + b->gate.offset, m->record);
                if (with_crc) swap_crcs(a, b);
                write_file(m, 0);
                CHECK(try_read(m, MC_IO_AUTO, 0, 0, &err) == (turn ? 1 : MC_EFORMAT), "swap %d.%d",
                      with_crc, i);
                CHECK(try_read(m, MC_IO_AUTO, place[i][0], place[i][1], &err) ==
                          (turn ? 1 : MC_EFORMAT),
                      "swap %d.%d", with_crc, i);
            }
        }
}

static void refused(const model *m, int code, const char *word, const char *what) {
    world w;
    mc_error err = {0};
    CHECK(open_world(m, 0, MC_IO_PREAD, &w, &err) == code && strstr(err.message, word), "%s: %s",
          what, err.message);
    close_world(&w);
}

static void check_bind(model *m) {
    mc_expert *x = &m->x[0][1][2], good = *x;
    x->up.crc ^= 1;
    refused(m, MC_EFORMAT, "layer 1, expert 2: expected a record", "two CRCs");
    *x = good;
    x->down.record = 0;
    refused(m, MC_EFORMAT, "layer 1, expert 2: expected a record", "half a record");
    *x = good;
    x->gate.record = x->up.record = 0;
    refused(m, MC_EFORMAT, "layer 1, expert 2: expected a record", "a third of one");
    *x = good;
    x->gate.offset += 64;
    refused(m, MC_EFORMAT, "layer 1, expert 2: expected a record", "where it begins");
    *x = good;
    x->up.offset += 4 * BLOCK;
    refused(m, MC_EFORMAT, "layer 1, expert 2: expected a record", "two ranges");
    *x = good;
    x->up.scale_file = 2;
    x->up.scale_offset = 13;
    refused(m, MC_EFORMAT, "layer 1, expert 2: expected a record", "a scale apart");
    *x = good;
    x->gate.scale_offset = -5;
    refused(m, MC_EIO, "layer 1, expert 2, scales", "a scale before the file");
    *x = good;
    CHECK(truncate(m->path[0], m->size[0] - 1) == 0, "truncate");
    refused(m, MC_EIO, "expert 4, record: wanted", "the padding is missing");
    write_file(m, 0);
}

/* Scales that touch their expert, without a record: read with it; a gap of a block: resident. */
static void check_beside(void) {
    mc_expert x;
    int64_t scales;
    for (int k = 0; k < 3; k++)
        *part(&x, k) = (mc_tensor){.dtype = MC_F8E4M3,
                                   .rows = 1024,
                                   .cols = 1024,
                                   .offset = 7 + k * ((1 << 20) + 256),
                                   .scale_dtype = MC_F32,
                                   .scale_offset = 7 + (1 << 20) + k * ((1 << 20) + 256),
                                   .block_rows = 128,
                                   .block_cols = 128};
    CHECK(mc_expert_slab(&x, 1, &scales, NULL) == (3 << 20) + BLOCK && scales == 0, "in between");
    x.gate.scale_offset = (4 << 20); /* behind a whole block */
    CHECK(mc_expert_slab(&x, 1, &scales, NULL) == (3 << 20) + BLOCK && scales == 256, "one apart");
    x.gate.scale_offset = 7 + 3 * ((1 << 20) + 256);
    x.gate.scale_file = 1;
    CHECK(mc_expert_slab(&x, 1, &scales, NULL) == (3 << 20) + BLOCK && scales == 256,
          "another file");
    x.gate.scale_file = 0;
    CHECK(mc_expert_slab(&x, 1, &scales, NULL) == (3 << 20) + BLOCK && scales == 0, "behind all");
    x.gate.scale_offset = INT64_MAX - 100;
    CHECK(mc_expert_slab(&x, 1, &scales, NULL) == MC_EFORMAT, "overflow");
    CHECK(mc_thread_bytes(MC_BF16, 512, NULL) == 0 &&
              mc_thread_bytes(MC_INT4, 512, NULL) >= 32 * 512 &&
              mc_thread_bytes(99, 1, NULL) == MC_EINVAL &&
              mc_thread_bytes(MC_INT4, 0, NULL) == MC_EINVAL,
          "memory of threads");
}

int main(int argc, char **argv) {
    static model m;
    char at[4000];
    (void)argc;
    snprintf(at, sizeof at, "%s", argv[0]);
    snprintf(dir, sizeof dir, "%s", dirname(at));
    alarm(300);
    check_beside();
    for (int f = 0; f < FORMS; f++)
        for (int gap = 0; gap < 2; gap++) {
            make(&m, forms[f], gap * 51, f % 2);
            check_views(&m, gap ? MC_IO_PREAD : MC_IO_DIRECT, f, f % 2);
            drop(&m);
        }
    make(&m, forms[8], 60, false);
    check_damage(&m, MC_IO_PREAD);
    check_damage(&m, MC_IO_DIRECT);
    check_recovery(&m);
    check_short(&m, MC_IO_PREAD);
    check_short(&m, MC_IO_DIRECT);
    check_swaps(&m);
    check_bind(&m);
    drop(&m);
    return test_end();
}
