/* crc.h - CRC-32C (Castagnoli, reflected polynomial 0x82f63b78, all bits inverted at the start and
 * the end) of files this project writes. */
#ifndef MCI_CRC_H
#define MCI_CRC_H
#include "base.h"

/* The CRC of some bytes followed by n more; crc 0: of none. By the CPU's instruction where it has
 * one. Pieces of 500 bytes or more are much faster than the same bytes one by one. */
uint32_t mci_crc32c(uint32_t crc, const void *data, int64_t n);
/* The same in plain C. */
uint32_t mci_crc32c_plain(uint32_t crc, const void *data, int64_t n);
#endif
