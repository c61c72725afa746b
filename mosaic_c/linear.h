/* linear.h - tensors bound from files, and the parallel matrix products that every block uses. */
#ifndef MCI_LINEAR_H
#define MCI_LINEAR_H
#include "engine.h"

/* A resident tensor: mat points into an allocation of this struct. */
typedef struct mci_weight {
    mci_mat mat;
    void *mem;
    int64_t mem_bytes;
} mci_weight;

static inline bool mci_absent(const mc_tensor *t) { return t->file < 0; }

/* Checks a tensor's description against the file: known dtype, positive sizes, ranges inside the
 * file. bytes, scale_bytes: what it takes. name: for errors. */
int mci_tensor_check(mc_engine *e, const mc_tensor *t, const char *name, int64_t *bytes,
                     int64_t *scale_bytes, mc_error *err);
/* Reads a tensor of exactly (rows, cols) into memory. An absent one gives mat.data NULL. */
int mci_weight_load(mc_engine *e, const mc_tensor *t, int64_t rows, int64_t cols, const char *name,
                    mci_weight *out, mc_error *err);
void mci_weight_free(mc_engine *e, mci_weight *w);

/* A vector of n decoded to float32 (plus 1 where asked); absent: *out NULL. */
int mci_vector_load(mc_engine *e, const mc_tensor *t, int64_t n, const char *name, bool plus_one,
                    float **out, mc_error *err);
void mci_vector_free(mc_engine *e, float *v, int64_t n);

/* One matrix product of a group: y[t][r] = W x[t]; with up set, y = silu(W x) * (Up x), where yu
 * is scratch of y's shape. */
typedef struct mci_job {
    const mci_mat *w, *up;
    const float *const *x;
    float *const *y, *const *yu;
    int64_t n_tok;
} mci_job;

/* Rows of w in a chunk, what a thread computes at once. */
int64_t mci_chunk_rows(const mci_mat *w, int64_t n_tok);
/* Runs all jobs as one parallel region; chunks are blocks of rows. */
void mci_run_jobs(mc_engine *e, const mci_job *jobs, int n);

enum { MCI_MLPS = 65 }; /* that run together: experts of a group and the shared one */

/* A gated MLP and how many rows pass through it. */
typedef struct mci_mlp {
    const mci_mat *gate, *up, *down;
    int64_t n;
} mci_mlp;

/* out = down(silu(gate x) * up x) of n <= MCI_MLPS at once: one parallel region for gate and up,
 * one for down. The row pointers of one follow those of the one before; act and up are scratch
 * rows of its width. */
void mci_run_mlps(mc_engine *e, const mci_mlp *m, int n, const float *const *x, float *const *act,
                  float *const *up, float *const *out);

/* y = norm(x) and x = x + (rows + bias), row by row in parallel: (n, width) each; bias may be
 * NULL. */
void mci_norm_rows(mc_engine *e, const float *x, const float *w, float eps, int64_t n,
                   int64_t width, float *y);
void mci_add_rows(mc_engine *e, float *rows, const float *bias, int64_t n, int64_t width, float *x);

/* rows[t] = base + t * ld, from scratch. */
float **mci_row_ptrs(mc_engine *e, float *base, int64_t n, int64_t ld);
#endif
