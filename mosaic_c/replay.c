/* replay.c - lines of a trace, checked. */
#include "replay.h"

#include <stdlib.h>

int mci_check_trace(int32_t n_layer, int32_t n_expert, int64_t n_line, const int32_t *layer,
                    const int64_t *start, const int32_t *ids, mc_error *err) {
    if (n_line < 0) return mci_fail(err, MC_EINVAL, 0, "trace: %lld lines", (long long)n_line);
    /* all bounds before the first id is read */
    for (int64_t i = 0; i < n_line; i++) {
        if (layer[i] < 0 || layer[i] >= n_layer)
            return mci_fail(err, MC_ERANGE, 0, "trace line %lld: layer %d of %d", (long long)i,
                            layer[i], n_layer);
        if (start[i] < 0 || start[i + 1] < start[i])
            return mci_fail(err, MC_EINVAL, 0, "trace line %lld: starts at %lld, ends at %lld",
                            (long long)i, (long long)start[i], (long long)start[i + 1]);
    }
    int64_t *seen = calloc((size_t)n_expert, sizeof *seen); /* line of the latest sight, from 1 */
    int rc = MC_OK;
    if (!seen) return mci_fail(err, MC_ENOMEM, 0, "trace replay: out of memory");
    for (int64_t i = 0; rc == MC_OK && i < n_line; i++)
        for (int64_t j = start[i]; rc == MC_OK && j < start[i + 1]; j++) {
            if (ids[j] < 0 || ids[j] >= n_expert)
                rc = mci_fail(err, MC_ERANGE, 0, "trace line %lld: expert %d of %d", (long long)i,
                              ids[j], n_expert);
            else if (seen[ids[j]] == i + 1)
                rc = mci_fail(err, MC_EINVAL, 0, "trace line %lld: expert %d comes twice",
                              (long long)i, ids[j]);
            else
                seen[ids[j]] = i + 1;
        }
    free(seen);
    return rc;
}
