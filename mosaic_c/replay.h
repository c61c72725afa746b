/* replay.h - lines of a trace that come from outside, checked before anything indexes by them. */
#ifndef MCI_REPLAY_H
#define MCI_REPLAY_H
#include "base.h"

/* Line i is layer[i] and ids[start[i] .. start[i + 1]). MC_ERANGE: a layer or an expert that does
 * not exist; MC_EINVAL: less than 0 lines, lines that run backwards, an expert twice in one. */
int mci_check_trace(int32_t n_layer, int32_t n_expert, int64_t n_line, const int32_t *layer,
                    const int64_t *start, const int32_t *ids, mc_error *err);
#endif
