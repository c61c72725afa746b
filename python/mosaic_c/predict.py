"""How long a token takes when its experts come from a disk: arithmetic, nothing measured."""

from __future__ import annotations

# The share of a token's arithmetic that ran beside its reads where it was measured (docs/performance.md,
# "Runs that read all the time"): a layer's experts, and reads ahead of the next router, beside its mixer.
OVERLAP = 0.25


def token_seconds(
    read_bytes: float, disk_rate: float, compute_s: float, overlap: float = OVERLAP
) -> float:
    """Seconds of one token.

    read_bytes: that the token reads from the disk, at disk_rate bytes a second. compute_s: seconds
    of its arithmetic alone. overlap: the share of compute_s, 0..1, that can run while reads run.

    In a layer the router is known only once attention is done, and the next layer needs the sum
    over the experts: little can run beside the reads that it causes. What can is the work on
    experts that are there already or have arrived, and whatever runs while a read ahead was right.
    So the token costs the part that waits for reads, (1 - overlap) * compute_s, and then the longer
    of its reads and of the work beside them. overlap stands for all that keeps both from being busy
    all the time, so the default is measured, not derived.
    """
    return (1 - overlap) * compute_s + max(read_bytes / disk_rate, overlap * compute_s)
