/* trial.h - is a habit worth its price? Decided by trying it now and then: pure arithmetic over
 * times, no clock, no knowledge of what is tried. */
#ifndef MCI_TRIAL_H
#define MCI_TRIAL_H
#include "base.h"

enum {
    MCI_TRIAL_SAMPLES = 48, /* rounds with, and as many without */
    MCI_TRIAL_HOLD = 512    /* rounds that follow the verdict */
};

/* Zeroed: a trial begins. */
typedef struct mci_trial {
    double s[2][MCI_TRIAL_SAMPLES]; /* seconds of rounds without and with */
    int32_t n, hold;                /* samples so far; rounds left until the next trial */
    bool won;
} mci_trial;

/* Whether the present round is to be run with it. */
bool mci_trial_use(const mci_trial *t);
/* The present round took `seconds`. */
void mci_trial_end(mci_trial *t, double seconds);
#endif
