/* acts.c - quantised activations by thread. */
#include "acts.h"

/* At the start of a thread's room; the values follow. Chunks that a thread claims one after the
 * other mostly share their tokens: the experts of a decode step all do. */
typedef struct acts {
    int64_t region, n, cols, group;
    const float *x[MCI_ACTS_TOK];
    mci_qact q[MCI_ACTS_TOK];
} acts;

static int64_t head_bytes(void) { return mci_round_up(sizeof(acts), MCI_ALIGN); }

int64_t mc_thread_bytes(int32_t dtype, int64_t cols, mc_error *err) {
    if (!mci_dtype_get(dtype) || cols < 1 || cols > INT32_MAX)
        return mci_fail(err, MC_EINVAL, 0, "no weights of dtype %d in rows of %lld", dtype,
                        (long long)cols);
    if (!mci_dtype_get(dtype)->integer) return 0;
    return mci_round_up(head_bytes() + MCI_ACTS_TOK * mci_qact_bytes(cols, 32), MCI_ALIGN);
}

int mci_acts_reserve(mc_engine *e, int dtype, int64_t cols, mc_error *err) {
    if (!mci_dtype_get(dtype)->integer) return MC_OK;
    return mci_thread_reserve(e, mc_thread_bytes(dtype, cols, err), err);
}

void mci_acts_forget(mc_engine *e) { e->region++; }

const mci_qact *mci_acts_get(mc_engine *e, int thread, const mci_mat *w, const float *const *x,
                             int64_t n) {
    const int64_t group = w->block_cols ? w->block_cols : w->cols;
    acts *a = mci_thread_scratch(e, thread);
    if (a->region == e->region && a->n >= n && a->cols == w->cols && a->group == group &&
        memcmp(a->x, x, (size_t)n * sizeof *x) == 0)
        return a->q;
    const int64_t bytes = mci_qact_bytes(w->cols, group);
    for (int64_t t = 0; t < n; t++) {
        a->x[t] = x[t];
        a->q[t] =
            mci_qact_fill(e->ops, x[t], w->cols, group, (uint8_t *)a + head_bytes() + t * bytes);
    }
    a->region = e->region;
    a->n = n;
    a->cols = w->cols;
    a->group = group;
    return a->q;
}
