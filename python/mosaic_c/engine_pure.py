"""What the C engine computes without an engine: sizes of blocks, checksums, replayed traces, decoded values, products.

No handle is held and no open object touched; in the manner of engine.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mosaic_c._engine import ffi, lib
from mosaic_c.dtypes import BITS
from mosaic_c.engine import DTYPES, POLICIES, call, floats, ints
from mosaic_c.errors import MosaicError


def scratch_bytes(kind: str, desc: dict[str, Any], threads: int) -> int:
    """Scratch that a block of this description needs."""
    c = ffi.new(f"mc_{kind}_desc *", desc)
    more = (threads,) if kind == "attn" else ()
    return call(getattr(lib, f"mc_{kind}_scratch"), c, *more)


def kv_bytes(desc: dict[str, Any]) -> tuple[int, int]:
    """(page pool, one session's state) in bytes."""
    c = ffi.new("mc_kv_desc *", desc)
    return call(lib.mc_kv_pool_bytes, c), call(lib.mc_kv_session_bytes, c)


def expert_slab(experts: np.ndarray) -> tuple[int, int]:
    """(one slab, resident scales of all) in bytes, for an (n, 3) array laid out as mc_tensor."""
    scale = ffi.new("int64_t *")
    pointer = ffi.cast("mc_expert *", ffi.from_buffer(experts))
    n = call(lib.mc_expert_slab, pointer, experts.shape[0], scale)
    return n, scale[0]


def tier_slot(experts: np.ndarray) -> int:
    """VRAM of a slot for any expert of a layer, an (n, 3) array laid out as mc_tensor; 0: not for the GPU."""
    pointer = ffi.cast("mc_expert *", ffi.from_buffer(experts))
    return call(lib.mc_tier_slot, pointer, experts.shape[0])


def tier_work(hidden: int, width: int, top_k: int, max_tok: int, slot: int) -> tuple[int, int]:
    """(VRAM, pinned memory of this process) beside slots of `slot` bytes, for chunks of max_tok tokens."""
    host = ffi.new("int64_t *")
    n = call(lib.mc_tier_work, hidden, width, top_k, max_tok, slot, host)
    return n, host[0]


def thread_bytes(dtype: str, cols: int) -> int:
    """Memory that each compute thread takes for weights of this dtype with rows of `cols`."""
    return call(lib.mc_thread_bytes, DTYPES[dtype], cols)


def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of bytes (anything with a contiguous buffer) that follow those whose CRC is given."""
    raw = ffi.from_buffer(data)
    return lib.mc_crc32c(crc, raw, len(raw))


def policy_replay(
    policy: str,
    n_layer: int,
    n_expert: int,
    slots: int,
    layer: np.ndarray,
    token: np.ndarray,
    start: np.ndarray,
    ids: np.ndarray,
    line_misses: np.ndarray | None = None,
) -> tuple[int, int]:
    """(hits, misses) of a trace; see mc_policy_replay. layer, ids int32; token, start int64.

    line_misses: (n_line,) int32, filled with the misses of each line.
    """
    if line_misses is not None and len(line_misses) != len(layer):
        raise ValueError(f"{len(layer)} lines, room for the misses of {len(line_misses)}")
    out = ffi.new("int64_t[2]")
    call(
        lib.mc_policy_replay, POLICIES[policy], n_layer, n_expert, slots, len(layer), ints(layer),
        ints(token, "int64_t"), ints(start, "int64_t"), ints(ids), out, out + 1,
        ffi.NULL if line_misses is None else ints(line_misses),
    )  # fmt: skip
    return out[0], out[1]


def hot_replay(
    n_layer: int,
    n_expert: int,
    slots: int,
    after: int,
    window: int,
    layer: np.ndarray,
    start: np.ndarray,
    ids: np.ndarray,
    line_served: np.ndarray | None = None,
    line_loads: np.ndarray | None = None,
) -> dict[str, int]:
    """calls, served, loads, evictions of a trace; see mc_hot_replay. layer, ids int32; start int64.

    line_served, line_loads: (n_line,) int32, filled with those of each line.
    """
    each = (line_served, line_loads)
    for room in each:
        if room is not None and len(room) != len(layer):
            raise ValueError(f"{len(layer)} lines, room for the counts of {len(room)}")
    out = ffi.new("mc_hot_counts *")
    call(
        lib.mc_hot_replay, n_layer, n_expert, slots, after, window, len(layer), ints(layer),
        ints(start, "int64_t"), ints(ids), out,
        *(ffi.NULL if room is None else ints(room) for room in each),
    )  # fmt: skip
    return {key: getattr(out, key) for key in ("calls", "served", "loads", "evictions")}


def rope_table(theta: float, dim: int, pos: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """inv_freq, cos, sin (dim / 2) float32 at a position."""
    out = np.empty((3, dim // 2), np.float32)
    f, c, s = (floats(row) for row in out)
    if lib.mc_rope_table(theta, dim, pos, f, c, s) < 0:
        raise MosaicError(f"rope: theta {theta}, dim {dim}, position {pos} make no sense", "EINVAL")
    return out[0], out[1], out[2]


def decode(dtype: str, raw: bytes, n: int) -> np.ndarray:
    """n values of a dtype, unscaled, as float32, exactly."""
    if len(raw) < -(-n * BITS[dtype] // 8):
        raise ValueError(f"{n} values of {dtype}: too few bytes, {len(raw)}")
    out = np.empty(n, np.float32)
    call(lib.mc_decode, DTYPES[dtype], raw, n, floats(out))
    return out


def gemm(
    isa: str,
    dtype: str,
    w: bytes,
    rows: int,
    cols: int,
    x: np.ndarray,
    scale_dtype: str = "F32",
    scale: bytes | None = None,
    block: tuple[int, int] = (128, 128),
) -> np.ndarray:
    """y (n, rows) = x (n, cols) W^T by the named kernel set. block: elements that share a scale."""
    y = np.empty((x.shape[0], rows), np.float32)
    need, scales = rows * -(-cols * BITS[dtype] // 8), 0
    if scale is not None:
        scales = -(-rows // block[0]) * -(-cols // (block[1] or cols)) * BITS[scale_dtype] // 8
    if len(w) < need or len(scale or b"") < scales or x.shape[1] < cols:
        raise ValueError(f"gemm ({rows}, {cols}) of {dtype}: too little data")
    t = {"dtype": DTYPES[dtype], "rows": rows, "cols": cols, "scale_dtype": DTYPES[scale_dtype]}
    if scale is not None:
        t["block_rows"], t["block_cols"] = block
    call(
        lib.mc_gemm, isa.encode(), ffi.new("mc_tensor *", t), w,
        ffi.NULL if scale is None else ffi.from_buffer(scale), floats(x), x.shape[0], floats(y),
    )  # fmt: skip
    return y
