/* ahead.c - experts read ahead of the line that may name them. */
#include "ahead.h"

enum {
    IDLE = MCI_GUESS_NONE,
    READING = MCI_GUESS_READING,
    READY = MCI_GUESS_READY,
    DROPPED, /* to be given up when its read ends */
    TAKEN    /* by a line, before its read ended */
};

struct mci_guess {
    mci_read read;
    int64_t item;
    int32_t slab, place; /* place: of the line, when TAKEN on its way */
    uint8_t state;
};

int mci_fetch(mc_engine *e, mci_slabs *slabs, const mci_experts *x, int32_t expert, int64_t tag,
              mci_read *r, int32_t *slab, mc_error *err) {
    bool fresh;
    *slab = mci_slabs_take(slabs, &fresh);
    uint8_t *p = mci_slabs_at(slabs, *slab);
    mci_experts_read(x, expert, p, slabs->eager, r);
    r->fresh = fresh ? p : NULL;
    r->fresh_bytes = slabs->bytes;
    r->tag = tag;
    int rc = mci_io_submit(e->io, r, err);
    if (rc < 0) {
        mci_slabs_give(slabs, *slab);
        *slab = -1;
    }
    return rc;
}

void mci_fetched(mci_slabs *slabs, const mci_read *r, int32_t slab) {
    mci_slabs_filled(slabs, slab);
    if (r->search) mci_slabs_searched(slabs, slab, r->found);
}

int mci_ahead_open(mci_ahead *a, mc_engine *e, mci_slabs *slabs, int32_t n, mc_error *err) {
    void *p;
    *a = (mci_ahead){.e = e, .slabs = slabs};
    int rc = mci_alloc(&e->mem, MC_MEM_META, n * (int64_t)sizeof *a->guess, "guesses", &p, err);
    if (rc < 0) return rc;
    a->guess = p;
    a->bytes = n * (int64_t)sizeof *a->guess;
    a->n = n;
    return MC_OK;
}

void mci_ahead_close(mci_ahead *a) {
    if (!a->e) return;
    mci_ahead_drop(a, true);
    mci_release(&a->e->mem, MC_MEM_META, a->guess, a->bytes);
    *a = (mci_ahead){.e = NULL};
}

/* What happens between tokens is not part of their time. */
void mci_ahead_token(mci_ahead *a, bool allowed) {
    a->allowed = allowed && a->n;
    a->start = mci_now();
}

void mci_ahead_token_end(mci_ahead *a) {
    if (!a->allowed) return;
    a->allowed = false;
    mci_trial_end(&a->trial, mci_now() - a->start);
    a->e->stats.ahead_on = mci_trial_use(&a->trial);
}

bool mci_ahead_wanted(const mci_ahead *a) { return a->allowed && mci_trial_use(&a->trial); }

bool mci_ahead_guess(mci_ahead *a, const mci_experts *x, int32_t expert, int64_t item) {
    mci_guess *g = NULL;
    for (int32_t i = 0; i < a->n; i++) {
        mci_guess *o = &a->guess[i];
        if (o->state == IDLE)
            g = o;
        else if (o->item == item && (o->state == READING || o->state == READY))
            return true;
    }
    if (!g || mci_fetch(a->e, a->slabs, x, expert, -1 - (g - a->guess), &g->read, &g->slab, NULL))
        return false;
    g->item = item;
    g->state = READING;
    a->reading++;
    a->e->stats.ahead_reads++;
    return true;
}

int mci_ahead_take(mci_ahead *a, int64_t item, int32_t place, int32_t *slab) {
    for (mci_guess *g = a->guess; g < a->guess + a->n; g++) {
        int state = g->state;
        if (g->item != item || (state != READING && state != READY)) continue;
        *slab = g->slab;
        g->place = place;
        g->state = state == READY ? IDLE : TAKEN;
        a->e->stats.ahead_used++;
        return state;
    }
    return MCI_GUESS_NONE;
}

int32_t mci_ahead_arrived(mci_ahead *a, const mci_read *r) {
    mci_guess *g = &a->guess[-1 - r->tag];
    a->reading--;
    if (g->state == TAKEN) {
        g->state = IDLE;
        return g->place;
    }
    /* a failure is not told: if the expert matters, the line reads it again */
    bool keep = g->state == READING && r->err.code == MC_OK;
    if (keep)
        mci_fetched(a->slabs, r, g->slab);
    else
        mci_slabs_give(a->slabs, g->slab);
    g->state = keep ? READY : IDLE;
    return -1;
}

void mci_ahead_drop(mci_ahead *a, bool wait) {
    for (mci_guess *g = a->guess; g < a->guess + a->n; g++) {
        if (g->state != READING && g->state != READY) continue;
        bool ended = g->state == READY;
        if (!ended && mci_io_withdraw(a->e->io, &g->read)) {
            a->reading--;
            ended = true;
        }
        if (ended) mci_slabs_give(a->slabs, g->slab);
        g->state = ended ? IDLE : DROPPED;
    }
    while (wait && a->reading) mci_ahead_arrived(a, mci_io_next(a->e->io, true));
}
