/* test_formats.c - every storage format from a file through bind and the parallel products: the
 * bits of the scalar kernels on the bytes in memory, for any thread count; what is no format is
 * refused. */
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "acts.h"
#include "linear.h"
#include "test.h"

enum { ROWS = 300, COLS = 200, TOKENS = 70, SKEW = 3 };

typedef struct form {
    int dtype, scale, rows, cols;
} form;

static const form forms[] = {
    {MC_F32, 0, 0, 0},           {MC_BF16, 0, 0, 0},         {MC_F16, 0, 0, 0},
    {MC_F8E4M3, MC_F32, 128, 128}, {MC_F8E4M3, MC_BF16, 128, 128},
    {MC_F8E4M3, MC_F8E8M0, 128, 128}, {MC_F8E4M3, MC_F32, 1, 0}, {MC_F8E4M3, MC_BF16, 1, 0},
    {MC_F4E2M1, MC_F8E8M0, 1, 32},
    {MC_INT4, MC_F32, 1, 0},     {MC_INT4, MC_F16, 1, 32},   {MC_INT4, MC_BF16, 1, 64},
    {MC_INT4, MC_F32, 1, 128},   {MC_INT8, MC_F32, 1, 0},    {MC_INT8, MC_F16, 1, 32},
    {MC_INT8, MC_BF16, 1, 64},   {MC_INT8, MC_F32, 1, 128},
};
enum { FORMS = (int)(sizeof forms / sizeof *forms) };

/* Two matrices (gate, up) of ROWS x COLS and one (down) of COLS x ROWS, then their scales. */
typedef struct fixture {
    uint8_t *bytes;
    int64_t size;
    mc_tensor t[3];
    char path[32];
} fixture;

static void fill(fixture *f, const form *k, bool nan) {
    rng r = {(uint64_t)(k - forms) + 5};
    f->bytes = test_alloc(1 << 20);
    f->size = SKEW;
    for (int i = 0; i < 3; i++) {
        mc_tensor *t = &f->t[i];
        int64_t bytes, scales;
        *t = (mc_tensor){.dtype = k->dtype,
                         .rows = i < 2 ? ROWS : COLS,
                         .cols = i < 2 ? COLS : ROWS,
                         .scale_file = mci_dtype_get(k->dtype)->scale_types ? 0 : -1,
                         .scale_dtype = k->scale, .block_rows = k->rows, .block_cols = k->cols};
        CHECK(mci_format_check(t, "t", &bytes, &scales, NULL) == MC_OK, "form %d",
              (int)(k - forms));
        t->offset = f->size;
        for (int64_t b = 0; b < bytes; b++) /* exponents near 1, no NaN */
            f->bytes[f->size++] = (uint8_t)(rng_next(&r) & (k->dtype < MC_F8E4M3 ? 0x3b : 0xbf));
        if (nan && k->dtype == MC_F8E4M3) /* in the last row, and in one that a vector ends with */
            f->bytes[t->offset + bytes - 1] = 0x7f, f->bytes[t->offset + 7 * t->cols + 31] = 0xff;
        t->scale_offset = f->size;
        const int size = mci_dtype_get(k->scale)->bits / 8;
        for (int64_t b = 0; scales && b < scales / size; b++, f->size += size) {
            float v = 0.01f + 0.01f * rng_unit(&r);
            uint32_t u = mci_bits(v);
            uint16_t h = (uint16_t)(0x2000 + rng_below(&r, 0x400));
            if (k->scale == MC_F8E8M0) f->bytes[f->size] = (uint8_t)(u >> 23);
            else if (k->scale == MC_F16) memcpy(f->bytes + f->size, &h, 2);
            else memcpy(f->bytes + f->size, (uint8_t *)&u + 4 - size, (size_t)size);
        }
        f->size++; /* the next one is odd again */
    }
    strcpy(f->path, "/tmp/mosaic_formats_XXXXXX");
    int fd = mkstemp(f->path);
    CHECK(fd >= 0 && write(fd, f->bytes, (size_t)f->size) == f->size, "%s", f->path);
    close(fd);
}

static void reference(const fixture *f, int i, const float *x, int64_t n, float *y) {
    mc_error err;
    const uint8_t *scale = f->t[i].scale_file < 0 ? NULL : f->bytes + f->t[i].scale_offset;
    CHECK(mc_gemm("scalar", &f->t[i], f->bytes + f->t[i].offset, scale, x, n, y, &err) == MC_OK,
          "%s", err.message);
}

static bool same(const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (mci_bits(a[i]) != mci_bits(b[i]) && (a[i] == a[i] || b[i] == b[i])) return false;
    return true;
}

static mc_engine *engine(int threads, const char *path, const char *isa) {
    mc_engine *e;
    mc_error err;
    const mc_engine_opts o = {.threads = threads, .lanes = 1, .io = MC_IO_PREAD, .isa = isa};
    CHECK(mc_engine_create(&o, &e, &err) == MC_OK && mc_engine_file(e, path, &err) == 0, "%s",
          err.message);
    return e;
}

/* linear(x) of every format, through file, bind and threads. */
static void check_linear(const fixture *f, const float *x, mc_engine *e, int id) {
    static float want[TOKENS * ROWS], got[TOKENS * ROWS];
    mc_linear *l;
    mc_error err;
    CHECK(mc_linear_create(e, NULL, 1, &l, &err) == MC_EINVAL && !l, "no tensor");
    if (mc_linear_create(e, &f->t[0], 1, &l, &err) != MC_OK) {
        CHECK(0, "form %d: %s", id, err.message);
        return;
    }
    for (int n = 1; n <= TOKENS; n += n < 5 ? 1 : 32) {
        reference(f, 0, x, n, want);
        CHECK(mc_linear_forward(l, x, n, got, &err) == MC_OK && same(want, got, n * ROWS),
              "form %d: linear of %d tokens", id, n);
    }
    CHECK(mc_linear_forward(l, NULL, 1, got, &err) == MC_EINVAL &&
              mc_linear_forward(l, x, -1, got, &err) == MC_EINVAL,
          "no x, no count");
    const int32_t ids[3] = {ROWS - 1, 7, 0}; /* rows of a resident matrix, scaled */
    CHECK(mc_linear_rows(l, ids, 3, got, &err) == MC_OK, "form %d: %s", id, err.message);
    for (int i = 0; i < 3; i++) {
        const mc_tensor *t = &f->t[0];
        const mci_mat m = mci_mat_of(t, f->bytes + t->offset, f->bytes + t->scale_offset);
        float row[COLS];
        mci_decode(t->dtype, m.data + ids[i] * mci_row_bytes(t->dtype, COLS), COLS, row);
        for (int c = 0; t->scale_file >= 0 && c < COLS; c++)
            row[c] *= mci_mat_scale(&m, ids[i], c / mci_mat_block(&m));
        CHECK(same(row, got + i * COLS, COLS), "form %d: row %d", id, ids[i]);
    }
    mc_linear_free(l);
}

/* down(silu(gate x) * up x) as the MoE layer runs it: two jobs of different tokens at once. */
static void check_expert(const fixture *f, const float *x, mc_engine *e, int id, bool nan) {
    static float g[TOKENS * ROWS], u[TOKENS * ROWS], want[TOKENS * COLS], got[TOKENS * COLS];
    reference(f, 0, x, TOKENS, g);
    reference(f, 1, x, TOKENS, u);
    mci_ops_ref.silu_mul(g, u, TOKENS * ROWS, g);
    reference(f, 2, g, TOKENS, want);
    mci_weight w[3];
    mc_error err;
    CHECK(mci_enter(e, &err) == MC_OK, "enter");
    for (int i = 0; i < 3; i++)
        CHECK(mci_weight_load(e, &f->t[i], f->t[i].rows, f->t[i].cols, "w", &w[i], &err) == MC_OK,
              "form %d: %s", id, err.message);
    for (int i = 0; i < 3; i++)
        CHECK(w[i].mat.no_nan == (f->t[i].dtype == MC_F8E4M3 && !nan), "form %d: no_nan", id);
    const float *xp[TOKENS];
    float *gp[TOKENS], *up[TOKENS], *yp[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        xp[t] = x + t * COLS;
        gp[t] = g + t * ROWS;
        up[t] = u + t * ROWS;
        yp[t] = got + t * COLS;
    }
    enum { CUT = 3 };
    mci_job first[2], second[2];
    first[0] = (mci_job){
        .w = &w[0].mat, .up = &w[1].mat, .x = xp, .y = gp, .yu = up, .n_tok = CUT};
    second[0] = (mci_job){
        .w = &w[2].mat, .x = (const float *const *)gp, .y = yp, .n_tok = CUT};
    first[1] = (mci_job){.w = &w[0].mat, .up = &w[1].mat, .x = xp + CUT, .y = gp + CUT,
                         .yu = up + CUT, .n_tok = TOKENS - CUT};
    second[1] = (mci_job){.w = &w[2].mat, .x = (const float *const *)(gp + CUT), .y = yp + CUT,
                          .n_tok = TOKENS - CUT};
    for (int again = 0; again < 2; again++) { /* nothing quantised lives on into the next region */
        memset(g, again, sizeof g);
        mci_run_jobs(e, first, 2);
        mci_run_jobs(e, second, 2);
        CHECK(same(want, got, TOKENS * COLS), "form %d: expert, run %d", id, again);
        memset(got, 0, sizeof got);
    }
    for (int i = 0; i < 3; i++) mci_weight_free(e, &w[i]);
    mci_leave(e);
}

/* Of all pairs of format and scale only those of the table are taken; the message names the
 * cause. */
static void check_pairs(mc_engine *e) {
    static const int block[][2] = {{0, 0},   {1, 0},   {1, 32},   {1, 64}, {1, 128},
                                   {128, 0}, {128, 1}, {128, 128}, {2, 0},  {1, -1}};
    int taken = 0;
    for (int d = -1; d <= MC_F8E8M0 + 1; d++)
        for (int s = -1; s <= MC_F8E8M0 + 1; s++)
            for (size_t b = 0; b < sizeof block / sizeof *block; b++)
                for (int file = -1; file <= 0; file++) {
                    mc_tensor t = {.dtype = d, .rows = 2, .cols = 4, .scale_file = file,
                                   .scale_dtype = s, .block_rows = block[b][0],
                                   .block_cols = block[b][1]};
                    bool right = file < 0 && d >= MC_F32 && d <= MC_F16 && b == 0;
                    for (int i = 0; i < FORMS; i++) /* scale types do not depend on the block */
                        for (int j = 0; j < FORMS && file == 0; j++)
                            right |= forms[i].dtype == d && forms[i].scale == s && d > MC_F16 &&
                                     forms[j].dtype == d && forms[j].rows == t.block_rows &&
                                     forms[j].cols == t.block_cols;
                    mc_linear *l;
                    mc_error err = {.code = 0};
                    int rc = mc_linear_create(e, &t, 1, &l, &err);
                    taken += right;
                    CHECK(right ? rc == MC_OK : rc == MC_EFORMAT && err.message[0],
                          "dtype %d, scale %d, file %d, %d x %d: %d %s", d, s, file, t.block_rows,
                          t.block_cols, rc, err.message);
                    if (rc == MC_OK) mc_linear_free(l);
                }
    /* F32 BF16 F16 with whatever scale dtype, which is not looked at; then docs/design.md section
     * 5 */
    CHECK(taken == 3 * (MC_F8E8M0 + 3) + 3 * 2 + 1 + 3 * 4 + 3 * 4, "%d pairs", taken);
}

int main(void) {
    static float x[TOKENS * COLS];
    rng r = {1};
    for (int i = 0; i < TOKENS * COLS; i++) x[i] = rng_unit(&r);
    for (int i = 0; i < FORMS; i++)
        for (int nan = 0; nan <= (forms[i].dtype == MC_F8E4M3); nan++) {
            fixture f;
            fill(&f, &forms[i], nan);
            for (int threads = 1; threads <= 3; threads += 2) {
                mc_engine *e = engine(threads, f.path, threads == 1 ? "scalar" : NULL);
                check_linear(&f, x, e, i);
                check_expert(&f, x, e, i, nan);
                if (i == 0 && threads == 1) check_pairs(e);
                CHECK(e->mem.now[MC_MEM_WEIGHTS] == 0, "leak");
                mc_engine_free(e);
            }
            unlink(f.path);
            free(f.bytes);
        }
    return test_end();
}
