/* cases.h - the one table of kernel cases. kernels.c checks every case against ops_ref bit for bit,
 * or times those that carry a bench factor. */
#ifndef CASES_H
#define CASES_H
#include "ops.h"

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
    int64_t bench;    /* 0: not timed; else n[0] is multiplied by it when timed */
    /* made by setup */
    void *buf[8];
    void *init;       /* first contents of out, or NULL */
    int64_t out_bytes, parts;
    double bytes, flops; /* one call: read + written, 2 an fma */
};

/* Calls fn for every case of the table, lengths expanded, in order. */
void cases_each(void (*fn)(kcase *c, void *arg), void *arg);
void case_setup(kcase *c, bool timed);
void case_free(kcase *c);
void case_name(const kcase *c, char *out, size_t size);
#endif
