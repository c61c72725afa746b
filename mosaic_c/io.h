/* io.h - reads of byte ranges: open files, reader lanes (threads), honest errors. It knows nothing
 * of experts or dtypes.
 *
 * Two ways to read, chosen per file when it is opened:
 *   direct  O_DIRECT: the 4 KiB-aligned superset of a range goes straight into memory. Nothing
 *           stays in the page cache. Alignment is probed; a file system that refuses is read by
 *           pread.
 *   pread   POSIX_FADV_RANDOM on the descriptor, pread of the exact range, then
 *           POSIX_FADV_DONTNEED over the page-rounded range. Without both, edge pages and readahead
 *           stay in the page cache and break the memory budget.
 * EINTR and short reads loop; one system call asks for at most 1 GiB. End of file before the range
 * is complete is MC_EIO with path, offset, wanted and got. */
#ifndef MCI_IO_H
#define MCI_IO_H
#include "base.h"

#define MCI_IO_BLOCK 4096 /* alignment of direct reads */

typedef struct mci_io mci_io;

/* A contiguous range. dst is where the byte at `offset` goes, congruent to offset modulo
 * MCI_IO_BLOCK, and the whole aligned superset of the range must be writable around it:
 *
 *   file   |....xxxxxxxx|xxxxxxxxxxxx|xxx.........|     x: the range, | : multiples of 4096
 *   memory |????xxxxxxxx|xxxxxxxxxxxx|xxx?????????|     ?: may be overwritten
 *               ^dst
 */
typedef struct mci_run {
    int32_t file;
    int64_t offset, bytes;
    uint8_t *dst;
} mci_run;

typedef struct mci_read {
    mci_run run[3]; /* gate, up, down at worst; ranges that touch are one */
    int32_t n_run;
    int64_t tag;    /* the caller's */
    uint8_t *fresh; /* memory never touched so far, of fresh_bytes: the lane makes its pages exist
                       before it reads into them; NULL: none */
    int64_t fresh_bytes;
    /* NULL, or called by the lane, outside read_s, on the bytes of each run (gaps between matrices
     * included) once all were read */
    bool (*scan)(const uint8_t *p, int64_t n);
    bool found;     /* scan was true of some run */
    mc_error err;   /* code 0: complete */
    int64_t bytes;  /* taken from the file, superset included */
    struct mci_read *next;
} mci_read;

/* Counts submitted reads (experts), not mci_io_load and mci_io_fetch. */
typedef struct mci_io_stats {
    int64_t reads, bytes;
    double read_s; /* summed over lanes */
    int32_t lanes, lanes_ran, files_direct, files_pread;
} mci_io_stats;

/* mode MC_IO_...; lanes 0: 2 when direct (auto included), 4 for pread. Lane threads start with the
 * first submit. */
int mci_io_create(int mode, int lanes, mci_io **out, mc_error *err);
/* Waits for reads in progress, joins the lanes, then closes the files. */
void mci_io_free(mci_io *io);
/* Returns the file's id. The same path twice gives the same id. Not a regular file: MC_EINVAL. */
int mci_io_open(mci_io *io, const char *path, mc_error *err);
int64_t mci_io_size(mci_io *io, int32_t file); /* -1: no such file */
const char *mci_io_path(mci_io *io, int32_t file);
int mci_io_lanes(mci_io *io);

/* Queues a read; the caller owns *r until it is handed back by mci_io_next. FIFO. */
int mci_io_submit(mci_io *io, mci_read *r, mc_error *err);
/* Takes back a read that no lane has begun: it will not be handed back. false: too late. */
bool mci_io_withdraw(mci_io *io, mci_read *r);
/* A finished read (r->err.code tells how it ended); wait: block until there is one. NULL: none is
 * finished (wait false) or none is outstanding. */
mci_read *mci_io_next(mci_io *io, bool wait);

/* Reads one large range now, cut into pieces over all lanes (dense weights). Must not be called
 * while submitted reads are outstanding. */
int mci_io_load(mci_io *io, const mci_run *run, mc_error *err);
/* Reads a small range now in the calling thread, any alignment of dst, exact bytes (scales, rows of
 * an embedding table). Leaves nothing in the page cache. */
int mci_io_fetch(mci_io *io, int32_t file, int64_t offset, int64_t bytes, void *dst, mc_error *err);
void mci_io_get_stats(mci_io *io, mci_io_stats *out);

/* For tests: replaces pread for this io (NULL restores), to inject short reads and errors. */
typedef int64_t mci_pread_fn(void *ctx, int fd, void *buf, int64_t n, int64_t off);
void mci_io_inject(mci_io *io, mci_pread_fn *fn, void *ctx);
#endif
