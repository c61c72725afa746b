/* blocks.h - a small model of random weights in two files, opened through the public interface, for
 * the tests of blocks and sessions. Every weight is kept as a double too, so that a reference needs
 * no decoder of the engine.
 *
 * Seven blocks in this order cover what the families differ in:
 *   0 attention  output gate, norms of q and k, rotation of a part of the head; FP8
 *   1 MoE        weights renormalised, shared expert behind a gate; FP8 experts
 *   2 delta rule FP8, BF16
 *   3 MoE        weights as they are, no shared expert; experts of every dtype
 *   4 attention  biases, no norms of q and k, the whole head rotated; BF16, F16
 *   5 dense MLP
 *   6 delta rule F32, norms that add one
 */
#ifndef BLOCKS_H
#define BLOCKS_H
#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <unistd.h>

#include "session.h"
#include "store.h"
#include "test.h"

enum {
    H = 136, /* two FP8 scale blocks, the second one partial */
    HEADS = 4,
    KV_HEADS = 2,
    D = 20,
    ROPE = 12,
    EXPERTS = 10,
    TOP_K = 3,
    WIDTH = 24,
    SHARED = 40,
    K_HEADS = 2,
    V_HEADS = 4,
    DK = 16,
    DV = 72,
    KERNEL = 4,
    CONV = 2 * K_HEADS * DK + V_HEADS * DV,
    CTX = 200,
    CHUNK = 80,
    VOCAB = 50,
    N_BLOCK = 7,
    MODEL_FILES = 2,
    MAX_TENSORS = 256
};

/* ---- the model on disk ---- */

typedef struct model {
    char path[MODEL_FILES][4200];
    FILE *f[MODEL_FILES];
    int64_t at[MODEL_FILES];
    rng r;
    bool bf16_scales; /* from now on; else of either type */
    struct {
        int32_t file;
        int64_t offset;
        double *v;
    } tensor[MAX_TENSORS];
    int n_tensor;
    mc_attn_desc attn[2];
    mc_delta_desc delta[2];
    mc_moe_desc moe[3];
    mc_expert expert[2][EXPERTS];
    mc_norm final;
    mc_tensor head, table;
} model;

static const mc_tensor ABSENT = {.file = -1, .scale_file = -1};

static inline void put_bytes(model *m, int file, const void *p, int64_t n) {
    if (fwrite(p, 1, (size_t)n, m->f[file]) != (size_t)n) {
        printf("FAIL cannot write %s: %s\n", m->path[file], strerror(errno));
        exit(1);
    }
    m->at[file] += n;
}

/* Tensors begin at odd offsets: nothing may rely on their alignment. */
static inline void pad(model *m, int file) {
    int64_t n = 1 + (int64_t)rng_below(&m->r, 40);
    for (n += (m->at[file] + n) % 2 == 0; n > 0; n--) put_bytes(m, file, "\xff", 1);
}

/* One random element of a dtype at about the size `amp`, written; its value. */
static inline double put_element(model *m, int file, int dtype, double amp) {
    uint32_t u = mci_bits((float)(amp * (double)rng_unit(&m->r)));
    if (dtype == MC_F32) {
        put_bytes(m, file, &u, 4);
        return (double)mci_f32(u);
    }
    if (dtype == MC_BF16) {
        uint16_t h = (uint16_t)(u >> 16);
        put_bytes(m, file, &h, 2);
        return (double)mci_f32((uint32_t)h << 16);
    }
    if (dtype == MC_F16) { /* 2^-8 .. 2^-3, 10 random bits of mantissa */
        uint32_t e = 7 + (uint32_t)rng_below(&m->r, 5), f = (uint32_t)rng_below(&m->r, 1024);
        uint16_t h = (uint16_t)(rng_below(&m->r, 2) << 15 | e << 10 | f);
        put_bytes(m, file, &h, 2);
        return ldexp((h >> 15 ? -1.0 : 1.0) * (1024 + f), (int)e - 25);
    }
    uint8_t b = (uint8_t)rng_next(&m->r);
    if ((b & 0x7f) == 0x7f) b = 0; /* no NaN */
    put_bytes(m, file, &b, 1);
    int e = b >> 3 & 15, f = b & 7;
    return (b >> 7 ? -1.0 : 1.0) * (e ? ldexp(8 + f, e - 10) : ldexp(f, -9));
}

static inline mc_tensor put(model *m, int dtype, int64_t rows, int64_t cols, double amp) {
    int file = rng_below(&m->r, 8) == 0;
    int64_t br = (rows + 127) / 128, bc = (cols + 127) / 128;
    double *v = test_alloc((size_t)(rows * cols) * 8), scale[16];
    pad(m, file);
    mc_tensor t = {.file = file,
                   .dtype = dtype,
                   .offset = m->at[file],
                   .rows = rows,
                   .cols = cols,
                   .scale_file = -1};
    for (int64_t i = 0; i < rows * cols; i++) v[i] = put_element(m, file, dtype, amp);
    if (dtype == MC_F8E4M3) { /* E4M3 codes taken at random have a root mean square near 150 */
        pad(m, 1);
        t.scale_file = 1;
        t.scale_dtype = rng_below(&m->r, 2) || m->bf16_scales ? MC_BF16 : MC_F32;
        t.scale_offset = m->at[1];
        t.block_rows = t.block_cols = 128;
        for (int64_t b = 0; b < br * bc; b++)
            scale[b] = put_element(m, 1, t.scale_dtype, amp / 100);
        for (int64_t i = 0; i < rows * cols; i++)
            v[i] *= scale[i / cols / 128 * bc + i % cols / 128];
    }
    if (m->n_tensor == MAX_TENSORS) abort();
    m->tensor[m->n_tensor].file = t.file;
    m->tensor[m->n_tensor].offset = t.offset;
    m->tensor[m->n_tensor++].v = v;
    return t;
}

/* The values of a tensor (rows, cols); NULL: absent. */
static inline const double *values(const model *m, const mc_tensor *t) {
    for (int i = 0; i < m->n_tensor; i++)
        if (m->tensor[i].file == t->file && m->tensor[i].offset == t->offset) return m->tensor[i].v;
    return NULL;
}

static inline mc_tensor put_mat(model *m, int dtype, int64_t rows, int64_t cols) {
    return put(m, dtype, rows, cols, 1.7 / sqrt((double)cols));
}

static inline mc_norm put_norm(model *m, int64_t n, int plus_one) {
    return (mc_norm){
        .weight = put(m, MC_BF16, 1, n, plus_one ? 0.5 : 1.5), .plus_one = plus_one, .eps = 1e-6f};
}

static inline mc_expert put_expert(model *m, int dtype, int64_t width) {
    mc_expert x;
    x.gate = put_mat(m, dtype, width, H);
    x.up = put_mat(m, dtype, width, H);
    x.down = put_mat(m, dtype, H, width);
    return x;
}

static inline void put_attn(model *m) {
    mc_attn_desc d = {.layer = 0,
                      .hidden = H,
                      .n_head = HEADS,
                      .n_kv_head = KV_HEADS,
                      .head_dim = D,
                      .rope_dim = ROPE,
                      .rope_theta = 1e4,
                      .gate = 1,
                      .ctx = CTX,
                      .max_tok = CHUNK};
    mc_norm none = {.weight = ABSENT};
    d.norm = put_norm(m, H, 1);
    d.q_norm = put_norm(m, D, 1);
    d.k_norm = put_norm(m, D, 0);
    d.q = put_mat(m, MC_F8E4M3, HEADS * D * 2, H);
    d.k = put_mat(m, MC_F8E4M3, KV_HEADS * D, H);
    d.v = put_mat(m, MC_BF16, KV_HEADS * D, H);
    d.o = put_mat(m, MC_F8E4M3, H, HEADS * D);
    d.q_bias = d.k_bias = d.v_bias = d.o_bias = ABSENT;
    m->attn[0] = d;
    d.layer = 1;
    d.gate = 0;
    d.rope_dim = D;
    d.rope_theta = 5e5;
    d.norm = put_norm(m, H, 0);
    d.q_norm = d.k_norm = none;
    d.q = put_mat(m, MC_BF16, HEADS * D, H);
    d.k = put_mat(m, MC_F16, KV_HEADS * D, H);
    d.v = put_mat(m, MC_F32, KV_HEADS * D, H);
    d.o = put_mat(m, MC_F16, H, HEADS * D);
    d.q_bias = put(m, MC_BF16, 1, HEADS * D, 0.4);
    d.k_bias = put(m, MC_F32, 1, KV_HEADS * D, 0.4);
    d.v_bias = put(m, MC_F16, 1, KV_HEADS * D, 0.4);
    d.o_bias = put(m, MC_BF16, 1, H, 0.4);
    m->attn[1] = d;
}

static inline void put_delta(model *m, int layer) {
    mc_delta_desc d = {.layer = layer,
                       .hidden = H,
                       .n_k_head = K_HEADS,
                       .n_v_head = V_HEADS,
                       .dk = DK,
                       .dv = DV,
                       .conv_kernel = KERNEL,
                       .max_tok = CHUNK};
    int big = layer ? MC_F32 : MC_F8E4M3, small = layer ? MC_F32 : MC_BF16;
    d.norm = put_norm(m, H, 1);
    d.qkv = put_mat(m, big, CONV, H);
    d.z = put_mat(m, big, V_HEADS * DV, H);
    d.b = put_mat(m, small, V_HEADS, H);
    d.a = put_mat(m, small, V_HEADS, H);
    d.conv = put(m, small, CONV, KERNEL, 0.8);
    d.a_log = put(m, MC_F32, 1, V_HEADS, 1.5);
    d.dt_bias = put(m, small, 1, V_HEADS, 1.0);
    d.out_norm = put_norm(m, DV, layer);
    d.out = put_mat(m, big, H, V_HEADS * DV);
    m->delta[layer] = d;
}

static inline void put_moe(model *m) {
    for (int i = 0; i < 3; i++) {
        mc_moe_desc d = {.layer = i,
                         .hidden = H,
                         .max_tok = CHUNK,
                         .renormalise = i == 0,
                         .router = ABSENT,
                         .shared = {ABSENT, ABSENT, ABSENT},
                         .shared_gate = ABSENT};
        d.norm = put_norm(m, H, i != 0);
        if (i < 2) {
            d.n_expert = EXPERTS;
            d.top_k = TOP_K;
            d.width = WIDTH;
            d.router = put(m, MC_BF16, EXPERTS, H, 0.3);
        }
        if (i != 1) {
            d.shared_width = SHARED;
            d.shared = put_expert(m, i ? MC_BF16 : MC_F8E4M3, SHARED);
        }
        if (i == 0) d.shared_gate = put(m, MC_BF16, 1, H, 0.2);
        m->moe[i] = d;
        m->bf16_scales = i == 0; /* the GPU tier wants all experts of a layer alike */
        for (int x = 0; i < 2 && x < EXPERTS; x++)
            m->expert[i][x] = put_expert(m, i ? x % 4 : MC_F8E4M3, WIDTH);
    }
    m->moe[2].layer = 0; /* unused: it has no store */
}

static inline model *make_model(const char *dir) {
    model *m = test_alloc(sizeof *m);
    memset(m, 0, sizeof *m);
    m->r.s = 7;
    for (int i = 0; i < MODEL_FILES; i++) {
        snprintf(m->path[i], sizeof m->path[i], "%s/weights%d", dir, i);
        if (!(m->f[i] = fopen(m->path[i], "wb"))) put_bytes(m, i, "", -1);
    }
    put_attn(m);
    put_moe(m);
    put_delta(m, 0);
    put_delta(m, 1);
    m->final = put_norm(m, H, 1);
    m->head = put_mat(m, MC_F8E4M3, VOCAB, H);
    m->table = put_mat(m, MC_BF16, VOCAB, H);
    for (int i = 0; i < MODEL_FILES; i++) {
        pad(m, i);
        if (fclose(m->f[i])) put_bytes(m, i, "", -1);
    }
    return m;
}

static inline void free_model(model *m) {
    for (int i = 0; i < m->n_tensor; i++) free(m->tensor[i].v);
    for (int i = 0; i < MODEL_FILES; i++) unlink(m->path[i]);
    free(m);
}

/* A fresh folder beside the program, on a real file system; or in the folder given. */
static inline void make_dir(int argc, char **argv, char *dir, size_t room) {
    char at[4000];
    snprintf(at, sizeof at, "%s", argc > 1 ? argv[1] : argv[0]);
    snprintf(dir, room, "%s/blocks_XXXXXX", argc > 1 ? at : dirname(at));
    if (mkdtemp(dir)) return;
    printf("FAIL cannot make a folder %s: %s\n", dir, strerror(errno));
    exit(1);
}

/* ---- the model opened ---- */

typedef struct setting {
    const char *isa;
    int threads, kv, io, policy, lanes;
    int64_t slots, pages;
    int32_t ahead;
    mc_tier_opts tier; /* bytes 0: none */
} setting;

static const setting PLAIN = {.threads = 1, .kv = MC_F32, .slots = TOP_K, .pages = 16};

typedef struct world {
    const model *m;
    setting set;
    mc_engine *e;
    mc_kv *kv;
    mc_store *store;
    mc_attn *attn[2];
    mc_delta *delta[2];
    mc_moe *moe[3];
    mc_linear *out, *table;
    mc_head *head;
    mc_step *st;
} world;

static inline mc_kv_desc kv_desc(setting s) {
    return (mc_kv_desc){.n_attn = 2,
                        .n_kv_head = KV_HEADS,
                        .head_dim = D,
                        .dtype = s.kv,
                        .ctx = CTX,
                        .pages = s.pages,
                        .n_delta = 2,
                        .conv_dim = CONV,
                        .conv_kernel = KERNEL,
                        .n_v_head = V_HEADS,
                        .dk = DK,
                        .dv = DV};
}

static inline int open_engine(const model *m, setting s, mc_engine **e, mc_error *err) {
    mc_engine_opts o = {.threads = s.threads, .lanes = s.lanes, .io = s.io, .isa = s.isa};
    int rc = mc_engine_create(&o, e, err);
    for (int i = 0; i < MODEL_FILES && rc >= 0; i++) rc = mc_engine_file(*e, m->path[i], err);
    return rc;
}

static inline int open_blocks(world *w, mc_error *err) {
    const model *m = w->m;
    mc_kv_desc k = kv_desc(w->set);
    int rc = mc_kv_create(w->e, &k, &w->kv, err);
    if (rc < 0) return rc;
    rc = mc_store_create(w->e, 2, EXPERTS, TOP_K, w->set.policy, &w->store, err);
    if (rc < 0) return rc;
    for (int i = 0; i < 3; i++) {
        if (i < 2 && ((rc = mc_attn_create(w->e, &m->attn[i], &w->attn[i], err)) < 0 ||
                      (rc = mc_delta_create(w->e, &m->delta[i], &w->delta[i], err)) < 0))
            return rc;
        rc = mc_moe_create(w->e, i < 2 ? w->store : NULL, &m->moe[i], i < 2 ? m->expert[i] : NULL,
                           &w->moe[i], err);
        if (rc < 0) return rc;
    }
    if (w->set.tier.bytes && (rc = mc_store_tier(w->store, &w->set.tier, err)) < 0) return rc;
    if ((rc = mc_store_open(w->store, w->set.slots, w->set.ahead, err)) < 0 ||
        (rc = mc_linear_create(w->e, &m->head, 1, &w->out, err)) < 0 ||
        (rc = mc_linear_create(w->e, &m->table, 0, &w->table, err)) < 0 ||
        (rc = mc_head_create(w->e, &m->final, w->out, CHUNK, &w->head, err)) < 0)
        return rc;
    return mc_step_create(w->e, &w->st, err);
}

static inline void close_world(world *w) {
    mc_step_free(w->st);
    mc_head_free(w->head);
    mc_linear_free(w->table);
    mc_linear_free(w->out);
    for (int i = 0; i < 3; i++) mc_moe_free(w->moe[i]);
    for (int i = 0; i < 2; i++) mc_attn_free(w->attn[i]);
    for (int i = 0; i < 2; i++) mc_delta_free(w->delta[i]);
    mc_store_free(w->store);
    mc_kv_free(w->kv);
    mc_engine_free(w->e);
    memset(w, 0, sizeof *w);
}

/* Everything opened; a test cannot go on without. */
static inline world open_world(const model *m, setting s) {
    world w = {.m = m, .set = s};
    mc_error err = {0};
    if (open_engine(m, s, &w.e, &err) >= 0 && open_blocks(&w, &err) >= 0) return w;
    printf("FAIL cannot open the model: %s\n", err.message);
    exit(1);
}

static inline mc_session *new_session(const world *w) {
    mc_session *s = NULL;
    mc_error err = {0};
    CHECK(mc_session_create(w->kv, &s, &err) == MC_OK, "%s", err.message);
    return s;
}

/* ---- running it ---- */

/* Activations of n tokens from position pos of a text; texts with different tags differ. */
static inline void embed(uint64_t tag, int64_t pos, int64_t n, float *x) {
    for (int64_t t = 0; t < n; t++) {
        rng r = {tag * 1000003 + (uint64_t)(pos + t)};
        for (int64_t i = 0; i < H; i++) x[t * H + i] = 2 * rng_unit(&r);
    }
}

static inline int block_forward(const world *w, mc_step *st, int block, float *x, int32_t *routed,
                                mc_error *err) {
    switch (block) {
    case 0:
        return mc_attn_forward(w->attn[0], st, x, err);
    case 1:
        return mc_moe_forward(w->moe[0], st, x, NULL, routed, err);
    case 2:
        return mc_delta_forward(w->delta[0], st, x, err);
    case 3:
        return mc_moe_forward(w->moe[1], st, x, NULL, routed, err);
    case 4:
        return mc_attn_forward(w->attn[1], st, x, err);
    case 5:
        return mc_moe_forward(w->moe[2], st, x, NULL, NULL, err);
    default:
        return mc_delta_forward(w->delta[1], st, x, err);
    }
}

/* The open chunk through all blocks. */
static inline int all_blocks(const world *w, mc_step *st, float *x, mc_error *err) {
    int rc = MC_OK;
    for (int i = 0; i < N_BLOCK && rc == MC_OK; i++) rc = block_forward(w, st, i, x, NULL, err);
    return rc;
}

/* One step: n tokens of a text in chunks of at most `chunk`, committed. last (H): activations of
 * the last token. After a failure the session stands where it stood. */
static inline int run(const world *w, mc_step *st, mc_session *s, uint64_t tag, int64_t n,
                      int64_t chunk, float *last, mc_error *err) {
    float *x = test_alloc((size_t)(CHUNK * H) * 4);
    int64_t pos = mc_session_position(s);
    int rc = mc_step_begin(st, &s, 1, err);
    for (int64_t k; n > 0 && rc == MC_OK; n -= k, pos += k) {
        k = MCI_MIN(n, chunk);
        embed(tag, pos, k, x);
        rc = mc_step_chunk(st, &k, err);
        if (rc == MC_OK) rc = all_blocks(w, st, x, err);
        if (last && rc == MC_OK) memcpy(last, x + (k - 1) * H, H * 4);
    }
    if (rc == MC_OK)
        rc = mc_step_commit(st, err);
    else
        mc_step_abort(st);
    free(x);
    return rc;
}

static inline bool same_bits(const float *a, const float *b, int64_t n) {
    return memcmp(a, b, (size_t)n * 4) == 0;
}
#endif
