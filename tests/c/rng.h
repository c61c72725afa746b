/* rng.h - splitmix64: any seed is a good one. */
#ifndef RNG_H
#define RNG_H
#include <stdint.h>

typedef struct rng {
    uint64_t s;
} rng;

static inline uint64_t rng_next(rng *r) {
    uint64_t z = r->s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline uint64_t rng_below(rng *r, uint64_t n) { return rng_next(r) % n; }

/* In [-1, 1), 24 bits. */
static inline float rng_unit(rng *r) {
    return (float)((int32_t)(rng_next(r) >> 40) - (1 << 23)) * 0x1p-23f;
}
#endif
