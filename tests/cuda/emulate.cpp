/* emulate.cpp - the CUDA runtime without CUDA: memory with edges, streams that put everything off,
 * errors on demand. One lock around all of it; no C++ library, so that C links it. */
#include "emulate.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "control.h"

enum { DEVICES = 8, ALLOCATIONS = 256, STREAMS = 64, PAGE = 64 << 10, VERSION = 13000, LATE = 3 };
enum { NAN_EDGE = 1 << 20 /* of a large allocation: the rest stays untouched, and zero */ };

struct allocation {
    char *map, *p;
    size_t mapped, bytes;
    int device; /* -1: pinned memory */
};

enum what { COPY, KERNEL, EVENT };
struct op {
    op *next;
    what is;
    void *to;
    const void *from;
    size_t bytes;
    emu_kernel call;
    const void *kernel;
    dim3 grid, block;
    cudaEvent_t event;
};
struct emu_stream {
    op *first, **end;
    int device;
};
struct emu_event {
    cudaStream_t stream; /* the last one that it was recorded in; NULL: never */
    int device, pending, late;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static allocation table[ALLOCATIONS];
static cudaStream_t streams[STREAMS];
static int devices = 2, driver = VERSION, lost;
static int64_t memory = 1 << 30, used[DEVICES], calls, live, fail_at;
static cudaError_t fail_with;
static uint64_t seed = 1;
static thread_local int current;

void emu_die(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "emulated GPU: ");
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "\n");
    abort();
}

unsigned emu_random(unsigned below) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((seed >> 33) % below);
}

/* ---- control --------------------------------------------------------------------------------- */

struct hold {
    hold() { pthread_mutex_lock(&lock); }
    ~hold() { pthread_mutex_unlock(&lock); }
};

void emu_devices(int n, int version) {
    hold h;
    devices = n;
    driver = version;
}
void emu_memory(int64_t bytes) {
    hold h;
    memory = bytes;
}
void emu_fail(int64_t nth, int error) {
    hold h;
    fail_at = nth ? calls + nth : 0;
    fail_with = (cudaError_t)error;
}
void emu_lose(int yes) {
    hold h;
    lost = yes;
}
int64_t emu_calls() {
    hold h;
    return calls;
}
int64_t emu_live() {
    hold h;
    return live;
}
void emu_seed(uint64_t s) {
    hold h;
    seed = s;
}

/* Counts a call; what it fails with, if it does. */
static cudaError_t called() {
    calls++;
    if (lost) return cudaErrorLaunchFailure;
    return calls == fail_at ? fail_with : cudaSuccess;
}

#define ENTER                                                                                      \
    hold h;                                                                                        \
    const cudaError_t injected = called();                                                         \
    if (injected) return injected

/* ---- errors and devices ---------------------------------------------------------------------- */

static const struct {
    cudaError_t e;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "driver too old for the runtime"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
};

const char *cudaGetErrorName(cudaError_t e) {
    for (const auto &i : errors)
        if (i.e == e) return i.name;
    return "an error";
}
const char *cudaGetErrorString(cudaError_t e) {
    for (const auto &i : errors)
        if (i.e == e) return i.text;
    return "unknown";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaRuntimeGetVersion(int *v) {
    ENTER;
    *v = VERSION;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v) {
    ENTER;
    *v = driver;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *n) {
    ENTER;
    *n = 0;
    if (driver < VERSION) return cudaErrorInsufficientDriver;
    if (!devices) return cudaErrorNoDevice;
    *n = devices;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    ENTER;
    if (device < 0 || device >= devices) return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int device) {
    ENTER;
    if (device < 0 || device >= devices) return cudaErrorInvalidDevice;
    *v = a == cudaDevAttrComputeCapabilityMajor   ? 8
         : a == cudaDevAttrComputeCapabilityMinor ? 9
         : a == cudaDevAttrL2CacheSize            ? 1 << 16
                                                  : 3;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    ENTER;
    if (device < 0 || device >= devices) return cudaErrorInvalidDevice;
    snprintf(p->name, sizeof p->name, "emulated GPU %d", device);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    ENTER;
    *left = (size_t)(memory - used[current]);
    *total = (size_t)memory;
    return cudaSuccess;
}
cudaError_t emu_occupancy(int *blocks) {
    ENTER;
    *blocks = 2;
    return cudaSuccess;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* | page nobody may touch | ... p: bytes, up to 255 more | page nobody may touch | */
static cudaError_t allocate(void **p, size_t bytes, int device) {
    *p = NULL;
    if (!bytes) return cudaErrorInvalidValue;
    const size_t all = (bytes + 255) / 256 * 256;
    if (device >= 0 && used[device] + (int64_t)all > memory) return cudaErrorMemoryAllocation;
    for (allocation &a : table) {
        if (a.p) continue;
        a.mapped = (all + PAGE - 1) / PAGE * PAGE + 2 * PAGE;
        a.map = (char *)mmap(NULL, a.mapped, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (a.map == MAP_FAILED) return cudaErrorMemoryAllocation;
        if (mprotect(a.map, PAGE, PROT_NONE) || mprotect(a.map + a.mapped - PAGE, PAGE, PROT_NONE))
            emu_die("mprotect failed");
        a.p = a.map + a.mapped - PAGE - all;
        a.bytes = bytes;
        a.device = device;
        const size_t edge = all < 2 * NAN_EDGE ? all : (size_t)NAN_EDGE;
        memset(a.p, 0xff, edge);
        memset(a.p + all - edge, 0xff, edge);
        if (device >= 0) used[device] += (int64_t)all;
        live++;
        *p = a.p;
        return cudaSuccess;
    }
    return cudaErrorMemoryAllocation;
}

static void drain(cudaStream_t s, cudaEvent_t until);

static cudaError_t release(void *p, bool pinned) {
    for (allocation &a : table) {
        if (a.p != p || (a.device < 0) != pinned) continue;
        for (cudaStream_t s : streams)
            if (s) drain(s, NULL); /* who frees waits */
        for (size_t i = a.bytes; i < (a.bytes + 255) / 256 * 256; i++)
            if ((unsigned char)a.p[i] != 0xff)
                emu_die("%zu bytes %s: written behind the end", a.bytes,
                        pinned ? "of pinned memory" : "of the device");
        if (!pinned) used[a.device] -= (int64_t)((a.bytes + 255) / 256 * 256);
        munmap(a.map, a.mapped);
        a = {};
        live--;
        return cudaSuccess;
    }
    return cudaErrorInvalidValue;
}

/* What lies in p .. p + bytes: a device, -1 for pinned memory, -2 for anything else. */
static int owner(const void *p, size_t bytes) {
    for (const allocation &a : table)
        if (a.p && (const char *)p >= a.p && (const char *)p + bytes <= a.p + a.bytes)
            return a.device;
    return -2;
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
    ENTER;
    return allocate(p, bytes, current);
}
cudaError_t cudaMallocHost(void **p, size_t bytes) {
    ENTER;
    return allocate(p, bytes, -1);
}
/* A call that fails releases all the same: what a test counts as a leak was never given back. */
static cudaError_t after(cudaError_t injected, cudaError_t e) { return injected ? injected : e; }
cudaError_t cudaFree(void *p) {
    hold h;
    const cudaError_t e = called();
    return after(e, release(p, false));
}
cudaError_t cudaFreeHost(void *p) {
    hold h;
    const cudaError_t e = called();
    return after(e, release(p, true));
}

/* ---- streams --------------------------------------------------------------------------------- */

/* Does what s has put off, up to the record of an event; NULL: all. */
static void drain(cudaStream_t s, cudaEvent_t until) {
    for (bool done = false; s->first && !done;) {
        op *o = s->first;
        s->first = o->next;
        if (!s->first) s->end = &s->first;
        if (o->is == COPY && !lost) memcpy(o->to, o->from, o->bytes);
        if (o->is == KERNEL && !lost) emu_run(o->call, o->kernel, o + 1, o->grid, o->block);
        if (o->is == EVENT) done = --o->event->pending == 0 && o->event == until;
        free(o);
    }
}

static op *add(cudaStream_t s, what is, size_t more) {
    op *o = (op *)calloc(1, sizeof *o + more);
    if (!o) emu_die("out of memory");
    o->is = is;
    *s->end = o;
    s->end = &o->next;
    return o;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    ENTER;
    *out = NULL;
    if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;
    for (cudaStream_t &s : streams) {
        if (s) continue;
        s = (cudaStream_t)calloc(1, sizeof *s);
        if (!s) return cudaErrorMemoryAllocation;
        s->end = &s->first;
        s->device = current;
        live++;
        *out = s;
        return cudaSuccess;
    }
    return cudaErrorMemoryAllocation;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    ENTER;
    drain(s, NULL);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    hold h;
    const cudaError_t e = called();
    drain(s, NULL);
    for (cudaStream_t &i : streams)
        if (i == s) i = NULL;
    free(s);
    live--;
    return e;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t s) {
    ENTER;
    if (s->device != current) return cudaErrorInvalidResourceHandle;
    if (owner(to, bytes) != (kind == cudaMemcpyDeviceToHost ? -1 : current) ||
        owner(from, bytes) != (kind == cudaMemcpyHostToDevice ? -1 : current))
        return cudaErrorInvalidValue;
    op *o = add(s, COPY, 0);
    o->to = to;
    o->from = from;
    o->bytes = bytes;
    return cudaSuccess;
}

cudaError_t emu_launch(emu_kernel call, const void *kernel, const void *arg, size_t bytes,
                       dim3 grid, dim3 block, cudaStream_t s) {
    ENTER;
    if (s->device != current) return cudaErrorInvalidResourceHandle;
    if (!grid.x || !block.x) return cudaErrorInvalidValue;
    op *o = add(s, KERNEL, bytes);
    memcpy(o + 1, arg, bytes);
    o->call = call;
    o->kernel = kernel;
    o->grid = grid;
    o->block = block;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    ENTER;
    *e = (cudaEvent_t)calloc(1, sizeof **e);
    if (!*e) return cudaErrorMemoryAllocation;
    (*e)->device = current;
    live++;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    ENTER;
    if (s->device != current || e->device != current) return cudaErrorInvalidResourceHandle;
    e->stream = s;
    e->late = (int)emu_random(LATE + 1);
    e->pending++;
    add(s, EVENT, 0)->event = e;
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    ENTER;
    if (e->device != current) return cudaErrorInvalidResourceHandle;
    if (!e->pending) return cudaSuccess;
    if (e->late-- > 0) return cudaErrorNotReady;
    drain(e->stream, e);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    ENTER;
    if (e->device != current) return cudaErrorInvalidResourceHandle;
    if (e->pending) drain(e->stream, e);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    hold h;
    const cudaError_t injected = called();
    if (e->pending) drain(e->stream, e);
    free(e);
    live--;
    return injected;
}
