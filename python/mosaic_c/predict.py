"""How long a token takes when its experts come from a disk: arithmetic, nothing measured."""

from __future__ import annotations


def token_seconds(read_bytes: float, disk_rate: float, compute_s: float, overlap: float) -> float:
    """Seconds of one token.

    read_bytes: that the token reads from the disk, at disk_rate bytes a second. compute_s: seconds
    of its arithmetic alone. overlap: the share of compute_s, 0..1, that can run while reads run.

    In a layer the router is known only once attention is done, and the next layer needs the sum
    over the experts: mixers, routers and shared experts cannot run beside the reads that they
    cause. What can is the work on experts that are there already, or that have arrived. So the
    token costs the part that waits for no read, (1 - overlap) * compute_s, and then the longer of
    its reads and of the work beside them. A lower bound: the last expert of a layer to arrive has
    nothing left to hide behind, and a disk is slower for few reads at once than for many.
    """
    return (1 - overlap) * compute_s + max(read_bytes / disk_rate, overlap * compute_s)
