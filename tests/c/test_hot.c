/* test_hot.c - promotion to VRAM: every decision against a slow model that keeps whole lines, and
 * the edges of the rule by hand. */
#include "hot.h"
#include "test.h"

enum { LAYERS = 4, EXPERTS = 20, ITEMS = LAYERS * EXPERTS, STEPS = 600, AFTER = 3, WINDOW = 16 };

static mci_hot *make(int32_t layers, int32_t experts, int64_t slots, int32_t after,
                     int32_t window) {
    mci_hot *h;
    mc_error err = {0};
    int rc = mci_hot_create(NULL, layers, experts, slots, after, window, &h, &err);
    CHECK(rc == MC_OK, "%s", err.message);
    return h;
}

/* ---- the slow model ---- */

typedef struct model {
    int64_t slots;
    int32_t after, window;
    int lines[LAYERS];
    bool called[LAYERS][STEPS][EXPERTS];
    bool held[ITEMS];
    int64_t used[ITEMS], clock;
} model;

static int model_calls(const model *m, int item) {
    int layer = item / EXPERTS, n = 0;
    for (int i = MCI_MAX(m->lines[layer] - m->window, 0); i < m->lines[layer]; i++)
        n += m->called[layer][i][item % EXPERTS];
    return n;
}

static int64_t model_held(const model *m) {
    int64_t n = 0;
    for (int i = 0; i < ITEMS; i++) n += m->held[i];
    return n;
}

static bool model_wants(const model *m, int item, int64_t *victim) {
    *victim = -1;
    if (m->held[item]) return false;
    if (model_held(m) < m->slots) return model_calls(m, item) >= (m->after > 1 ? m->after - 1 : 1);
    int oldest = -1;
    for (int i = 0; i < ITEMS; i++)
        if (m->held[i] && (oldest < 0 || m->used[i] < m->used[oldest])) oldest = i;
    if (model_calls(m, item) - model_calls(m, oldest) < m->after) return false;
    *victim = oldest;
    return true;
}

static void model_line(model *m, int layer, const int32_t *ids, int n) {
    for (int i = 0; i < n; i++) {
        m->called[layer][m->lines[layer]][ids[i]] = true;
        if (m->held[layer * EXPERTS + ids[i]]) m->used[layer * EXPERTS + ids[i]] = ++m->clock;
    }
    m->lines[layer]++;
}

static void check_against_model(uint64_t seed) {
    rng r = {seed};
    model *m = test_alloc(sizeof *m);
    memset(m, 0, sizeof *m);
    m->window = 1 + (int32_t)rng_below(&r, 32);
    m->after = 1 + (int32_t)rng_below(&r, (uint64_t)MCI_MIN(m->window, 5));
    m->slots = 1 + (int64_t)rng_below(&r, ITEMS / 4);
    mci_mem mem = {0};
    mci_hot *h;
    mc_error err = {0};
    int rc = mci_hot_create(&mem, LAYERS, EXPERTS, m->slots, m->after, m->window, &h, &err);
    CHECK(rc == MC_OK && mem.now[MC_MEM_META] > 0, "%s", err.message);
    bool same = rc == MC_OK;
    for (int step = 0; same && step < STEPS; step++) {
        int32_t ids[EXPERTS];
        int layer = (int)rng_below(&r, LAYERS);
        int n = 1 + (int)rng_below(&r, rng_below(&r, 16) ? 4 : EXPERTS);
        for (int i = 0; i < EXPERTS; i++) ids[i] = i;
        for (int i = 0; i < n; i++) { /* distinct, the low ones more often */
            int j = i + (int)rng_below(&r, 1 + rng_below(&r, (uint64_t)(EXPERTS - i)));
            int32_t swap = ids[i];
            ids[i] = ids[j];
            ids[j] = swap;
        }
        mci_hot_line(h, layer, ids, n);
        model_line(m, layer, ids, n);
        for (int i = 0; i < n; i++) {
            int64_t item = layer * EXPERTS + ids[i], got, want;
            bool wants = mci_hot_wants(h, item, &got);
            same = same && wants == model_wants(m, (int)item, &want) && got == want;
            if (!wants || rng_below(&r, 8) == 0) continue; /* a tier may leave one out */
            if (got >= 0) {
                mci_hot_drop(h, got);
                m->held[got] = false;
            }
            mci_hot_put(h, item);
            m->held[item] = true;
            m->used[item] = ++m->clock;
        }
        if (rng_below(&r, 16) == 0) {
            int64_t item = (int64_t)rng_below(&r, ITEMS);
            mci_hot_drop(h, item);
            m->held[item] = false;
        }
        for (int i = 0; i < ITEMS; i++) same = same && mci_hot_holds(h, i) == m->held[i];
        same = same && mci_hot_held(h) == model_held(m);
        CHECK(same, "seed %llu, step %d: another decision than the slow model's",
              (unsigned long long)seed, step);
    }
    mci_hot_free(h);
    CHECK(mem.total == 0, "leak of %lld bytes", (long long)mem.total);
    free(m);
}

/* ---- by hand ---- */

static void call_times(mci_hot *h, int32_t layer, int32_t id, int times) {
    for (int i = 0; i < times; i++) mci_hot_line(h, layer, &id, 1);
}

static void check_free_slots(void) {
    int64_t victim = 7;
    mci_hot *h =
        make(1, 8, INT64_MAX, AFTER, WINDOW); /* more slots than items: all free for ever */
    call_times(h, 0, 0, 1);
    CHECK(!mci_hot_wants(h, 0, &victim) && victim == -1, "one call is no reason");
    call_times(h, 0, 0, 1);
    CHECK(mci_hot_wants(h, 0, &victim) && victim == -1, "a free slot takes after - 1 calls");
    mci_hot_put(h, 0);
    CHECK(!mci_hot_wants(h, 0, &victim) && victim == -1, "held already");
    mci_hot_put(h, 0);
    CHECK(mci_hot_held(h) == 1, "put twice");
    mci_hot_drop(h, 0);
    mci_hot_drop(h, 0);
    CHECK(mci_hot_held(h) == 0 && !mci_hot_holds(h, 0), "dropped twice");
    CHECK(mci_hot_wants(h, 0, &victim), "its calls outlive the slot");
    mci_hot_free(h);
    h = make(1, 8, 2, 1, 1);
    call_times(h, 0, 3, 1);
    CHECK(mci_hot_wants(h, 3, &victim), "after 1: the first call");
    CHECK(!mci_hot_wants(h, 4, &victim), "never called");
    mci_hot_free(h);
    mci_hot_free(NULL);
}

/* The second call is `gap` lines of other experts after the first. */
static bool second_call_counts(int32_t window, int gap) {
    int64_t victim;
    mci_hot *h = make(2, 8, 4, AFTER, window);
    call_times(h, 0, 0, 1);
    call_times(h, 0, 1, gap);
    call_times(h, 1, 2, 40); /* lines of another layer do not age it */
    call_times(h, 0, 0, 1);
    bool wants = mci_hot_wants(h, 0, &victim);
    mci_hot_free(h);
    return wants;
}

static void check_window(void) {
    CHECK(second_call_counts(WINDOW, WINDOW - 2), "16 lines, both ends included");
    CHECK(!second_call_counts(WINDOW, WINDOW - 1), "17 lines");
    CHECK(second_call_counts(32, 30) && !second_call_counts(32, 31), "the widest window");
}

static void check_hysteresis(void) {
    int64_t victim;
    int swaps = 0;
    mci_hot *h = make(1, 4, 1, AFTER, WINDOW);
    call_times(h, 0, 0, 2);
    mci_hot_put(h, 0);
    for (int i = 0; i < 200; i++) { /* equals in turns */
        int32_t id = i % 2;
        mci_hot_line(h, 0, &id, 1);
        swaps += mci_hot_wants(h, id, &victim);
    }
    CHECK(swaps == 0 && mci_hot_holds(h, 0), "%d swaps of equals", swaps);
    /* 8 of the 16 lines each; of the lines that fall out of the window every other one is 0's */
    call_times(h, 0, 1, 2);
    CHECK(!mci_hot_wants(h, 1, &victim) && victim == -1, "9 calls against 7");
    call_times(h, 0, 1, 1);
    CHECK(mci_hot_wants(h, 1, &victim) && victim == 0, "10 calls against 6");
    mci_hot_free(h);
}

static void check_order(void) {
    int64_t victim;
    int32_t line[3] = {2, 0, 1}, id = 3;
    mci_hot *h = make(1, 32, 3, AFTER, WINDOW);
    for (int64_t i = 0; i < 3; i++) mci_hot_put(h, i);
    mci_hot_line(h, 0, line, 3); /* the order within a line is the order of use */
    call_times(h, 0, id, 4);
    CHECK(mci_hot_wants(h, id, &victim) && victim == 2, "victim %lld", (long long)victim);
    mci_hot_drop(h, 2);
    mci_hot_put(h, id);
    for (int i = 0; i < WINDOW; i++) call_times(h, 0, 4 + i % 4, 1);
    CHECK(mci_hot_wants(h, 4, &victim) && victim == 0, "victim %lld", (long long)victim);
    mci_hot_drop(h, 0);
    mci_hot_put(h, 4);
    CHECK(mci_hot_wants(h, 5, &victim) && victim == 1, "victim %lld", (long long)victim);
    mci_hot_drop(h, 1);
    mci_hot_put(h, 5);
    CHECK(mci_hot_wants(h, 6, &victim) && victim == id, "its turn comes %lld", (long long)victim);
    mci_hot_free(h);
}

static void check_whole_layers(void) { /* a prompt's chunks call everything */
    int32_t ids[EXPERTS];
    int64_t victim, taken = 0;
    for (int i = 0; i < EXPERTS; i++) ids[i] = i;
    mci_hot *h = make(1, EXPERTS, 5, AFTER, WINDOW);
    for (int line = 0; line < 3 * WINDOW; line++) {
        mci_hot_line(h, 0, ids, EXPERTS);
        for (int i = 0; i < EXPERTS; i++)
            if (mci_hot_wants(h, ids[i], &victim)) {
                CHECK(victim == -1, "nothing that all share pushes anything out");
                mci_hot_put(h, ids[i]);
                taken++;
            }
    }
    CHECK(taken == 5 && mci_hot_held(h) == 5, "%lld taken", (long long)taken);
    mci_hot_free(h);
}

static void check_replay(void) {
    /* layer 0: A A A B B B B, and one line of layer 1 in between */
    int32_t layer[] = {0, 0, 0, 1, 0, 0, 0, 0, 0}, ids[] = {0, 0, 0, 0, 1, 1, 1, 1, 1, 1};
    int64_t start[] = {0, 1, 2, 3, 5, 6, 7, 8, 9, 10};
    int32_t served[9], loads[9];
    mc_hot_counts c;
    mc_error err = {0};
#define REPLAY(nl, ne, slots, after, window, n)                                                    \
    mc_hot_replay(nl, ne, slots, after, window, n, layer, start, ids, &c, served, loads, &err)
    CHECK(REPLAY(2, 2, 1, 2, 4, 9) == MC_OK, "%s", err.message);
    /* A comes at its first call (after - 1) and goes at B's third, when the window is A B B B */
    static const int32_t want_served[] = {0, 1, 1, 0, 0, 0, 0, 1, 1};
    static const int32_t want_loads[] = {1, 0, 0, 0, 0, 0, 1, 0, 0};
    CHECK(!memcmp(served, want_served, sizeof served) && !memcmp(loads, want_loads, sizeof loads),
          "other lines serve or load");
    CHECK(c.calls == 10 && c.served == 4 && c.loads == 2 && c.evictions == 1,
          "%lld calls, %lld served, %lld loads, %lld evictions", (long long)c.calls,
          (long long)c.served, (long long)c.loads, (long long)c.evictions);
    CHECK(REPLAY(2, 2, 1, 2, 4, 0) == MC_OK && c.calls == 0, "no lines");
    CHECK(REPLAY(0, 2, 1, 2, 4, 9) == MC_EINVAL, "no layers");
    CHECK(REPLAY(1 << 20, 1 << 20, 1, 2, 4, 9) == MC_EINVAL, "too many items");
    CHECK(REPLAY(2, 2, 0, 2, 4, 9) == MC_EINVAL, "no slots");
    CHECK(REPLAY(2, 2, 1, 0, 4, 9) == MC_EINVAL && REPLAY(2, 2, 1, 5, 4, 9) == MC_EINVAL, "after");
    CHECK(REPLAY(2, 2, 1, 1, 0, 9) == MC_EINVAL && REPLAY(2, 2, 1, 1, 33, 9) == MC_EINVAL,
          "window");
    CHECK(REPLAY(2, 2, 1, 2, 4, -1) == MC_EINVAL, "lines");
    CHECK(REPLAY(1, 2, 1, 2, 4, 9) == MC_ERANGE, "layer outside");
    CHECK(REPLAY(2, 1, 1, 1, 4, 9) == MC_ERANGE, "expert outside");
    ids[4] = 0;
    CHECK(REPLAY(2, 2, 1, 2, 4, 9) == MC_EINVAL, "an expert twice in a line");
    mci_mem mem = {0};
    mci_hot *h;
    mem.fail_after = 1;
    CHECK(mci_hot_create(&mem, 2, 4, 2, 1, 1, &h, &err) == MC_ENOMEM && !h && !mem.total, "memory");
}

int main(void) {
    for (uint64_t seed = 1; seed <= 200; seed++) check_against_model(seed);
    check_free_slots();
    check_window();
    check_hysteresis();
    check_order();
    check_whole_layers();
    check_replay();
    return test_end();
}
