/* kv.c - the pool of KV pages that all sessions of a model share. It counts references; which page
 * belongs where is session.c's business. */
#include "session.h"

#include <stdlib.h>

static int64_t page_count(const mc_kv_desc *d) {
    return (d->ctx + MC_PAGE_TOKENS - 1) / MC_PAGE_TOKENS;
}

static int64_t pool_pages(const mc_kv_desc *d) {
    return !d->n_attn ? 0 : d->pages ? d->pages : page_count(d);
}

static int64_t page_bytes(const mc_kv_desc *d) {
    return (int64_t)d->n_attn * 2 * d->n_kv_head * MC_PAGE_TOKENS * d->head_dim *
           (d->dtype == MC_F32 ? 4 : 2);
}

static int64_t state_floats(const mc_kv_desc *d) {
    return d->n_delta *
           ((int64_t)d->conv_dim * (d->conv_kernel - 1) + (int64_t)d->n_v_head * d->dk * d->dv);
}

/* Caps keep one page and one state far below 2^62; all pages together are checked. */
int mci_kv_check(const mc_kv_desc *d, mc_error *err) {
    const struct {
        const char *name;
        int64_t v, lo, hi;
    } f[] = {{"ctx", d->ctx, 1, (int64_t)1 << 31},
             {"attention layers", d->n_attn, 0, 4096},
             {"KV heads", d->n_kv_head, d->n_attn ? 1 : 0, 4096},
             {"head_dim", d->head_dim, d->n_attn ? 1 : 0, 4096},
             {"pages", d->pages, 0, (int64_t)1 << 31},
             {"linear layers", d->n_delta, 0, 4096},
             {"conv channels", d->conv_dim, d->n_delta ? 1 : 0, 1 << 24},
             {"conv kernel", d->conv_kernel, d->n_delta ? 1 : 0, 16},
             {"value heads", d->n_v_head, d->n_delta ? 1 : 0, 4096},
             {"key dim", d->dk, d->n_delta ? 1 : 0, 4096},
             {"value dim", d->dv, d->n_delta ? 1 : 0, 4096}};
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        if (f[i].v < f[i].lo || f[i].v > f[i].hi)
            return mci_fail(err, MC_EINVAL, 0, "state: %s: expected %lld..%lld, got %lld",
                            f[i].name, (long long)f[i].lo, (long long)f[i].hi, (long long)f[i].v);
    if (d->dtype != MC_F32 && d->dtype != MC_BF16)
        return mci_fail(err, MC_EINVAL, 0, "state: KV dtype: expected F32 or BF16");
    int64_t pool;
    if (!mci_mul(pool_pages(d), page_bytes(d) + 8, &pool))
        return mci_fail(err, MC_EINVAL, 0, "state: %lld KV pages of %lld bytes are too many",
                        (long long)pool_pages(d), (long long)page_bytes(d));
    return MC_OK;
}

int64_t mc_kv_pool_bytes(const mc_kv_desc *d, mc_error *err) {
    int rc = mci_kv_check(d, err);
    return rc < 0 ? rc : pool_pages(d) * (page_bytes(d) + 8);
}

int64_t mc_kv_session_bytes(const mc_kv_desc *d, mc_error *err) {
    int rc = mci_kv_check(d, err);
    return rc < 0 ? rc : 2 * 4 * state_floats(d) + 4 * page_count(d);
}

int mc_kv_create(mc_engine *e, const mc_kv_desc *d, mc_kv **out, mc_error *err) {
    void *pool = NULL, *refs = NULL, *list = NULL;
    mc_kv *kv;
    int rc;
    *out = NULL;
    if ((rc = mci_kv_check(d, err)) < 0) return rc;
    if (!(kv = calloc(1, sizeof *kv))) return mci_fail(err, MC_ENOMEM, 0, "KV: out of memory");
    atomic_init(&kv->refs, 1);
    kv->d = *d;
    kv->table_len = page_count(d);
    kv->n_page = pool_pages(d);
    kv->page_bytes = page_bytes(d);
    kv->conv_floats = d->n_delta ? (int64_t)d->conv_dim * (d->conv_kernel - 1) : 0;
    kv->rec_floats = (int64_t)d->n_v_head * d->dk * d->dv;
    kv->state_floats = state_floats(d);
    if ((rc = mci_enter(e, err)) < 0) {
        free(kv);
        return rc;
    }
    rc = mci_alloc(&e->mem, MC_MEM_STATE, kv->n_page * kv->page_bytes, "KV pages", &pool, err);
    if (rc == MC_OK)
        rc = mci_alloc(&e->mem, MC_MEM_STATE, kv->n_page * 4, "KV page table", &refs, err);
    if (rc == MC_OK)
        rc = mci_alloc(&e->mem, MC_MEM_STATE, kv->n_page * 4, "KV page table", &list, err);
    kv->e = e;
    kv->pool = pool;
    kv->page_refs = refs;
    kv->free_list = list;
    mci_engine_retain(e);
    mci_leave(e);
    if (rc < 0) {
        mc_kv_free(kv);
        return rc;
    }
    /* popped from the end, so pages are first used in ascending order */
    for (int64_t i = 0; i < kv->n_page; i++)
        kv->free_list[kv->n_free++] = (int32_t)(kv->n_page - 1 - i);
    *out = kv;
    return MC_OK;
}

void mci_kv_retain(mc_kv *kv) { atomic_fetch_add(&kv->refs, 1); }

void mc_kv_free(mc_kv *kv) {
    if (!kv || atomic_fetch_sub(&kv->refs, 1) != 1) return;
    mci_mem *m = &kv->e->mem;
    mci_release(m, MC_MEM_STATE, kv->pool, kv->n_page * kv->page_bytes);
    mci_release(m, MC_MEM_STATE, kv->page_refs, kv->n_page * 4);
    mci_release(m, MC_MEM_STATE, kv->free_list, kv->n_page * 4);
    mci_engine_release(kv->e);
    free(kv);
}

int32_t mci_kv_take(mc_kv *kv) {
    if (!kv->n_free) return -1;
    int32_t p = kv->free_list[--kv->n_free];
    kv->page_refs[p] = 1;
    return p;
}

void mci_kv_drop(mc_kv *kv, int32_t page) {
    if (--kv->page_refs[page] == 0) kv->free_list[kv->n_free++] = page;
}
