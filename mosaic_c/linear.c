/* linear.c - binds tensors to memory and multiplies by them: one matrix, several as one parallel
 * region, rows of an embedding table on demand, the output head. */
#include "linear.h"

#include "acts.h"
#include "crc.h"

#include <stdio.h>
#include <stdlib.h>

/* Bytes of a matrix a thread takes at once, of gate and up each: smaller claims waste bandwidth
 * (64 KB costs 20-45 %), much larger ones leave threads idle at the end. */
#define CLAIM_BYTES (128 << 10)

/* ---- tensors ---- */

static int check_range(mc_engine *e, int32_t file, int64_t offset, int64_t bytes, const char *name,
                       mc_error *err) {
    int64_t size = mci_io_size(e->io, file), end;
    if (size < 0) return mci_fail(err, MC_ERANGE, 0, "%s: no file with id %d", name, file);
    if (offset < 0 || !mci_add(offset, bytes, &end) || end > size)
        return mci_fail(err, MC_EIO, 0, "%s: %s: wanted %lld bytes at %lld, the file has %lld",
                        mci_io_path(e->io, file), name, (long long)bytes, (long long)offset,
                        (long long)size);
    return MC_OK;
}

int mci_tensor_check(mc_engine *e, const mc_tensor *t, const char *name, int64_t *bytes,
                     int64_t *scale_bytes, mc_error *err) {
    int rc = mci_format_check(t, name, bytes, scale_bytes, err);
    if (rc < 0 || (rc = check_range(e, t->file, t->offset, *bytes, name, err)) < 0) return rc;
    return *scale_bytes ? check_range(e, t->scale_file, t->scale_offset, *scale_bytes, name, err)
                        : MC_OK;
}

static int damaged(mc_engine *e, const mc_tensor *t, int64_t offset, const char *name,
                   int64_t bytes, uint32_t expected, uint32_t got, mc_error *err) {
    return mci_fail(err, MC_EFORMAT, 0,
                    "%s, byte %lld: %s of %lld bytes is damaged: CRC-32C expected %08x, got %08x; "
                    "restore the file",
                    mci_io_path(e->io, t->file), (long long)offset, name, (long long)bytes,
                    expected, got);
}

static int check_crc(mc_engine *e, const mc_tensor *t, const mci_mat *m, int64_t bytes,
                     int64_t scale_bytes, const char *name, mc_error *err) {
    if (t->record != MC_CRC_TENSOR) return MC_OK;
    uint32_t crc = mci_crc32c(mci_crc32c(0, m->data, bytes), m->scale, scale_bytes);
    return crc == t->crc ? MC_OK
                         : damaged(e, t, t->offset, name, bytes + scale_bytes, t->crc, crc, err);
}

int mci_weight_load(mc_engine *e, const mc_tensor *t, int64_t rows, int64_t cols, const char *name,
                    mci_weight *out, mc_error *err) {
    int64_t bytes, scale_bytes, scale_at;
    int rc;
    mci_run run;
    memset(out, 0, sizeof *out);
    if (mci_absent(t)) return MC_OK;
    if ((rc = mci_tensor_check(e, t, name, &bytes, &scale_bytes, err)) < 0) return rc;
    if ((rc = mci_acts_reserve(e, t->dtype, cols, err)) < 0) return rc;
    if (t->rows != rows || t->cols != cols)
        return mci_fail(err, MC_EFORMAT, 0, "%s: expected shape (%lld, %lld), got (%lld, %lld)",
                        name, (long long)rows, (long long)cols, (long long)t->rows,
                        (long long)t->cols);
    /* | slack | weights at the file's offset mod 4096 | slack of a direct read | scales | */
    int64_t lead = t->offset % MCI_IO_BLOCK;
    scale_at = mci_round_up(lead + bytes, MCI_IO_BLOCK);
    out->mem_bytes = scale_at + mci_round_up(scale_bytes, MCI_ALIGN) + MCI_IO_BLOCK;
    if ((rc = mci_alloc(&e->mem, MC_MEM_WEIGHTS, out->mem_bytes, name, &out->mem, err)) < 0)
        return rc;
    /* small blocks are aligned to 64 only; direct reads need a page boundary */
    uint8_t *base = out->mem;
    base += (MCI_IO_BLOCK - (uintptr_t)base % MCI_IO_BLOCK) % MCI_IO_BLOCK;
    run = (mci_run){.file = t->file, .offset = t->offset, .bytes = bytes, .dst = base + lead};
    if ((rc = mci_io_load(e->io, &run, err)) < 0) goto fail;
    out->mat = mci_mat_of(t, run.dst, scale_bytes ? base + scale_at : NULL);
    out->mat.no_nan = t->dtype == MC_F8E4M3 && !e->ops->f8_has_nan(run.dst, bytes);
    if (scale_bytes) {
        rc = mci_io_fetch(e->io, t->scale_file, t->scale_offset, scale_bytes, base + scale_at, err);
        if (rc < 0) goto fail;
    }
    if ((rc = check_crc(e, t, &out->mat, bytes, scale_bytes, name, err)) < 0) goto fail;
    return MC_OK;
fail:
    mci_weight_free(e, out);
    return rc;
}

void mci_weight_free(mc_engine *e, mci_weight *w) {
    mci_release(&e->mem, MC_MEM_WEIGHTS, w->mem, w->mem_bytes);
    memset(w, 0, sizeof *w);
}

int mci_vector_load(mc_engine *e, const mc_tensor *t, int64_t n, const char *name, bool plus_one,
                    float **out, mc_error *err) {
    mci_weight w;
    void *v;
    int rc = mci_weight_load(e, t, 1, n, name, &w, err);
    *out = NULL;
    if (rc < 0 || !w.mat.data) return rc;
    rc = mci_alloc(&e->mem, MC_MEM_WEIGHTS, n * 4, name, &v, err);
    if (rc == MC_OK) {
        *out = v;
        mci_mat_row(&w.mat, 0, *out);
        for (int64_t i = 0; plus_one && i < n; i++) (*out)[i] = 1.0f + (*out)[i];
    }
    mci_weight_free(e, &w);
    return rc;
}

void mci_vector_free(mc_engine *e, float *v, int64_t n) {
    mci_release(&e->mem, MC_MEM_WEIGHTS, v, n * 4);
}

/* ---- parallel products ---- */

typedef struct jobs_ctx {
    mc_engine *e;
    const mci_job *jobs;
} jobs_ctx;

int64_t mci_chunk_rows(const mci_mat *w, int64_t n_tok) {
    int64_t rows = MCI_MAX(CLAIM_BYTES / mci_row_bytes(w->dtype, w->cols), 1);
    /* each chunk quantises its tokens again */
    if (mci_dtype_get(w->dtype)->integer && n_tok > MCI_ACTS_TOK) rows = MCI_MAX(rows, 512);
    return mci_round_up(rows, 16); /* kernels take up to 16 rows side by side */
}

static int64_t job_step(const mci_job *j) { return mci_chunk_rows(j->w, j->n_tok); }

static int64_t job_chunks(const mci_job *j) {
    int64_t step = job_step(j);
    return j->n_tok ? (j->w->rows + step - 1) / step : 0;
}
/* y[t][r0..r1) of n tokens by w. */
static void product(mc_engine *e, int thread, const mci_mat *w, int64_t r0, int64_t r1,
                    const float *const *x, int64_t n, float *const *y) {
    if (!mci_dtype_get(w->dtype)->integer) {
        e->ops->gemm(w, r0, r1, x, n, y);
        return;
    }
    for (int64_t t = 0, k; t < n; t += k) {
        k = MCI_MIN(n - t, (int64_t)MCI_ACTS_TOK);
        e->ops->qgemm(w, r0, r1, mci_acts_get(e, thread, w, x + t, k), k, y + t);
    }
}

static void jobs_chunk(void *ctx, int64_t chunk, int thread) {
    const jobs_ctx *c = ctx;
    const mci_job *j = c->jobs;
    for (int64_t k; chunk >= (k = job_chunks(j)); j++) chunk -= k;
    int64_t step = job_step(j), r0 = chunk * step, r1 = MCI_MIN(r0 + step, j->w->rows);
    product(c->e, thread, j->w, r0, r1, j->x, j->n_tok, j->y);
    if (!j->up) return;
    product(c->e, thread, j->up, r0, r1, j->x, j->n_tok, j->yu);
    for (int64_t t = 0; t < j->n_tok; t++)
        c->e->ops->silu_mul(j->y[t] + r0, j->yu[t] + r0, r1 - r0, j->y[t] + r0);
}

void mci_run_jobs(mc_engine *e, const mci_job *jobs, int n) {
    jobs_ctx c = {e, jobs};
    int64_t chunks = 0;
    for (int i = 0; i < n; i++) chunks += job_chunks(&jobs[i]);
    mci_acts_forget(e);
    mci_io_look(e->io);
    mci_pool_run(e->pool, jobs_chunk, &c, chunks);
}

void mci_run_mlps(mc_engine *e, const mci_mlp *m, int n, const float *const *x, float *const *act,
                  float *const *up, float *const *out) {
    mci_job first[MCI_MLPS], second[MCI_MLPS];
    for (int i = 0; i < n; x += m[i].n, act += m[i].n, up += m[i].n, out += m[i].n, i++) {
        first[i] = (mci_job){
            .w = m[i].gate, .up = m[i].up, .n_tok = m[i].n, .x = x, .y = act, .yu = up};
        second[i] = (mci_job){
            .w = m[i].down, .n_tok = m[i].n, .x = (const float *const *)act, .y = out};
    }
    mci_run_jobs(e, first, n);
    mci_run_jobs(e, second, n);
}

typedef struct rows_ctx {
    const mci_ops *ops;
    const float *x, *w;
    float eps, *y;
    float *rows;
    int64_t width;
} rows_ctx;

static void norm_row(void *ctx, int64_t t, int thread) {
    const rows_ctx *c = ctx;
    (void)thread;
    c->ops->rmsnorm(c->x + t * c->width, c->w, c->eps, c->width, c->y + t * c->width);
}

static void add_row(void *ctx, int64_t t, int thread) {
    const rows_ctx *c = ctx;
    (void)thread;
    if (c->w) c->ops->add(c->w, c->width, c->rows + t * c->width);
    c->ops->add(c->rows + t * c->width, c->width, c->y + t * c->width);
}

void mci_norm_rows(mc_engine *e, const float *x, const float *w, float eps, int64_t n,
                   int64_t width, float *y) {
    rows_ctx c = {.ops = e->ops, .x = x, .w = w, .eps = eps, .y = y, .width = width};
    mci_pool_run(e->pool, norm_row, &c, n);
}

void mci_add_rows(mc_engine *e, float *rows, const float *bias, int64_t n, int64_t width,
                  float *x) {
    rows_ctx c = {.ops = e->ops, .w = bias, .rows = rows, .y = x, .width = width};
    mci_pool_run(e->pool, add_row, &c, n);
}

float **mci_row_ptrs(mc_engine *e, float *base, int64_t n, int64_t ld) {
    float **p = mci_scratch(e, n, sizeof *p);
    for (int64_t t = 0; t < n; t++) p[t] = base + t * ld;
    return p;
}

/* ---- mc_linear ---- */

struct mc_linear {
    mc_engine *e;
    mc_tensor t;
    _Atomic int64_t refs;
    mci_weight w; /* mat.data NULL: rows are read on demand */
    uint32_t *row_crc; /* then: of each row, or NULL */
};

int mc_linear_create(mc_engine *e, const mc_tensor *w, int resident, mc_linear **out,
                     mc_error *err) {
    int64_t bytes, scale_bytes;
    int rc;
    mc_linear *l = NULL;
    *out = NULL;
    if (!w) return mci_fail(err, MC_EINVAL, 0, "linear: NULL tensor");
    if ((rc = mci_enter(e, err)) < 0) return rc;
    if ((rc = mci_tensor_check(e, w, "linear", &bytes, &scale_bytes, err)) < 0) goto done;
    if (!resident && scale_bytes) {
        rc = mci_fail(err, MC_EINVAL, 0, "linear: rows of a scaled matrix must be resident");
        goto done;
    }
    if (!(l = calloc(1, sizeof *l))) {
        rc = mci_fail(err, MC_ENOMEM, 0, "linear: out of memory");
        goto done;
    }
    l->t = *w;
    atomic_init(&l->refs, 1);
    if (resident && (rc = mci_weight_load(e, w, w->rows, w->cols, "linear", &l->w, err)) < 0) {
        free(l);
        goto done;
    }
    l->e = e;
    mci_engine_retain(e);
    *out = l;
done:
    mci_leave(e);
    return rc;
}

void mc_linear_free(mc_linear *l) {
    if (!l || atomic_fetch_sub(&l->refs, 1) != 1) return;
    mci_weight_free(l->e, &l->w);
    mci_release(&l->e->mem, MC_MEM_META, l->row_crc, l->t.rows * 4);
    mci_engine_release(l->e);
    free(l);
}

int mc_linear_row_crc(mc_linear *l, const uint32_t *crc, mc_error *err) {
    mc_engine *e = l->e;
    void *mem;
    int rc = mci_enter(e, err);
    if (rc < 0) return rc;
    if (!crc || l->w.mat.data || l->row_crc)
        rc = mci_fail(err, MC_EINVAL, 0, "linear: CRCs are for rows that are read on demand, once");
    else if ((rc = mci_alloc(&e->mem, MC_MEM_META, l->t.rows * 4, "CRCs of rows", &mem, err)) == 0)
        l->row_crc = memcpy(mem, crc, (size_t)l->t.rows * 4);
    mci_leave(e);
    return rc;
}

/* Tokens are taken in pieces so that the pointer arrays need little scratch. */
#define PIECE 256

int mc_linear_forward(mc_linear *l, const float *x, int64_t n_tok, float *y, mc_error *err) {
    mc_engine *e = l->e;
    int rc = mci_enter(e, err);
    const float *xp[PIECE];
    float *yp[PIECE];
    if (rc < 0) return rc;
    if (!l->w.mat.data || n_tok < 0 || (n_tok && (!x || !y))) {
        rc = mci_fail(err, MC_EINVAL, 0, "linear: %s", l->w.mat.data
                      ? "bad count of tokens or NULL pointer" : "the matrix is not resident");
        n_tok = 0;
    }
    for (int64_t t0 = 0; t0 < n_tok; t0 += PIECE) {
        int64_t n = MCI_MIN(n_tok - t0, PIECE);
        for (int64_t t = 0; t < n; t++) {
            xp[t] = x + (t0 + t) * l->t.cols;
            yp[t] = y + (t0 + t) * l->t.rows;
        }
        mci_run_jobs(e, &(mci_job){.w = &l->w.mat, .x = xp, .y = yp, .n_tok = n}, 1);
    }
    mci_leave(e);
    return rc;
}

int mc_linear_rows(mc_linear *l, const int32_t *ids, int64_t n, float *y, mc_error *err) {
    mc_engine *e = l->e;
    int64_t cols = l->t.cols, row = mci_row_bytes(l->t.dtype, cols);
    int rc = mci_enter(e, err);
    if (rc < 0) return rc;
    for (int64_t i = 0; i < n && rc == MC_OK; i++)
        if (ids[i] < 0 || ids[i] >= l->t.rows)
            rc = mci_fail(err, MC_ERANGE, 0, "token id: expected 0..%lld, got %d",
                          (long long)l->t.rows - 1, ids[i]);
    for (int64_t i = 0; i < n && rc == MC_OK; i++) {
        float *dst = y + i * cols;
        if (l->w.mat.data) {
            mci_mat_row(&l->w.mat, ids[i], dst);
            continue;
        }
        /* The stored row is at most as wide as the decoded one: read it into the row's tail, then
         * decode forward; element c is written at 4c and read at or beyond it. */
        uint8_t *raw = (uint8_t *)(dst + cols) - row;
        int64_t at = l->t.offset + ids[i] * row;
        if ((rc = mci_io_fetch(e->io, l->t.file, at, row, raw, err)) < 0) break;
        uint32_t got = l->row_crc ? mci_crc32c(0, raw, row) : 0;
        if (l->row_crc && got != l->row_crc[ids[i]]) {
            char name[40];
            snprintf(name, sizeof name, "row %d of the embedding", ids[i]);
            rc = damaged(e, &l->t, at, name, row, l->row_crc[ids[i]], got, err);
            break;
        }
        for (int64_t c = 0, s = row / cols; c < cols; c++) {
            uint8_t one[4];
            memcpy(one, raw + c * s, (size_t)s);
            mci_decode(l->t.dtype, one, 1, dst + c);
        }
    }
    mci_leave(e);
    return rc;
}

/* ---- mc_head ---- */

struct mc_head {
    mc_engine *e;
    mc_linear *l;
    float *norm, eps;
    int64_t max_tok;
};

int mc_head_create(mc_engine *e, const mc_norm *norm, mc_linear *w, int64_t max_tok, mc_head **out,
                   mc_error *err) {
    mc_head *h;
    int rc;
    *out = NULL;
    if (w->e != e || !w->w.mat.data || max_tok < 1)
        return mci_fail(err, MC_EINVAL, 0, "head: needs a resident matrix of this engine");
    if (!(h = calloc(1, sizeof *h))) return mci_fail(err, MC_ENOMEM, 0, "head: out of memory");
    if ((rc = mci_enter(e, err)) < 0) {
        free(h);
        return rc;
    }
    h->eps = norm->eps;
    h->max_tok = max_tok;
    rc = mci_vector_load(e, &norm->weight, w->t.cols, "final norm", norm->plus_one != 0, &h->norm,
                         err);
    if (rc == MC_OK) rc = mci_scratch_reserve(e, PIECE * (w->t.cols * 4 + MCI_ALIGN), err);
    if (rc < 0) {
        mci_vector_free(e, h->norm, w->t.cols);
        free(h);
    } else {
        h->e = e;
        h->l = w;
        mci_engine_retain(e);
        atomic_fetch_add(&w->refs, 1);
        *out = h;
    }
    mci_leave(e);
    return rc;
}

void mc_head_free(mc_head *h) {
    if (!h) return;
    mci_vector_free(h->e, h->norm, h->l->t.cols);
    mc_linear_free(h->l);
    mci_engine_release(h->e);
    free(h);
}

int mc_head_forward(mc_head *h, const float *x, const int32_t *pick, int64_t n, float *y,
                    mc_error *err) {
    mc_engine *e = h->e;
    int64_t cols = h->l->t.cols;
    const float *xp[PIECE];
    float *yp[PIECE];
    int rc = mci_enter(e, err);
    if (rc < 0) return rc;
    for (int64_t i = 0; i < n && rc == MC_OK; i++)
        if (pick[i] < 0 || pick[i] >= h->max_tok)
            rc = mci_fail(err, MC_ERANGE, 0, "head: picked token %d of a chunk of at most %lld",
                          pick[i], (long long)h->max_tok);
    for (int64_t t0 = 0; t0 < n && rc == MC_OK; t0 += PIECE) {
        int64_t m = MCI_MIN(n - t0, PIECE);
        e->scratch_used = 0;
        float *nx = mci_scratch(e, m * cols, 4);
        for (int64_t t = 0; t < m; t++) {
            const float *src = x + pick[t0 + t] * cols;
            xp[t] = h->norm ? nx + t * cols : src;
            yp[t] = y + (t0 + t) * h->l->t.rows;
            if (h->norm) e->ops->rmsnorm(src, h->norm, h->eps, cols, nx + t * cols);
        }
        mci_run_jobs(e, &(mci_job){.w = &h->l->w.mat, .x = xp, .y = yp, .n_tok = m}, 1);
        rc = mci_check_cancel(e, err);
    }
    mci_leave(e);
    return rc;
}
