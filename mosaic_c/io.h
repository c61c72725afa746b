/* io.h - reads of byte ranges: open files, a queue, the threads that serve it, honest errors. It
 * knows nothing of experts or dtypes.
 *
 * Modes (io_file.h says how a range is read):
 *   direct  lanes (threads), each with one read at a time; buffered where a file system refuses
 *   pread   the same, always buffered
 *   uring   direct reads in a ring of the kernel, handed over and collected by the caller's thread;
 *           lanes read what needs more than that: files that refuse direct reads, fresh memory
 *   mmap    files are mapped; a submitted run with dst NULL makes its pages exist in the mapping
 *   auto    direct, until mci_io_use changes it */
#ifndef MCI_IO_H
#define MCI_IO_H
#include "io_file.h"

enum { MCI_IO_LANES_MOST = 16 /* where their number is not given */ };

typedef struct mci_io mci_io;

typedef struct mci_read {
    mci_run run[3]; /* gate, up, down at worst; ranges that touch are one */
    int32_t n_run;
    int64_t tag;    /* the caller's */
    uint8_t *fresh; /* memory never touched so far, of fresh_bytes: the lane makes its pages exist
                       before it reads into them; NULL: none */
    int64_t fresh_bytes;
    /* NULL, or called by the lane, outside read_s, once the bytes of all runs lie at their dst. It
     * may refuse them: by err, like a read that failed */
    bool (*scan)(struct mci_read *r);
    const void *owner; /* the scan's own, as are the next three */
    const uint8_t *slab;
    int32_t which;
    bool search;
    bool found;    /* what scan said; false: no scan, or the read failed */
    mc_error err;  /* code 0: complete */
    int64_t bytes; /* taken from the file, superset included */
    struct mci_read *next;
    double began; /* by the ring: when it was taken up, */
    int32_t left; /* and runs still under way */
} mci_read;

/* Counts submitted reads (experts), not mci_io_load, mci_io_fetch and what mci_io_count hides. */
typedef struct mci_io_stats {
    int64_t reads, bytes;
    double read_s; /* summed over reads, each from its beginning to its end */
    double busy_s; /* wall time during which a read was submitted and not finished */
    int32_t mode;  /* really in use: MC_IO_PREAD where every file refused direct reads */
    int32_t lanes; /* reads that may be under way at once: threads, or places in the ring */
    int32_t lanes_ran, files_direct, files_pread; /* threads that did counted reads */
    int64_t retried; /* runs that a ring did not bring whole, so that its thread read the rest */
    int32_t depth;   /* the largest number of reads submitted and not finished */
    char note[256];  /* why a file that was to be read directly is not; "" where none */
} mci_io_stats;

/* Whether this system can do a mode at all; MC_ESYS: why not. */
int mci_io_mode(int mode, mc_error *err);
/* Reads at once that memory is to be planned for, of so many bytes each, in a mode whose number of
 * lanes is not given. */
int mci_io_most(int mode, int64_t bytes);
/* lanes: reads under way at once (threads, for uring places in its ring); 0: 2, and 4 buffered,
 * mapped or once a file has refused direct reads, until mci_io_use sets another number. Threads
 * start with the first submit that needs them. MC_ESYS: uring is asked for and not there. */
int mci_io_create(int mode, int lanes, mci_io **out, mc_error *err);
/* Where the number of lanes is not given: mci_io_use may set up to `most`, if that is more than
 * mci_io_lanes so far; those in use stay as they are. Before any read. MC_ENOMEM, MC_ESYS: the ring
 * had to be made anew and could not be. */
int mci_io_allow(mci_io *io, int most, mc_error *err);
/* Waits for reads in progress, stops the threads, then closes the files. */
void mci_io_free(mci_io *io);
bool mci_io_idle(mci_io *io); /* no read is outstanding */
/* Goes on in a mode, direct or uring, with so many lanes, at most mci_io_lanes: by what auto
 * measured, or in the mode asked for with more of them. While no read is outstanding. MC_EINVAL:
 * not so; MC_ESYS: no uring here; both change nothing. */
int mci_io_use(mci_io *io, int mode, int lanes, mc_error *err);
/* Whether reads submitted from now on enter the counters; while no read is outstanding. */
void mci_io_count(mci_io *io, bool count);
/* Returns the file's id. The same path twice gives the same id. Not a regular file: MC_EINVAL. */
int mci_io_open(mci_io *io, const char *path, mc_error *err);
int64_t mci_io_size(mci_io *io, int32_t file); /* -1: no such file */
const char *mci_io_path(mci_io *io, int32_t file);
bool mci_io_direct(mci_io *io, int32_t file); /* it is read directly */
/* Reads that may ever be under way at once: lanes as given; or 4, or as mci_io_allow says.
 * Those in use now may be fewer: see the statistics. */
int mci_io_lanes(mci_io *io);
int mci_io_asked(const mci_io *io); /* the mode given to create */
bool mci_io_lanes_given(const mci_io *io);

/* The byte of a mapped file at `offset`, until mci_io_free; NULL: not mapped. It can be read once a
 * submitted run that holds it is complete; should memory run short, the kernel drops such pages and
 * the next touch reads them again. */
const uint8_t *mci_io_at(mci_io *io, int32_t file, int64_t offset);
/* MC_EIO when a mapped file has become shorter: touching what is gone would end the process. It
 * cannot see a file that shrinks after the call, nor a disk that fails under a dropped page. */
int mci_io_check(mci_io *io, int32_t file, mc_error *err);

/* Queues a read; the caller owns *r until it is handed back by mci_io_next. FIFO. */
int mci_io_submit(mci_io *io, mci_read *r, mc_error *err);
/* Takes back a submitted read that no lane has begun: this one, or (r NULL) the next of any. It is
 * the caller's again, never handed back by mci_io_next, and its error is MC_ECANCEL. NULL: too
 * late. */
mci_read *mci_io_withdraw(mci_io *io, mci_read *r);
/* Lets a ring go on while the caller computes: notes what has ended, begins what waits. */
void mci_io_look(mci_io *io);
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

/* For tests: replaces pread for this io (NULL restores), to inject short reads and errors. While it
 * is set, the ring and the mappings are read through it too. */
void mci_io_inject(mci_io *io, mci_pread_fn *fn, void *ctx);
#endif
