/* tier.c - experts in VRAM: their slots, the thread that brings them, the products of a line. */
#include "tier.h"

#include <stdio.h>
#include <stdlib.h>

#include "hot.h"
#include "upload.h"

enum {
    NONE = -1,
    BATCH = 128 /* tokens of a call: more read weights less often and pin more memory */
};

/* of an item; NEVER: a weight that the kernels do not multiply by */
enum { ABSENT, LOADING, HELD, NEVER };

struct mci_tier {
    mc_engine *e;
    const mci_gpu_api *api;
    mci_gpu *gpu; /* NULL: given up */
    mci_slabs *slabs;
    mci_hot *hot;
    int32_t n_layer, n_expert;
    mci_gpu_room room;
    int64_t host; /* pinned memory that is counted */

    void *tables; /* one allocation: */
    int64_t table_bytes;
    mci_slot_shape *shape; /* (n_layer); bytes 0: not for the GPU */
    int32_t *slot_of;      /* (n_layer * n_expert) or NONE */
    int32_t *free;         /* (slots) stack */
    int64_t n_free;
    uint8_t *state; /* (n_layer * n_expert) */
    bool *held;     /* (n_layer * n_expert) state is HELD */

    /* the line */
    int32_t layer, n_hot;
    mci_products line;
    int64_t next_tok; /* of the line, not yet begun */
    bool running;
    int32_t n_row;
    mci_gpu_item *item; /* (n_expert) */
    int32_t *at;        /* (n_expert) pairs begun, of each hot expert */
    int32_t *token;     /* (BATCH * top_k) of each row of the call, */
    int32_t *pair;      /* and its pair */

    mci_uploads *uploads;
};

_Static_assert((int)MC_TIER_SLABS == (int)MCI_GPU_STAGES, "a slab for each stage");

/* ---- the build and the device ---------------------------------------------------------------- */

const char *mc_engine_gpu(void) {
    const char *why = NULL;
    return mci_gpu_get(&why) ? NULL : why;
}

int mc_gpu_probe(int32_t device, mc_gpu_info *out, mc_error *err) {
    const char *why = NULL;
    const mci_gpu_api *api = mci_gpu_get(&why);
    memset(out, 0, sizeof *out);
    return api ? api->probe(device, out, err) : mci_fail(err, MC_ESYS, 0, "%s", why);
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static bool same_shape(const mci_slot_shape *a, const mci_slot_shape *b) {
    return a->bytes == b->bytes && a->dtype == b->dtype && a->scale_dtype == b->scale_dtype;
}

int64_t mc_tier_slot(const mc_expert *experts, int64_t n, mc_error *err) {
    mci_slot_shape first = {0}, s;
    for (int64_t i = 0; i < n; i++) {
        const mc_tensor *const t[3] = {&experts[i].gate, &experts[i].up, &experts[i].down};
        mci_mat m[3];
        for (int k = 0; k < 3; k++) {
            int64_t bytes, scale;
            int rc = mci_format_check(t[k], "expert", &bytes, &scale, err);
            if (rc < 0) return rc;
            m[k] = mci_mat_of(t[k], NULL, NULL);
        }
        if (!mci_slot_of(m, &s) || (i && !same_shape(&s, &first))) return 0;
        first = s;
    }
    return first.bytes;
}

static mci_gpu_room room_for(int32_t hidden, int32_t width, int32_t top_k, int64_t max_tok,
                             int64_t slot_bytes) {
    const int32_t tokens = (int32_t)MCI_MIN(max_tok, BATCH);
    return (mci_gpu_room){.slot_bytes = slot_bytes,
                          .tokens = tokens,
                          .rows = tokens * top_k,
                          .items = tokens * top_k,
                          .hidden = hidden,
                          /* of MXFP4, the widest of all formats */
                          .vector_in = mci_slot_vector(MC_F4E2M1, hidden),
                          .vector_act = mci_slot_vector(MC_F4E2M1, width)};
}

int64_t mc_tier_work(int32_t hidden, int32_t width, int32_t top_k, int64_t max_tok,
                     int64_t slot_bytes, int64_t *host, mc_error *err) {
    const char *why = NULL;
    const mci_gpu_api *api = mci_gpu_get(&why);
    *host = 0;
    if (!api) return mci_fail(err, MC_ESYS, 0, "%s", why);
    if (hidden < 1 || width < 1 || top_k < 1 || max_tok < 1 || slot_bytes < 0 ||
        top_k > INT32_MAX / BATCH || hidden > 1 << 20 || width > 1 << 20)
        return mci_fail(err, MC_EINVAL, 0, "GPU tier: impossible sizes");
    const mci_gpu_room r = room_for(hidden, width, top_k, max_tok, slot_bytes);
    *host = api->host(&r);
    return api->vram(&r);
}

/* ---- open, close ----------------------------------------------------------------------------- */

/* All tables in one block, widest elements first so that each is aligned. */
static int alloc_tables(mci_tier *t, mc_error *err) {
    const int64_t items = (int64_t)t->n_layer * t->n_expert, L = t->n_layer, E = t->n_expert;
    const int64_t rows = t->room.rows, slots = t->room.slots;
    t->table_bytes = L * (int64_t)sizeof *t->shape + E * (int64_t)(sizeof *t->item + 4) +
                     (items + slots + 2 * rows) * 4 + 2 * items;
    int rc = mci_alloc(&t->e->mem, MC_MEM_META, t->table_bytes, "tier table", &t->tables, err);
    if (rc < 0) return rc;
    t->shape = t->tables;
    t->item = (mci_gpu_item *)(t->shape + L);
    t->at = (int32_t *)(t->item + E);
    t->slot_of = t->at + E;
    t->free = t->slot_of + items;
    t->token = t->free + slots;
    t->pair = t->token + rows;
    t->state = (uint8_t *)(t->pair + rows);
    t->held = (bool *)(t->state + items);
    for (int64_t i = 0; i < items; i++) t->slot_of[i] = NONE;
    for (int64_t i = slots; i-- > 0;) t->free[t->n_free++] = (int32_t)i;
    return MC_OK;
}

/* The shape of a layer's experts, bytes 0 where the GPU does not multiply all of them. */
static mci_slot_shape layer_shape(const mci_experts *x) {
    mci_slot_shape first = {0}, s;
    for (int32_t i = 0; i < x->n; i++) {
        mci_mat m[3];
        for (int k = 0; k < 3; k++) m[k] = mci_experts_format(x, i, k);
        if (!mci_slot_of(m, &s) || (i && !same_shape(&s, &first))) return (mci_slot_shape){0};
        first = s;
    }
    return first;
}

/* Slots that o->bytes hold beside the work space. */
static int plan(mci_tier *t, const mc_tier_opts *o, const mci_experts *x, int32_t top_k,
                int64_t max_tok, mc_error *err) {
    int64_t slot = 0, experts = 0;
    int32_t hidden = 1, width = 1;
    for (int32_t i = 0; i < t->n_layer; i++) {
        const mci_slot_shape s = layer_shape(&x[i]);
        slot = MCI_MAX(slot, s.bytes);
        experts += s.bytes ? x[i].n : 0;
        hidden = MCI_MAX(hidden, x[i].hidden);
        width = MCI_MAX(width, x[i].width);
    }
    if (!experts)
        return mci_fail(err, MC_EINVAL, 0,
                        "GPU tier: it multiplies experts of FP8 in 128x128 blocks, MXFP4 and int4 "
                        "in groups of 64, and these are of another format");
    t->room = room_for(hidden, width, top_k, max_tok, slot);
    const int64_t work = t->api->vram(&t->room), slots = (o->bytes - work) / slot;
    if (o->bytes < work + slot)
        return mci_fail(err, MC_EBUDGET, 0,
                        "GPU tier: %lld bytes of VRAM given, one expert and the work space take "
                        "%lld",
                        (long long)o->bytes, (long long)(work + slot));
    t->room.slots = MCI_MIN(slots, experts);
    t->e->stats.gpu_vram = work + t->room.slots * slot;
    return MC_OK;
}

int mci_tier_open(mc_engine *e, const mc_tier_opts *o, const mci_experts *x, int32_t n_layer,
                  int32_t top_k, int64_t max_tok, mci_slabs *slabs, mci_tier **out, mc_error *err) {
    const char *why = NULL;
    const mci_gpu_api *api = mci_gpu_get(&why);
    *out = NULL;
    if (!api) return mci_fail(err, MC_ESYS, 0, "%s", why);
    mci_tier *t = calloc(1, sizeof *t);
    if (!t) return mci_fail(err, MC_ENOMEM, 0, "GPU tier: out of memory");
    t->e = e;
    t->api = api;
    t->slabs = slabs;
    t->n_layer = n_layer;
    t->n_expert = x->n;
    int rc = plan(t, o, x, top_k, max_tok, err);
    if (rc == MC_OK) rc = alloc_tables(t, err);
    if (rc == MC_OK)
        rc = mci_hot_create(&e->mem, n_layer, x->n, t->room.slots, o->after, o->window, &t->hot,
                            err);
    for (int32_t i = 0; rc == MC_OK && i < n_layer; i++) t->shape[i] = layer_shape(&x[i]);
    if (rc == MC_OK) {
        const int64_t host = api->host(&t->room);
        rc = mci_recount(&e->mem, MC_MEM_SCRATCH, host, "pinned memory of the GPU tier", err);
        if (rc == MC_OK) t->host = host;
    }
    if (rc == MC_OK) rc = api->open(o->device, &t->room, &t->gpu, err);
    if (rc == MC_OK) rc = mci_uploads_open(api, t->gpu, &t->uploads, err);
    if (rc < 0) {
        mci_tier_close(t);
        return rc;
    }
    mc_stats *st = &e->stats;
    st->gpu_slots = t->room.slots;
    st->gpu_slot_bytes = t->room.slot_bytes;
    st->gpu_host = t->host;
    *out = t;
    return MC_OK;
}

/* Gives the device back; from now on all experts are absent. */
static void shut(mci_tier *t) {
    mc_stats *st = &t->e->stats;
    mci_upload u;
    mci_uploads_stop(t->uploads);
    while (mci_uploads_take(t->uploads, &u)) mci_slabs_let(t->slabs, u.slab);
    mci_uploads_close(t->uploads);
    t->uploads = NULL;
    t->api->close(t->gpu);
    t->gpu = NULL;
    t->running = false;
    if (t->host) mci_recount(&t->e->mem, MC_MEM_SCRATCH, -t->host, "", NULL);
    t->host = 0;
    st->gpu_slots = st->gpu_held = st->gpu_vram = st->gpu_host = 0;
}

/* The end of the tier, for this reason. */
static void give_up(mci_tier *t, const mc_error *why) {
    snprintf(t->e->stats.gpu_note, sizeof t->e->stats.gpu_note,
             "the GPU tier was given up, all experts run on the CPU: %.180s", why->message);
    shut(t);
}

void mci_tier_close(mci_tier *t) {
    if (!t) return;
    shut(t);
    mci_hot_free(t->hot);
    mci_release(&t->e->mem, MC_MEM_META, t->tables, t->table_bytes);
    free(t);
}

/* ---- lines ----------------------------------------------------------------------------------- */

/* Takes over what the thread has finished. */
static void collect(mci_tier *t) {
    mc_stats *st = &t->e->stats;
    mc_error failed = {0};
    for (mci_upload u; t->gpu && mci_uploads_take(t->uploads, &u);) {
        mci_slabs_let(t->slabs, u.slab);
        if (u.result == MCI_UPLOAD_DONE) {
            t->state[u.item] = HELD;
            t->held[u.item] = true;
            st->gpu_promotions++;
            st->gpu_held++;
            st->gpu_bytes_up += u.shape->bytes;
            continue;
        }
        t->state[u.item] = u.result == MCI_UPLOAD_REFUSED ? NEVER : ABSENT;
        mci_hot_drop(t->hot, u.item);
        t->free[t->n_free++] = u.slot;
        t->slot_of[u.item] = NONE;
        if (u.result == MCI_UPLOAD_FAILED && !failed.code) failed = u.error;
    }
    if (failed.code) give_up(t, &failed);
}

void mci_tier_settle(mci_tier *t) {
    if (!t->gpu) return;
    mci_uploads_wait(t->uploads);
    collect(t);
}

int32_t mci_tier_split(mci_tier *t, int32_t layer, int32_t *ids, int32_t n) {
    int32_t cold = 0, hot = 0;
    if (t->gpu) collect(t);
    t->layer = layer;
    t->n_hot = 0;
    if (!t->gpu || !t->shape[layer].bytes) return n;
    const bool *held = t->held + (int64_t)layer * t->n_expert;
    mci_hot_line(t->hot, layer, ids, n);
    for (int32_t i = 0; i < n; i++) {
        if (held[ids[i]])
            t->at[hot++] = ids[i];
        else
            ids[cold++] = ids[i];
    }
    memcpy(ids + cold, t->at, (size_t)hot * sizeof *ids);
    t->n_hot = hot;
    t->e->stats.gpu_hits += hot;
    return cold;
}

bool mci_tier_holds(const mci_tier *t, int32_t layer, int32_t expert) {
    return t->gpu && t->held[(int64_t)layer * t->n_expert + expert];
}

const bool *mci_tier_line(const mci_tier *t, const int32_t **ids, int32_t *n) {
    *ids = t->at;
    *n = t->n_hot;
    return t->gpu ? t->held + (int64_t)t->layer * t->n_expert : NULL;
}

/* Begins the rows of the next BATCH tokens that have any; 0: none is left. */
static int next_batch(mci_tier *t, mc_error *err) {
    const mci_products *l = &t->line;
    const mci_slot_shape *s = &t->shape[t->layer];
    const int64_t bytes = mci_slot_vector(s->dtype, s->hidden);
    int32_t place[BATCH], n_tok = 0, n_item = 0;
    for (t->n_row = 0; !t->n_row && t->next_tok < l->n_tok; t->next_tok += t->room.tokens) {
        const int64_t first = t->next_tok, end = MCI_MIN(first + t->room.tokens, l->n_tok);
        for (int i = 0; i < BATCH; i++) place[i] = NONE;
        for (int32_t i = 0; i < l->n; i++) {
            mci_gpu_item it = {.slot = t->slot_of[(int64_t)t->layer * t->n_expert + l->ids[i]],
                               .first = t->n_row};
            for (; t->at[i] < l->start[i + 1] && l->pairs[t->at[i]] / l->top_k < end; t->at[i]++) {
                const int64_t tok = l->pairs[t->at[i]] / l->top_k;
                int32_t *p = &place[tok - first];
                if (*p == NONE) {
                    *p = n_tok++;
                    mci_slot_input(t->e->ops, s, l->x + tok * s->hidden, s->hidden,
                                   (uint8_t *)t->api->input(t->gpu) + *p * bytes);
                }
                t->pair[t->n_row] = l->pairs[t->at[i]];
                t->token[t->n_row++] = *p;
            }
            it.n = t->n_row - it.first;
            if (it.n) t->item[n_item++] = it;
        }
    }
    if (!t->n_row) return 0;
    t->e->stats.gpu_bytes_io += n_tok * bytes + (int64_t)t->n_row * s->hidden * 4;
    int rc = t->api->run(t->gpu, s, t->item, n_item, t->token, t->n_row, n_tok, err);
    return rc < 0 ? rc : 1;
}

/* The next batch, or the end of the tier. */
static int begin_batch(mci_tier *t, mc_error *err) {
    mc_error own;
    int rc = next_batch(t, &own);
    t->running = rc > 0;
    if (rc < 0) {
        if (err) *err = own;
        give_up(t, &own);
    }
    return rc;
}

int mci_tier_run(mci_tier *t, const mci_products *line, mc_error *err) {
    t->line = *line;
    t->next_tok = 0;
    for (int32_t i = 0; i < line->n; i++) t->at[i] = line->start[i];
    t->e->stats.gpu_rows += line->start[line->n] - line->start[0];
    int rc = begin_batch(t, err);
    return rc < 0 ? rc : MC_OK;
}

int mci_tier_step(mci_tier *t, bool wait, mc_error *err) {
    const int32_t hidden = t->shape[t->layer].hidden;
    while (t->running) {
        const float *rows;
        mc_error own;
        const double t0 = mci_now();
        int rc = t->api->ran(t->gpu, wait, &rows, &own);
        if (wait) t->e->stats.gpu_wait_s += mci_now() - t0;
        if (rc == 0) return 0;
        if (rc < 0) {
            if (err) *err = own;
            give_up(t, &own);
            return rc;
        }
        for (int32_t r = 0; r < t->n_row; r++)
            memcpy(t->line.out + (int64_t)t->pair[r] * hidden, rows + (int64_t)r * hidden,
                   (size_t)hidden * sizeof *rows);
        if ((rc = begin_batch(t, err)) < 0) return rc;
    }
    return 1;
}

/* Whether an expert may lose its slot: it is there, and not of the line being computed. */
static bool may_leave(const mci_tier *t, int64_t item) {
    if (t->state[item] != HELD) return false;
    if (!t->running || item / t->n_expert != t->layer) return true;
    for (int32_t i = 0; i < t->line.n; i++)
        if (t->line.ids[i] == item % t->n_expert) return false;
    return true;
}

bool mci_tier_wants(const mci_tier *t, int32_t expert) {
    const int64_t item = (int64_t)t->layer * t->n_expert + expert;
    int64_t victim;
    return t->gpu && t->shape[t->layer].bytes && t->state[item] == ABSENT &&
           mci_hot_wants(t->hot, item, &victim) && mci_uploads_room(t->uploads);
}

void mci_tier_offer(mci_tier *t, int32_t expert, const mci_mat m[3], int32_t slab) {
    const int64_t item = (int64_t)t->layer * t->n_expert + expert;
    int64_t victim;
    if (!mci_hot_wants(t->hot, item, &victim)) return;
    if (victim >= 0) {
        if (!may_leave(t, victim)) return;
        mci_hot_drop(t->hot, victim);
        t->free[t->n_free++] = t->slot_of[victim];
        t->slot_of[victim] = NONE;
        t->state[victim] = ABSENT;
        t->held[victim] = false;
        t->e->stats.gpu_held--;
        t->e->stats.gpu_evictions++;
    }
    mci_hot_put(t->hot, item);
    t->state[item] = LOADING;
    t->slot_of[item] = t->free[--t->n_free];
    mci_slabs_hold(t->slabs, slab);
    mci_uploads_ask(t->uploads, &(mci_upload){.item = item,
                                              .slot = t->slot_of[item],
                                              .slab = slab,
                                              .shape = &t->shape[t->layer],
                                              .mat = {m[0], m[1], m[2]}});
}

void mci_tier_end(mci_tier *t) {
    const float *rows;
    mc_error err;
    if (!t->running) return;
    t->running = false;
    if (t->api->ran(t->gpu, true, &rows, &err) < 0) give_up(t, &err);
}
