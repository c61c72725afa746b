/* io_file.h - files and the ways to read a range of one: direct, buffered, mapped; and a table of
 * them by id. It knows nothing of queues, threads or experts.
 *
 *   direct    O_DIRECT: the 4 KiB-aligned superset of a range goes straight into memory. Nothing
 *             stays in the page cache. Alignment is probed; a file system that refuses is read
 *             buffered, and `refusal` says why.
 *   buffered  POSIX_FADV_RANDOM on the descriptor, pread of the exact range, then
 *             POSIX_FADV_DONTNEED over the page-rounded range. Without both, edge pages and
 *             readahead stay in the page cache and break the memory budget.
 *   mapped    the whole file mapped, MADV_RANDOM; a read makes the pages of its range exist.
 *
 * EINTR and short reads loop; one system call asks for at most 1 GiB. End of file before the range
 * is complete is MC_EIO with path, offset, wanted and got. */
#ifndef MCI_IO_FILE_H
#define MCI_IO_FILE_H
#include <pthread.h>

#include "base.h"

#define MCI_IO_BLOCK 4096     /* alignment of direct reads */
#define MCI_IO_CALL (1 << 30) /* of one system call: the kernel stops a little under 2 GiB */

/* A contiguous range. dst is where the byte at `offset` goes, congruent to offset modulo
 * MCI_IO_BLOCK, and the whole aligned superset of the range must be writable around it:
 *
 *   file   |....xxxxxxxx|xxxxxxxxxxxx|xxx.........|     x: the range, | : multiples of 4096
 *   memory |????xxxxxxxx|xxxxxxxxxxxx|xxx?????????|     ?: may be overwritten
 *               ^dst
 *
 * dst NULL: the pages of a mapped file are to exist. */
typedef struct mci_run {
    int32_t file;
    int64_t offset, bytes;
    uint8_t *dst;
} mci_run;

/* Stands in for pread in tests: short reads and errors. */
typedef int64_t mci_pread_fn(void *ctx, int fd, void *buf, int64_t n, int64_t off);
typedef struct mci_shim {
    mci_pread_fn *fn; /* NULL: pread */
    void *ctx;
} mci_shim;

typedef struct mci_file {
    char *path;
    int fd, direct_fd;   /* direct_fd -1: direct reads were refused, or not asked for */
    _Atomic bool direct; /* in use; goes off for good when a direct read is refused */
    _Atomic int refusal; /* errno of the refusal */
    int64_t size;        /* when it was opened */
    uint8_t *map;        /* NULL: not mapped */
} mci_file;

/* Files by id 0, 1, ...; from any thread. Pointers to files stay good until mci_files_close. */
typedef struct mci_files {
    pthread_mutex_t lock;
    mci_file **file;
    int32_t n, room;
    bool direct, map; /* of files opened from now on: read directly where possible; map too */
} mci_files;

void mci_files_init(mci_files *t, bool direct, bool map);
void mci_files_close(mci_files *t);
/* The file's id. The same path twice gives the same id. Not a regular file: MC_EINVAL. */
int mci_files_open(mci_files *t, const char *path, mc_error *err);
mci_file *mci_files_get(mci_files *t, int32_t id); /* NULL: no such file */
/* The file of a run; MC_ERANGE: there is none, or the range is none. */
int mci_files_find(mci_files *t, const mci_run *run, mci_file **f, mc_error *err);

/* MC_EIO when the file is shorter than when it was opened: its mapping has no memory behind the
 * end, and a load from there ends the process. */
int mci_file_check(const mci_file *f, mc_error *err);

/* Bytes of the run's aligned superset, from the block that holds its first byte. */
int64_t mci_run_span(const mci_run *run);
/* Whether dst can take a direct read, and the file gives one. */
bool mci_file_direct(mci_file *f, const mci_run *run);
/* The run in the way that fits file and dst. done: bytes of the superset that a direct read has
 * brought already. *taken grows by the bytes that came from the file. */
int mci_file_read(mci_file *f, const mci_shim *shim, const mci_run *run, int64_t done,
                  int64_t *taken, mc_error *err);
/* Buffered, exactly run->bytes to any dst. */
int mci_file_fetch(mci_file *f, const mci_shim *shim, const mci_run *run, mc_error *err);
/* Makes the pages of memory that was never touched exist. Huge pages that exist before the read
 * make direct reads several times faster than pages that appear one by one. Clearing them takes as
 * long as reading on some virtual machines: it is for lanes, not for the thread that computes. */
void mci_prefault(uint8_t *p, int64_t bytes);
#endif
