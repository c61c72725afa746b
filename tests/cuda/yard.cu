/* yard.cu - see yard.h: the same runtime calls as gpu.cu makes, around nothing. */
#include "yard.h"

#include <time.h>

enum { TIMES = 9, WARM = 3 };

struct nothing {
    int n;
};
static __global__ void empty(const nothing) {}

static double now() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct yard {
    char *device[2], *host;
    cudaStream_t stream;
    cudaEvent_t done;
};

/* The median time of `in` bytes there, a kernel, `out` bytes back; or of a copy on the device. */
static double measure(int device, int64_t in, bool kernel, int64_t out, int64_t copy) {
    yard y = {{NULL, NULL}, NULL, NULL, NULL};
    const int64_t most = copy ? copy : in > out ? in : out;
    double t[TIMES] = {0}, result = -1;
    bool ok = !cudaSetDevice(device) && !cudaMalloc((void **)&y.device[0], (size_t)most) &&
              (!copy || !cudaMalloc((void **)&y.device[1], (size_t)most)) &&
              !cudaMallocHost((void **)&y.host, (size_t)most) &&
              !cudaStreamCreateWithFlags(&y.stream, cudaStreamNonBlocking) &&
              !cudaEventCreateWithFlags(&y.done, cudaEventDisableTiming);
    for (int i = -WARM; ok && i < TIMES; i++) {
        nothing none = {0};
        void *args[] = {&none};
        const double from = now();
        if (copy)
            ok = !cudaMemcpyAsync(y.device[1], y.device[0], (size_t)copy, cudaMemcpyDeviceToDevice,
                                  y.stream);
        if (in)
            ok = ok && !cudaMemcpyAsync(y.device[0], y.host, (size_t)in, cudaMemcpyHostToDevice,
                                        y.stream);
        if (kernel) ok = ok && !cudaLaunchKernel(empty, dim3(1), dim3(32), args, 0, y.stream);
        if (out)
            ok = ok && !cudaMemcpyAsync(y.host, y.device[0], (size_t)out, cudaMemcpyDeviceToHost,
                                        y.stream);
        ok = ok && !cudaEventRecord(y.done, y.stream) && !cudaEventSynchronize(y.done);
        const double s = now() - from;
        int at = i;
        for (; at > 0 && t[at - 1] > s; at--) t[at] = t[at - 1];
        if (i >= 0) t[at] = s;
    }
    if (ok) result = t[TIMES / 2];
    if (y.done) (void)cudaEventDestroy(y.done);
    if (y.stream) (void)cudaStreamDestroy(y.stream);
    if (y.host) (void)cudaFreeHost(y.host);
    for (int i = 0; i < 2; i++)
        if (y.device[i]) (void)cudaFree(y.device[i]);
    return result;
}

int64_t yard_l2(int device) {
    int bytes = 0;
    return cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device) ? -1 : bytes;
}
double yard_copy(int device, int64_t bytes) { return measure(device, 0, false, 0, bytes); }
double yard_upload(int device, int64_t bytes) { return measure(device, bytes, false, 0, 0); }
double yard_empty(int device, int64_t in, int64_t out) { return measure(device, in, true, out, 0); }
