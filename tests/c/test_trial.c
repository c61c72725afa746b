/* A trial prefers what was faster, against drift and outliers. */
#include "../../mosaic_c/trial.h"

#include "test.h"

enum { ROUNDS = 2 * MCI_TRIAL_SAMPLES };

/* Runs a whole trial; with(out) tell what a round takes. Returns how many rounds ran with. */
static int run(mci_trial *t, double without, double with, double drift, int outliers) {
    int n = 0;
    for (int i = 0; i < ROUNDS; i++) {
        bool use = mci_trial_use(t);
        double s = use ? with : without;
        n += use;
        if (i % 5 < outliers) s += 100;
        mci_trial_end(t, s + drift * i);
    }
    return n;
}

static void check(double without, double with, double drift, int outliers, bool won) {
    mci_trial t = {.n = 0};
    CHECK(run(&t, without, with, drift, outliers) == MCI_TRIAL_SAMPLES, "half of the rounds");
    for (int i = 0; i < MCI_TRIAL_HOLD; i++) {
        CHECK(mci_trial_use(&t) == won, "%g against %g: round %d", with, without, i);
        mci_trial_end(&t, 50);
    }
    CHECK(run(&t, with, without, drift, outliers) == MCI_TRIAL_SAMPLES, "a trial again");
    if (without != with)
        CHECK(mci_trial_use(&t) == (without < 0.995 * with), "the world has changed");
}

int main(void) {
    check(1.0, 0.9, 0, 0, true);
    check(1.0, 1.0, 0, 0, false);
    check(1.0, 0.999, 0, 0, false); /* a draw */
    check(1.0, 0.98, 0, 0, true);
    check(1.0, 1.1, 0, 0, false);
    check(1.0, 0.9, 0.01, 0, true); /* drift falls on both sides */
    check(1.0, 1.0, 0.01, 0, false);
    check(1.0, 1.0, -0.01, 0, false);
    check(1.0, 0.9, 0, 1, true); /* one round of five disturbed */
    check(1.0, 1.1, 0, 1, false);
    return test_end();
}
