/* session_file.c - a session in a file: everything or nothing.
 *
 *   | header, 168 bytes | meta | conv and recurrent state | KV pages | CRC-32C of all before |
 *
 * Little-endian. Pages are stored whole; what lies past the position in the last one is never read.
 * A file is written beside its name and renamed when it is complete and on disk. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crc.h"
#include "session.h"

#define VERSION 1

typedef struct header {
    char magic[8]; /* "MCSESS\n\0" */
    uint32_t version, header_bytes;
    uint8_t model[32];
    int64_t shape[12]; /* of mc_kv_desc, see fill_shape */
    int64_t pos, n_page, n_meta;
} header;

_Static_assert(sizeof(header) == 168, "session header");

static void fill_shape(const mc_kv *kv, int64_t *s) {
    const mc_kv_desc *d = &kv->d;
    const int64_t v[12] = {d->n_attn,  d->n_kv_head, d->head_dim,    d->dtype,
                           d->n_delta, d->conv_dim,  d->conv_kernel, d->n_v_head,
                           d->dk,      d->dv,        MC_PAGE_TOKENS, kv->state_floats};
    memcpy(s, v, sizeof v);
}

/* ---- writing ---- */

#define CACHED (8 << 20) /* bytes that may lie in the page cache at a time: it counts as ours */

typedef struct file {
    int fd;
    const char *path;
    int64_t at, dropped; /* bytes so far; of these, out of the page cache */
    uint32_t crc;        /* of these bytes */
} file;

/* Takes what has been read or written (once it is on disk) out of the page cache. */
static void drop_pages(file *f, bool written) {
    if (written) (void)fdatasync(f->fd);
    (void)posix_fadvise(f->fd, 0, 0, POSIX_FADV_DONTNEED);
    f->dropped = f->at;
}

static int put(file *f, const void *data, int64_t n, mc_error *err) {
    const uint8_t *p = data;
    f->crc = mci_crc32c(f->crc, data, n);
    while (n > 0) {
        ssize_t k = write(f->fd, p, (size_t)MCI_MIN(n, CACHED));
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0)
            return mci_fail(err, MC_EIO, errno, "%s: write at %lld failed: %s", f->path,
                            (long long)f->at, strerror(errno));
        p += k;
        n -= k;
        f->at += k;
        if (f->at - f->dropped >= CACHED) drop_pages(f, true);
    }
    return MC_OK;
}

static int write_all(mc_session *s, file *f, const header *h, const void *meta, mc_error *err) {
    mc_kv *kv = s->kv;
    int rc;
    if ((rc = put(f, h, sizeof *h, err)) < 0 || (rc = put(f, meta, h->n_meta, err)) < 0 ||
        (rc = put(f, s->state[s->cur], kv->state_floats * 4, err)) < 0)
        return rc;
    for (int64_t i = 0; i < h->n_page; i++)
        if ((rc = put(f, mci_kv_page(kv, s->pages[i]), kv->page_bytes, err)) < 0) return rc;
    uint32_t crc = f->crc;
    if ((rc = put(f, &crc, 4, err)) < 0) return rc;
    if (fsync(f->fd) < 0)
        return mci_fail(err, MC_EIO, errno, "%s: fsync failed: %s", f->path, strerror(errno));
    drop_pages(f, false);
    return MC_OK;
}

int mc_session_save(mc_session *s, const char *path, const uint8_t *model, const void *meta,
                    int64_t n_meta, mc_error *err) {
    mc_kv *kv = s->kv;
    mc_engine *e = kv->e;
    header h = {.magic = "MCSESS\n", .version = VERSION, .header_bytes = sizeof h};
    char tmp[4096];
    int rc = mci_enter(e, err), fd;
    if (rc < 0) return rc;
    if ((rc = mci_session_claim(s, err)) < 0) {
        mci_leave(e);
        return rc;
    }
    /* A file takes long and steps of other sessions go on meanwhile, so it is written without the
     * lock: the claim keeps the session as it is, a reference alive, and its references to pages
     * make others copy these before they write. */
    s->refs++;
    mci_engine_retain(e);
    mci_leave(e);
    file f = {.path = tmp};
    struct stat old;
    bool exists = stat(path, &old) == 0;
    if (exists && !S_ISREG(old.st_mode)) {
        rc = mci_fail(err, MC_EINVAL, 0, "%s: expected a file or a new name, it is neither", path);
        goto done;
    }
    if (snprintf(tmp, sizeof tmp, "%s.XXXXXX", path) >= (int)sizeof tmp) {
        rc = mci_fail(err, MC_EINVAL, 0, "session: path too long");
        goto done;
    }
    if (n_meta < 0) {
        rc = mci_fail(err, MC_EINVAL, 0, "session: %lld bytes of meta", (long long)n_meta);
        goto done;
    }
    memcpy(h.model, model, 32);
    fill_shape(kv, h.shape);
    h.pos = s->pos;
    h.n_page = kv->d.n_attn ? (s->pos + MC_PAGE_TOKENS - 1) / MC_PAGE_TOKENS : 0;
    h.n_meta = n_meta;
    fd = f.fd = mkostemp(tmp, O_CLOEXEC); /* a name of its own: others may save here at once */
    if (fd >= 0 && exists) (void)fchmod(fd, old.st_mode & 0777);
    if (fd < 0) {
        rc = mci_fail(err, MC_EIO, errno, "%s: cannot create: %s", tmp, strerror(errno));
        goto done;
    }
    rc = write_all(s, &f, &h, meta, err);
    if (close(fd) < 0 && rc == MC_OK)
        rc = mci_fail(err, MC_EIO, errno, "%s: close failed: %s", tmp, strerror(errno));
    if (rc == MC_OK && rename(tmp, path) < 0)
        rc = mci_fail(err, MC_EIO, errno, "%s: cannot rename: %s", path, strerror(errno));
    if (rc < 0) unlink(tmp);
done:
    if (mci_enter(e, NULL) == MC_OK) { /* it is the process of before */
        atomic_store(&s->busy, 0);
        mci_session_drop(s);
        mci_leave(e);
    }
    mci_engine_release(e);
    return rc;
}

/* ---- reading ---- */

static int get(file *f, void *data, int64_t n, mc_error *err) {
    uint8_t *p = data;
    int64_t left = n;
    while (left > 0) {
        ssize_t k = read(f->fd, p, (size_t)MCI_MIN(left, CACHED));
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0)
            return mci_fail(err, k < 0 ? MC_EIO : MC_EFORMAT, k < 0 ? errno : 0,
                            "%s: wanted %lld bytes at %lld, got %lld", f->path, (long long)n,
                            (long long)(f->at - (n - left)), (long long)(n - left));
        p += k;
        left -= k;
        f->at += k;
        if (f->at - f->dropped >= CACHED) drop_pages(f, false);
    }
    f->crc = mci_crc32c(f->crc, data, n);
    return MC_OK;
}

static int check_header(const mc_kv *kv, const header *h, const uint8_t *model, int64_t size,
                        const char *path, mc_error *err) {
    int64_t shape[12], want;
    if (memcmp(h->magic, "MCSESS\n", 8))
        return mci_fail(err, MC_EFORMAT, 0, "%s: not a session file", path);
    if (h->version != VERSION || h->header_bytes != sizeof *h)
        return mci_fail(err, MC_EFORMAT, 0, "%s: session format version: expected %d, got %u", path,
                        VERSION, h->version);
    if (memcmp(h->model, model, 32))
        return mci_fail(err, MC_EFORMAT, 0, "%s: saved from another model", path);
    fill_shape(kv, shape);
    if (memcmp(h->shape, shape, sizeof shape))
        return mci_fail(err, MC_EFORMAT, 0,
                        "%s: saved with another state shape (KV dtype %s, here %s); open the model "
                        "as it was when saved",
                        path, h->shape[3] == MC_F32 ? "f32" : "bf16",
                        kv->d.dtype == MC_F32 ? "f32" : "bf16");
    if (h->pos < 0 || h->pos > kv->d.ctx)
        return mci_fail(err, MC_EFULL, 0, "%s: holds %lld tokens, the context is %lld", path,
                        (long long)h->pos, (long long)kv->d.ctx);
    if (h->n_page != (kv->d.n_attn ? (h->pos + MC_PAGE_TOKENS - 1) / MC_PAGE_TOKENS : 0) ||
        h->n_meta < 0 || h->n_meta > size)
        return mci_fail(err, MC_EFORMAT, 0, "%s: damaged header", path);
    want = (int64_t)sizeof *h + h->n_meta + kv->state_floats * 4 + h->n_page * kv->page_bytes + 4;
    if (size != want)
        return mci_fail(err, MC_EFORMAT, 0, "%s: expected %lld bytes, the file has %lld", path,
                        (long long)want, (long long)size);
    return MC_OK;
}

static int read_all(mc_session *s, file *f, const uint8_t *model, void *meta, int64_t room,
                    int64_t *n_meta, mc_error *err) {
    mc_kv *kv = s->kv;
    struct stat st;
    header h;
    uint32_t want, crc;
    int rc;
    if (fstat(f->fd, &st) < 0)
        return mci_fail(err, MC_EIO, errno, "%s: %s", f->path, strerror(errno));
    if ((rc = get(f, &h, sizeof h, err)) < 0 ||
        (rc = check_header(kv, &h, model, st.st_size, f->path, err)) < 0)
        return rc;
    if (h.n_meta > room)
        return mci_fail(err, MC_ERANGE, 0, "%s: meta of %lld bytes, room for %lld", f->path,
                        (long long)h.n_meta, (long long)room);
    if ((rc = get(f, meta, h.n_meta, err)) < 0 ||
        (rc = get(f, s->state[s->cur], kv->state_floats * 4, err)) < 0)
        return rc;
    for (int64_t i = 0; i < h.n_page; i++) {
        int32_t page = mci_kv_take(kv);
        if (page < 0)
            return mci_fail(err, MC_EFULL, 0,
                            "%s: KV pool full: %lld pages wanted; close a session, or open the "
                            "model with a larger ctx",
                            f->path, (long long)h.n_page);
        s->pages[s->n_page++] = page;
        if ((rc = get(f, mci_kv_page(kv, page), kv->page_bytes, err)) < 0) return rc;
    }
    want = f->crc;
    if ((rc = get(f, &crc, 4, err)) < 0) return rc;
    if (crc != want)
        return mci_fail(err, MC_EFORMAT, 0, "%s: damaged: CRC expected %08x, got %08x", f->path,
                        crc, want);
    s->pos = h.pos;
    *n_meta = h.n_meta;
    return MC_OK;
}

int64_t mc_session_load(mc_kv *kv, const char *path, const uint8_t *model, void *meta,
                        int64_t n_meta, mc_session **out, mc_error *err) {
    mc_session *s = NULL;
    int64_t got = 0;
    int rc = mci_enter(kv->e, err);
    *out = NULL;
    if (rc < 0) return rc;
    file f = {.path = path};
    f.fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang us */
    if (f.fd < 0) {
        rc = mci_fail(err, MC_EIO, errno, "%s: cannot open: %s", path, strerror(errno));
        goto done;
    }
    if ((rc = mci_session_new(kv, &s, err)) < 0) goto done;
    if ((rc = read_all(s, &f, model, meta, n_meta, &got, err)) < 0)
        mci_session_drop(s);
    else
        *out = s;
done:
    if (f.fd >= 0) {
        drop_pages(&f, false);
        close(f.fd);
    }
    mci_leave(kv->e);
    return rc < 0 ? rc : got;
}
