/* cases.c - inputs, calls and costs of every kernel, and the table of cases.
 *
 * Buffers start one float (weights: three bytes) past an aligned address, so that no kernel may
 * count on alignment. */
#include "cases.h"

#include "linear.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/* ---- inputs ---------------------------------------------------------------------------------- */

static rng seeded(const kcase *c, uint64_t salt) {
    uint64_t s = salt * 1000003 + (uint64_t)c->in * 31 + (uint64_t)(c->dtype * 8 + c->scale) +
                 (uint64_t)c->block * 977;
    for (int i = 0; i < 5; i++) s = s * 6364136223846793005u + (uint64_t)c->n[i] + 1;
    return (rng){s};
}

static float special(rng *r) {
    static const uint32_t bits[] = {0x7fc00000, 0xffc00001, 0x7f800001, 0xff800001,
                                    0x7f800000, 0xff800000, 0,          0x80000000,
                                    1,          0x807fffff, 0x7f7fffff, 0x00800000};
    return mci_f32(bits[rng_below(r, sizeof bits / sizeof *bits)]);
}

static float value(rng *r, fill f, int64_t n) {
    uint64_t u = rng_next(r);
    if (f == WIDE) {
        uint32_t b = (uint32_t)u;
        return mci_f32((b & 0x7f800000u) == 0x7f800000u ? b & 0x807fffffu : b);
    }
    if (f == TINY) return rng_unit(r) * mci_f32((uint32_t)(u % 40) << 23);
    if (f == SPECIAL && u % (uint64_t)(n + 4) < 2) return special(r);
    return rng_unit(r);
}

void *case_alloc(kcase *c, int slot, int64_t bytes) {
    const bool large = bytes >= 2 << 20;
    const size_t align = large ? 2 << 20 : 64, size = ((size_t)bytes + align) / align * align;
    void *p = c->buf[slot] = aligned_alloc(align, size);
    if (!p) c->failed = true;
    if (p && large) madvise(p, size, MADV_HUGEPAGE);
    return p;
}

/* n floats, one float off alignment; slot keeps it for case_free. */
static float *floats(kcase *c, int slot, int64_t n, fill f) {
    rng r = seeded(c, (uint64_t)slot + 1);
    float *p = case_alloc(c, slot, (n + 2) * 4);
    for (int64_t i = 0; p && i < n; i++) p[i + 1] = value(&r, f, n);
    return p ? p + 1 : NULL;
}

float *case_floats(kcase *c, int slot, int64_t n, fill f) { return floats(c, slot, n, f); }

static float *in(const kcase *c, int slot) { return (float *)c->buf[slot] + 1; }

/* ---- elementwise: n[0] values ---------------------------------------------------------------- */

static void cost(kcase *c, double bytes, double flops, int64_t parts) {
    c->bytes = bytes;
    c->flops = flops;
    c->parts = parts;
}

static void init_out(kcase *c, int64_t n, fill f) {
    c->init = floats(c, 7, n, f);
    c->out_bytes = n * 4;
}

static void setup_map(kcase *c) {
    floats(c, 0, c->n[0], c->in);
    floats(c, 1, c->n[0], c->in);
    init_out(c, c->n[0], c->in);
    cost(c, 8.0 * (double)c->n[0], 0, 1);
}

static void setup_bf16(kcase *c) {
    setup_map(c);
    c->init = NULL;
    c->out_bytes = c->n[0] * 2;
}

#define MAP(kernel, call)                                                                          \
    static void run_##kernel(const mci_ops *o, const kcase *c, void *out, int64_t part,            \
                             int64_t parts) {                                                      \
        (void)part, (void)parts;                                                                   \
        const float *x = in(c, 0), *x2 = in(c, 1);                                                 \
        float *y = out;                                                                            \
        int64_t n = c->n[0];                                                                       \
        (void)x, (void)x2, (void)y;                                                                \
        o->call;                                                                                   \
    }                                                                                              \
    static const kop kernel = {#kernel, setup_map, run_##kernel, 4};

MAP(vexp, vexp(x, n, y))
MAP(vsigmoid, vsigmoid(x, n, y))
MAP(vsoftplus, vsoftplus(x, n, y))
MAP(silu_mul, silu_mul(x, x2, n, y))
MAP(silu_mul_in, silu_mul(y, x2, n, y))
MAP(sigmoid_mul, sigmoid_mul(x, n, y))
MAP(axpy, axpy(x2[0], x, n, y))
MAP(add, add(x, n, y))
MAP(softmax, softmax(y, n))
MAP(rmsnorm, rmsnorm(x, x2, 1e-6f, n, y))
MAP(rmsnorm_in, rmsnorm(y, x2, 1e-6f, n, y))
MAP(l2norm, l2norm(y, 1e-6f, 0.125f, n))

static void run_bf16(const mci_ops *o, const kcase *c, void *out, int64_t part, int64_t parts) {
    (void)part, (void)parts;
    o->to_bf16(in(c, 0), c->n[0], out);
}
static const kop to_bf16 = {"to_bf16", setup_bf16, run_bf16, 2};

static void setup_rope(kcase *c) { /* n[0] = half */
    floats(c, 0, c->n[0], c->in);
    floats(c, 1, c->n[0], c->in);
    init_out(c, 2 * c->n[0], c->in);
    cost(c, 24.0 * (double)c->n[0], 0, 1);
}
static void run_rope(const mci_ops *o, const kcase *c, void *out, int64_t part, int64_t parts) {
    (void)part, (void)parts;
    o->rope(out, in(c, 0), in(c, 1), c->n[0]);
}
static const kop rope = {"rope", setup_rope, run_rope, 4};

/* ---- gemm: rows, cols, tokens ---------------------------------------------------- */

enum { SKEW = 3 }; /* bytes the weights are off alignment; floats between rows of y */

static uint8_t f8_code(rng *r, const kcase *c) {
    uint8_t b = (uint8_t)rng_next(r);
    if (c->in == TINY) return b & 0x87;
    /* a NaN makes its whole row NaN: about one row in three gets one */
    if (c->in == SPECIAL && rng_below(r, (uint64_t)(3 * c->n[1])) == 0) return b | 0x7f;
    return (b & 0x7f) == 0x7f ? b & 0xf0 : b;
}

/* Random halves; NaN and infinity only where asked for. */
static uint16_t f16_code(rng *r, const kcase *c) {
    uint16_t h = (uint16_t)rng_next(r);
    if (c->in == TINY) h &= 0x87ff;
    if (c->in == UNIT) h &= 0xbbff;
    if (c->in == WIDE && (h & 0x7c00) == 0x7c00) h &= 0x83ff;
    if (c->in == SPECIAL && (h & 0x7c00) == 0x7c00 && rng_below(r, 64)) h &= 0x83ff;
    return h;
}

static mci_mat matrix(const kcase *c) {
    const bool scaled = mci_dtype_get(c->dtype)->scale_types != 0;
    return (mci_mat){.data = (const uint8_t *)c->buf[2] + SKEW,
                     .scale = scaled ? (const uint8_t *)c->buf[3] + SKEW : NULL,
                     .rows = c->n[0], .cols = c->n[1], .dtype = c->dtype, .scale_dtype = c->scale,
                     .block_rows = !scaled ? 0 : c->dtype == MC_F8E4M3 && c->block ? 128 : 1,
                     .block_cols = c->block,
                     .no_nan = c->dtype == MC_F8E4M3 && c->in != SPECIAL && !c->watch};
}

static void weights(kcase *c) {
    const int64_t bytes = c->n[0] * mci_row_bytes(c->dtype, c->n[1]);
    const int size = mci_dtype_get(c->dtype)->bits / 8;
    uint8_t *w = case_alloc(c, 2, bytes + SKEW);
    rng r = seeded(c, 77);
    if (!w) return;
    w += SKEW;
    for (int64_t i = 0; i < bytes; i += MCI_MAX(size, 1)) {
        if (c->dtype == MC_F8E4M3) {
            w[i] = f8_code(&r, c);
        } else if (size <= 1) { /* integers and MXFP4: every code is a number */
            w[i] = (uint8_t)rng_next(&r);
        } else if (c->dtype == MC_F16) {
            uint16_t h = f16_code(&r, c);
            memcpy(w + i, &h, 2);
        } else {
            int64_t n = c->in == SPECIAL ? 2 * c->n[1] : bytes / size;
            uint32_t u = mci_bits(value(&r, c->in, n));
            memcpy(w + i, (uint8_t *)&u + 4 - size, (size_t)size); /* BF16: the upper half */
        }
    }
}

static void scales(kcase *c) {
    const mci_mat m = matrix(c);
    const int64_t n = (m.rows + m.block_rows - 1) / m.block_rows * mci_mat_scales(&m);
    const int size = mci_dtype_get(c->scale)->bits / 8;
    uint8_t *s = case_alloc(c, 3, n * size + SKEW);
    rng r = seeded(c, 78);
    if (!s) return;
    s += SKEW;
    for (int64_t i = 0; i < n; i++, s += size) {
        float v = c->in == UNIT ? 0.001f + 0.001f * rng_unit(&r) : value(&r, c->in, 8);
        uint32_t u = mci_bits(v);
        if (c->scale == MC_F8E8M0) { /* 255 is its NaN */
            uint32_t e = u >> 23 & 0xff;
            *s = (uint8_t)(e == 255 && c->in != SPECIAL ? 254 : e);
        } else if (c->scale == MC_F16) {
            uint16_t h = f16_code(&r, c);
            memcpy(s, &h, 2);
        } else {
            memcpy(s, (uint8_t *)&u + 4 - size, (size_t)size);
        }
    }
}

mci_mat case_weights(kcase *c) {
    weights(c);
    if (mci_dtype_get(c->dtype)->scale_types) scales(c);
    return matrix(c);
}

/* Rows of y are SKEW floats longer than they need be. */
static void setup_product(kcase *c, double act_bytes) {
    const double rows = (double)c->n[0], cols = (double)c->n[1], T = (double)c->n[2];
    const int64_t row = mci_row_bytes(c->dtype, c->n[1]);
    floats(c, 0, c->n[2] * c->n[1], c->in);
    const mci_mat m = case_weights(c);
    const int64_t share = mci_chunk_rows(&m, c->n[2]);
    double all = rows * (double)row;
    if (m.scale)
        all += rows / m.block_rows * (double)mci_mat_scales(&m) * mci_dtype_get(c->scale)->bits / 8;
    c->out_bytes = (c->n[2] * (c->n[0] + SKEW) - SKEW) * 4; /* ends with the last value */
    cost(c, all + T * (act_bytes * cols + 4 * rows), 2 * rows * cols * T,
         (c->n[0] + share - 1) / share);
}

static void setup_gemm(kcase *c) { setup_product(c, 4); }

static void run_gemm(const mci_ops *o, const kcase *c, void *out, int64_t part, int64_t parts) {
    const float *x[1024];
    float *y[1024];
    mci_mat m = matrix(c);
    for (int64_t t = 0; t < c->n[2]; t++) {
        x[t] = in(c, 0) + t * c->n[1];
        y[t] = (float *)out + t * (c->n[0] + SKEW);
    }
    o->gemm(&m, c->n[0] * part / parts, c->n[0] * (part + 1) / parts, x, c->n[2], y);
}
static const kop gemm = {"gemm", setup_gemm, run_gemm, 4};

/* ---- qgemm: the same, of activations that ops_ref quantised ---------------------------------- */

static int64_t group_of(const kcase *c) { return c->block ? c->block : c->n[1]; }

static void setup_qgemm(kcase *c) {
    const int64_t bytes = mci_qact_bytes(c->n[1], group_of(c));
    setup_product(c, 1);
    mci_qact *q = case_alloc(c, 4, c->n[2] * (bytes + (int64_t)sizeof(mci_qact)));
    for (int64_t t = 0; !c->failed && t < c->n[2]; t++)
        q[t] = mci_qact_fill(&mci_ops_ref, in(c, 0) + t * c->n[1], c->n[1], group_of(c),
                             (uint8_t *)(q + c->n[2]) + t * bytes);
}

static void run_qgemm(const mci_ops *o, const kcase *c, void *out, int64_t part, int64_t parts) {
    float *y[1024];
    mci_mat m = matrix(c);
    for (int64_t t = 0; t < c->n[2]; t++) y[t] = (float *)out + t * (c->n[0] + SKEW);
    o->qgemm(&m, c->n[0] * part / parts, c->n[0] * (part + 1) / parts, c->buf[4], c->n[2], y);
}
static const kop qgemm = {"qgemm", setup_qgemm, run_qgemm, 4};

/* quantise: cols, in groups of c->block. out: s, q8, q, each whole */
static void setup_quantise(kcase *c) {
    const int64_t n = c->n[1], groups = (n + group_of(c) - 1) / group_of(c);
    floats(c, 0, n, c->in);
    c->out_bytes = 8 * groups + mci_round_up(n, 8);
    cost(c, 5.0 * (double)n, 0, 1);
}

static void run_quantise(const mci_ops *o, const kcase *c, void *out, int64_t part, int64_t parts) {
    (void)part, (void)parts;
    const int64_t n = c->n[1], groups = (n + group_of(c) - 1) / group_of(c);
    float *s = out;
    o->quantise(in(c, 0), n, group_of(c), (int8_t *)(s + 2 * groups), s, (int32_t *)out + groups);
    for (int64_t g = 0; g < groups; g++) /* any NaN will do */
        if (s[g] != s[g]) s[g] = NAN;
}
static const kop quantise = {"quantise", setup_quantise, run_quantise, 1};

/* ---- attn: KV heads, group, head_dim, positions, page_tokens --------------------------------- */

static void setup_attn(kcase *c) {
    const int64_t heads = c->n[0], G = c->n[1], D = c->n[2], N = c->n[3], P = c->n[4];
    const int64_t pages = (N + P - 1) / P, size = c->dtype == MC_BF16 ? 2 : 4;
    floats(c, 0, heads * G * D, c->in);
    for (int s = 1; s <= 2; s++) {
        const float *v = floats(c, s, heads * pages * P * D, c->in);
        if (c->dtype != MC_BF16 || !v) continue;
        void *wide = c->buf[s];
        uint8_t *h = case_alloc(c, s, heads * pages * P * D * 2 + 4);
        for (int64_t i = 0; h && i < heads * pages * P * D; i++) {
            uint16_t b = mci_f32_to_bf16(v[i]);
            memcpy(h + 4 + 2 * i, &b, 2);
        }
        free(wide);
    }
    floats(c, 3, heads * G * N, UNIT); /* scratch */
    c->out_bytes = heads * G * D * 4;
    double kv = (double)(heads * N * D);
    cost(c, 2 * kv * (double)size, 4 * kv * (double)G, heads);
}

static void run_attn(const mci_ops *o, const kcase *c, void *out, int64_t part, int64_t parts) {
    const int64_t G = c->n[1], D = c->n[2], N = c->n[3], P = c->n[4], pages = (N + P - 1) / P;
    const int64_t size = c->dtype == MC_BF16 ? 2 : 4;
    for (int64_t h = c->n[0] * part / parts; h < c->n[0] * (part + 1) / parts; h++) {
        const void *k[1024], *v[1024];
        for (int64_t p = 0; p < pages; p++) {
            k[p] = (const uint8_t *)c->buf[1] + 4 + (h * pages + p) * P * D * size;
            v[p] = (const uint8_t *)c->buf[2] + 4 + (h * pages + p) * P * D * size;
        }
        mci_attn_args a = {.head_dim = D, .group = G, .n_pos = N, .page_tokens = P,
                           .kv_dtype = c->dtype, .scale = 0.17f, .k = k, .v = v,
                           .q = in(c, 0) + h * G * D, .out = (float *)out + h * G * D,
                           .scores = in(c, 3) + h * G * N};
        o->attn(&a);
    }
}
static const kop attn = {"attn", setup_attn, run_attn, 4};

/* ---- delta: heads, dk, dv, tokens, flags ----------------------------------------------------- */

enum { IN_PLACE = 1, ALIGNED = 2, TO_LINE = 15 }; /* ALIGNED: states begin at a cache line */

static int64_t state_at(const kcase *c) { return c->n[4] & ALIGNED ? TO_LINE : 0; }

/* out: state (heads, dk, dv), then o (tokens, heads, dv), all state_at floats later */
static void setup_delta(kcase *c) {
    const int64_t H = c->n[0], dk = c->n[1], dv = c->n[2], T = c->n[3];
    floats(c, 0, T * H * dk, c->in);
    floats(c, 1, T * H * dk, c->in);
    floats(c, 2, T * H * dv, c->in);
    floats(c, 3, T * H, c->in);
    floats(c, 4, T * H, c->in);
    floats(c, 5, state_at(c) + H * dk * dv, c->in);
    init_out(c, state_at(c) + H * dk * dv + T * H * dv, c->in);
    cost(c, 8.0 * (double)(H * dk * dv), 8.0 * (double)(H * dk * dv * T), H);
}

static void run_delta(const mci_ops *o, const kcase *c, void *out, int64_t part, int64_t parts) {
    const int64_t H = c->n[0], dk = c->n[1], dv = c->n[2], T = c->n[3];
    for (int64_t h = H * part / parts; h < H * (part + 1) / parts; h++) {
        float *s = (float *)out + state_at(c) + h * dk * dv;
        const float *from = c->n[4] & IN_PLACE ? s : in(c, 5) + state_at(c) + h * dk * dv;
        const int64_t cut = dk == 128 ? 0 : dv / 2 & -8; /* two ranges of columns; timed: all */
        mci_delta_args a = {.dk = dk, .dv = dv, .j0 = 0, .j1 = cut, .n_tok = T,
                            .s_in = from, .s_out = s,
                            .q = in(c, 0) + h * dk, .k = in(c, 1) + h * dk, .v = in(c, 2) + h * dv,
                            .alpha = in(c, 3) + h, .beta = in(c, 4) + h, .ld_qk = H * dk,
                            .ld_v = H * dv, .ld_ab = H, .ld_o = H * dv,
                            .o = (float *)out + state_at(c) + H * dk * dv + h * dv};
        if (cut) o->delta(&a);
        a.j0 = cut;
        a.j1 = dv;
        o->delta(&a);
    }
}
static const kop delta = {"delta", setup_delta, run_delta, 4};

/* ---- conv: channels, kernel, tokens, in place ------------------------------------------------ */

/* out: state (kernel-1, C), then y (tokens, C) */
static void setup_conv(kcase *c) {
    const int64_t C = c->n[0], k = c->n[1], T = c->n[2];
    floats(c, 0, T * C, c->in);
    floats(c, 1, C * k, c->in);
    floats(c, 2, (k - 1) * C, c->in);
    init_out(c, (k - 1) * C + T * C, c->in);
    cost(c, 4.0 * (double)(C * (k + 2 * T + 2 * (k - 1))), 2.0 * (double)(C * k * T), 1);
}

static void run_conv(const mci_ops *o, const kcase *c, void *out, int64_t part, int64_t parts) {
    (void)part, (void)parts;
    const int64_t C = c->n[0], k = c->n[1], T = c->n[2], cut = C / 3;
    float *s = out, *y = s + (k - 1) * C;
    const float *from = c->n[3] ? s : in(c, 2);
    o->conv(in(c, 0), T, C, 0, cut, in(c, 1), k, from, s, y);
    o->conv(in(c, 0), T, C, cut, C, in(c, 1), k, from, s, y);
}
static const kop conv = {"conv", setup_conv, run_conv, 4};

/* ---- the table ------------------------------------------------------------------------------- */

enum { LEN = -1 }; /* stands for each of the awkward lengths */
static const int64_t lengths[] = {1,  2,  3,  7,   8,   9,   15,  16,   17,  31,
                                  32, 33, 64, 127, 128, 129, 576, 1408, 4544};

#define ALL_FILLS(...) {__VA_ARGS__, .in = UNIT}, {__VA_ARGS__, .in = WIDE}, \
                       {__VA_ARGS__, .in = TINY}, {__VA_ARGS__, .in = SPECIAL}
#define PRODUCT(kernel, ...)                                                                       \
    ALL_FILLS(.op = &kernel, __VA_ARGS__, .n = {9, LEN, 1}),                                       \
    ALL_FILLS(.op = &kernel, __VA_ARGS__, .n = {6, LEN, 2}),                                       \
    ALL_FILLS(.op = &kernel, __VA_ARGS__, .n = {35, LEN, 1}),                                      \
    ALL_FILLS(.op = &kernel, __VA_ARGS__, .n = {5, LEN, 7}),                                       \
    ALL_FILLS(.op = &kernel, __VA_ARGS__, .n = {LEN, 33, 3}),                                      \
    ALL_FILLS(.op = &kernel, __VA_ARGS__, .n = {131, 300, 5}),                                     \
    ALL_FILLS(.op = &kernel, __VA_ARGS__, .n = {7, 257, LEN})
#define GEMM(dt, sc, bl) PRODUCT(gemm, .dtype = dt, .scale = sc, .block = bl)
#define QGEMM(sc, bl) PRODUCT(qgemm, .dtype = MC_INT4, .scale = sc, .block = bl)
#define QUANTISE(bl) ALL_FILLS(.op = &quantise, .dtype = MC_INT4, .block = bl, .n = {1, LEN})
/* timed: rows, columns, tokens; so many times the rows that the matrix is far larger than caches */
#define TIMED(kernel, dt, sc, bl, rows, cols, tok, times)                                          \
    {.op = &kernel, .dtype = dt, .scale = sc, .block = bl, .n = {rows, cols, tok}, .bench = times}
#define TIMED_GEMV(kernel, dt, sc, bl, times)                                                      \
    TIMED(kernel, dt, sc, bl, 2048, 512, 1, times), TIMED(kernel, dt, sc, bl, 512, 2048, 1, times),\
    TIMED(kernel, dt, sc, bl, 128, 7168, 1, times)
/* layers, experts a layer, tokens an expert, hidden, width */
#define EXPERTS(layers, experts, tok, hidden, width, times)                                        \
    {.op = &case_experts, .dtype = MC_F8E4M3, .scale = MC_BF16, .block = 128,                      \
     .n = {layers, experts, tok, hidden, width}, .bench = times}

static const kcase table[] = {
    ALL_FILLS(.op = &vexp, .n = {LEN}), {.op = &vexp, .n = {4096}, .bench = 1},
    ALL_FILLS(.op = &vsigmoid, .n = {LEN}), {.op = &vsigmoid, .n = {4096}, .bench = 1},
    ALL_FILLS(.op = &vsoftplus, .n = {LEN}),
    ALL_FILLS(.op = &silu_mul, .n = {LEN}), {.op = &silu_mul, .n = {4096}, .bench = 1},
    ALL_FILLS(.op = &silu_mul_in, .n = {LEN}),
    ALL_FILLS(.op = &sigmoid_mul, .n = {LEN}),
    ALL_FILLS(.op = &axpy, .n = {LEN}), {.op = &axpy, .n = {2048}, .bench = 1},
    ALL_FILLS(.op = &add, .n = {LEN}), {.op = &add, .n = {2048}, .bench = 1},
    ALL_FILLS(.op = &softmax, .n = {LEN}), {.op = &softmax, .n = {256}, .bench = 1},
    ALL_FILLS(.op = &rmsnorm, .n = {LEN}), {.op = &rmsnorm, .n = {2048}, .bench = 1},
    ALL_FILLS(.op = &rmsnorm_in, .n = {LEN}),
    ALL_FILLS(.op = &l2norm, .n = {LEN}),
    ALL_FILLS(.op = &to_bf16, .n = {LEN}),
    ALL_FILLS(.op = &rope, .n = {LEN}), {.op = &rope, .n = {32}, .bench = 1},
    GEMM(MC_F32, 0, 0), GEMM(MC_BF16, 0, 0), GEMM(MC_F16, 0, 0),
    GEMM(MC_F8E4M3, MC_F32, 128), PRODUCT(gemm, .dtype = MC_F8E4M3, .block = 128, .watch = 1),
    GEMM(MC_F8E4M3, MC_BF16, 128), GEMM(MC_F8E4M3, MC_F8E8M0, 128),
    GEMM(MC_F8E4M3, MC_F32, 0), GEMM(MC_F8E4M3, MC_BF16, 0), GEMM(MC_F8E4M3, MC_F8E8M0, 0),
    GEMM(MC_F4E2M1, MC_F8E8M0, 32),
    GEMM(MC_INT8, MC_F32, 0), GEMM(MC_INT8, MC_F16, 32), GEMM(MC_INT8, MC_F32, 64),
    GEMM(MC_INT8, MC_BF16, 128),
    QGEMM(MC_F32, 0), QGEMM(MC_F16, 32), QGEMM(MC_F32, 64), QGEMM(MC_BF16, 64),
    QGEMM(MC_BF16, 128), QUANTISE(0), QUANTISE(32), QUANTISE(64), QUANTISE(128),
    TIMED_GEMV(gemm, MC_F8E4M3, MC_BF16, 128, 384),
    TIMED_GEMV(gemm, MC_F8E4M3, MC_F32, 0, 384),
    TIMED_GEMV(gemm, MC_BF16, 0, 0, 192),
    TIMED_GEMV(gemm, MC_INT8, MC_F32, 0, 384),
    TIMED_GEMV(qgemm, MC_INT4, MC_F32, 64, 768),
    TIMED_GEMV(qgemm, MC_INT4, MC_F32, 0, 768),
    TIMED_GEMV(gemm, MC_F4E2M1, MC_F8E8M0, 32, 768),
    TIMED(gemm, MC_F16, 0, 0, 512, 2048, 1, 192), TIMED(gemm, MC_F32, 0, 0, 512, 2048, 1, 96),
    TIMED(gemm, MC_F8E4M3, MC_BF16, 128, 512, 2048, 2, 256),
    TIMED(gemm, MC_F8E4M3, MC_BF16, 128, 512, 2048, 3, 256),
    TIMED(gemm, MC_F8E4M3, MC_BF16, 128, 512, 2048, 4, 256),
    TIMED(gemm, MC_F8E4M3, MC_BF16, 128, 512, 2048, 8, 256),
    TIMED(gemm, MC_F8E4M3, MC_BF16, 128, 512, 2048, 32, 256),
    TIMED(gemm, MC_F8E4M3, MC_BF16, 128, 512, 2048, 128, 128),
    TIMED(gemm, MC_F8E4M3, MC_BF16, 128, 2048, 512, 128, 128),
    TIMED(gemm, MC_BF16, 0, 0, 512, 2048, 128, 64),
    TIMED(gemm, MC_INT8, MC_F32, 0, 512, 2048, 128, 128),
    TIMED(gemm, MC_F4E2M1, MC_F8E8M0, 32, 512, 2048, 128, 256),
    TIMED(qgemm, MC_INT4, MC_F32, 64, 512, 2048, 4, 256),
    TIMED(qgemm, MC_INT4, MC_F32, 64, 512, 2048, 32, 256),
    {.op = &quantise, .dtype = MC_INT4, .block = 64, .n = {1, 2048}, .bench = 1},
    ALL_FILLS(.op = &case_topk, .n = {LEN, 8, 3}),
    {.op = &case_topk, .n = {256, 8, 1}, .bench = 1},
    EXPERTS(2, 3, 1, 256, 128, 0), EXPERTS(1, 3, 5, 128, 256, 0),
    EXPERTS(1, 8, 1, 2048, 512, 16), EXPERTS(1, 8, 8, 2048, 512, 16),
    EXPERTS(1, 64, 8, 2048, 512, 2),
    ALL_FILLS(.op = &attn, .dtype = MC_F32, .n = {1, 3, LEN, 5, 2}),
    ALL_FILLS(.op = &attn, .dtype = MC_BF16, .n = {1, 3, LEN, 5, 2}),
    ALL_FILLS(.op = &attn, .dtype = MC_F32, .n = {2, 4, 24, LEN, 64}),
    ALL_FILLS(.op = &attn, .dtype = MC_BF16, .n = {2, 9, 40, LEN, 16}),
    ALL_FILLS(.op = &attn, .dtype = MC_BF16, .n = {1, 8, 256, 130, 64}),
    {.op = &attn, .dtype = MC_BF16, .n = {2, 8, 256, 64, 64}, .bench = 1},
    {.op = &attn, .dtype = MC_BF16, .n = {2, 8, 256, 4096, 64}, .bench = 1},
    ALL_FILLS(.op = &delta, .n = {2, 9, LEN, 3, 0}),
    ALL_FILLS(.op = &delta, .n = {1, LEN, 9, 2, IN_PLACE}),
    ALL_FILLS(.op = &delta, .n = {2, 5, LEN, 1, 0}),
    ALL_FILLS(.op = &delta, .n = {2, 5, LEN, 1, ALIGNED}),
    ALL_FILLS(.op = &delta, .n = {3, 16, 48, 0, 0}),
    ALL_FILLS(.op = &delta, .n = {2, 7, 480, 1, ALIGNED}),
    {.op = &delta, .n = {2, 128, 128, 1, ALIGNED}, .bench = 512},
    {.op = &delta, .n = {2, 128, 128, 1, IN_PLACE}, .bench = 256},
    {.op = &delta, .n = {2, 128, 128, 64, IN_PLACE}, .bench = 8},
    ALL_FILLS(.op = &conv, .n = {LEN, 4, 5, 0}),
    ALL_FILLS(.op = &conv, .n = {LEN, 4, 2, 1}),
    ALL_FILLS(.op = &conv, .n = {LEN, 4, 1, 1}),
    ALL_FILLS(.op = &conv, .n = {40, 2, 0, 0}),
    ALL_FILLS(.op = &conv, .n = {19, 11, 6, 0}),
    ALL_FILLS(.op = &conv, .n = {19, 1, 6, 0}),
    {.op = &conv, .n = {8192, 4, 1, 1}, .bench = 1},
};

void cases_each(void (*fn)(kcase *c, void *arg), void *arg) {
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        int at = -1;
        for (int k = 0; k < 5; k++)
            if (table[i].n[k] == LEN) at = k;
        for (size_t l = 0; l < (at < 0 ? 1 : sizeof lengths / sizeof *lengths); l++) {
            kcase c = table[i];
            if (at >= 0) c.n[at] = lengths[l];
            if (c.n[2] > 600 && (c.op == &gemm || c.op == &qgemm)) continue; /* fit run_gemm */
            fn(&c, arg);
        }
    }
}

bool case_setup(kcase *c, int64_t times) {
    c->n[0] *= times;
    c->op->setup(c);
    return !c->failed;
}

void case_free(kcase *c) {
    for (int i = 0; i < 8; i++) free(c->buf[i]);
    memset(c->buf, 0, sizeof c->buf);
}

void case_name(const kcase *c, char *out, size_t size) {
    static const char *const fills[] = {"unit", "wide", "tiny", "special"};
    int n = snprintf(out, size, "%s", c->op->name);
    const bool product = c->op == &gemm || c->op == &qgemm || c->op == &case_experts;
    if (product || c->op == &attn || c->op == &quantise)
        n += snprintf(out + n, size - (size_t)n, " %s", mci_dtype_get(c->dtype)->name);
    if (product && mci_dtype_get(c->dtype)->scale_types)
        n += snprintf(out + n, size - (size_t)n, "/%s", mci_dtype_get(c->scale)->name);
    if (c->block && c->dtype != MC_F8E4M3)
        n += snprintf(out + n, size - (size_t)n, " g%d", c->block);
    if (c->watch) n += snprintf(out + n, size - (size_t)n, " watch");
    if (!c->block && product && mci_dtype_get(c->dtype)->scale_types)
        n += snprintf(out + n, size - (size_t)n, " row");
    for (int i = 0; i < 5 && (i == 0 || c->n[i]); i++)
        n += snprintf(out + n, size - (size_t)n, "%s%lld", i ? "x" : " ", (long long)c->n[i]);
    if (!c->bench) snprintf(out + n, size - (size_t)n, " %s", fills[c->in]);
}
