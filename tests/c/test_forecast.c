/* test_forecast.c - the forecast of experts against its definition, worked out slowly from all that
 * has happened, and what it is for: routing that repeats itself. */
#include <math.h>
#include <string.h>

#include "forecast.h"
#include "test.h"

enum { L = 3, E = 20, LINES = 200, TOKENS = 160, LAGS = 128, SIGNALS = 4 };

static mci_forecast *make(int n_layer, int n_expert) {
    size_t bytes = (size_t)mci_forecast_bytes(n_layer, n_expert);
    void *memory = test_alloc(bytes);
    CHECK(bytes % 8 == 0, "%zu bytes", bytes);
    memset(memory, 0, bytes);
    return mci_forecast_init(memory, n_layer, n_expert);
}

/* ---- the definition ---- */

typedef struct row {                         /* an expert in a line, and what was known of it */
    double x[SIGNALS], z[SIGNALS], y, trust; /* z: what was known after it */
    int token;
} row;

typedef struct slow {
    double far;
    int token, n_row, n[L];         /* lines of each layer */
    double share[L][LINES + 1][E];  /* of line 1, 2, ... */
    double alike[LAGS], echo[L][E]; /* echo: of the layer's next line */
    double weight[SIGNALS];
    row rows[L * LINES * E];
} slow;

/* Mean share, fading, of the lines so far and of one more that called all experts evenly. */
static double mean(const slow *s, int l, int e, double half_life) {
    double sum = 1.0 / E, n = 1;
    for (int i = 1; i <= s->n[l]; i++) {
        double w = exp2((i - s->n[l]) / half_life);
        sum += w * s->share[l][i][e];
        n += w;
    }
    return sum / n;
}

static void signals(const slow *s, int l, int e, double *x) {
    int last = s->n[l];
    while (last > 0 && s->share[l][last][e] <= 0) last--;
    x[0] = (last ? s->share[l][last][e] / (s->n[l] + 1 - last) : 0) - 1.0 / E;
    x[1] = mean(s, l, e, 16) - 1.0 / E;
    x[2] = mean(s, l, e, 128) - 1.0 / E;
    x[3] = s->echo[l][e] - 1.0 / E;
}

static double guess(const slow *s, const double *x) {
    double y = 1.0 / E;
    for (int i = 0; i < SIGNALS; i++) y += s->weight[i] * x[i];
    return y;
}

/* w . x = (1 - far) y + far w . z over all rows, towards 1/4 each, by elimination. */
static void slow_token(slow *s, double far) {
    double a[SIGNALS][SIGNALS + 1];
    for (int i = 0; i < SIGNALS; i++)
        for (int j = 0; j <= SIGNALS; j++) a[i][j] = j == SIGNALS ? L * .25 : i == j ? L : 0;
    for (const row *r = s->rows; r < s->rows + s->n_row; r++) {
        double w = r->trust * exp2((r->token - s->token) / 64.0);
        for (int i = 0; i < SIGNALS; i++)
            for (int j = 0; j <= SIGNALS; j++)
                a[i][j] +=
                    w * r->x[i] * (j == SIGNALS ? (1 - far) * r->y : r->x[j] - far * r->z[j]);
    }
    for (int p = 0; p < SIGNALS; p++)
        for (int i = 0; i < SIGNALS; i++) {
            double f = i == p ? 0 : a[i][p] / a[p][p];
            for (int j = p; j <= SIGNALS; j++) a[i][j] -= f * a[p][j];
        }
    for (int i = 0; i < SIGNALS; i++) s->weight[i] = a[i][SIGNALS] / a[i][i];
    s->token++;
    s->far = far;
}

/* Lines of more than half of all experts are not heard in echoes. */
static bool heard(const slow *s, int l, int line) {
    int n = 0;
    for (int e = 0; e < E; e++) n += s->share[l][line][e] > 0;
    return 2 * n <= E;
}

static void slow_line(slow *s, int l, const int32_t *ids, int n) {
    for (int e = 0; e < E && s->n[l] > 0; e++) {
        row *r = &s->rows[s->n_row++];
        signals(s, l, e, r->x);
        r->trust = 1 / (1.0 / E + fmax(guess(s, r->x), 0));
        r->y = -1.0 / E;
        r->token = s->token;
        for (int i = 0; i < n; i++)
            if (ids[i] == e) r->y += 1.0 / n;
    }
    int line = ++s->n[l], lags = line < LAGS ? line : LAGS - 1;
    for (int i = 0; i < n; i++) s->share[l][line][ids[i]] = 1.0 / n;
    double loud[LAGS] = {0}, middle = 0, total = 0;
    for (int d = 1; d < LAGS && d < line; d++) {
        int same = 0;
        for (int e = 0; e < E; e++)
            same += s->share[l][line][e] > 0 && s->share[l][line - d][e] > 0;
        if (!heard(s, l, line) || !heard(s, l, line - d)) same = 0;
        s->alike[d] += ((double)same / n - s->alike[d]) / L;
    }
    for (int d = 1; d <= lags; d++) middle += s->alike[d] / lags;
    for (int d = 1; d <= lags; d++) total += loud[d] = pow(fmax(s->alike[d] - middle, 0), 4);
    for (int e = 0; e < E; e++) {
        double sum = 0;
        for (int d = 1; d <= lags; d++) {
            double told = 0, of = 0;
            for (int h = 1; h <= 8 && h <= d; h++) {
                double part = h == 1 ? 1 : pow(s->far, h - 1);
                if (heard(s, l, line + h - d)) told += part * s->share[l][line + h - d][e];
                of += part;
            }
            if (loud[d] > total / 128) sum += loud[d] * told / of;
        }
        s->echo[l][e] = total > 0 ? sum / total : 1.0 / E;
    }
    for (int e = 0; e < E && line > 1; e++) signals(s, l, e, s->rows[s->n_row - E + e].z);
}

/* n distinct experts, the low ones more often, some of them those of the line `again`. */
static int draw(rng *r, int32_t *ids, const int32_t *again, int n_again) {
    int n = rng_below(r, 12) ? 1 + (int)rng_below(r, 5) : 1 + (int)rng_below(r, E), got = 0;
    bool in[E] = {0};
    while (got < n) {
        int e = (int)rng_below(r, 1 + rng_below(r, E));
        if (n_again && rng_below(r, 2))
            e = again[rng_below(r, (uint64_t)n_again)];
        else if (n_again && in[e])
            e = (int)rng_below(r, E);
        if (!in[e])
            ids[got++] = e;
        else
            n_again = 0;
        in[e] = true;
    }
    return n;
}

static void check_definition(uint64_t seed) {
    rng r = {seed};
    mci_forecast *f = make(L, E);
    slow *s = test_alloc(sizeof *s);
    int32_t ids[TOKENS][L][E];
    int n[TOKENS][L], period = 2 + (int)rng_below(&r, 9);
    double worst = 0;
    memset(s, 0, sizeof *s);
    for (int i = 0; i < SIGNALS; i++) s->weight[i] = .25;
    for (int t = 0; t < TOKENS; t++) {
        double far = (double)rng_below(&r, 100) / 100;
        mci_forecast_token(f, far);
        slow_token(s, far);
        for (int l = 0; l < L; l++) {
            bool back = t >= period;
            if (rng_below(&r, 20) == 0)
                n[t][l] = 0; /* a layer left out */
            else
                n[t][l] = draw(&r, ids[t][l], back ? ids[t - period][l] : NULL,
                               back ? n[t - period][l] : 0);
            if (!n[t][l]) continue;
            const double *got = mci_forecast_line(f, l, ids[t][l], n[t][l]);
            slow_line(s, l, ids[t][l], n[t][l]);
            for (int e = 0; e < E; e++) {
                double x[SIGNALS];
                signals(s, l, e, x);
                worst = fmax(worst, fabs(got[e] - guess(s, x)));
            }
        }
    }
    CHECK(worst < 1e-5, "seed %llu: off by %g", (unsigned long long)seed, worst);
    free(s);
    free(f);
}

/* Random lines that come again every PERIOD tokens: soon the next line is known. */
static void check_repetition(void) {
    enum { PERIOD = 9, K = 4, N = 64 };
    rng r = {7};
    mci_forecast *f = make(L, N);
    int32_t ids[PERIOD][L][K];
    int right = 0, all = 0;
    for (int i = 0; i < PERIOD * L; i++)
        for (int k = 0; k < K; k++) ids[i / L][i % L][k] = (int32_t)(rng_below(&r, N / K) * K) + k;
    for (int t = 0; t < 6 * PERIOD; t++) {
        mci_forecast_token(f, 0);
        for (int l = 0; l < L; l++) {
            const double *got = mci_forecast_line(f, l, ids[t % PERIOD][l], K);
            const int32_t *next = ids[(t + 1) % PERIOD][l];
            for (int k = 0; k < K && t > 4 * PERIOD; k++) {
                int better = 0;
                for (int e = 0; e < N; e++) better += got[e] > got[next[k]];
                right += better < K;
                all++;
            }
        }
    }
    CHECK(right > all * 95 / 100, "%d of %d foreseen", right, all);
    free(f);
}

/* A chunk that calls every expert evenly says nothing about which comes next. */
static void check_chunk(void) {
    mci_forecast *f = make(1, E), *g = make(1, E);
    int32_t all[E], one[2] = {3, 8};
    for (int e = 0; e < E; e++) all[e] = E - 1 - e;
    const double *a = mci_forecast_line(f, 0, all, E);
    for (int e = 1; e < E; e++) CHECK(a[e] == a[0], "%d", e);
    a = mci_forecast_line(f, 0, one, 2);
    const double *b = mci_forecast_line(g, 0, one, 2);
    for (int e = 0; e < E; e++)
        CHECK((e == 3 || e == 8) == (a[e] > 1.0 / E) && (a[e] > 1.0 / E) == (b[e] > 1.0 / E), "%d",
              e);
    free(f);
    free(g);
}

int main(void) {
    for (uint64_t seed = 1; seed <= 6; seed++) check_definition(seed);
    check_repetition();
    check_chunk();
    return test_end();
}
