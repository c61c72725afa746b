/* trial.c - rounds with and without in turns, then the better way for a while.
 *
 * The order is without, with, with, without, ...: a drift of the machine or of the cache falls on
 * both sides alike. Medians are compared, because a round may be disturbed. Their number: with 16
 * of each, two of six runs decided against what was worth a seventh. A draw is without, because the
 * habit has costs that no round shows. */
#include "trial.h"

static int side(const mci_trial *t) { return (t->n ^ t->n >> 1) & 1; }

bool mci_trial_use(const mci_trial *t) { return t->hold ? t->won : side(t); }

static double median(double *s) {
    for (int i = 1; i < MCI_TRIAL_SAMPLES; i++)
        for (int j = i; j > 0 && s[j] < s[j - 1]; j--) {
            double swap = s[j];
            s[j] = s[j - 1];
            s[j - 1] = swap;
        }
    return 0.5 * (s[(MCI_TRIAL_SAMPLES - 1) / 2] + s[MCI_TRIAL_SAMPLES / 2]);
}

void mci_trial_end(mci_trial *t, double seconds) {
    if (t->hold) {
        t->hold--;
        return;
    }
    t->s[side(t)][t->n / 2] = seconds; /* each pair of rounds has one of either side */
    if (++t->n < 2 * MCI_TRIAL_SAMPLES) return;
    t->won = median(t->s[1]) < 0.995 * median(t->s[0]);
    t->hold = MCI_TRIAL_HOLD;
    t->n = 0;
}
