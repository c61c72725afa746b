/* slabs.c - an arena of equal slabs of memory. */
#include "slabs.h"

#include <sys/mman.h>

enum {
    HUGE_PAGE = 2 << 20,
    OWN_MAPPING = 1 << 20 /* mci_alloc aligns memory of this size to huge pages */
};

/* flags: its pages exist; scratch of settle; no FP8 code in it is a NaN; it is held, and was given
 * meanwhile; the upper half counts uses up to SEARCHED. A search takes as long as a tenth more for
 * some twenty uses. */
enum { WARM = 1, USED = 2, NO_NAN = 4, HOLD = 8, GIVEN = 16, USE = 32, SEARCHED = 15 * USE };

int mci_slabs_open(mci_slabs *s, mc_engine *e, int64_t n, int64_t bytes, bool mapped,
                   mc_error *err) {
    int64_t arena;
    int rc;
    if (n > INT32_MAX || !mci_mul(n, bytes, &arena))
        return mci_fail(err, MC_EBUDGET, 0, "expert cache: %lld slabs of %lld bytes", (long long)n,
                        (long long)bytes);
    if (arena < OWN_MAPPING && !mapped) arena += MCI_IO_BLOCK; /* room to align its start */
    *s = (mci_slabs){.e = e, .bytes = bytes, .n = (int32_t)n, .limit = (int32_t)n};
    s->table_bytes = n * (int64_t)(sizeof *s->free + sizeof *s->flags);
    if ((rc = mci_alloc(&e->mem, MC_MEM_META, s->table_bytes, "slab table", &s->table, err)) < 0)
        return rc;
    rc = mapped ? mci_recount(&e->mem, MC_MEM_CACHE, arena, "mapped experts", err)
                : mci_alloc(&e->mem, MC_MEM_CACHE, arena, "expert cache", &s->arena_mem, err);
    if (rc < 0) {
        mci_slabs_close(s);
        return rc;
    }
    s->arena_bytes = arena;
    s->arena = s->arena_mem;
    if (s->arena) s->arena += -(uintptr_t)s->arena % MCI_IO_BLOCK;
    s->free = s->table;
    s->flags = (uint16_t *)(s->free + n);
    for (int32_t i = s->n; i-- > 0;) s->free[s->n_free++] = i;
    return MC_OK;
}

void mci_slabs_close(mci_slabs *s) {
    if (!s->e) return;
    mci_release(&s->e->mem, MC_MEM_META, s->table, s->table_bytes);
    mci_release(&s->e->mem, MC_MEM_CACHE, s->arena_mem, s->arena_bytes);
    if (!s->arena_mem) mci_recount(&s->e->mem, MC_MEM_CACHE, -s->arena_bytes, "", NULL);
    /* what was given back is not counted, and the release took off all */
    if (s->arena_mem) mci_recount(&s->e->mem, MC_MEM_CACHE, s->given_back, "expert cache", NULL);
    *s = (mci_slabs){.e = NULL};
}

uint8_t *mci_slabs_at(const mci_slabs *s, int32_t slab) {
    return s->arena ? s->arena + slab * s->bytes : NULL;
}

int32_t mci_slabs_take(mci_slabs *s, bool *fresh) {
    if (!s->n_free) return -1;
    int32_t slab = s->free[--s->n_free];
    *fresh = !(s->flags[slab] & WARM);
    return slab;
}

void mci_slabs_give(mci_slabs *s, int32_t slab) {
    if (s->flags[slab] & HOLD)
        s->flags[slab] |= GIVEN;
    else
        s->free[s->n_free++] = slab;
}

void mci_slabs_hold(mci_slabs *s, int32_t slab) { s->flags[slab] |= HOLD; }

void mci_slabs_let(mci_slabs *s, int32_t slab) {
    const bool given = s->flags[slab] & GIVEN;
    s->flags[slab] &= (uint16_t)~(HOLD | GIVEN);
    if (given) mci_slabs_give(s, slab);
}

void mci_slabs_filled(mci_slabs *s, int32_t slab) { s->flags[slab] = WARM; }

bool mci_slabs_used(mci_slabs *s, int32_t slab) {
    if (s->flags[slab] >= SEARCHED) return false;
    s->flags[slab] = (uint16_t)(s->flags[slab] + USE);
    return s->flags[slab] >= SEARCHED;
}

void mci_slabs_searched(mci_slabs *s, int32_t slab, bool has_nan) {
    s->flags[slab] |= (uint16_t)(SEARCHED | (has_nan ? 0 : NO_NAN));
}

bool mci_slabs_no_nan(const mci_slabs *s, int32_t slab) { return s->flags[slab] & NO_NAN; }

int mci_slabs_count(mci_slabs *s, int64_t limit, mc_error *err) {
    int64_t back = s->arena_bytes < OWN_MAPPING ? 0 : (s->n - limit) * s->bytes;
    int rc = mci_recount(&s->e->mem, MC_MEM_CACHE, s->given_back - back, "expert cache", err);
    if (rc < 0) return rc;
    s->given_back = back;
    s->limit = (int32_t)limit;
    return MC_OK;
}

/* Residents move into the first slabs. Pages go back whole because what leaves is one range. */
void mci_slabs_settle(mci_slabs *s, int32_t *owner, int64_t n_owner) {
    int32_t low = 0;
    for (int64_t i = 0; i < n_owner; i++)
        if (owner[i] >= 0) s->flags[owner[i]] |= USED;
    for (int64_t i = 0; i < n_owner; i++) {
        if (owner[i] < s->limit) continue;
        while (s->flags[low] & USED) low++;
        memcpy(mci_slabs_at(s, low), mci_slabs_at(s, owner[i]), (size_t)s->bytes);
        s->flags[low] = (uint16_t)(USED | s->flags[owner[i]]);
        owner[i] = low;
    }
    s->n_free = 0;
    for (int32_t i = s->n; i-- > 0;) {
        if (i < s->limit && !(s->flags[i] & USED)) s->free[s->n_free++] = i;
        s->flags[i] &= (uint16_t)~USED;
    }
    if (s->limit == s->n || s->arena_bytes < OWN_MAPPING) return;
    memset(s->flags + s->limit, 0, (size_t)(s->n - s->limit) * sizeof *s->flags);
    /* from the next huge page on: a part of one would not go back anyway */
    uintptr_t end = (uintptr_t)mci_slabs_at(s, s->n), mask = HUGE_PAGE - 1;
    uintptr_t from = ((uintptr_t)mci_slabs_at(s, s->limit) + mask) & ~mask;
    if (from < end) madvise((void *)from, end - from, MADV_DONTNEED);
}
