/* ops.c - which kernel set runs, the top-k every router uses, and the public gemm for tests. */
#include "ops.h"

#include "cpu.h"
#include "pool.h"

/* Best first. */
static const mci_ops *const sets[] = {&mci_ops_avx512, &mci_ops_avx2, &mci_ops_ref};
enum { N_SETS = (int)(sizeof sets / sizeof *sets) };

static bool runs(const mci_ops *o) {
    return o->gemm && (o->features & ~mci_cpu_features()) == 0;
}

const char *mc_engine_isas(void) {
    if (runs(&mci_ops_avx512)) return "avx512 avx2 scalar";
    return runs(&mci_ops_avx2) ? "avx2 scalar" : "scalar";
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

int mc_gemm(const char *isa, int32_t dtype, const void *w, int32_t scale_dtype, const void *scale,
            int64_t rows, int64_t cols, const float *x, int64_t n_tok, float *y, mc_error *err) {
    const mci_ops *ops;
    int rc = mci_ops_get(isa, &ops, err);
    if (rc) return rc;
    const mci_dtype *type = mci_dtype_get(dtype);
    if (!type) return mci_fail(err, MC_EINVAL, 0, "no dtype %d", (int)dtype);
    if (type->scaled && (!scale || (scale_dtype != MC_F32 && scale_dtype != MC_BF16)))
        return mci_fail(err, MC_EINVAL, 0, "%s needs a scale of F32 or BF16", type->name);
    int64_t bytes, xs, ys;
    if (rows < 0 || cols < 1 || n_tok < 0 || !mci_mul(rows, cols, &bytes) ||
        !mci_mul(bytes, type->bytes, &bytes) || !mci_mul(n_tok, cols, &xs) ||
        !mci_mul(xs, 4, &xs) || !mci_mul(n_tok, rows, &ys) || !mci_mul(ys, 4, &ys))
        return mci_fail(err, MC_EINVAL, 0, "gemm: bad shape: rows %lld, cols %lld, tokens %lld",
                        (long long)rows, (long long)cols, (long long)n_tok);
    if (rows == 0 || n_tok == 0) return MC_OK;
    if (!w || !x || !y) return mci_fail(err, MC_EINVAL, 0, "gemm: NULL pointer");
    const mci_mat m = {.data = w, .scale = type->scaled ? scale : NULL, .rows = rows, .cols = cols,
                       .dtype = dtype, .scale_dtype = scale_dtype};
    uint32_t fp = mci_fp_enter();
    for (int64_t t0 = 0; t0 < n_tok; t0 += 64) {
        const float *xp[64];
        float *yp[64];
        int64_t n = MCI_MIN(n_tok - t0, 64);
        for (int64_t t = 0; t < n; t++) {
            xp[t] = x + (t0 + t) * cols;
            yp[t] = y + (t0 + t) * rows;
        }
        ops->gemm(&m, 0, rows, xp, n, yp);
    }
    mci_fp_restore(fp);
    return MC_OK;
}
