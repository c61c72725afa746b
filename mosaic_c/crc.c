/* crc.c - CRC-32C: the instruction of SSE4.2 in three streams, elsewhere slicing by eight (Kounavis
 * and Berry 2005). Tables are made on the stack when they pay: no static data. */
#include "crc.h"

#define POLY 0x82f63b78u
#define TABLES_PAY 512 /* bytes from which eight tables are made faster than bits are shifted */

uint32_t mci_crc32c_plain(uint32_t crc, const void *data, int64_t n) {
    const uint8_t *p = data;
    uint32_t t[8][256], v = ~crc;
    if (n >= TABLES_PAY) {
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t b = i;
            for (int k = 0; k < 8; k++) b = b >> 1 ^ (b & 1 ? POLY : 0);
            t[0][i] = b;
        }
        for (int k = 1; k < 8; k++)
            for (int i = 0; i < 256; i++) t[k][i] = t[k - 1][i] >> 8 ^ t[0][t[k - 1][i] & 0xff];
        for (; n >= 8; n -= 8, p += 8) {
            uint32_t a = mci_u32(p) ^ v, b = mci_u32(p + 4);
            v = t[7][a & 0xff] ^ t[6][a >> 8 & 0xff] ^ t[5][a >> 16 & 0xff] ^ t[4][a >> 24] ^
                t[3][b & 0xff] ^ t[2][b >> 8 & 0xff] ^ t[1][b >> 16 & 0xff] ^ t[0][b >> 24];
        }
    }
    for (; n > 0; n--) {
        v ^= *p++;
        for (int k = 0; k < 8; k++) v = v >> 1 ^ (v & 1 ? POLY : 0);
    }
    return ~v;
}

#if defined(__x86_64__)
#include <nmmintrin.h>

/* The instruction takes three cycles and one can start in each, so three runs of STREAM bytes go
 * side by side and are joined: the CRC of ab is that of a, moved over as many zero bytes as b has,
 * xor that of b. Moving is linear, so a table for each byte of the CRC does it. */
#define STREAM 4096
#define X_STREAM                                                                                   \
    0x35d73a62u /* x^(8 STREAM) mod the polynomial: 0x80000000 moved over STREAM bytes */

static void move_tables(uint32_t t[4][256]) {
    uint32_t v = X_STREAM; /* of the highest bit, then of each lower one */
    for (int bit = 31; bit >= 0; bit--, v = v >> 1 ^ (v & 1 ? POLY : 0))
        t[bit / 8][1 << bit % 8] = v;
    for (int k = 0; k < 4; k++) {
        t[k][0] = 0;
        for (int i = 3; i < 256; i++) t[k][i] = t[k][i & (i - 1)] ^ t[k][i & -i];
    }
}

__attribute__((target("sse4.2"))) static uint32_t crc_sse42(uint32_t crc, const uint8_t *p,
                                                            int64_t n) {
    uint32_t t[4][256];
    uint64_t v = ~crc;
    if (n >= 4 * 3 * STREAM) {
        move_tables(t);
        for (; n >= 3 * STREAM; n -= 3 * STREAM, p += 3 * STREAM) {
            uint64_t s[3] = {v, 0, 0};
            for (int i = 0; i < STREAM; i += 8)
                for (int k = 0; k < 3; k++) {
                    uint64_t w;
                    memcpy(&w, p + k * STREAM + i, 8);
                    s[k] = _mm_crc32_u64(s[k], w);
                }
            v = s[0];
            for (int k = 1; k < 3; k++)
                v = s[k] ^ t[0][v & 0xff] ^ t[1][v >> 8 & 0xff] ^ t[2][v >> 16 & 0xff] ^
                    t[3][v >> 24];
        }
    }
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        v = _mm_crc32_u64(v, w);
    }
    for (; n > 0; n--) v = _mm_crc32_u8((uint32_t)v, *p++);
    return ~(uint32_t)v;
}
#endif

uint32_t mci_crc32c(uint32_t crc, const void *data, int64_t n) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return crc_sse42(crc, data, n);
#endif
    return mci_crc32c_plain(crc, data, n);
}

uint32_t mc_crc32c(uint32_t crc, const void *data, int64_t n) { return mci_crc32c(crc, data, n); }
