"""Expert ids of a trace in place of a router's choice: the same cache traffic for any model of that shape."""

from __future__ import annotations

import os

import numpy as np

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.plan import ModelPlan
from mosaic_c.trace import read_trace


class Routing:
    """The decode lines of a trace as a Model's `routing`: position t of a session takes the trace's token t.

    ids (tokens, layers, top_k) int32.
    """

    def __init__(self, path: str | os.PathLike[str], plan: ModelPlan) -> None:
        """MosaicError for a trace that cannot be read or lacks lines, UsageError for one of another shape."""
        self.path = os.fspath(path)
        lines = read_trace(path).select("decode")
        if not len(lines):
            raise MosaicError(f"{self.path}: no decode lines", "EFORMAT")
        layers, used = lines.n_layer, np.diff(lines.start)
        theirs = (layers, {lines.n_expert}, set(used.tolist()))
        ours = (
            len(plan.moe_layers),
            {m.experts.count for m in plan.moe_layers if m.experts},
            {m.top_k for m in plan.moe_layers},
        )
        if theirs != ours or len(ours[2]) != 1:
            raise UsageError(
                f"{self.path}: a trace of {_shape(*theirs)}; the model has {_shape(*ours)}"
            )
        _, token = np.unique(lines.token, return_inverse=True)  # prefill lines are counted too
        have = np.bincount(token)
        if (have != layers).any():
            t = int(np.argmax(have != layers))
            raise MosaicError(
                f"{self.path}: decode token {t} has lines for {have[t]} of {layers} layers",
                "EFORMAT",
            )
        self.ids = np.empty((len(have), layers, used[0]), np.int32)
        self.ids[token, lines.layer] = lines.ids.reshape(-1, used[0])

    def __len__(self) -> int:
        return len(self.ids)

    def __call__(self, layer: int, positions: np.ndarray) -> np.ndarray:
        if positions.max() >= len(self):
            raise UsageError(
                f"{self.path}: {len(self)} tokens; there is none for position {positions.max()}"
            )
        return np.ascontiguousarray(self.ids[positions, layer])


def checked(ids: object, n: int, top_k: int, layer: int) -> np.ndarray:
    """What a Model's `routing` gave for n positions, as the engine takes it: it knows no length and would read
    past the end of a shorter array."""
    got = f"{ids.dtype} {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.shape != (n, top_k):
        raise UsageError(
            f"routing: expected an array int32 ({n}, {top_k}) for layer {layer}, got {got}"
        )
    return np.ascontiguousarray(ids)


def _shape(layers: int, experts: set[int], top_k: set[int]) -> str:
    def some(numbers: set[int]) -> str:
        return " or ".join(map(str, sorted(numbers))) or "no"

    return f"{layers} layers x {some(experts)} experts, top-{some(top_k)}"
