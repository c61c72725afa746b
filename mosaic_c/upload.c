/* upload.c - the thread that copies experts to VRAM. */
#include "upload.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>

/* ASKED and COPYING belong to the thread, the others to the caller. */
enum { IDLE, ASKED, COPYING, OVER };

enum { POLL_NS = 100 * 1000 }; /* it looks at copies under way so often */

struct mci_uploads {
    const mci_gpu_api *api;
    mci_gpu *gpu;
    pthread_t thread;
    bool started, stop;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    int state[MCI_GPU_STAGES];
    mci_upload up[MCI_GPU_STAGES];
};

/* One stage a step further, its new state; the lock is not held. */
static int advance(mci_uploads *u, int i, int state) {
    mci_upload *up = &u->up[i];
    int rc;
    if (state == ASKED) {
        if (!mci_slot_fill(up->shape, up->mat, u->api->stage(u->gpu, i))) {
            up->result = MCI_UPLOAD_REFUSED;
            return OVER;
        }
        rc = u->api->upload(u->gpu, i, up->slot, up->shape->bytes, &up->error);
        if (rc >= 0) return COPYING;
    } else {
        rc = u->api->uploaded(u->gpu, i, &up->error);
        if (rc == 0) return COPYING;
    }
    up->result = rc < 0 ? MCI_UPLOAD_FAILED : MCI_UPLOAD_DONE;
    return OVER;
}

static void nap(mci_uploads *u) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_nsec += POLL_NS;
    at.tv_sec += at.tv_nsec / 1000000000;
    at.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&u->wake, &u->lock, &at);
}

/* Fills one stage while the other is under way. */
static void *work(void *arg) {
    mci_uploads *u = arg;
    const mc_error *failed = NULL;
    mc_error reason;
    mci_fp_enter();
    pthread_mutex_lock(&u->lock);
    for (;;) {
        bool busy = false, moved = false;
        for (int i = 0; i < MCI_GPU_STAGES; i++) {
            int state = u->state[i];
            if (state != ASKED && state != COPYING) continue;
            pthread_mutex_unlock(&u->lock);
            if (failed) {
                u->up[i].result = MCI_UPLOAD_FAILED;
                u->up[i].error = *failed;
                state = OVER;
            } else {
                state = advance(u, i, state);
            }
            if (state == OVER && u->up[i].result == MCI_UPLOAD_FAILED && !failed) {
                reason = u->up[i].error;
                failed = &reason;
            }
            pthread_mutex_lock(&u->lock);
            moved |= state != u->state[i];
            busy |= state == COPYING;
            u->state[i] = state;
        }
        if (moved) {
            pthread_cond_broadcast(&u->done);
            continue;
        }
        if (busy) {
            nap(u);
            continue;
        }
        if (u->stop) break;
        pthread_cond_wait(&u->wake, &u->lock);
    }
    pthread_mutex_unlock(&u->lock);
    return NULL;
}

int mci_uploads_open(const mci_gpu_api *api, mci_gpu *gpu, mci_uploads **out, mc_error *err) {
    pthread_condattr_t attr;
    sigset_t all, old;
    mci_uploads *u = calloc(1, sizeof *u);
    *out = NULL;
    if (!u) return mci_fail(err, MC_ENOMEM, 0, "GPU tier: out of memory");
    u->api = api;
    u->gpu = gpu;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&u->lock, NULL);
    pthread_cond_init(&u->wake, &attr);
    pthread_cond_init(&u->done, NULL);
    pthread_condattr_destroy(&attr);
    sigfillset(&all); /* Ctrl-C is the program's */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int sys = pthread_create(&u->thread, NULL, work, u);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    u->started = sys == 0;
    if (sys) {
        mci_uploads_close(u);
        return mci_fail(err, MC_ESYS, sys, "GPU tier: cannot start its thread: %s", strerror(sys));
    }
    *out = u;
    return MC_OK;
}

void mci_uploads_stop(mci_uploads *u) {
    if (!u || !u->started) return;
    pthread_mutex_lock(&u->lock);
    u->stop = true;
    pthread_cond_signal(&u->wake);
    pthread_mutex_unlock(&u->lock);
    pthread_join(u->thread, NULL);
    u->started = false;
}

void mci_uploads_close(mci_uploads *u) {
    if (!u) return;
    mci_uploads_stop(u);
    pthread_mutex_destroy(&u->lock);
    pthread_cond_destroy(&u->wake);
    pthread_cond_destroy(&u->done);
    free(u);
}

/* The first stage in a state, or -1. */
static int find(mci_uploads *u, int state) {
    int found = -1;
    pthread_mutex_lock(&u->lock);
    for (int i = 0; i < MCI_GPU_STAGES && found < 0; i++)
        if (u->state[i] == state) found = i;
    pthread_mutex_unlock(&u->lock);
    return found;
}

static void set(mci_uploads *u, int i, int state) {
    pthread_mutex_lock(&u->lock);
    u->state[i] = state;
    pthread_cond_signal(&u->wake);
    pthread_mutex_unlock(&u->lock);
}

bool mci_uploads_room(mci_uploads *u) { return find(u, IDLE) >= 0; }

void mci_uploads_ask(mci_uploads *u, const mci_upload *what) {
    const int i = find(u, IDLE);
    u->up[i] = *what;
    set(u, i, ASKED);
}

bool mci_uploads_take(mci_uploads *u, mci_upload *out) {
    const int i = u ? find(u, OVER) : -1;
    if (i < 0) return false;
    *out = u->up[i];
    set(u, i, IDLE);
    return true;
}

void mci_uploads_wait(mci_uploads *u) {
    pthread_mutex_lock(&u->lock);
    for (int i = 0; i < MCI_GPU_STAGES; i++)
        while (u->state[i] == ASKED || u->state[i] == COPYING)
            pthread_cond_wait(&u->done, &u->lock);
    pthread_mutex_unlock(&u->lock);
}
