/* cases.h - the one table of kernel cases: kernels.c checks every case against ops_ref bit for bit,
 * bench.c times those that carry a bench factor. Like the engine it never prints or exits. */
#ifndef CASES_H
#define CASES_H
#include "engine.h"
#include "rng.h"

typedef enum fill {
    UNIT,    /* uniform in [-1, 1) */
    WIDE,    /* any finite bit pattern: all exponents, subnormals, both zeros */
    TINY,    /* products and sums that are subnormal or underflow */
    SPECIAL, /* UNIT sprinkled with NaN, infinities, zeros, subnormals */
} fill;

typedef struct kcase kcase;

/* One kernel: how to make inputs, how to call it, what a call moves and computes. */
typedef struct kop {
    const char *name;
    void (*setup)(kcase *c);
    /* out was filled with c->init (in-place inputs) or a pattern; part of parts: independent
     * shares of the work, for threads */
    void (*run)(const mci_ops *o, const kcase *c, void *out, int64_t part, int64_t parts);
    int word; /* bytes of a value of out: 4 and 2 are f32 and bf16, of which any NaN equals any */
} kop;

struct kcase {
    const kop *op;
    int64_t n[5];     /* sizes, named beside each op in cases.c */
    int dtype, scale; /* storage of weights or KV; of the weights' scales */
    int block;        /* columns that share a scale, 0: the whole row; of FP8 128 means 128x128 */
    int watch;        /* FP8 whose bytes nobody searched for NaN codes */
    fill in;
    int64_t bench;    /* 0: not timed; else n[0] may be multiplied by up to this when timed */
    /* made by setup */
    void *buf[8];
    bool failed;      /* memory ran out */
    /* not NULL: instead of op->run, which is NULL; the whole call, shared out by itself */
    void (*whole)(mc_engine *e, const kcase *c, void *out);
    void *init;       /* first contents of out, or NULL */
    int64_t out_bytes, parts;
    double bytes, flops; /* one call: read + written, 2 an fma */
};

/* Calls fn for every case of the table, lengths expanded, in order. */
void cases_each(void (*fn)(kcase *c, void *arg), void *arg);
/* Makes the inputs of `times` such cases side by side (n[0] is multiplied). False: out of memory,
 * case_free all the same. */
bool case_setup(kcase *c, int64_t times);
void case_free(kcase *c);
void case_name(const kcase *c, char *out, size_t size);

/* ---- for setup ---- */

/* Memory of the case in a slot of buf, 64-byte aligned, in huge pages where it is large; NULL: the
 * case has failed. */
void *case_alloc(kcase *c, int slot, int64_t bytes);
/* n random floats, one float off alignment. */
float *case_floats(kcase *c, int slot, int64_t n, fill f);
/* A matrix of n[0] x n[1], its weights in slot 2, its scales in slot 3. */
mci_mat case_weights(kcase *c);

extern const kop case_topk, case_experts; /* cases_moe.c */
#endif
