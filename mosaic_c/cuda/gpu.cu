/* gpu.cu - the device layer with CUDA: memory, copies, the launch, and what went wrong. It knows
 * slots and rows of a call; tier.c decides what lies where.
 *
 * One call is one copy there, one kernel, one copy back. What is copied there, pinned and on the
 * device alike, grows from the activations downwards, so that it is one piece however small:
 *
 *   ... | ticket | chunks | token of each row | activations, token after token ...
 *
 * The zeros of ticket and chunks travel with it: nothing needs clearing. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expert.cuh"

enum { ALIGN = 256, OLDEST = 75 /* capability */ };
enum { FORMATS = 3, SIZES = 2 };

typedef void (*mci_kernel)(mci_call);

/* What the kernels rely on. */
static_assert(MCI_TILE == 2 * MCI_OCTETS, "a tile of down is two rows an octet");
static_assert(MCI_TILE == 64, "a tile of gate and up is a group of int4");
static_assert(MCI_TOKENS <= 8 && MCI_TOKENS <= MCI_THREADS / 32, "a lane, and a warp, a token");

static int32_t const formats[FORMATS] = {MC_F8E4M3, MC_F4E2M1, MC_INT4};
static mci_kernel const kernels[FORMATS][SIZES] = {
    {mci_experts<MC_F8E4M3, 1>, mci_experts<MC_F8E4M3, MCI_TOKENS>},
    {mci_experts<MC_F4E2M1, 1>, mci_experts<MC_F4E2M1, MCI_TOKENS>},
    {mci_experts<MC_INT4, 1>, mci_experts<MC_INT4, MCI_TOKENS>},
};

struct mci_gpu {
    int device;
    mci_gpu_room room;
    int grid[FORMATS][SIZES];      /* blocks that run at once */
    int64_t before;                /* bytes in front of the activations of a call */
    char *slots, *work, *in, *out; /* device; work: act */
    char *host_in, *host_out, *stage[MCI_GPU_STAGES];
    cudaStream_t compute, upload;
    cudaEvent_t ran, uploaded[MCI_GPU_STAGES];
};

/* ---- errors ---------------------------------------------------------------------------------- */

static int fail(mc_error *err, int code, const char *fmt, ...) {
    if (err) {
        va_list args;
        err->code = code;
        err->sys = 0;
        va_start(args, fmt);
        vsnprintf(err->message, sizeof err->message, fmt, args);
        va_end(args);
    }
    return code;
}

/* The failure e of what was being done. */
static int failed(mc_error *err, cudaError_t e, const char *doing) {
    (void)cudaGetLastError(); /* or the next launch would report it once more */
    return fail(err, e == cudaErrorMemoryAllocation ? MC_ENOMEM : MC_ESYS, "GPU: %s: %s (%s)",
                doing, cudaGetErrorName(e), cudaGetErrorString(e));
}

#define TRY(call, doing)                                                                           \
    do {                                                                                           \
        const cudaError_t e_ = (call);                                                             \
        if (e_ != cudaSuccess) return failed(err, e_, doing);                                      \
    } while (0)

/* ---- devices --------------------------------------------------------------------------------- */

static int no_device(mc_error *err, cudaError_t e, int driver, int runtime) {
    (void)cudaGetLastError();
    if (driver == 0)
        return fail(err, MC_ESYS,
                    "no NVIDIA driver here: install one for CUDA %d.%d or later, or "
                    "go without the GPU",
                    runtime / 1000, runtime % 1000 / 10);
    if (e == cudaErrorInsufficientDriver)
        return fail(err, MC_ESYS,
                    "the NVIDIA driver is of CUDA %d.%d and this build of %d.%d: "
                    "update the driver, or go without the GPU",
                    driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (e == cudaErrorNoDevice || e == cudaSuccess)
        return fail(err, MC_ESYS,
                    "no NVIDIA GPU here (or CUDA_VISIBLE_DEVICES hides it): go "
                    "without the GPU");
    return failed(err, e, "counting devices");
}

/* Makes the device this thread's, after finding that it is there and can run the kernels. */
static int choose(int32_t device, mc_gpu_info *out, mc_error *err) {
    int driver = 0, runtime = 0, n = 0, major = 0, minor = 0;
    TRY(cudaRuntimeGetVersion(&runtime), "asking for the version");
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    const cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n < 1) return no_device(err, e, driver, runtime);
    if (device < 0 || device >= n)
        return fail(err, MC_ERANGE, "no GPU %d: there %s %d, from 0", (int)device,
                    n == 1 ? "is" : "are", n);
    TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "asking for the capability");
    TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
        "asking for the capability");
    out->devices = n;
    out->capability = 10 * major + minor;
    out->driver = driver;
    out->runtime = runtime;
    if (out->capability < OLDEST)
        return fail(err, MC_ESYS,
                    "GPU %d has compute capability %d.%d and the kernels need %d.%d: "
                    "go without the GPU",
                    (int)device, major, minor, OLDEST / 10, OLDEST % 10);
    TRY(cudaSetDevice(device), "taking the device");
    return MC_OK;
}

static int probe(int32_t device, mc_gpu_info *out, mc_error *err) {
    memset(out, 0, sizeof *out);
    const int rc = choose(device, out, err);
    if (rc) return rc;
    cudaDeviceProp prop;
    size_t left = 0, total = 0;
    TRY(cudaGetDeviceProperties(&prop, device), "asking for the name");
    TRY(cudaMemGetInfo(&left, &total), "asking for free memory");
    snprintf(out->name, sizeof out->name, "%.79s", prop.name);
    out->free = (int64_t)left;
    out->total = (int64_t)total;
    return MC_OK;
}

/* ---- room ------------------------------------------------------------------------------------ */

static int64_t up(int64_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

/* The most chunks of a call: each full one has MCI_TOKENS rows, and each item one that is not. */
static int64_t most_chunks(const mci_gpu_room *r) {
    return (int64_t)r->items + r->rows / MCI_TOKENS;
}
static int64_t before(int64_t chunks, int64_t rows) {
    return up((int64_t)sizeof(mci_chunk) * (1 + chunks) + 4 * rows);
}
static int64_t in_bytes(const mci_gpu_room *r) {
    return before(most_chunks(r), r->rows) + up(r->tokens * r->vector_in);
}
static int64_t work_bytes(const mci_gpu_room *r) { return up(r->rows * r->vector_act); }
static int64_t out_bytes(const mci_gpu_room *r) { return up((int64_t)r->rows * r->hidden * 4); }

static int64_t vram(const mci_gpu_room *r) { return in_bytes(r) + work_bytes(r) + out_bytes(r); }
static int64_t host(const mci_gpu_room *r) {
    return MCI_GPU_STAGES * r->slot_bytes + in_bytes(r) + out_bytes(r);
}

/* ---- open and close -------------------------------------------------------------------------- */

static int allocate(mci_gpu *g, mc_error *err) {
    const mci_gpu_room *r = &g->room;
    const int64_t slots = r->slots * r->slot_bytes, want = slots + vram(r);
    size_t left = 0, total = 0;
    TRY(cudaMemGetInfo(&left, &total), "asking for free memory");
    if (want > (int64_t)left)
        return fail(err, MC_ENOMEM, "GPU %d: %.1f MiB of VRAM wanted, %.1f free", g->device,
                    (double)want / 0x1p20, (double)left / 0x1p20);
    TRY(cudaMalloc((void **)&g->slots, (size_t)slots), "taking VRAM for experts");
    TRY(cudaMalloc((void **)&g->in, (size_t)in_bytes(r)), "taking VRAM for activations");
    TRY(cudaMalloc((void **)&g->work, (size_t)work_bytes(r)), "taking VRAM for activations");
    TRY(cudaMalloc((void **)&g->out, (size_t)out_bytes(r)), "taking VRAM for results");
    TRY(cudaMallocHost((void **)&g->host_in, (size_t)in_bytes(r)), "pinning memory");
    TRY(cudaMallocHost((void **)&g->host_out, (size_t)out_bytes(r)), "pinning memory");
    for (int i = 0; i < MCI_GPU_STAGES; i++)
        TRY(cudaMallocHost((void **)&g->stage[i], (size_t)r->slot_bytes), "pinning memory");
    return MC_OK;
}

static int prepare(mci_gpu *g, mc_error *err) {
    int processors = 0;
    TRY(cudaStreamCreateWithFlags(&g->compute, cudaStreamNonBlocking), "making a stream");
    TRY(cudaStreamCreateWithFlags(&g->upload, cudaStreamNonBlocking), "making a stream");
    /* who waits for long sleeps: the CPU has experts of its own to compute */
    const unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync;
    TRY(cudaEventCreateWithFlags(&g->ran, flags), "making an event");
    for (int i = 0; i < MCI_GPU_STAGES; i++)
        TRY(cudaEventCreateWithFlags(&g->uploaded[i], flags), "making an event");
    TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, g->device),
        "counting processors");
    for (int f = 0; f < FORMATS; f++)
        for (int s = 0; s < SIZES; s++) {
            int blocks = 0;
            TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernels[f][s], MCI_THREADS,
                                                              0),
                "looking at the kernels");
            g->grid[f][s] = processors * (blocks > 0 ? blocks : 1);
        }
    return MC_OK;
}

/* The context may be lost: then every call fails at once and there is nothing to wait for. */
static void close(mci_gpu *g) {
    if (!g) return;
    (void)cudaSetDevice(g->device);
    if (g->compute) (void)cudaStreamSynchronize(g->compute);
    if (g->upload) (void)cudaStreamSynchronize(g->upload);
    for (int i = 0; i < MCI_GPU_STAGES; i++) {
        if (g->uploaded[i]) (void)cudaEventDestroy(g->uploaded[i]);
        if (g->stage[i]) (void)cudaFreeHost(g->stage[i]);
    }
    if (g->ran) (void)cudaEventDestroy(g->ran);
    if (g->upload) (void)cudaStreamDestroy(g->upload);
    if (g->compute) (void)cudaStreamDestroy(g->compute);
    if (g->host_out) (void)cudaFreeHost(g->host_out);
    if (g->host_in) (void)cudaFreeHost(g->host_in);
    char *const mine[] = {g->out, g->work, g->in, g->slots};
    for (int i = 0; i < 4; i++)
        if (mine[i]) (void)cudaFree(mine[i]);
    (void)cudaGetLastError();
    free(g);
}

static int open(int32_t device, const mci_gpu_room *room, mci_gpu **out, mc_error *err) {
    mc_gpu_info info;
    int rc = choose(device, &info, err);
    *out = NULL;
    if (rc) return rc;
    /* kernels count vectors, tickets and rows in 32 bits */
    const int64_t most = INT32_MAX;
    if (room->slots < 1 || room->slots > most || room->slot_bytes < MCI_SLOT_PIECE ||
        room->slot_bytes % MCI_SLOT_PIECE || room->tokens < 1 || room->rows < 1 ||
        room->items < 1 || room->hidden < 1 || room->tokens * (room->vector_in / 16) > most ||
        room->rows * (room->vector_act / 16) > most ||
        most_chunks(room) * (room->vector_in / 16 + room->hidden) > most)
        return fail(err, MC_EINVAL,
                    "GPU: a room of %lld slots of %lld bytes for %d rows is beyond "
                    "what the kernels can count",
                    (long long)room->slots, (long long)room->slot_bytes, (int)room->rows);
    mci_gpu *g = (mci_gpu *)calloc(1, sizeof *g);
    if (!g) return fail(err, MC_ENOMEM, "out of memory");
    g->device = device;
    g->room = *room;
    g->before = before(most_chunks(room), room->rows);
    if ((rc = allocate(g, err)) != MC_OK || (rc = prepare(g, err)) != MC_OK) {
        close(g);
        return rc;
    }
    *out = g;
    return MC_OK;
}

/* ---- uploads --------------------------------------------------------------------------------- */

static void *stage(mci_gpu *g, int32_t i) { return g->stage[i]; }

static int upload(mci_gpu *g, int32_t i, int32_t slot, int64_t bytes, mc_error *err) {
    TRY(cudaSetDevice(g->device), "taking the device");
    TRY(cudaMemcpyAsync(g->slots + slot * g->room.slot_bytes, g->stage[i], (size_t)bytes,
                        cudaMemcpyHostToDevice, g->upload),
        "copying an expert");
    TRY(cudaEventRecord(g->uploaded[i], g->upload), "copying an expert");
    return MC_OK;
}

static int uploaded(mci_gpu *g, int32_t i, mc_error *err) {
    TRY(cudaSetDevice(g->device), "taking the device");
    const cudaError_t e = cudaEventQuery(g->uploaded[i]);
    if (e == cudaErrorNotReady) return 0;
    TRY(e, "copying an expert");
    return 1;
}

/* ---- runs ------------------------------------------------------------------------------------ */

static void *input(mci_gpu *g) { return g->host_in + g->before; }

/* Cuts items into chunks of at most `size` rows; how many. */
static int32_t cut(const mci_gpu_item *item, int32_t n_item, int32_t size, mci_chunk *chunk) {
    int32_t n = 0;
    for (int32_t i = 0; i < n_item; i++)
        for (int32_t at = 0; at < item[i].n; at += size) {
            const int32_t rows = item[i].n - at < size ? item[i].n - at : size;
            if (chunk) {
                chunk[n].slot = item[i].slot;
                chunk[n].first = item[i].first + at;
                chunk[n].n = rows;
                chunk[n].done = 0;
            }
            n++;
        }
    return n;
}

static int run(mci_gpu *g, const mci_slot_shape *s, const mci_gpu_item *item, int32_t n_item,
               const int32_t *token, int32_t n_row, int32_t n_tok, mc_error *err) {
    int32_t most = 1;
    for (int32_t i = 0; i < n_item; i++)
        if (item[i].n > most) most = item[i].n;
    int format = 0;
    while (format < FORMATS && formats[format] != s->dtype) format++;
    if (format == FORMATS || n_item > g->room.items || n_row > g->room.rows ||
        n_tok > g->room.tokens || s->bytes > g->room.slot_bytes)
        return fail(err, MC_EINVAL, "GPU: no kernel for dtype %d, or no room for %d rows of %d "
                    "tokens", (int)s->dtype, (int)n_row, (int)n_tok);
    const int size = most > 1 ? 1 : 0;
    const int32_t chunks = cut(item, n_item, size ? MCI_TOKENS : 1, NULL);
    const int64_t head = before(chunks, n_row), vector = mci_slot_vector(s->dtype, s->hidden);
    const int64_t at = g->before - head;
    char *host = g->host_in + at, *there = g->in + at;
    const int64_t tokens_at = (int64_t)sizeof(mci_chunk) * (1 + chunks);
    memset(host, 0, sizeof(mci_chunk)); /* the ticket */
    cut(item, n_item, size ? MCI_TOKENS : 1, (mci_chunk *)(void *)host + 1);
    memcpy(host + tokens_at, token, 4 * (size_t)n_row);

    mci_call c;
    memset(&c, 0, sizeof c);
    c.slots = (const uint8_t *)g->slots;
    c.slot_bytes = g->room.slot_bytes;
    c.shape = *s;
    c.pieces[0] = mci_slot_pieces(s->dtype, s->hidden);
    c.pieces[1] = mci_slot_pieces(s->dtype, s->width);
    c.vector[0] = (int32_t)(vector / 16);
    c.vector[1] = (int32_t)(mci_slot_vector(s->dtype, s->width) / 16);
    c.tiles[0] = (s->width + MCI_TILE - 1) / MCI_TILE;
    c.tiles[1] = (s->hidden + MCI_TILE - 1) / MCI_TILE;
    c.chunks = chunks;
    c.ticket = (int32_t *)(void *)there;
    c.chunk = (mci_chunk *)(void *)there + 1;
    c.token = (const int32_t *)(void *)(there + tokens_at);
    c.x = (const uint4 *)(void *)(g->in + g->before);
    c.act = (uint4 *)(void *)g->work;
    c.out = (float *)(void *)g->out;

    const int32_t tickets = chunks * (c.tiles[0] + c.tiles[1]);
    const int grid = tickets < g->grid[format][size] ? tickets : g->grid[format][size];
    void *args[] = {&c};
    TRY(cudaSetDevice(g->device), "taking the device");
    TRY(cudaMemcpyAsync(there, host, (size_t)(head + n_tok * vector), cudaMemcpyHostToDevice,
                        g->compute),
        "copying activations");
    TRY(cudaLaunchKernel(kernels[format][size], dim3((unsigned)grid), dim3(MCI_THREADS), args, 0,
                         g->compute),
        "launching the kernel");
    TRY(cudaMemcpyAsync(g->host_out, g->out, (size_t)n_row * (size_t)s->hidden * 4,
                        cudaMemcpyDeviceToHost, g->compute),
        "copying results");
    TRY(cudaEventRecord(g->ran, g->compute), "copying results");
    return MC_OK;
}

static int ran(mci_gpu *g, bool wait, const float **out, mc_error *err) {
    enum { LOOKS = 20 }; /* about a microsecond each; most calls end soon */
    TRY(cudaSetDevice(g->device), "taking the device");
    cudaError_t e = cudaEventQuery(g->ran);
    for (int i = 0; wait && e == cudaErrorNotReady && i < LOOKS; i++) e = cudaEventQuery(g->ran);
    if (e == cudaErrorNotReady && !wait) return 0;
    if (e == cudaErrorNotReady) e = cudaEventSynchronize(g->ran);
    TRY(e, "computing experts");
    *out = (const float *)(void *)g->host_out;
    return 1;
}

extern "C" const mci_gpu_api *mci_gpu_get(const char **why) {
    static const mci_gpu_api api = {probe,  vram,     host,  open, close, stage,
                                    upload, uploaded, input, run,  ran};
    *why = NULL;
    return &api;
}
