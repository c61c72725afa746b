/* crc.h - CRC-32C (Castagnoli, reflected polynomial 0x82f63b78) of files this project writes. */
#ifndef MCI_CRC_H
#define MCI_CRC_H
#include "base.h"

/* Tables for eight bytes at a time, built by the caller once per file: no static data. */
typedef struct mci_crc {
    uint32_t t[8][256];
    uint32_t value; /* of the bytes so far */
} mci_crc;

void mci_crc_init(mci_crc *c);
void mci_crc_add(mci_crc *c, const void *data, int64_t n);
#endif
