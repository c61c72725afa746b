/* measure.h - which way of reading is the fastest here: a few experts are read in each. */
#ifndef MCI_MEASURE_H
#define MCI_MEASURE_H
#include "expert.h"
#include "slabs.h"

/* With MC_IO_AUTO: reads random experts of the layers into free slabs, by io_uring with 2 and most
 * places, directly with 2, 1 and most lanes (where lanes were given, with those), goes on in the
 * way chosen and leaves the figures in e->stats. 8 to 64 reads and at most 60 ms each. Other modes
 * are not measured; direct and uring go on with most lanes where that is more than 4, which it is
 * for small experts (mci_io_most), and their number was not given. Only direct reads are compared:
 * what pread delivers may come from the page cache and says nothing of the disk, so it is used
 * where direct reads are refused and nowhere else. A read that fails ends the measurement; whoever
 * needs that expert will see the error. */
void mci_measure_reads(mc_engine *e, const mci_experts *layers, int32_t n_layer, mci_slabs *slabs);
/* Which of n ways, the preferred first, with these speeds: a later one must be faster than the
 * choice so far by more than a tenth. -1: none. */
int32_t mci_measure_best(const double *gbs, int32_t n);
#endif
