/* expert.c - experts on disk: checked, laid out, their scales read, the CRC of records. */
#include "expert.h"

#include "acts.h"
#include "crc.h"

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

enum { PARTS = 6 }; /* of an expert: gate, up, down, then their scales */

/* r (PARTS): bytes 0: none. Runs without a matrix are left out. */
static mci_layout lay_out(const mci_range *r, bool record) {
    mci_layout l = {.part = {-1, -1, -1, -1, -1, -1}};
    int order[PARTS], n = 0;
    for (int i = 0; i < PARTS; i++) {
        int j = n;
        if (!r[i].bytes) continue;
        for (n++; j > 0; j--) {
            const mci_range *a = &r[order[j - 1]];
            if (a->file < r[i].file || (a->file == r[i].file && a->offset <= r[i].offset)) break;
            order[j] = order[j - 1];
        }
        order[j] = i;
    }
    for (int first = 0, end; first < n; first = end) {
        mci_range run = r[order[first]];
        bool matrix = false;
        for (end = first; end < n; end++) {
            const mci_range *m = &r[order[end]];
            if (m->file != run.file || block_down(m->offset) > block_up(run.offset + run.bytes))
                break;
            run.bytes = MCI_MAX(run.bytes, m->offset + m->bytes - run.offset);
            matrix |= order[end] < 3;
        }
        if (!matrix) continue;
        int64_t start = block_down(run.offset), bytes = block_up(run.offset + run.bytes) - start;
        for (int i = first; i < end; i++) l.part[order[i]] = l.bytes + r[order[i]].offset - start;
        l.at[l.n_run] = l.bytes;
        l.run[l.n_run++] = record ? (mci_range){run.file, start, bytes} : run;
        l.bytes += bytes;
    }
    return l;
}

/* The ranges of matrix k and of its scale where it may be read with it. */
static void ranges_of(const mc_tensor *t, int64_t bytes, int64_t scale, mci_range *r) {
    r[0] = (mci_range){t->file, t->offset, bytes};
    r[3] = (mci_range){t->file, t->scale_offset, t->scale_file == t->file ? scale : 0};
}

static const char *const NAMES[3] = {"gate", "up", "down"};

int64_t mc_expert_slab(const mc_expert *experts, int64_t n, int64_t *scale_bytes, mc_error *err) {
    int64_t slab = 0, scales = 0;
    for (int64_t i = 0; i < n; i++) {
        const mc_tensor *const t[3] = {&experts[i].gate, &experts[i].up, &experts[i].down};
        mci_range r[PARTS];
        int64_t bytes, scale[3];
        for (int k = 0; k < 3; k++) {
            char name[64];
            snprintf(name, sizeof name, "expert %lld, %s", (long long)i, NAMES[k]);
            if (t[k]->file < 0) return mci_fail(err, MC_EFORMAT, 0, "%s: absent", name);
            int rc = mci_format_check(t[k], name, &bytes, &scale[k], err);
            if (rc < 0) return rc;
            if (scale[k] && (t[k]->scale_offset < 0 || t[k]->scale_offset > INT64_MAX / 4))
                return mci_fail(err, MC_EFORMAT, 0, "%s: impossible offset %lld of scales", name,
                                (long long)t[k]->scale_offset);
            ranges_of(t[k], bytes, scale[k], r + k);
        }
        mci_layout l = lay_out(r, t[0]->record);
        for (int k = 0; k < 3; k++)
            if (l.part[3 + k] < 0 && !mci_add(scales, mci_round_up(scale[k], SCALE_ALIGN), &scales))
                return mci_fail(err, MC_EFORMAT, 0, "experts: too many bytes of scales");
        slab = MCI_MAX(slab, l.bytes);
    }
    if (scale_bytes) *scale_bytes = scales;
    return slab;
}

mci_mat mci_experts_format(const mci_experts *x, int32_t expert, int k) {
    const mci_mat_ref *m = &x->ref[expert].mat[k];
    return (mci_mat){.scale = x->ref[expert].inside >> k & 1 ? NULL : m->scale,
                     .rows = k < 2 ? x->width : x->hidden,
                     .cols = k < 2 ? x->hidden : x->width,
                     .dtype = m->dtype,
                     .scale_dtype = m->scale_dtype,
                     .block_rows = m->block_rows,
                     .block_cols = m->block_cols};
}

static int64_t mat_bytes(const mci_mat *m) { return m->rows * mci_row_bytes(m->dtype, m->cols); }

mci_layout mci_experts_layout(const mci_experts *x, int32_t expert) {
    const mci_expert_ref *ref = &x->ref[expert];
    mci_range r[PARTS];
    for (int k = 0; k < 3; k++) {
        const mci_mat m = mci_experts_format(x, expert, k);
        const mci_mat_ref *at = &ref->mat[k];
        r[k] = (mci_range){at->file, at->offset, mat_bytes(&m)};
        r[3 + k] = (mci_range){.bytes = 0};
        if (ref->inside >> k & 1)
            r[3 + k] = (mci_range){at->file, at->scale_offset, mci_scales_bytes(&m)};
    }
    return lay_out(r, ref->record);
}

/* Every byte of the record, so that a part that nobody looks at vouches for the disk all the same.
 * The numbers make a record that lies in the place of another one differ. */
static void check_record(const mci_experts *x, mci_read *r) {
    const mci_run *run = &r->run[0];
    const uint32_t where[2] = {(uint32_t)x->layer, (uint32_t)r->which};
    uint32_t crc = mci_crc32c(mci_crc32c(0, where, sizeof where), run->dst, run->bytes);
    if (crc != x->ref[r->which].crc)
        mci_fail(&r->err, MC_EFORMAT, 0,
                 "%s: layer %d, expert %d: its record of %lld bytes at offset %lld is damaged: "
                 "CRC-32C expected %08x, got %08x; restore the file",
                 mci_io_path(x->e->io, run->file), x->layer, r->which, (long long)run->bytes,
                 (long long)run->offset, x->ref[r->which].crc, crc);
}

/* A part of an expert: in its slab, or in the mapping of its file. */
static const uint8_t *place(const mci_experts *x, const uint8_t *slab, int64_t part, int32_t file,
                            int64_t offset) {
    return slab ? slab + part : mci_io_at(x->e->io, file, offset);
}

bool mci_experts_have_nan(const mci_experts *x, int32_t expert, const uint8_t *slab) {
    const mci_layout l = mci_experts_layout(x, expert);
    for (int k = 0; k < 3; k++) {
        const mci_mat m = mci_experts_format(x, expert, k);
        const mci_mat_ref *at = &x->ref[expert].mat[k];
        const uint8_t *data = place(x, slab, l.part[k], at->file, at->offset);
        if (m.dtype == MC_F8E4M3 && x->e->ops->f8_has_nan(data, mat_bytes(&m))) return true;
    }
    return false;
}

static bool scan_expert(mci_read *r) {
    const mci_experts *x = r->owner;
    if (x->ref[r->which].record) check_record(x, r);
    return r->search && r->err.code == MC_OK && mci_experts_have_nan(x, r->which, r->slab);
}

void mci_experts_read(const mci_experts *x, int32_t expert, uint8_t *slab, bool search,
                      mci_read *r) {
    const mci_expert_ref *ref = &x->ref[expert];
    mci_layout l = mci_experts_layout(x, expert);
    r->n_run = l.n_run;
    for (int32_t i = 0; i < l.n_run; i++)
        r->run[i] = (mci_run){l.run[i].file, l.run[i].offset, l.run[i].bytes,
                              slab ? slab + l.at[i] + l.run[i].offset % MCI_IO_BLOCK : NULL};
    r->scan = ref->record || search ? scan_expert : NULL;
    r->search = search;
    r->slab = slab;
    r->owner = x;
    r->which = expert;
}

void mci_experts_mats(const mci_experts *x, int32_t expert, const uint8_t *slab, bool no_nan,
                      mci_mat out[3]) {
    mci_layout l = mci_experts_layout(x, expert);
    for (int k = 0; k < 3; k++) {
        const mci_mat_ref *m = &x->ref[expert].mat[k];
        out[k] = mci_experts_format(x, expert, k);
        out[k].data = place(x, slab, l.part[k], m->file, m->offset);
        if (l.part[3 + k] >= 0)
            out[k].scale = place(x, slab, l.part[3 + k], m->file, m->scale_offset);
        out[k].no_nan = no_nan && out[k].dtype == MC_F8E4M3;
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

/* Fills all of a matrix but its scale, and its two ranges. */
static int bind_mat(bind_ctx *c, int32_t expert, int k, const mc_tensor *t, mci_range *r,
                    mc_error *err) {
    int64_t rows = k < 2 ? c->x->width : c->x->hidden, cols = k < 2 ? c->x->hidden : c->x->width;
    mci_range mat = {t->file, t->offset, 0}, scale = {t->scale_file, t->scale_offset, 0};
    int rc;
    if (t->rows != rows || t->cols != cols)
        return mci_fail(err, MC_EFORMAT, 0,
                        "layer %d, expert %d, %s: expected shape (%lld, %lld), got (%lld, %lld)",
                        c->layer, expert, NAMES[k], (long long)rows, (long long)cols,
                        (long long)t->rows, (long long)t->cols);
    char full[64];
    snprintf(full, sizeof full, "layer %d, expert %d, %s", c->layer, expert, NAMES[k]);
    if ((rc = mci_format_check(t, full, &mat.bytes, &scale.bytes, err)) < 0 ||
        (rc = check_range(c, expert, NAMES[k], &mat, err)) < 0 ||
        (scale.bytes && (rc = check_range(c, expert, "scales", &scale, err)) < 0) ||
        (rc = mci_acts_reserve(c->e, t->dtype, cols, err)) < 0)
        return rc;
    c->x->ref[expert].mat[k] = (mci_mat_ref){.offset = mat.offset,
                                             .file = mat.file,
                                             .dtype = (uint8_t)t->dtype,
                                             .scale_dtype = (uint8_t)t->scale_dtype,
                                             .block_rows = (uint8_t)t->block_rows,
                                             .block_cols = (uint8_t)t->block_cols};
    ranges_of(t, mat.bytes, scale.bytes, r);
    return MC_OK;
}

static int check_record_place(const bind_ctx *c, int32_t expert, const mc_tensor *const t[3],
                              const mci_layout *l, mc_error *err) {
    bool whole = l->n_run == 1 && l->run[0].offset == t[0]->offset;
    for (int k = 0; k < 3; k++)
        whole &=
            t[k]->record && t[k]->crc == t[0]->crc && (t[k]->scale_file < 0 || l->part[3 + k] >= 0);
    if (!whole)
        return mci_fail(err, MC_EFORMAT, 0,
                        "layer %d, expert %d: expected a record: gate at a multiple of %d, all "
                        "else behind it without a gap of so much, one CRC",
                        c->layer, expert, MCI_IO_BLOCK);
    return check_range(c, expert, "record", &l->run[0], err);
}

static int bind_expert(bind_ctx *c, int32_t expert, const mc_expert *from, mc_error *err) {
    const mc_tensor *const t[3] = {&from->gate, &from->up, &from->down};
    mci_expert_ref *ref = &c->x->ref[expert];
    mci_range r[PARTS];
    int rc = MC_OK;
    for (int k = 0; k < 3 && rc == MC_OK; k++) rc = bind_mat(c, expert, k, t[k], r + k, err);
    if (rc < 0) return rc;
    ref->record = t[0]->record || t[1]->record || t[2]->record;
    ref->crc = t[0]->crc;
    ref->inside = 0;
    const mci_layout l = lay_out(r, ref->record);
    if (ref->record && (rc = check_record_place(c, expert, t, &l, err)) < 0) return rc;
    for (int k = 0; k < 3; k++) {
        const mci_mat m = mci_experts_format(c->x, expert, k);
        if (t[k]->scale_file < 0) continue;
        if (l.part[3 + k] >= 0) {
            ref->inside |= (uint8_t)(1 << k);
            ref->mat[k].scale_offset = t[k]->scale_offset;
            continue;
        }
        c->job[c->n_job++].r =
            (mci_range){t[k]->scale_file, t[k]->scale_offset, mci_scales_bytes(&m)};
        c->scale_bytes += mci_round_up(mci_scales_bytes(&m), SCALE_ALIGN);
    }
    return MC_OK;
}

/* Gives every scale that stays its place in memory and reads them all. */
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
            if (!mci_dtype_get(m->dtype)->scale_types || x->ref[i].inside >> k & 1) continue;
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
    int rc = mci_alloc(&e->mem, MC_MEM_SCRATCH, jobs + SCALE_READ, "expert scales", &tmp, err);
    if (rc < 0) return rc;
    x->e = e;
    x->layer = layer;
    c.job = tmp;
    for (int32_t i = 0; i < x->n && rc == MC_OK; i++) {
        rc = bind_expert(&c, i, &experts[i], err);
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
