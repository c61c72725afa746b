"""What a model is made of for sizing: its tensors by shape and job, and what a sequence keeps.

Unlike plan.py this covers architectures that the engine does not run, knows no arithmetic, and
lists a tensor once with the number of times that it occurs. Names have "{i}" for the layer and
"{e}" for the expert. Shapes are (rows, cols), row-major; 4-bit formats by their logical shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

# The job of a tensor. LINEAR: a resident matrix that quantised releases quantise; KEPT: one that
# they leave as it is (routers, norms, head); ROWS: kept too, and a token reads one row of it.
EXPERT, LINEAR, KEPT, ROWS = "expert", "linear", "kept", "rows"
BYTES = {"BF16": 2, "F32": 4, "I64": 8}
WHOLE = 1 << 62  # as the columns of a block: the whole row


@dataclass(frozen=True)
class Tensor:
    """One tensor, `count` times in the checkpoint. dtype: of what no format changes, else ""."""

    name: str
    shape: tuple[int, ...]
    group: str
    dtype: str = ""
    count: int = 1

    @property
    def kept_bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Form:
    """A storage format: bits a value, and a scale of `scale` bytes for each block (rows, cols).

    Partial blocks have a scale of their own; a row starts at a whole byte.
    """

    name: str
    bits: int
    block: tuple[int, int] = (1, WHOLE)
    scale: int = 0

    def bytes(self, shape: tuple[int, ...]) -> int:
        rows, cols = math.prod(shape[:-1]), shape[-1]
        blocks = -(-rows // self.block[0]) * -(-cols // self.block[1])
        return rows * -(-cols * self.bits // 8) + blocks * self.scale


BF16 = Form("BF16", 16)
F32 = Form("F32", 32)
MXFP4 = Form("MXFP4", 4, (1, 32), 1)  # 4.25 bits a value
FP8_BARE = Form("FP8, no scales", 8)  # where no release fixes a layout of scales
FP8_ROWS = Form("FP8 by row", 8, (1, WHOLE), 4)


def fp8_blocks(scale: int) -> Form:
    """FP8 in blocks of 128 x 128 with scales of this many bytes: 4 F32, 2 BF16, 1 E8M0."""
    return Form("FP8 128x128", 8, (128, 128), scale)


@dataclass(frozen=True)
class Architecture:
    """A config.json as tensors.

    tensors: what the text model computes with. spare: multi-token prediction, on disk and not
    loaded. layers: those with experts. kv: values that the context grows by with each token;
    window: values of fixed size in the type of the KV cache; recurrent: F32 values of fixed size.
    fp8: how a release in FP8 stores matrices, None where none is known. partial: the tensors beside
    the experts are unknown. notes: what is left out or assumed, one line each.
    """

    name: str
    tensors: tuple[Tensor, ...]
    layers: int
    experts: int
    top_k: int
    positions: int | None = None
    kv: Fraction = Fraction(0)
    window: int = 0
    recurrent: int = 0
    spare: tuple[Tensor, ...] = ()
    fp8: Form | None = None
    partial: bool = False
    notes: tuple[str, ...] = ()
