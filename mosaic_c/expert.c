/* expert.c - experts on disk: descriptions checked, ranges laid out, scales read. */
#include "expert.h"

#include "acts.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    SCALE_ALIGN = 128,
    SCALE_GAP = 64 << 10,  /* scales nearer than this are fetched by one read ... */
    SCALE_READ = 256 << 10 /* ... of at most this */
};

/* ---- layout ---------------------------------------------------------------------------------- */

static int64_t block_down(int64_t n) { return n & -MCI_IO_BLOCK; }
static int64_t block_up(int64_t n) { return mci_round_up(n, MCI_IO_BLOCK); }

static mci_layout lay_out(const mci_range r[3]) {
    mci_layout l = {.n_run = 0};
    int order[3] = {0, 1, 2};
    for (int i = 1; i < 3; i++)
        for (int j = i; j > 0; j--) {
            const mci_range *a = &r[order[j - 1]], *b = &r[order[j]];
            if (a->file < b->file || (a->file == b->file && a->offset <= b->offset)) break;
            int swap = order[j];
            order[j] = order[j - 1];
            order[j - 1] = swap;
        }
    for (int i = 0; i < 3; i++) {
        const mci_range *m = &r[order[i]];
        mci_range *run = l.n_run ? &l.run[l.n_run - 1] : NULL;
        if (!run || run->file != m->file ||
            block_down(m->offset) > block_up(run->offset + run->bytes)) {
            l.at[l.n_run] = l.bytes;
            run = &l.run[l.n_run++];
            *run = *m;
        }
        run->bytes = MCI_MAX(run->bytes, m->offset + m->bytes - run->offset);
        int64_t at = l.at[l.n_run - 1], start = block_down(run->offset);
        l.mat[order[i]] = at + m->offset - start;
        l.bytes = at + block_up(run->offset + run->bytes) - start;
    }
    return l;
}

int64_t mc_expert_slab(const mc_expert *experts, int64_t n, int64_t *scale_bytes) {
    int64_t slab = 0, scales = 0;
    for (int64_t i = 0; i < n; i++) {
        const mc_tensor *const t[3] = {&experts[i].gate, &experts[i].up, &experts[i].down};
        mci_range r[3];
        for (int k = 0; k < 3; k++) {
            int64_t scale;
            r[k] = (mci_range){.file = t[k]->file, .offset = t[k]->offset};
            if (t[k]->file < 0 || mci_format_check(t[k], "expert", &r[k].bytes, &scale, NULL))
                return MC_EINVAL;
            if (!mci_add(scales, mci_round_up(scale, SCALE_ALIGN), &scales)) return MC_EINVAL;
        }
        slab = MCI_MAX(slab, lay_out(r).bytes);
    }
    if (scale_bytes) *scale_bytes = scales;
    return slab;
}

mci_layout mci_experts_layout(const mci_experts *x, int32_t expert) {
    mci_range r[3];
    for (int k = 0; k < 3; k++) {
        const mci_mat_ref *m = &x->ref[expert].mat[k];
        const int64_t rows = k < 2 ? x->width : x->hidden, cols = k < 2 ? x->hidden : x->width;
        r[k] = (mci_range){m->file, m->offset, rows * mci_row_bytes(m->dtype, cols)};
    }
    return lay_out(r);
}

static bool all_fp8(const mci_mat_ref *m) {
    return m[0].dtype == MC_F8E4M3 && m[1].dtype == MC_F8E4M3 && m[2].dtype == MC_F8E4M3;
}

void mci_experts_read(const mc_engine *e, const mci_experts *x, int32_t expert, uint8_t *slab,
                      mci_read *r) {
    mci_layout l = mci_experts_layout(x, expert);
    r->n_run = l.n_run;
    for (int32_t i = 0; i < l.n_run; i++)
        r->run[i] = (mci_run){l.run[i].file, l.run[i].offset, l.run[i].bytes,
                              slab ? slab + l.at[i] + l.run[i].offset % MCI_IO_BLOCK : NULL};
    r->scan = all_fp8(x->ref[expert].mat) ? e->ops->f8_has_nan : NULL;
}

void mci_experts_mats(const mci_experts *x, int32_t expert, const uint8_t *slab, bool no_nan,
                      mci_mat out[3]) {
    mci_layout l = mci_experts_layout(x, expert);
    for (int k = 0; k < 3; k++) {
        const mci_mat_ref *m = &x->ref[expert].mat[k];
        out[k] = (mci_mat){.data = slab ? slab + l.mat[k] : mci_io_at(x->io, m->file, m->offset),
                           .scale = m->scale,
                           .rows = k < 2 ? x->width : x->hidden,
                           .cols = k < 2 ? x->hidden : x->width,
                           .dtype = m->dtype,
                           .scale_dtype = m->scale_dtype,
                           .block_rows = m->block_rows,
                           .block_cols = m->block_cols,
                           .no_nan = no_nan};
    }
}

/* ---- bind ------------------------------------------------------------------------------------ */

typedef struct scale_job {
    mci_range r;
    uint8_t *dst;
} scale_job;

static int by_place(const void *a, const void *b) {
    const mci_range *x = &((const scale_job *)a)->r, *y = &((const scale_job *)b)->r;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* Writers put the scales of a layer side by side: a few large reads instead of three an expert. */
static int read_scales(mci_io *io, scale_job *job, int64_t n, uint8_t *buffer, mc_error *err) {
    qsort(job, (size_t)n, sizeof *job, by_place);
    for (int64_t i = 0, j; i < n; i = j) {
        const mci_range *first = &job[i].r;
        int64_t end = first->offset + first->bytes;
        for (j = i + 1; j < n && job[j].r.file == first->file; j++) {
            int64_t next = MCI_MAX(end, job[j].r.offset + job[j].r.bytes);
            if (job[j].r.offset - end > SCALE_GAP || next - first->offset > SCALE_READ) break;
            end = next;
        }
        bool alone = j == i + 1; /* it may be larger than the buffer */
        int rc = mci_io_fetch(io, first->file, first->offset, end - first->offset,
                              alone ? job[i].dst : buffer, err);
        if (rc < 0) return rc;
        for (int64_t k = i; !alone && k < j; k++)
            memcpy(job[k].dst, buffer + (job[k].r.offset - first->offset), (size_t)job[k].r.bytes);
    }
    return MC_OK;
}

typedef struct bind_ctx {
    mc_engine *e;
    mci_experts *x;
    int32_t layer;
    scale_job *job; /* (3 n), n_job of them used */
    int64_t n_job, scale_bytes;
} bind_ctx;

static int check_range(const bind_ctx *c, int32_t expert, const char *what, const mci_range *r,
                       mc_error *err) {
    int64_t size = mci_io_size(c->e->io, r->file), end;
    if (size < 0)
        return mci_fail(err, MC_ERANGE, 0, "layer %d, expert %d, %s: no file with id %d", c->layer,
                        expert, what, r->file);
    if (!mci_add(r->offset, r->bytes, &end) || end > size)
        return mci_fail(err, MC_EIO, 0,
                        "%s: layer %d, expert %d, %s: wanted %lld bytes at offset %lld, got %lld: "
                        "the file ends at %lld",
                        mci_io_path(c->e->io, r->file), c->layer, expert, what, (long long)r->bytes,
                        (long long)r->offset,
                        r->offset < 0 ? 0 : (long long)MCI_MAX(size - r->offset, 0),
                        (long long)size);
    return MC_OK;
}

static int bind_mat(bind_ctx *c, int32_t expert, int k, const mc_tensor *t, mc_error *err) {
    static const char *const name[3] = {"gate", "up", "down"};
    int64_t rows = k < 2 ? c->x->width : c->x->hidden, cols = k < 2 ? c->x->hidden : c->x->width;
    mci_range r = {t->file, t->offset, 0}, scale = {t->scale_file, t->scale_offset, 0};
    int rc;
    if (t->rows != rows || t->cols != cols)
        return mci_fail(err, MC_EFORMAT, 0,
                        "layer %d, expert %d, %s: expected shape (%lld, %lld), got (%lld, %lld)",
                        c->layer, expert, name[k], (long long)rows, (long long)cols,
                        (long long)t->rows, (long long)t->cols);
    char full[64];
    snprintf(full, sizeof full, "layer %d, expert %d, %s", c->layer, expert, name[k]);
    if ((rc = mci_format_check(t, full, &r.bytes, &scale.bytes, err)) < 0 ||
        (rc = check_range(c, expert, name[k], &r, err)) < 0 ||
        (rc = mci_acts_reserve(c->e, t->dtype, cols, err)) < 0)
        return rc;
    c->x->ref[expert].mat[k] = (mci_mat_ref){.offset = r.offset, .file = r.file,
                                             .dtype = (uint8_t)t->dtype,
                                             .scale_dtype = (uint8_t)t->scale_dtype,
                                             .block_rows = (uint8_t)t->block_rows,
                                             .block_cols = (uint8_t)t->block_cols};
    if (!scale.bytes) return MC_OK;
    c->job[c->n_job++].r = scale;
    c->scale_bytes += mci_round_up(scale.bytes, SCALE_ALIGN);
    return check_range(c, expert, "scales", &scale, err);
}

/* Gives every scaled matrix its place in memory and reads them all. */
static int bind_scales(bind_ctx *c, uint8_t *buffer, mc_error *err) {
    mci_experts *x = c->x;
    void *scales;
    int64_t j = 0;
    int rc = mci_alloc(&c->e->mem, MC_MEM_WEIGHTS, c->scale_bytes, "expert scales", &scales, err);
    if (rc < 0 || !scales) return rc;
    x->scales = scales;
    x->scale_bytes = c->scale_bytes;
    uint8_t *dst = scales;
    for (int32_t i = 0; i < x->n; i++)
        for (int k = 0; k < 3; k++) {
            mci_mat_ref *m = &x->ref[i].mat[k];
            if (!mci_dtype_get(m->dtype)->scale_types) continue;
            m->scale = c->job[j].dst = dst;
            dst += mci_round_up(c->job[j++].r.bytes, SCALE_ALIGN);
        }
    return read_scales(c->e->io, c->job, c->n_job, buffer, err);
}

int mci_experts_bind(mc_engine *e, mci_experts *x, int32_t layer, const mc_expert *experts,
                     mc_error *err) {
    bind_ctx c = {.e = e, .x = x, .layer = layer};
    int64_t jobs = (int64_t)x->n * 3 * (int64_t)sizeof(scale_job), slab = 0;
    void *tmp;
    x->io = e->io;
    int rc = mci_alloc(&e->mem, MC_MEM_SCRATCH, jobs + SCALE_READ, "expert scales", &tmp, err);
    if (rc < 0) return rc;
    c.job = tmp;
    for (int32_t i = 0; i < x->n && rc == MC_OK; i++) {
        const mc_tensor *const t[3] = {&experts[i].gate, &experts[i].up, &experts[i].down};
        for (int k = 0; k < 3 && rc == MC_OK; k++) rc = bind_mat(&c, i, k, t[k], err);
        if (rc == MC_OK) slab = MCI_MAX(slab, mci_experts_layout(x, i).bytes);
    }
    if (rc == MC_OK) rc = bind_scales(&c, (uint8_t *)tmp + jobs, err);
    mci_release(&e->mem, MC_MEM_SCRATCH, tmp, jobs + SCALE_READ);
    if (rc < 0)
        mci_experts_free(e, x);
    else
        x->slab_bytes = slab;
    return rc;
}

void mci_experts_free(mc_engine *e, mci_experts *x) {
    mci_release(&e->mem, MC_MEM_WEIGHTS, x->scales, x->scale_bytes);
    x->scales = NULL;
    x->slab_bytes = 0;
}
