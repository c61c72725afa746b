/* test_policy.c - the cache policies: known right answers on traces, and every decision against a
 * slow model that scans all items.
 *
 *   test_policy [DIR]   DIR holds the traces (default ../data/traces); those that are absent, such
 *                       as recordings that may not be distributed, are skipped. */
#include <math.h>

#include "forecast.h"
#include "policy.h"
#include "test.h"

typedef struct trace {
    int32_t n_layer, n_expert;
    int64_t n_line;
    int32_t *layer, *ids;
    int64_t *token, *start;
} trace;

/* Decode lines of "phase,step,layer,experts"; false when there is no such file. */
static bool read_trace(const char *dir, const char *name, trace *t) {
    char path[4096], line[4096];
    snprintf(path, sizeof path, "%s/%s.csv", dir, name);
    FILE *f = fopen(path, "r");
    if (!f) return false;
    memset(t, 0, sizeof *t);
    enum { LINES = 20000, WIDTH = 16 };
    t->layer = test_alloc(LINES * 4);
    t->ids = test_alloc(LINES * WIDTH * 4);
    t->token = test_alloc(LINES * 8);
    t->start = test_alloc((LINES + 1) * 8);
    t->start[0] = 0;
    while (fgets(line, sizeof line, f) && t->n_line < LINES) {
        int value;
        if (sscanf(line, "# n_layer=%d", &value) == 1) t->n_layer = value;
        if (sscanf(line, "# n_expert=%d", &value) == 1) t->n_expert = value;
        /* the synthetic ones say it in words */
        sscanf(line, "# routing trace: synthetic %*[^,], %d layers", &t->n_layer);
        if (strncmp(line, "decode,", 7)) continue;
        char *at = line + 7;
        int64_t i = t->n_line++;
        t->token[i] = strtol(at, &at, 10);
        t->layer[i] = (int32_t)strtol(at + 1, &at, 10);
        t->start[i + 1] = t->start[i];
        for (at++; *at >= ' ';) t->ids[t->start[i + 1]++] = (int32_t)strtol(at, &at, 10);
    }
    fclose(f);
    return true;
}

static void free_trace(trace *t) {
    free(t->layer);
    free(t->ids);
    free(t->token);
    free(t->start);
}

static int replay(const trace *t, int kind, int64_t slots, int64_t *hits, int64_t *misses) {
    mc_error err = {0};
    int rc = mc_policy_replay(kind, t->n_layer, t->n_expert, slots, t->n_line, t->layer, t->token,
                              t->start, t->ids, hits, misses, NULL, &err);
    CHECK(rc == MC_OK, "%s", err.message);
    return rc;
}

static void check_layer_lru(const char *dir) {
    static const struct {
        const char *name;
        int64_t slots, hits, misses;
    } known[] = {{"zipf-v4-shape", 2, 81, 3759},    {"zipf-v4-shape", 4, 278, 3562},
                 {"zipf-v4-shape", 8, 954, 2886},   {"zipf-v4-shape", 16, 1626, 2214},
                 {"zipf-v4-shape", 32, 2223, 1617}, {"zipf-v4-shape", 64, 2686, 1154},
                 {"uniform-v4-shape", 8, 84, 3756}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        trace t;
        int64_t hits, misses;
        bool there = read_trace(dir, known[i].name, &t);
        CHECK(there, "no trace %s in %s", known[i].name, dir);
        if (!there) continue;
        if (replay(&t, MC_POLICY_LAYER_LRU, known[i].slots, &hits, &misses) == MC_OK)
            CHECK(hits == known[i].hits && misses == known[i].misses,
                  "%s, %lld slots a layer: expected %lld hits and %lld misses, got %lld and %lld",
                  known[i].name, (long long)known[i].slots, (long long)known[i].hits,
                  (long long)known[i].misses, (long long)hits, (long long)misses);
        free_trace(&t);
    }
}

/* One global cache of floor(share * layers * experts) slots; rates are known to three digits. */
static void check_rates(const char *dir, bool verbose) {
    static const double share[5] = {.05, .10, .15, .25, .40};
    static const int kind[3] = {MC_POLICY_LRU, MC_POLICY_LFU, MC_POLICY_BELADY};
    static const struct {
        const char *name;
        double rate[3][5];
    } known[] = {{"qwen3-30b-a3b",
                  {{.377, .498, .650, .816, .909},
                   {.371, .551, .677, .831, .910},
                   {.576, .740, .819, .895, .917}}},
                 {"olmoe",
                  {{.000, .000, .434, .565, .696},
                   {.213, .342, .434, .576, .731},
                   {.346, .541, .647, .766, .869}}},
                 {"zipf-v4-shape",
                  {{.362, .523, .616, .699, .745},
                   {.499, .600, .647, .707, .746},
                   {.610, .702, .734, .749, .749}}},
                 {"uniform-v4-shape",
                  {{.053, .094, .132, .221, .345},
                   {.043, .091, .142, .227, .346},
                   {.256, .343, .405, .477, .545}}}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        trace t;
        if (!read_trace(dir, known[i].name, &t)) continue;
        for (int k = 0; k < 3; k++) {
            if (verbose) printf("%-17s %-7s", known[i].name, mci_policy_name(kind[k]));
            for (int s = 0; s < 5; s++) {
                int64_t slots = (int64_t)(share[s] * t.n_layer * t.n_expert), hits, misses;
                if (replay(&t, kind[k], slots, &hits, &misses) != MC_OK) continue;
                double rate = (double)hits / (double)(hits + misses), want = known[i].rate[k][s];
                CHECK(rate - want < 0.00051 && want - rate < 0.00051,
                      "%s, %s, %lld slots: expected %.3f, got %.4f", known[i].name,
                      mci_policy_name(kind[k]), (long long)slots, want, rate);
                if (verbose) printf("  %.4f (%+.4f)", rate, rate - want);
            }
            if (verbose) printf("\n");
        }
        free_trace(&t);
    }
}

/* What auto promises: at no size half a point below the better of lru and lfu. */
static void check_promise(const char *dir) {
    static const char *name[] = {"qwen3-30b-a3b", "olmoe", "zipf-v4-shape", "uniform-v4-shape"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        trace t;
        if (!read_trace(dir, name[i], &t)) continue;
        for (int percent = 1; percent <= 100; percent++) {
            int64_t slots = (int64_t)percent * t.n_layer * t.n_expert / 100, hits[3], misses;
            for (int kind = MC_POLICY_AUTO; kind <= MC_POLICY_LRU; kind++)
                if (replay(&t, kind, slots, &hits[kind], &misses) != MC_OK) hits[kind] = 0;
            double all = (double)t.start[t.n_line];
            double best = (double)MCI_MAX(hits[MC_POLICY_LFU], hits[MC_POLICY_LRU]) / all;
            double rate = (double)hits[MC_POLICY_AUTO] / all;
            CHECK(rate > best - .005, "%s, %d %%: auto %.4f, the better of lru and lfu %.4f",
                  name[i], percent, rate, best);
        }
        free_trace(&t);
    }
}

/* ---- the slow model ---- */

enum { LAYERS = 5, EXPERTS = 24, ITEMS = LAYERS * EXPERTS };

typedef struct model {
    int kind;
    int64_t slots, clock, tokens;
    bool held[ITEMS];
    double count[ITEMS]; /* far from ties, or exactly equal, whatever the rounding */
    int64_t last[ITEMS], next[ITEMS];
    mci_forecast *forecast; /* auto: has a test of its own */
    double share[ITEMS];
    int64_t due[ITEMS]; /* price of a slot up to when the layer was, or would have been, served */
    int64_t paid, price;
    double misses, of_tokens;
    bool elsewhere[EXPERTS]; /* of the line to come */
    int32_t called[EXPERTS];
    int n_called;
} model;

/* auto: an expert's forecast share, less the price of a slot, in the policy's fixed point */
static int64_t worth(const model *m, int item) {
    return (int64_t)(m->share[item] * 0x1p32) - m->due[item];
}

static bool leaves_first(const model *m, int a, int b) {
    if (m->kind == MC_POLICY_BELADY)
        return m->next[a] != m->next[b] ? m->next[a] > m->next[b] : a > b;
    if (m->kind == MC_POLICY_AUTO && worth(m, a) != worth(m, b)) return worth(m, a) < worth(m, b);
    if (m->kind == MC_POLICY_LFU && m->count[a] != m->count[b]) return m->count[a] < m->count[b];
    return m->last[a] < m->last[b];
}

static bool in_line(int item, int layer, const int32_t *ids, int n) {
    for (int i = 0; i < n; i++)
        if (layer * EXPERTS + ids[i] == item) return true;
    return false;
}

/* Hits of the line, for auto: which of its experts were held before. */
static bool hit_in_line(int item, int layer, const int32_t *ids, int n, const mci_touch *out) {
    for (int i = 0; i < n; i++)
        if (layer * EXPERTS + ids[i] == item) return out[i].hit;
    return false;
}

static int model_victim(const model *m, int layer, const int32_t *ids, int n, int64_t *held) {
    int best = -1;
    *held = 0;
    for (int i = 0; i < ITEMS; i++) {
        if (!m->held[i] || (m->kind == MC_POLICY_LAYER_LRU && i / EXPERTS != layer)) continue;
        ++*held;
        if (m->kind == MC_POLICY_LFU && in_line(i, layer, ids, n)) continue;
        if (best < 0 || leaves_first(m, i, best)) best = i;
    }
    return best;
}

/* auto refuses the worst, whoever that is; only hits may not leave. */
static void model_auto_line(model *m, int layer, const int32_t *ids, int n, mci_touch *out) {
    int32_t whole[EXPERTS];
    int all = 0;
    for (int i = 0; i < n; i++) whole[all++] = ids[i];
    for (int i = 0; i < m->n_called; i++) whole[all++] = m->called[i];
    m->n_called = 0;
    if (!all) return;
    const double *share = mci_forecast_line(m->forecast, layer, whole, all);
    for (int e = 0; e < EXPERTS; e++) {
        m->share[layer * EXPERTS + e] = m->elsewhere[e] ? -0x1p30 : share[e];
        m->due[layer * EXPERTS + e] = m->paid + m->price * layer;
    }
    for (int i = 0; i < n; i++) {
        int item = layer * EXPERTS + ids[i];
        m->last[item] = ++m->clock;
        out[i] = (mci_touch){m->held[item], m->held[item], -1};
    }
    for (int i = 0; i < n; i++) {
        int item = layer * EXPERTS + ids[i], worst = item;
        int64_t held = 0;
        if (out[i].hit) continue;
        m->misses++;
        for (int j = 0; j < ITEMS; j++) held += m->held[j];
        m->held[item] = out[i].admitted = true;
        if (held < m->slots) continue;
        for (int j = 0; j < ITEMS; j++)
            if (m->held[j] && !hit_in_line(j, layer, ids, n, out) && leaves_first(m, j, worst))
                worst = j;
        m->held[worst] = false;
        out[i].admitted = worst != item;
        out[i].victim = worst == item ? -1 : worst;
    }
}

static void model_token(model *m) {
    if (m->kind == MC_POLICY_LFU && m->tokens > 0 && m->tokens % 16 == 0)
        for (int i = 0; i < ITEMS; i++) m->count[i] /= 2;
    if (m->kind == MC_POLICY_AUTO) {
        for (int i = 0; i < ITEMS; i++) m->due[i] = m->paid + m->price * (i / EXPERTS);
        double stay = (double)m->slots * m->of_tokens;
        double far = m->of_tokens > 0 ? stay / (stay + 8 * m->misses) : 0;
        mci_forecast_token(m->forecast, far);
        m->paid += m->price * LAYERS;
        m->price = (int64_t)((1 - far) * 0x1p32 / ITEMS);
        m->misses *= 0x1.f50765b6e4540p-1; /* 2^(-1/32) */
        m->of_tokens = m->of_tokens * 0x1.f50765b6e4540p-1 + 1;
    }
    m->tokens++;
}

static void model_line(model *m, int layer, const int32_t *ids, int n, const int64_t *next,
                       mci_touch *out) {
    if (m->kind == MC_POLICY_AUTO) {
        model_auto_line(m, layer, ids, n, out);
        return;
    }
    int64_t token = m->tokens ? (m->tokens - 1) % 16 : 0;
    double power = exp2((double)(token * LAYERS + layer) / (16 * LAYERS));
    for (int i = 0; i < n; i++) {
        int item = layer * EXPERTS + ids[i];
        int64_t held;
        m->count[item] += power;
        m->last[item] = ++m->clock;
        if (next) m->next[item] = next[i];
        out[i] = (mci_touch){m->held[item], m->held[item], -1};
        if (m->held[item]) continue;
        int victim = model_victim(m, layer, ids, n, &held);
        if (held >= m->slots) {
            if (victim < 0) continue;
            m->held[victim] = false;
            out[i].victim = victim;
        }
        m->held[item] = out[i].admitted = true;
    }
}

static void check_against_model(int kind, uint64_t seed) {
    rng r = {seed};
    model m = {.kind = kind, .slots = 1 + (int64_t)rng_below(&r, EXPERTS + 4)};
    mci_policy *p;
    mci_mem mem = {0};
    mc_error err;
    int rc = mci_policy_create(&mem, kind, LAYERS, EXPERTS, m.slots, &p, &err);
    CHECK(rc == MC_OK, "%s", err.message);
    if (rc < 0) return;
    void *memory = test_alloc((size_t)mci_forecast_bytes(LAYERS, EXPERTS));
    memset(memory, 0, (size_t)mci_forecast_bytes(LAYERS, EXPERTS));
    m.forecast = mci_forecast_init(memory, LAYERS, EXPERTS);
    for (int step = 0; step < 400; step++) {
        int32_t ids[EXPERTS];
        int64_t next[EXPERTS];
        mci_touch got[EXPERTS], want[EXPERTS];
        int n = 1 + (int)rng_below(&r, rng_below(&r, 4) ? 6 : EXPERTS);
        int layer = (int)rng_below(&r, LAYERS);
        if (rng_below(&r, 2)) {
            mci_policy_token(p);
            model_token(&m);
        }
        for (int i = 0; i < EXPERTS; i++) ids[i] = i;
        for (int i = 0; i < n; i++) { /* distinct, the low ones more often */
            int j = i + (int)rng_below(&r, 1 + rng_below(&r, (uint64_t)(EXPERTS - i)));
            int32_t swap = ids[i];
            ids[i] = ids[j];
            ids[j] = swap;
            next[i] = rng_below(&r, 4) ? step + 1 + (int64_t)rng_below(&r, 30) : INT64_MAX;
        }
        const int64_t *future = kind == MC_POLICY_BELADY ? next : NULL;
        memset(m.elsewhere, 0, sizeof m.elsewhere);
        m.n_called = 0;
        if (rng_below(&r, 2)) { /* some experts are kept elsewhere, and served there */
            int cold = 0;
            for (int e = 0; e < EXPERTS; e++) m.elsewhere[e] = rng_below(&r, 4) == 0;
            for (int i = 0; i < n; i++) {
                if (m.elsewhere[ids[i]])
                    m.called[m.n_called++] = ids[i];
                else
                    ids[cold] = ids[i], next[cold++] = next[i];
            }
            n = cold;
            mci_policy_elsewhere(p, m.elsewhere, m.called, m.n_called);
        }
        model_line(&m, layer, ids, n, future, want);
        mci_policy_line(p, layer, ids, n, future, got);
        bool same = true;
        for (int i = 0; i < n; i++)
            same = same && got[i].hit == want[i].hit && got[i].admitted == want[i].admitted &&
                   got[i].victim == want[i].victim;
        CHECK(same, "%s, seed %llu, step %d", mci_policy_name(kind), (unsigned long long)seed,
              step);
        if (rng_below(&r, 8) == 0) {
            int64_t item = (int64_t)rng_below(&r, ITEMS);
            mci_policy_forget(p, item);
            m.held[item] = false;
        }
        if (rng_below(&r, 40) == 0) {
            int64_t out[ITEMS], held, gone = 0, left = 0;
            m.slots = 1 + (int64_t)rng_below(&r, EXPERTS + 4);
            int64_t count = mci_policy_resize(p, m.slots, out);
            for (int l = 0; l < (kind == MC_POLICY_LAYER_LRU ? LAYERS : 1); l++)
                for (int v; (v = model_victim(&m, l, NULL, 0, &held)) >= 0 && held > m.slots;) {
                    CHECK(gone < count && out[gone] == v, "resize drops another item");
                    m.held[v] = false;
                    gone++;
                }
            CHECK(gone == count, "resize drops %lld, expected %lld", (long long)count,
                  (long long)gone);
            for (int i = 0; i < ITEMS; i++) left += m.held[i];
            CHECK(left == mci_policy_held(p), "held");
        }
        bool held_same = true;
        for (int i = 0; i < ITEMS; i++)
            held_same = held_same && m.held[i] == mci_policy_holds(p, i);
        CHECK(held_same, "%s, seed %llu, step %d: residents differ", mci_policy_name(kind),
              (unsigned long long)seed, step);
        if (!same || !held_same) break;
    }
    free(memory);
    mci_policy_free(p);
    CHECK(mem.total == 0, "leak of %lld bytes", (long long)mem.total);
}

/* A token's demand one larger than the cache: plain LRU over a cycle hits nothing, ever. */
static void check_cycle(void) {
    enum { TOKENS = 50, K = 4 };
    int32_t layer[TOKENS * 3], ids[TOKENS * 3 * K];
    int64_t token[TOKENS * 3], start[TOKENS * 3 + 1], hits, misses;
    for (int i = 0; i < TOKENS * 3; i++) {
        layer[i] = i % 3;
        token[i] = i / 3;
        start[i] = (int64_t)i * K;
        for (int j = 0; j < K; j++) ids[i * K + j] = j;
    }
    start[TOKENS * 3] = TOKENS * 3 * K;
    const struct {
        int kind;
        int64_t slots, hits;
    } known[] = {{MC_POLICY_LRU, 11, 0},
                 {MC_POLICY_LRU, 12, (TOKENS - 1) * 12},
                 {MC_POLICY_LAYER_LRU, 3, 0},
                 {MC_POLICY_LAYER_LRU, 4, (TOKENS - 1) * 12},
                 {MC_POLICY_AUTO, 12, (TOKENS - 1) * 12},
                 {MC_POLICY_BELADY, 12, (TOKENS - 1) * 12}};
    int ok = mc_policy_replay(MC_POLICY_AUTO, 3, K, 11, TOKENS * 3, layer, token, start, ids, &hits,
                              &misses, NULL, NULL);
    CHECK(ok == MC_OK && hits >= (TOKENS - 2) * 11, "auto, 11 slots: %lld hits", (long long)hits);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        int rc = mc_policy_replay(known[i].kind, 3, K, known[i].slots, TOKENS * 3, layer, token,
                                  start, ids, &hits, &misses, NULL, NULL);
        CHECK(rc == MC_OK && hits == known[i].hits && misses == TOKENS * 12 - hits,
              "%s, %lld slots: %lld hits", mci_policy_name(known[i].kind),
              (long long)known[i].slots, (long long)hits);
    }
}

static void check_errors(void) {
    int32_t layer[2] = {0, 1}, ids[4] = {0, 1, 2, 3};
    int32_t each[2] = {-1, -1};
    int64_t token[2] = {0, 0}, start[3] = {0, 2, 4}, hits, misses;
    mc_error err;
#define REPLAY(kind, nl, ne, slots, n)                                                             \
    mc_policy_replay(kind, nl, ne, slots, n, layer, token, start, ids, &hits, &misses, each, &err)
    CHECK(REPLAY(MC_POLICY_LRU, 2, 4, 2, 2) == MC_OK && hits == 0 && misses == 4, "%lld",
          (long long)misses);
    CHECK(each[0] == 2 && each[1] == 2, "misses of the lines: %d and %d", each[0], each[1]);
    CHECK(REPLAY(MC_POLICY_BELADY, 2, 4, 2, 0) == MC_OK && misses == 0, "empty trace");
    CHECK(REPLAY(99, 2, 4, 2, 2) == MC_EINVAL, "kind");
    CHECK(REPLAY(MC_POLICY_LRU, 0, 4, 2, 2) == MC_EINVAL, "no layers");
    CHECK(REPLAY(MC_POLICY_LRU, 1 << 20, 1 << 20, 2, 2) == MC_EINVAL, "too many items");
    CHECK(REPLAY(MC_POLICY_LRU, 2, 4, 0, 2) == MC_EINVAL, "no slots");
    CHECK(REPLAY(MC_POLICY_LRU, 2, 4, 2, -1) == MC_EINVAL, "lines");
    CHECK(REPLAY(MC_POLICY_LRU, 1, 4, 2, 2) == MC_ERANGE, "layer outside");
    CHECK(REPLAY(MC_POLICY_LRU, 2, 3, 2, 2) == MC_ERANGE, "expert outside");
    ids[1] = 0;
    CHECK(REPLAY(MC_POLICY_LRU, 2, 4, 2, 2) == MC_EINVAL, "an expert twice in a line");
    ids[1] = 1;
    start[1] = 5;
    CHECK(REPLAY(MC_POLICY_LRU, 2, 4, 2, 2) == MC_EINVAL, "lines that run backwards");
    mci_mem mem = {0};
    mci_policy *p;
    mem.fail_after = 1;
    CHECK(mci_policy_create(&mem, MC_POLICY_LFU, 2, 4, 2, &p, &err) == MC_ENOMEM && !p, "memory");
    CHECK(mci_policy_name(0) && !mci_policy_name(-1) && !mci_policy_name(5), "names");
}

int main(int argc, char **argv) {
    const char *dir = argc > 1 ? argv[1] : "../data/traces";
    check_layer_lru(dir);
    check_rates(dir, argc > 1);
    check_promise(dir);
    for (uint64_t seed = 1; seed <= 40; seed++)
        for (int kind = MC_POLICY_AUTO; kind <= MC_POLICY_BELADY; kind++)
            check_against_model(kind, seed);
    check_cycle();
    check_errors();
    return test_end();
}
