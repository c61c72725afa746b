/* io_load.c - one large range read now, by all lanes. */
#include <stdlib.h>

#include "io.h"

enum { PIECE = 4 << 20 /* of the range, at a time in one lane */ };

static void put(mci_read **list, mci_read *r) {
    r->next = *list;
    *list = r;
}

/* Pieces end at multiples of PIECE in the file, so that no two lanes write one block of memory. */
static int load(mci_io *io, const mci_run *run, mci_read *spare, mc_error *err) {
    int64_t worst = INT64_MAX;
    mci_read *r;
    int rc = MC_OK;
    for (int64_t at = run->offset, end = at + run->bytes;;) {
        while (at < end && rc == MC_OK && (r = spare)) {
            int64_t n = MCI_MIN(end, (at / PIECE + 1) * PIECE) - at;
            spare = r->next;
            uint8_t *dst = run->dst + (at - run->offset);
            *r = (mci_read){.run = {{run->file, at, n, dst}},
                            .n_run = 1,
                            .tag = at,
                            .fresh = dst,
                            .fresh_bytes = n};
            if ((rc = mci_io_submit(io, r, err)) == MC_OK) at += n;
        }
        if (!(r = mci_io_next(io, true))) return rc;
        if (r->err.code < 0 && r->tag < worst) { /* the lowest offset, whatever came first */
            worst = r->tag;
            rc = r->err.code;
            if (err) *err = r->err;
        }
        put(&spare, r);
    }
}

int mci_io_load(mci_io *io, const mci_run *run, mc_error *err) {
    int64_t end;
    mci_read *spare = NULL;
    const int n = 2 * mci_io_lanes(io);
    if (run->offset < 0 || !mci_add(run->offset, run->bytes, &end) || end > INT64_MAX - PIECE)
        return mci_fail(err, MC_ERANGE, 0, "%s: impossible range: %lld bytes at offset %lld",
                        mci_io_path(io, run->file), (long long)run->bytes, (long long)run->offset);
    mci_read *pieces = calloc((size_t)n, sizeof *pieces);
    if (!pieces) return mci_fail(err, MC_ENOMEM, 0, "read: out of memory");
    for (int i = 0; i < n; i++) put(&spare, &pieces[i]);
    mci_io_count(io, false); /* the counters are about experts */
    int rc = load(io, run, spare, err);
    mci_io_count(io, true);
    free(pieces);
    return rc;
}
