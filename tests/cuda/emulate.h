/* emulate.h - CUDA for a compiler that knows none: g++ -x c++ -include emulate.h compiles kernels
 * and host code of a .cu file, emulate.cpp (the runtime) and fibers.cpp (the threads of a kernel)
 * run them. Only what mosaic_c/cuda uses, and stricter than a device where it can be:
 *
 *   - threads and blocks run in an order that is shuffled, and other blocks between barriers
 *   - a barrier or shuffle that not every thread reaches, at the same line, ends the program with a
 *     message; so does a wait that nobody ends
 *   - device memory is NaN at first, and ends at a page that cannot be touched
 *   - copies and kernels run when they are waited for, not when they are called
 *   - an object is used by the device it belongs to
 *
 * What it cannot show: how a device orders memory, and speed. */
#ifndef EMULATE_H
#define EMULATE_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- language -------------------------------------------------------------------------------- */

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
/* of the block that runs: fibers.cpp puts its own into the section */
#define __shared__ __attribute__((used, section("emu_shared")))

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

#define EMU_HERE int line = __builtin_LINE()
void __syncthreads(EMU_HERE);
void __threadfence();
void __nanosleep(unsigned ns);
int atomicAdd(int *p, int v);
/* The bits of lane src, or of this lane where src lies outside 0..31. */
unsigned emu_shuffle(unsigned mask, unsigned bits, int src, int line);
int emu_lane();

template <class T> T emu_shuffle_of(unsigned mask, T v, int src, int line) {
    static_assert(sizeof(T) == 4, "words only");
    unsigned bits;
    memcpy(&bits, &v, 4);
    bits = emu_shuffle(mask, bits, src, line);
    memcpy(&v, &bits, 4);
    return v;
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int with, EMU_HERE) {
    return emu_shuffle_of(mask, v, emu_lane() ^ with, line);
}
template <class T> T __shfl_sync(unsigned mask, T v, int src, int width = 32, EMU_HERE) {
    return emu_shuffle_of(mask, v, (emu_lane() & -width) | (src & (width - 1)), line);
}

static inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (int8_t)(a >> i) * (int8_t)(b >> i);
    return c;
}
template <class T> T __ldcs(const T *p) { return *p; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

/* ---- runtime --------------------------------------------------------------------------------- */

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice
};
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76
};
enum { cudaStreamNonBlocking = 1, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
struct cudaDeviceProp {
    char name[256];
};
typedef struct emu_stream *cudaStream_t;
typedef struct emu_event *cudaEvent_t;

const char *cudaGetErrorName(cudaError_t e);
const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaGetLastError();
cudaError_t cudaRuntimeGetVersion(int *v);
cudaError_t cudaDriverGetVersion(int *v);
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device);
cudaError_t cudaMemGetInfo(size_t *left, size_t *total);
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMallocHost(void **p, size_t bytes);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s);
cudaError_t cudaEventQuery(cudaEvent_t e);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t s);

/* A kernel and its one parameter, as bytes. */
typedef void (*emu_kernel)(const void *kernel, const void *arg);
cudaError_t emu_launch(emu_kernel call, const void *kernel, const void *arg, size_t bytes,
                       dim3 grid, dim3 block, cudaStream_t s);

template <class A> void emu_call(const void *kernel, const void *arg) {
    ((void (*)(A))kernel)(*(const A *)arg);
}
template <class A>
cudaError_t cudaLaunchKernel(void (*kernel)(A), dim3 grid, dim3 block, void **args, size_t shared,
                             cudaStream_t s) {
    return shared
               ? cudaErrorInvalidValue
               : emu_launch(emu_call<A>, (const void *)kernel, args[0], sizeof(A), grid, block, s);
}
cudaError_t emu_occupancy(int *blocks);
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F, int, size_t) {
    return emu_occupancy(blocks);
}

/* ---- between emulate.cpp and fibers.cpp ------------------------------------------------------ */

void emu_run(emu_kernel call, const void *kernel, const void *arg, dim3 grid, dim3 block);
unsigned emu_random(unsigned below);
[[noreturn]] void emu_die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#endif
