/* yard.h - what a device does without an engine, for test_gpu bench. A negative time: it failed. */
#ifndef YARD_H
#define YARD_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
int64_t yard_l2(int device); /* bytes */
/* Median seconds of 9: a copy of bytes on the device; from pinned memory to it; a call of `in`
 * bytes there, a kernel that does nothing, `out` bytes back. */
double yard_copy(int device, int64_t bytes);
double yard_upload(int device, int64_t bytes);
double yard_empty(int device, int64_t in, int64_t out);
#ifdef __cplusplus
}
#endif
#endif
