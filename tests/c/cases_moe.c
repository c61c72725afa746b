/* cases_moe.c - cases of what the MLP of a layer does beyond single kernels: the router's top-k,
 * and the experts of a group together, as moe.c runs them. */
#include "cases.h"

#include "linear.h"

/* ---- topk: experts, k, tokens ---------------------------------------------------------------- */

static void setup_topk(kcase *c) {
    c->n[1] = MCI_MIN(c->n[0], c->n[1]);
    case_floats(c, 0, c->n[0] * c->n[2], c->in);
    c->out_bytes = 4 * c->n[1] * c->n[2];
    c->bytes = 4.0 * (double)((c->n[0] + c->n[1]) * c->n[2]);
    c->parts = c->n[2];
}

/* NaN below everything. */
static bool above(float a, float b) { return a > b || (b != b && a == a); }

/* The specification: each rank is the first of the best that are left. */
static void topk_ref(const float *x, int64_t n, int64_t k, int32_t *ids) {
    for (int64_t r = 0; r < k; r++) {
        int64_t best = -1;
        for (int64_t i = 0; i < n; i++) {
            bool taken = false;
            for (int64_t q = 0; q < r; q++) taken |= ids[q] == i;
            if (!taken && (best < 0 || above(x[i], x[best]))) best = i;
        }
        ids[r] = (int32_t)best;
    }
}

static void run_topk(const mci_ops *o, const kcase *c, void *out, int64_t part, int64_t parts) {
    const int64_t n = c->n[0], k = c->n[1], T = c->n[2];
    for (int64_t t = T * part / parts; t < T * (part + 1) / parts; t++) {
        const float *x = (const float *)c->buf[0] + 1 + t * n;
        (o == &mci_ops_ref ? topk_ref : mci_topk)(x, n, k, (int32_t *)out + t * k);
    }
}
const kop case_topk = {"topk", setup_topk, run_topk, 1};

/* ---- experts: layers, experts a layer, tokens an expert, hidden, width ----------------------- */

/* One token means the same one for all experts, a decode step; otherwise each has its own. out:
 * (layers, experts, tokens, hidden). Layer after layer, so that no weight is still in a cache. */
typedef struct moe_case {
    mci_mat gate, up, down; /* of all experts, one below the other */
    const float **x;        /* pointers to the rows of one layer */
    float **act, **up_row, **out;
} moe_case;

static mci_mat all_experts(kcase *c, int slot, int64_t rows, int64_t cols) {
    kcase w = *c;
    w.n[0] = c->n[0] * c->n[1] * rows;
    w.n[1] = cols;
    w.n[4] = slot; /* another seed */
    mci_mat m = case_weights(&w);
    c->buf[slot] = w.buf[2];
    c->buf[slot + 1] = w.buf[3];
    c->failed |= w.failed;
    return m;
}

/* Expert i's rows; FP8's 128 rows of a scale divide them. */
static mci_mat expert(const mci_mat *all, int64_t i, int64_t rows) {
    mci_mat m = *all;
    m.rows = rows;
    m.data += i * rows * mci_row_bytes(m.dtype, m.cols);
    m.scale = mci_scale_row(all, i * rows);
    return m;
}

static void run_experts(mc_engine *e, const kcase *c, void *out) {
    const moe_case *m = c->buf[0];
    const int64_t E = c->n[1], T = c->n[2], H = c->n[3], W = c->n[4];
    mci_mat mats[MCI_MLPS][3];
    mci_mlp mlps[MCI_MLPS];
    for (int64_t l = 0; l < c->n[0]; l++) {
        for (int64_t i = 0; i < E; i++) {
            mci_mat *w = mats[i];
            w[0] = expert(&m->gate, l * E + i, W);
            w[1] = expert(&m->up, l * E + i, W);
            w[2] = expert(&m->down, l * E + i, H);
            mlps[i] = (mci_mlp){&w[0], &w[1], &w[2], T};
        }
        for (int64_t i = 0; i < E * T; i++) m->out[i] = (float *)out + (l * E * T + i) * H;
        mci_run_mlps(e, mlps, (int)E, m->x, m->act, m->up_row, m->out);
    }
}

static void setup_experts(kcase *c) {
    const int64_t H = c->n[3], W = c->n[4], n = c->n[1] * c->n[2];
    const int64_t n_tok = c->n[2] == 1 ? 1 : n;
    moe_case *m = case_alloc(c, 0, (int64_t)sizeof *m + 4 * n * (int64_t)sizeof(void *));
    float *x = case_floats(c, 1, n_tok * H + 2 * n * W, c->in);
    if (c->failed) return;
    m->gate = all_experts(c, 2, W, H);
    m->up = all_experts(c, 4, W, H);
    m->down = all_experts(c, 6, H, W);
    m->x = (const float **)(void *)(m + 1);
    m->act = (float **)(void *)(m->x + n);
    m->up_row = m->act + n;
    m->out = m->up_row + n;
    for (int64_t i = 0; i < n; i++) {
        m->x[i] = x + i % n_tok * H;
        m->act[i] = x + n_tok * H + i * W;
        m->up_row[i] = m->act[i] + n * W;
    }
    const int64_t layers = c->n[0], row = mci_row_bytes(c->dtype, H);
    double w = 3.0 * (double)(layers * c->n[1] * W * row);
    w *= 1 + (double)mci_dtype_get(c->scale)->bits / mci_dtype_get(c->dtype)->bits / (128 * 128);
    c->out_bytes = layers * n * H * 4;
    c->bytes = w + 4.0 * (double)(layers * (n_tok + n) * H);
    c->flops = 6.0 * (double)(layers * n * H) * (double)W;
    c->parts = 1;
    c->whole = run_experts;
}
const kop case_experts = {"experts", setup_experts, NULL, 4};
