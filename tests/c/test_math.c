/* test_math.c - how far exp, sigmoid and softplus are from double libm, their limits, and top-k. */
#include "ops.h"
#include "test.h"

#include <math.h>

/* |got - want| in units of the float spacing at want. */
static double ulps(float got, double want) {
    if (isnan(want)) return isnan(got) ? 0 : 1e9;
    float w = (float)want;
    if (isinf(w) || isinf(got)) return w == got ? 0 : 1e9;
    int e;
    frexp(want, &e);
    double unit = ldexp(1.0, MCI_MAX(e - 24, -149));
    return fabs((double)got - want) / unit;
}

static double d_exp(double x) { return exp(x); }
static double d_sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }
static double d_softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }

typedef void vfn(const float *x, int64_t n, float *y);

/* Every 2^stride-th float of the whole range, both signs. */
static void sweep(const char *name, vfn *f, double (*want)(double), double limit) {
    enum { N = 4096 };
    static float x[N], y[N];
    double worst = 0;
    float at = 0;
    const uint32_t stride = 1021;
    uint32_t u = 0;
    bool more = true;
    while (more) {
        int n = 0;
        for (; n < N && more; n++) {
            x[n] = mci_f32(u);
            more = u <= UINT32_MAX - stride;
            u += stride;
        }
        f(x, n, y);
        for (int i = 0; i < n; i++) {
            double e = ulps(y[i], isnan(x[i]) ? (double)NAN : want((double)x[i]));
            if (e > worst) worst = e, at = x[i];
        }
    }
    printf("%s: at most %.2f ulp, at %a\n", name, worst, (double)at);
    CHECK(worst <= limit, "%s: %.3f ulp at %a (%g)", name, worst, (double)at, (double)at);
}

static float one(vfn *f, float x) {
    float y;
    f(&x, 1, &y);
    return y;
}

static void functions(const mci_ops *o) {
    printf("%s\n", o->name);
    sweep("exp", o->vexp, d_exp, 1.0);
    sweep("sigmoid", o->vsigmoid, d_sigmoid, 2.5);
    sweep("softplus", o->vsoftplus, d_softplus, 3.5);
    CHECK(one(o->vexp, 0.0f) == 1.0f && one(o->vexp, -0.0f) == 1.0f, "exp(0)");
    CHECK(one(o->vexp, INFINITY) == INFINITY && one(o->vexp, -INFINITY) == 0.0f, "infinities");
    CHECK(isnan(one(o->vexp, NAN)) && isnan(one(o->vexp, -NAN)), "NaN");
    CHECK(one(o->vexp, 0x1.62e42ep6f) < INFINITY && one(o->vexp, 0x1.62e43p6f) == INFINITY,
          "overflow at 88.7228");
    CHECK(one(o->vexp, -103.97f) == 0x1p-149f && one(o->vexp, -103.98f) == 0.0f,
          "underflow at -103.972");
    CHECK(one(o->vsigmoid, INFINITY) == 1.0f && one(o->vsigmoid, -INFINITY) == 0.0f, "sigmoid");
    CHECK(one(o->vsigmoid, 0.0f) == 0.5f && isnan(one(o->vsigmoid, NAN)), "sigmoid");
    CHECK(one(o->vsoftplus, INFINITY) == INFINITY && one(o->vsoftplus, -INFINITY) == 0.0f,
          "softplus");
    CHECK(one(o->vsoftplus, 1e30f) == 1e30f && isnan(one(o->vsoftplus, NAN)), "softplus");
}

/* The definition, spelled out: the best of what is left, k times. */
static void slow_topk(const float *s, int64_t n, int64_t k, int32_t *ids) {
    bool taken[64] = {false};
    for (int64_t i = 0; i < k; i++) {
        int64_t best = -1;
        for (int64_t j = 0; j < n; j++) {
            if (taken[j]) continue;
            bool wins = best < 0 || (isnan(s[best]) && !isnan(s[j])) || s[j] > s[best];
            if (wins) best = j;
        }
        taken[best] = true;
        ids[i] = (int32_t)best;
    }
}

static void topk(void) {
    const float tie[6] = {1, 3, 3, 2, 3, 1};
    int32_t ids[64], want[64];
    mci_topk(tie, 6, 4, ids);
    CHECK(ids[0] == 1 && ids[1] == 2 && ids[2] == 4 && ids[3] == 3, "ties: lower id first");
    const float nans[4] = {NAN, -INFINITY, NAN, -1};
    mci_topk(nans, 4, 4, ids);
    CHECK(ids[0] == 3 && ids[1] == 1 && ids[2] == 0 && ids[3] == 2, "NaN below -infinity");
    const float zeros[3] = {-0.0f, 0.0f, -0.0f};
    mci_topk(zeros, 3, 3, ids);
    CHECK(ids[0] == 0 && ids[1] == 1 && ids[2] == 2, "-0 equals +0");
    mci_topk(tie, 6, 0, NULL);
    rng r = {42};
    for (int i = 0; i < 20000; i++) {
        float s[64];
        int64_t n = 1 + (int64_t)rng_below(&r, 64), k = (int64_t)rng_below(&r, (uint64_t)n + 1);
        for (int64_t j = 0; j < n; j++) { /* few values, so that ties are common */
            uint64_t u = rng_below(&r, 12);
            s[j] = u == 0 ? NAN : u == 1 ? -INFINITY : (float)u;
        }
        mci_topk(s, n, k, ids);
        slow_topk(s, n, k, want);
        CHECK(memcmp(ids, want, (size_t)k * sizeof *ids) == 0, "n %d k %d", (int)n, (int)k);
    }
}

static void names(void) {
    const mci_ops *o;
    mc_error e;
    CHECK(mci_ops_get("scalar", &o, &e) == MC_OK && o == &mci_ops_ref, "scalar");
    CHECK(mci_ops_get(NULL, &o, &e) == MC_OK &&
              !strncmp(mc_engine_isas(), o->name, strlen(o->name)),
          "the best comes first");
    CHECK(mci_ops_get("neon9", &o, &e) == MC_EINVAL && !o && strstr(e.message, "scalar"), "%s",
          e.message);
    float y = 0, x = 2;
    uint8_t w = 0x40;
    float s = 0.5f;
    mc_tensor t = {.dtype = MC_F8E4M3, .rows = 1, .cols = 1, .block_rows = 128, .block_cols = 128};
    CHECK(mc_gemm("scalar", &t, &w, &s, &x, 1, &y, &e) == MC_OK && y == 2, "%g", (double)y);
    CHECK(mc_gemm("x", &t, &w, &s, &x, 1, &y, &e) == MC_EINVAL, "isa");
    CHECK(mc_gemm(NULL, NULL, &w, &s, &x, 1, &y, &e) == MC_EINVAL, "no tensor");
    CHECK(mc_gemm(NULL, &t, NULL, &s, &x, 1, &y, &e) == MC_EINVAL, "no weights");
    CHECK(mc_gemm(NULL, &t, &w, NULL, &x, 1, &y, &e) == MC_EFORMAT, "no scale");
    t.scale_dtype = MC_F16;
    CHECK(mc_gemm(NULL, &t, &w, &s, &x, 1, &y, &e) == MC_EFORMAT, "scale dtype");
    t.dtype = 99;
    CHECK(mc_gemm(NULL, &t, &w, &s, &x, 1, &y, &e) == MC_EFORMAT, "dtype");
    t = (mc_tensor){.rows = INT64_MAX, .cols = 2};
    CHECK(mc_gemm(NULL, &t, &w, NULL, &x, 1, &y, &e) == MC_EFORMAT, "size");
}

int main(void) {
    const mci_ops *o;
    if (mci_ops_get("avx2", &o, NULL) == MC_OK) functions(o);
    if (mci_ops_get("avx512", &o, NULL) == MC_OK) functions(o);
    functions(&mci_ops_ref);
    topk();
    names();
    return test_end();
}
