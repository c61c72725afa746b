/* ops.c - which kernel set runs, the top-k every router uses, and the public gemm for tests. */
#include "ops.h"

#include <stdlib.h>

#include "cpu.h"
#include "pool.h"

/* Best first: a CPU that runs one runs all after it. */
static const mci_ops *const sets[] = {&mci_ops_avx512vnni, &mci_ops_avx512, &mci_ops_avx2,
                                      &mci_ops_ref};
static const char names[] = "avx512vnni avx512 avx2 scalar"; /* theirs, in that order */
enum { N_SETS = (int)(sizeof sets / sizeof *sets) };

const mci_ops *mci_ops_set(int i) { return i >= 0 && i < N_SETS ? sets[i] : NULL; }

static bool runs(const mci_ops *o) {
    return o->gemm && (o->features & ~mci_cpu_features()) == 0;
}

const char *mc_engine_isas(void) {
    const char *from = names;
    for (int i = 0; !runs(sets[i]); i++) from += strlen(sets[i]->name) + 1;
    return from;
}

int mci_ops_get(const char *name, const mci_ops **out, mc_error *err) {
    *out = NULL;
    for (int i = 0; i < N_SETS; i++) {
        if (!runs(sets[i]) || (name && strcmp(name, sets[i]->name) != 0)) continue;
        *out = sets[i];
        return MC_OK;
    }
    return mci_fail(err, MC_EINVAL, 0, "kernel set \"%.32s\": this CPU runs: %s", name,
                    mc_engine_isas());
}

/* NaN below everything, -infinity included. */
static bool above(float a, float b) { return a > b || (b != b && a == a); }

void mci_topk(const float *scores, int64_t n, int64_t k, int32_t *ids) {
    int64_t have = 0;
    for (int64_t i = 0; i < n && k > 0; i++) {
        if (have == k && !above(scores[i], scores[ids[k - 1]])) continue;
        int64_t at = have < k ? have++ : k - 1;
        /* past equal scores only: the one met first has the lower id */
        for (; at > 0 && above(scores[i], scores[ids[at - 1]]); at--) ids[at] = ids[at - 1];
        ids[at] = (int32_t)i;
    }
}

/* | q | pad to MCI_ALIGN | s | q8 | pad | */
int64_t mci_qact_bytes(int64_t n, int64_t group) {
    int64_t groups = (n + group - 1) / group;
    return mci_round_up(n, MCI_ALIGN) + mci_round_up(groups * 8, MCI_ALIGN);
}

mci_qact mci_qact_fill(const mci_ops *ops, const float *x, int64_t n, int64_t group, void *mem) {
    int8_t *q = mem;
    float *s = (float *)(void *)(q + mci_round_up(n, MCI_ALIGN));
    int32_t *q8 = (int32_t *)(void *)(s + (n + group - 1) / group);
    ops->quantise(x, n, group, q, s, q8);
    return (mci_qact){q, s, q8};
}

/* Tokens a call of a kernel gets at a time. */
enum { PIECE = 64 };

/* One piece of a public product on the integer path; mem: q, s and q8 of PIECE tokens. */
static void quantised(const mci_ops *ops, const mci_mat *m, const float *const *x, int64_t n,
                      float *const *y, uint8_t *mem) {
    const int64_t group = m->block_cols ? m->block_cols : m->cols;
    const int64_t bytes = mci_qact_bytes(m->cols, group);
    mci_qact q[PIECE];
    for (int64_t t = 0; t < n; t++)
        q[t] = mci_qact_fill(ops, x[t], m->cols, group, mem + t * bytes);
    ops->qgemm(m, 0, m->rows, q, n, y);
}

int mc_gemm(const char *isa, const mc_tensor *t, const void *w, const void *scale, const float *x,
            int64_t n_tok, float *y, mc_error *err) {
    const mci_ops *ops;
    int64_t bytes, scale_bytes, xs, ys;
    int rc = mci_ops_get(isa, &ops, err);
    if (rc) return rc;
    if (!t) return mci_fail(err, MC_EINVAL, 0, "gemm: NULL tensor");
    mc_tensor shape = *t;
    shape.offset = 0;
    shape.scale_file = scale ? 0 : -1;
    if ((rc = mci_format_check(&shape, "gemm", &bytes, &scale_bytes, err)) < 0) return rc;
    if (n_tok < 0 || !mci_mul(n_tok, t->cols, &xs) || !mci_mul(xs, 4, &xs) ||
        !mci_mul(n_tok, t->rows, &ys) || !mci_mul(ys, 4, &ys))
        return mci_fail(err, MC_EINVAL, 0, "gemm: bad shape: rows %lld, cols %lld, tokens %lld",
                        (long long)t->rows, (long long)t->cols, (long long)n_tok);
    if (n_tok == 0) return MC_OK;
    if (!w || !x || !y) return mci_fail(err, MC_EINVAL, 0, "gemm: NULL pointer");
    const mci_mat m = mci_mat_of(&shape, w, scale);
    const bool integer = mci_dtype_get(m.dtype)->integer;
    uint8_t *mem = NULL;
    if (integer && !(mem = malloc((size_t)(PIECE * mci_qact_bytes(m.cols, 32)))))
        return mci_fail(err, MC_ENOMEM, 0, "gemm: out of memory");
    uint32_t fp = mci_fp_enter();
    for (int64_t t0 = 0; t0 < n_tok; t0 += PIECE) {
        const float *xp[PIECE];
        float *yp[PIECE];
        int64_t n = MCI_MIN(n_tok - t0, PIECE);
        for (int64_t i = 0; i < n; i++) {
            xp[i] = x + (t0 + i) * m.cols;
            yp[i] = y + (t0 + i) * m.rows;
        }
        if (integer)
            quantised(ops, &m, xp, n, yp, mem);
        else
            ops->gemm(&m, 0, m.rows, xp, n, yp);
    }
    mci_fp_restore(fp);
    free(mem);
    return MC_OK;
}
