/* test.h - what the C tests share: a counter of checks, one line a failure, memory. */
#ifndef TEST_H
#define TEST_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "rng.h"

static atomic_int test_passed, test_failed;

/* Counts one check; a failure prints where and what. At most 20 lines: the count says the rest. */
#define CHECK(cond, ...)                                                                           \
    do {                                                                                           \
        if (cond) {                                                                                \
            test_passed++;                                                                         \
        } else if (test_failed++ < 20) {                                                           \
            printf("FAIL %s:%d: %s: ", __FILE__, __LINE__, #cond);                                 \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
        }                                                                                          \
    } while (0)

/* The last statement of main. */
static inline int test_end(void) {
    printf("%d passed, %d failed\n", test_passed, test_failed);
    return test_failed ? 1 : 0;
}

static inline void *test_alloc(size_t n) {
    void *p = aligned_alloc(64, (n + 127) / 64 * 64);
    if (!p) {
        printf("FAIL test ran out of memory (%zu bytes)\n", n);
        exit(1);
    }
    return p;
}
/* The part of a layer's description that the store looks at. */
#define LAYER(l, n, k, h, w) \
    (&(mc_moe_desc){.layer = l, .n_expert = n, .top_k = k, .hidden = h, .width = w})

#endif
