"""How long a token takes when its experts come from a disk: arithmetic, nothing measured."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Savings:
    """What dense weights, KV cache and state would leave behind if they were in VRAM. ram: bytes of RAM; experts:
    that would fit there; read: bytes of dense weights a token computes with, of `bytes` in all."""

    ram: int
    dense: int
    state: int
    experts: int
    read: int
    bytes: int

    @property
    def share(self) -> float:
        return self.read / self.bytes if self.bytes else 0.0

    def seconds(self, rate: float) -> float:
        """Of a token, that its dense weights take at a rate of memory: no GPU can save more."""
        return self.read / rate


def savings(
    dense: int, state: int, read: int, token_experts: int, expert: int, missing: int
) -> Savings:
    """dense, state: bytes in RAM now. read: of dense weights, and token_experts: of experts, that a token computes
    with. expert: bytes of one; missing: experts that RAM does not hold now."""
    room = (dense + state) // expert if expert else 0
    return Savings(
        dense + state, dense, state, max(min(room, missing), 0), read, read + token_experts
    )
