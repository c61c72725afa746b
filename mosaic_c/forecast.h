/* forecast.h - which experts a layer will call at its next tokens, judged from what it called so
 * far. Pure arithmetic over counters; it knows nothing of caches. forecast.c has the formula. */
#ifndef MCI_FORECAST_H
#define MCI_FORECAST_H
#include "base.h"

typedef struct mci_forecast mci_forecast;

/* Bytes of a forecast for n_layer layers of n_expert experts, a multiple of 8; the product fits
 * an int32. */
int64_t mci_forecast_bytes(int32_t n_layer, int32_t n_expert);
/* Makes one in zeroed memory of that size (8-byte aligned), which stays the caller's. */
mci_forecast *mci_forecast_init(void *zeroed, int32_t n_layer, int32_t n_expert);

/* A token begins. far, 0 to 1: what a layer's line after the next counts beside the next one. */
void mci_forecast_token(mci_forecast *f, double far);
/* The layer called these n >= 1 distinct experts. Returns (n_expert): the share that each
 * is expected to have of the layer's lines to come, (1 - far) * (next + far * the one after + far^2
 * * ...); 1 / n_expert is the average, below 0 possible. Borrowed until the next call. */
const double *mci_forecast_line(mci_forecast *f, int32_t layer, const int32_t *ids, int32_t n);
#endif
