/* expert.h - the experts of one layer on disk: checked once, then where each matrix lies in its
 * file and in a slab of memory. It knows nothing of caches.
 *
 * A slab takes whole blocks of the file; ranges whose blocks touch are one read, in any order:
 *
 *   file   ..|....uuuuuuuu|uuuuudddd|dddsss..|..      |: multiples of 4096
 *   slab     |....uuuuuuuu|uuuuudddd|dddsss..|....gggg|gg......|
 *             run 0: up and down, a scale     run 1: gate, from elsewhere
 *
 * Scales that touch the matrices of their expert, in the file of their own matrix, are read with
 * them. Those that lie elsewhere (few and small) are read once and stay resident. */
#ifndef MCI_EXPERT_H
#define MCI_EXPERT_H
#include "engine.h"

typedef struct mci_mat_ref {
    int64_t offset;
    union {
        const uint8_t *scale; /* resident, or NULL */
        int64_t scale_offset; /* in the same file, where mci_expert_ref.inside has bit k */
    };
    int32_t file;
    uint8_t dtype, scale_dtype;
    uint8_t block_rows, block_cols; /* 1 or 128; 0, 32, 64 or 128 */
} mci_mat_ref;

typedef struct mci_expert_ref {
    mci_mat_ref mat[3]; /* gate, up, down */
    uint32_t crc;       /* of a record: mc_expert */
    bool record;
    uint8_t inside;
} mci_expert_ref;

/* Of one layer. ref: (n), the caller's. */
typedef struct mci_experts {
    mci_expert_ref *ref;
    const mc_engine *e;
    int32_t layer, n, hidden, width;
    int64_t slab_bytes; /* the largest; 0: not bound */
    void *scales;
    int64_t scale_bytes;
} mci_experts;

typedef struct mci_range {
    int32_t file;
    int64_t offset, bytes;
} mci_range;

typedef struct mci_layout {
    mci_range run[3]; /* bytes to read: exact, or a whole record */
    int64_t at[3];    /* where the first block of each run lies in the slab */
    int64_t part[6];  /* where gate, up, down, then their scales begin in the slab; -1: not there */
    int32_t n_run;
    int64_t bytes;
} mci_layout;

/* Checks gate, up (width, hidden) and down (hidden, width) of n experts against their files and
 * reads their scales. On failure x is unbound and owns nothing. layer: for messages. */
int mci_experts_bind(mc_engine *e, mci_experts *x, int32_t layer, const mc_expert *experts,
                     mc_error *err);
void mci_experts_free(mc_engine *e, mci_experts *x);
/* Matrix k (gate, up, down) of an expert, without its data and a scale that lies in the slab. */
mci_mat mci_experts_format(const mci_experts *x, int32_t expert, int k);
mci_layout mci_experts_layout(const mci_experts *x, int32_t expert);
/* Fills the ranges of a read of an expert into its slab (NULL: into the mapping of its file), and
 * the scan: the lane checks the CRC of a record and, where search is true, searches FP8 for NaN
 * codes (r->found). x must stay where it is until the read ends. */
void mci_experts_read(const mci_experts *x, int32_t expert, uint8_t *slab, bool search,
                      mci_read *r);
/* Whether an FP8 code of the expert in `slab` is a NaN. */
bool mci_experts_have_nan(const mci_experts *x, int32_t expert, const uint8_t *slab);
/* gate, up and down of an expert that lies in `slab` (NULL: in the mapping of its file); no_nan:
 * such a search found nothing. */
void mci_experts_mats(const mci_experts *x, int32_t expert, const uint8_t *slab, bool no_nan,
                      mci_mat out[3]);
#endif
