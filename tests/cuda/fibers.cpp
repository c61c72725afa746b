/* fibers.cpp - runs the threads of a kernel, each on a stack of its own, one at a time.
 *
 * A thread runs until it waits at a barrier, a shuffle or in a sleep, or ends; then the next one of
 * its block, in an order drawn anew for each sweep over the block; after a sweep any block may be
 * next. How many blocks exist at once is drawn for each launch, from one up. */
#undef _FORTIFY_SOURCE /* its longjmp takes another stack for a mistake */
#include <setjmp.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "emulate.h"

enum { THREADS = 256, WARP = 32, BLOCKS = 4, STACK = 64 << 10, SHARED = 16 << 10 };
enum { PATIENCE = 200000 /* sweeps in which every thread that may run sleeps */ };

enum state { READY, BARRIER, SHUFFLE, DONE };

struct fiber {
    jmp_buf at;
    bool entered;
    state is;
    int line;
    unsigned index;
};
struct warp {
    unsigned value[WARP], result[WARP];
    int arrived;
};
struct block {
    fiber thread[THREADS];
    warp warps[THREADS / WARP];
    int arrived, left;
    unsigned index;
    char shared[SHARED];
};

dim3 threadIdx, blockIdx, blockDim, gridDim;
extern char __start_emu_shared[], __stop_emu_shared[];

static block blocks[BLOCKS];
static char *stacks;
static block *now; /* whose turn it is */
static fiber *self;
static jmp_buf scheduler;
static bool active; /* somebody did more than sleep */
static struct {
    emu_kernel call;
    const void *kernel, *arg;
} job;

int emu_lane() { return (int)(self->index % WARP); }

static void leave() {
    fiber *f = self;
    if (!_setjmp(f->at)) _longjmp(scheduler, 1);
}

static void body() {
    for (;;) { /* a stack serves one launch after the other */
        job.call(job.kernel, job.arg);
        self->is = DONE;
        now->left--;
        active = true;
        leave();
    }
}

static void enter(fiber *f) {
    self = f;
    threadIdx = dim3(f->index);
    blockIdx = dim3(now->index);
    if (_setjmp(scheduler)) return;
    if (f->entered) _longjmp(f->at, 1);
    f->entered = true;
    ucontext_t c;
    getcontext(&c);
    c.uc_stack.ss_sp = stacks + STACK * ((now - blocks) * THREADS + f->index);
    c.uc_stack.ss_size = STACK;
    c.uc_link = NULL;
    makecontext(&c, body, 0);
    setcontext(&c);
}

void __syncthreads(int line) {
    self->is = BARRIER;
    self->line = line;
    active = true;
    if (++now->arrived == (int)blockDim.x) {
        now->arrived = 0;
        for (unsigned i = 0; i < blockDim.x; i++) {
            if (now->thread[i].line != line)
                emu_die("barrier: thread %u is at line %d, thread %u at %d", self->index, line, i,
                        now->thread[i].line);
            now->thread[i].is = READY;
        }
    }
    leave();
}

unsigned emu_shuffle(unsigned mask, unsigned bits, int src, int line) {
    warp *w = &now->warps[self->index / WARP];
    fiber *lanes = &now->thread[self->index / WARP * WARP];
    const int lane = emu_lane();
    if (mask != 0xffffffffu) emu_die("line %d: only full masks are emulated", line);
    self->line = line;
    self->is = SHUFFLE;
    active = true;
    w->value[lane] = bits;
    if (++w->arrived < WARP) {
        leave();
    } else {
        w->arrived = 0;
        memcpy(w->result, w->value, sizeof w->result);
        for (int i = 0; i < WARP; i++) {
            if (lanes[i].line != line)
                emu_die("shuffle: lane %d is at line %d, lane %d at %d", lane, line, i,
                        lanes[i].line);
            lanes[i].is = READY;
        }
    }
    return w->result[src >= 0 && src < WARP ? src : lane];
}

void __nanosleep(unsigned) { leave(); }

/* Others may come between what a thread wrote and its announcement, or right after that. */
void __threadfence() {
    active = true;
    if (emu_random(2)) leave();
}
int atomicAdd(int *p, int v) {
    const int old = *p;
    *p += v;
    active = true;
    if (emu_random(4) == 0) leave();
    return old;
}

/* ---- scheduler ------------------------------------------------------------------------------- */

static void start(block *b, unsigned index) {
    b->index = index;
    b->arrived = 0;
    b->left = (int)blockDim.x;
    memset(b->shared, 0xff, sizeof b->shared);
    for (unsigned i = 0; i < blockDim.x; i++) {
        b->thread[i].index = i;
        b->thread[i].is = READY;
    }
}

static void stuck(const block *b) {
    int n[4] = {0}, line[4] = {0};
    for (unsigned i = 0; i < blockDim.x; i++) {
        n[b->thread[i].is]++;
        line[b->thread[i].is] = b->thread[i].line;
    }
    emu_die("block %u: %d threads wait at the barrier of line %d, %d in the shuffle of line %d, "
            "and %d have returned",
            b->index, n[BARRIER], line[BARRIER], n[SHUFFLE], line[SHUFFLE], n[DONE]);
}

/* One turn for each thread of b that may run. */
static void sweep(block *b) {
    const size_t shared = (size_t)(__stop_emu_shared - __start_emu_shared);
    const unsigned step = emu_random(blockDim.x) | 1, from = emu_random(blockDim.x);
    bool any = false;
    now = b;
    memcpy(__start_emu_shared, b->shared, shared);
    for (unsigned i = 0; i < blockDim.x; i++) {
        fiber *f = &b->thread[(i * step + from) % blockDim.x];
        if (f->is != READY) continue;
        any = true;
        enter(f);
    }
    if (!any) stuck(b);
    memcpy(b->shared, __start_emu_shared, shared);
}

void emu_run(emu_kernel call, const void *kernel, const void *arg, dim3 grid, dim3 block) {
    if (!stacks)
        stacks = (char *)mmap(NULL, (size_t)STACK * THREADS * BLOCKS, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) emu_die("no memory for stacks");
    if (__stop_emu_shared - __start_emu_shared > SHARED) emu_die("too much shared memory");
    if (block.x > THREADS || block.x % WARP || (block.x & (block.x - 1)) ||
        block.y * block.z != 1 || grid.y * grid.z != 1)
        emu_die("a launch of this shape is not emulated");
    blockDim = block;
    gridDim = grid;
    job = {call, kernel, arg};
    struct block *runs[BLOCKS];
    unsigned next = 0, live = 0;
    int idle = 0;
    for (unsigned most = 1 + emu_random(BLOCKS); live < most && next < grid.x; live++) {
        runs[live] = &blocks[live];
        start(runs[live], next++);
    }
    while (live) {
        const unsigned i = emu_random(live);
        active = false;
        sweep(runs[i]);
        idle = active ? 0 : idle + 1;
        if (idle > PATIENCE) emu_die("endless wait: every thread that may run sleeps");
        if (runs[i]->left) continue;
        if (next < grid.x)
            start(runs[i], next++);
        else
            runs[i] = runs[--live];
    }
}
