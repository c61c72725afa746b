/* acts.h - quantised activations, which integer weights are multiplied by: every thread has room of
 * its own and quantises the tokens of the chunk it computes, so nobody waits for anybody. */
#ifndef MCI_ACTS_H
#define MCI_ACTS_H
#include "engine.h"

enum { MCI_ACTS_TOK = 32 }; /* tokens a thread holds */

/* Makes room in every thread for rows of `cols`, where weights of this dtype need it (at bind,
 * under the lock). */
int mci_acts_reserve(mc_engine *e, int dtype, int64_t cols, mc_error *err);
/* The n <= MCI_ACTS_TOK rows x[0..n) of w's columns, quantised as w needs them. In one parallel
 * region the same x is quantised once a thread; the next region says mci_acts_forget. */
const mci_qact *mci_acts_get(mc_engine *e, int thread, const mci_mat *w, const float *const *x,
                             int64_t n);
void mci_acts_forget(mc_engine *e);
#endif
