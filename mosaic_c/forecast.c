/* forecast.c - a linear guess whose weights are learned while the model runs.
 *
 * An expert of a line of n has the share 1/n of it, the others 0: a chunk that calls all E experts
 * tells them apart as little as it should (1/E each, the average), and lines of one token and of
 * several sequences are alike. Four signals of an expert, all in shares and taken less 1/E:
 *
 *   recent  (share when last called) / (lines since)
 *   fast    mean share, fading with a half-life of 16 lines of the layer
 *   slow    mean share, fading with a half-life of 128
 *   echo    mean share in the lines that followed lines like the latest
 *
 * echo: for every lag d, S[d] is how much of the latest lines their layers had called d lines
 * before, too; it fades with a token's worth of lines. A lag counts with the fourth power of S[d]
 * above the mean, so that few of them speak: where text repeats itself, or sequences take turns,
 * the lag of the repetition. It says what followed d lines ago: lines + 1 - d, + 2 - d, ... to the
 * present one, 8 at most, each counting `far` times the one before.
 *
 * The forecast is 1/E + w . signals. No fixed w fits all: recorded traces want `recent` to count,
 * independent draws want it ignored (5 points of hit rate either way). So w, common to all layers,
 * is learned: with x the signals before a line, y the shares in it and z the signals after it, all
 * less 1/E, the forecast should be the share now and the forecast of what comes then,
 *
 *   w . x = (1 - far) y + far w . z        (least-squares temporal difference, Bradtke & Barto
 * 1996)
 *
 * which for far = 0 is plain least squares. Rows are divided by the expected share, as the variance
 * of a rare event is proportional to its mean: otherwise the few busiest experts, which are never
 * in question, would decide alone. They fade with a half-life of 64 tokens; a prior that weighs as
 * much as PRIOR tokens holds w in place while there is little to learn from and keeps the equations
 * regular.
 *
 * Only + - * / in a fixed order: the same lines give the same bits on every machine. */
#include "forecast.h"

#define FAST_FADE 0x1.ea4afa2a490dap-1 /* 2^(-1/16) */
#define SLOW_FADE 0x1.fd3c22b8f71f1p-1 /* 2^(-1/128) */
#define FIT_FADE 0x1.fa7c1819e90d8p-1  /* 2^(-1/64) */
#define PRIOR 1.0                      /* tokens */
#define PRIOR_WEIGHT .25               /* of every signal */

enum { RECENT, FAST, SLOW, ECHO, SIGNALS };
enum {
    LAGS = 128,  /* lines of a layer that are remembered */
    HORIZON = 8, /* how many lines a lag foretells */
    FAINT = 128, /* a lag with less than this part of all weight is not worth its time */
};

struct mci_forecast {
    int32_t n_layer, n_expert, words;
    double far, weight[SIGNALS];
    double xx[SIGNALS][SIGNALS], xz[SIGNALS][SIGNALS], xy[SIGNALS]; /* fading sums */
    double alike[LAGS];                                             /* S, from 1 on */
    /* of a layer: */
    double *fast_n, *slow_n; /* (n_layer) lines so far, fading */
    double *past_share;      /* (n_layer, LAGS) 1/n of line i at i % LAGS */
    uint64_t *past;          /* (n_layer, LAGS, words) its experts, a bit each */
    double *now, *guess;     /* (n_expert) shares in the present line; the forecast */
    /* of an expert: */
    float *share, *fast, *slow, *echo; /* (items) when last called; fading sums; the signal */
    uint32_t *last;                    /* (items) line when last called */
    uint32_t *lines;                   /* (n_layer) so far */
};

int64_t mci_forecast_bytes(int32_t n_layer, int32_t n_expert) {
    int64_t L = n_layer, E = n_expert, words = (E + 63) / 64;
    int64_t wide = 2 * L + L * LAGS * (1 + words) + 2 * E, narrow = 5 * L * E + L;
    return (int64_t)sizeof(mci_forecast) + 8 * wide + 4 * (narrow + narrow % 2);
}

mci_forecast *mci_forecast_init(void *zeroed, int32_t n_layer, int32_t n_expert) {
    int64_t items = (int64_t)n_layer * n_expert, lines = (int64_t)n_layer * LAGS;
    mci_forecast *f = zeroed;
    f->n_layer = n_layer;
    f->n_expert = n_expert;
    f->words = (n_expert + 63) / 64;
    for (int i = 0; i < SIGNALS; i++) f->weight[i] = PRIOR_WEIGHT;
    f->fast_n = (double *)(f + 1);
    f->slow_n = f->fast_n + n_layer;
    f->past_share = f->slow_n + n_layer;
    f->now = f->past_share + lines;
    f->guess = f->now + n_expert;
    f->past = (uint64_t *)(f->guess + n_expert);
    f->share = (float *)(f->past + lines * f->words);
    f->fast = f->share + items;
    f->slow = f->fast + items;
    f->echo = f->slow + items;
    f->last = (uint32_t *)(f->echo + items);
    f->lines = f->last + items;
    return f;
}

/* Solves (xx - far xz + prior I) weight = (1 - far) xy + prior PRIOR_WEIGHT by elimination. */
static void fit(mci_forecast *f, double far) {
    double a[SIGNALS][SIGNALS + 1], prior = PRIOR * f->n_layer;
    for (int i = 0; i < SIGNALS; i++) {
        for (int j = 0; j < SIGNALS; j++)
            a[i][j] = f->xx[i][j] - far * f->xz[i][j] + (i == j ? prior : 0);
        a[i][SIGNALS] = (1 - far) * f->xy[i] + prior * PRIOR_WEIGHT;
    }
    for (int p = 0; p < SIGNALS; p++) {
        int top = p;
        for (int i = p + 1; i < SIGNALS; i++)
            if (a[i][p] * a[i][p] > a[top][p] * a[top][p]) top = i;
        for (int j = p; j <= SIGNALS; j++) {
            double swap = a[p][j];
            a[p][j] = a[top][j];
            a[top][j] = swap;
        }
        for (int i = p + 1; i < SIGNALS; i++) {
            double times = a[i][p] / a[p][p];
            for (int j = p; j <= SIGNALS; j++) a[i][j] -= times * a[p][j];
        }
    }
    for (int i = SIGNALS; i-- > 0;) {
        double v = a[i][SIGNALS];
        for (int j = i + 1; j < SIGNALS; j++) v -= a[i][j] * f->weight[j];
        f->weight[i] = v / a[i][i];
    }
}

void mci_forecast_token(mci_forecast *f, double far) {
    f->far = far;
    fit(f, far);
    for (int i = 0; i < SIGNALS; i++) {
        f->xy[i] *= FIT_FADE;
        for (int j = 0; j < SIGNALS; j++) {
            f->xx[i][j] *= FIT_FADE;
            f->xz[i][j] *= FIT_FADE;
        }
    }
}

static double *past_share_at(const mci_forecast *f, int32_t layer, uint32_t line) {
    return f->past_share + (int64_t)layer * LAGS + line % LAGS;
}

static uint64_t *past_at(const mci_forecast *f, int32_t layer, uint32_t line) {
    return f->past + ((int64_t)layer * LAGS + line % LAGS) * f->words;
}

/* Remembers the line and tells the lags how alike it is to the one so far back. A line of more than
 * half of all experts, such as a long chunk, is like everything: remembered as empty. */
static void remember(mci_forecast *f, int32_t layer, const int32_t *ids, int32_t n) {
    uint32_t line = f->lines[layer];
    uint64_t *mine = past_at(f, layer, line);
    memset(mine, 0, (size_t)f->words * sizeof *mine);
    for (int32_t i = 0; i < n && n <= f->n_expert / 2; i++)
        mine[ids[i] / 64] |= UINT64_C(1) << ids[i] % 64;
    *past_share_at(f, layer, line) = 1.0 / n;
    double part = 1.0 / f->n_layer; /* of a token */
    for (uint32_t d = 1; d < LAGS && d < line; d++) {
        const uint64_t *theirs = past_at(f, layer, line - d);
        int same = 0;
        for (int32_t k = 0; k < f->words; k++) same += __builtin_popcountll(mine[k] & theirs[k]);
        f->alike[d] += part * ((double)same / n - f->alike[d]);
    }
}

/* The layer's lines to come as its past has them, echo (n_expert). */
static void listen(const mci_forecast *f, int32_t layer, double *echo) {
    uint32_t line = f->lines[layer], end = MCI_MIN(line + 1, LAGS);
    double mean = 0, total = 0, loud[LAGS], sum[HORIZON + 1] = {0}, power = 1;
    for (int h = 1; h <= HORIZON; h++, power *= f->far) sum[h] = sum[h - 1] + power;
    for (uint32_t d = 1; d < end; d++) mean += f->alike[d];
    mean /= end - 1;
    for (uint32_t d = 1; d < end; d++) {
        double above = MCI_MAX(f->alike[d] - mean, 0);
        loud[d] = above * above * (above * above);
        total += loud[d];
    }
    for (int32_t e = 0; e < f->n_expert; e++) echo[e] = total > 0 ? 0 : 1.0 / f->n_expert;
    for (uint32_t d = 1; d < end; d++) {
        if (loud[d] * FAINT <= total) continue;
        uint32_t lines = MCI_MIN(d, HORIZON);
        double part = loud[d] / total / sum[lines];
        for (uint32_t h = 1; h <= lines; h++, part *= f->far) {
            const uint64_t *then = past_at(f, layer, line + h - d);
            double v = part * *past_share_at(f, layer, line + h - d);
            for (int32_t k = 0; k < f->words; k++)
                for (uint64_t left = then[k]; left; left &= left - 1)
                    echo[64 * k + __builtin_ctzll(left)] += v;
        }
    }
}

/* What is known of an expert before its layer's line `line`: x (SIGNALS), and the forecast of it.
 */
static inline double look(const mci_forecast *f, int64_t item, uint32_t line, double fast_n,
                          double slow_n, double even, double *x) {
    const double *w = f->weight;
    x[RECENT] = f->share[item] / (double)(line - f->last[item]) - even;
    /* means with one more line that called all experts evenly: the very first ones jump less */
    x[FAST] = (f->fast[item] + even) * fast_n - even;
    x[SLOW] = (f->slow[item] + even) * slow_n - even;
    x[ECHO] = f->echo[item] - even;
    return even + w[RECENT] * x[RECENT] + w[FAST] * x[FAST] + w[SLOW] * x[SLOW] + w[ECHO] * x[ECHO];
}

const double *mci_forecast_line(mci_forecast *f, int32_t layer, const int32_t *ids, int32_t n) {
    int64_t base = (int64_t)layer * f->n_expert;
    uint32_t line = ++f->lines[layer];
    double even = 1.0 / f->n_expert, x[SIGNALS], z[SIGNALS], xy[SIGNALS] = {0};
    double xx[SIGNALS][SIGNALS] = {{0}}, xz[SIGNALS][SIGNALS] = {{0}};
    double fast_was = 1 / (f->fast_n[layer] + 1), slow_was = 1 / (f->slow_n[layer] + 1);
    f->fast_n[layer] = f->fast_n[layer] * FAST_FADE + 1;
    f->slow_n[layer] = f->slow_n[layer] * SLOW_FADE + 1;
    double fast_is = 1 / (f->fast_n[layer] + 1), slow_is = 1 / (f->slow_n[layer] + 1);
    remember(f, layer, ids, n);
    listen(f, layer, f->guess);
    for (int32_t i = 0; i < n; i++) f->now[ids[i]] = 1.0 / n;
    for (int32_t e = 0; e < f->n_expert; e++) {
        int64_t item = base + e;
        double now = f->now[e], guess = look(f, item, line, fast_was, slow_was, even, x);
        double trust = 1 / (even + MCI_MAX(guess, 0));
        if (now > 0) {
            f->share[item] = (float)now;
            f->last[item] = line;
        }
        f->fast[item] = (float)(f->fast[item] * FAST_FADE + now);
        f->slow[item] = (float)(f->slow[item] * SLOW_FADE + now);
        f->echo[item] = (float)f->guess[e];
        f->guess[e] = look(f, item, line + 1, fast_is, slow_is, even, z);
        for (int i = 0; i < SIGNALS; i++) {
            double v = x[i] * trust;
            xy[i] += v * (now - even);
            for (int j = 0; j < SIGNALS; j++) {
                xx[i][j] += v * x[j];
                xz[i][j] += v * z[j];
            }
        }
    }
    for (int32_t i = 0; i < n; i++) f->now[ids[i]] = 0;
    for (int i = 0; i < SIGNALS && line > 1;
         i++) { /* before its first line a layer had no signals */
        f->xy[i] += xy[i];
        for (int j = 0; j < SIGNALS; j++) {
            f->xx[i][j] += xx[i][j];
            f->xz[i][j] += xz[i][j];
        }
    }
    return f->guess;
}
