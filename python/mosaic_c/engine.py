"""Handles of the C engine: one class for each C object, one method for each call, errors as exceptions.

This module, engine_pure.py and engine_bench.py talk to mosaic_c._engine, nothing else does. Objects own their
C handle (freed when dropped or closed, in any order); arrays are the caller's numpy memory, checked here
for type and layout before C sees them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mosaic_c import modes
from mosaic_c._engine import ffi, lib
from mosaic_c.errors import MosaicError

DTYPES = {
    "F32": lib.MC_F32, "BF16": lib.MC_BF16, "F16": lib.MC_F16, "F8_E4M3": lib.MC_F8E4M3,
    "F4": lib.MC_F4E2M1, "INT4": lib.MC_INT4, "I8": lib.MC_INT8, "F8_E8M0": lib.MC_F8E8M0,
}  # fmt: skip
IO_MODES = {name: getattr(lib, f"MC_IO_{name.upper()}") for name in modes.IO_MODES}
POLICIES = {
    name: getattr(lib, f"MC_POLICY_{name.upper().replace('-', '_')}") for name in modes.POLICIES
}
PAGE_TOKENS = lib.MC_PAGE_TOKENS
TIER_SLABS = lib.MC_TIER_SLABS
MEM_KINDS = ("weights", "cache", "state", "scratch", "meta")


def check(rc: int, err: Any) -> int:
    """rc if it is a success; otherwise the C error as a MosaicError with code "EIO", "EFULL", ..."""
    if rc >= 0:
        return rc
    name = ffi.string(lib.mc_status_name(rc)).decode()
    message = ffi.string(err.message).decode("utf-8", "replace")
    raise MosaicError(message or text(lib.mc_status_text(rc)), name.removeprefix("MC_"))


def call(function: Any, *args: Any) -> int:
    """One C call; Handles among the arguments stay alive until it returns, whoever closes them."""
    err = ffi.new("mc_error *")
    owners = [a.pin() if isinstance(a, Handle) else a for a in args]
    raw = [o[0] if isinstance(a, Handle) else o for a, o in zip(args, owners, strict=True)]
    return check(function(*raw, err), err)


def _owner(kind: str) -> Any:
    """Room for a handle, and its end: made before the call that fills it, so that an interrupt between
    the two loses nothing. Freeing NULL is fine. The end is a C function, which no interrupt can cut
    short: one that is raised inside a destructor in Python would be printed and forgotten."""
    return ffi.gc(ffi.new(f"{kind} **"), getattr(lib, f"{kind}_clear"))


def create(function: Any, kind: str, *args: Any) -> Any:
    owner = _owner(kind)
    call(function, *args, owner)
    return owner


def floats(array: np.ndarray, *shape: int) -> Any:
    """The memory of an array that holds at least `shape`, for C."""
    if array.dtype != np.float32 or not array.flags.c_contiguous or array.size < math.prod(shape):
        raise ValueError(
            f"expected contiguous float32 of at least {shape}, got {array.dtype} {array.shape}"
        )
    return ffi.cast("float *", ffi.from_buffer(array))


def ints(array: np.ndarray, kind: str = "int32_t") -> Any:
    """The memory of an array of just this type, for C."""
    if f"{array.dtype}_t" != kind or not array.flags.c_contiguous:
        raise ValueError(f"expected contiguous {kind}, got {array.dtype}")
    return ffi.cast(f"{kind} *", ffi.from_buffer(array))


def text(c: Any) -> str:
    return ffi.string(c).decode("utf-8", "replace")


def _path(path: str) -> bytes:
    if "\0" in path:
        raise MosaicError(f"path {path!r}: expected no NUL in it", "EINVAL")
    return path.encode("utf-8", "surrogateescape")


class Handle:
    """Owner of one C object. Closing it while another thread is in a call on it is safe: the object goes
    when that call returns."""

    _own: Any = None

    def pin(self) -> Any:
        """The owner, to be held by whoever is about to call C. Raises ECLOSED after close()."""
        own = self._own
        if own is None:
            raise MosaicError(f"the {type(self).__name__.lower()} is closed", "ECLOSED")
        return own

    @property
    def closed(self) -> bool:
        return self._own is None

    def close(self) -> None:
        """Gives the C object up; twice is fine."""
        self._own = None


class Engine(Handle):
    def __init__(
        self,
        threads: int = 1,
        lanes: int = 0,
        io: str = "auto",
        budget: int = 0,
        isa: str | None = None,
        most: int = 0,
    ) -> None:
        name = ffi.NULL if isa is None else ffi.new("char[]", isa.encode())
        fields = {
            "threads": threads,
            "lanes": lanes,
            "most": most,
            "io": IO_MODES[io],
            "budget": budget,
        }
        opts = ffi.new("mc_engine_opts *", fields | {"isa": name})
        self._own = create(lib.mc_engine_create, "mc_engine", opts)

    def file(self, path: str) -> int:
        return call(lib.mc_engine_file, self, _path(path))

    def cancel(self, on: bool = True) -> None:
        lib.mc_engine_cancel(self.pin()[0], int(on))

    def stats(self) -> Any:
        """mc_stats, as the C struct."""
        out = ffi.new("mc_stats *")
        call(lib.mc_engine_stats, self, out)
        return out


def isas() -> list[str]:
    """Kernel sets this CPU can run, best first."""
    return text(lib.mc_engine_isas()).split()


def gpu() -> str | None:
    """Why there is no GPU tier; None where there is one."""
    return None if (reason := lib.mc_engine_gpu()) == ffi.NULL else text(reason)


def gpu_probe(device: int = 0) -> dict[str, Any]:
    """mc_gpu_info of a device as a dict: name, total, free, devices, capability, driver, runtime. From now on this
    process holds the memory of the driver."""
    out = ffi.new("mc_gpu_info *")
    call(lib.mc_gpu_probe, device, out)
    names = ("total", "free", "devices", "capability", "driver", "runtime")
    name = ffi.string(out.name).decode("utf-8", "replace")
    return {"name": name} | {key: getattr(out, key) for key in names}


def io_modes() -> dict[str, str | None]:
    """Every way to read experts: None where this system can, otherwise the reason why it cannot."""
    reasons: dict[str, str | None] = {}
    for name, mode in IO_MODES.items():
        err = ffi.new("mc_error *")
        refused = lib.mc_io_mode(mode, err) < 0
        reasons[name] = text(err.message) if refused else None
    return reasons


def io_most(io: str, size: int) -> int:
    """Reads that may be under way at once in a mode, for which the plan keeps memory."""
    return lib.mc_io_most(IO_MODES[io], size)


def io_name(mode: int) -> str:
    return next(name for name, value in IO_MODES.items() if value == mode)


def cpu() -> str:
    return ffi.string(lib.mc_engine_cpu()).decode()


def build() -> str:
    """How the extension was compiled, in words that commas part: mc_engine_build."""
    return ffi.string(lib.mc_engine_build()).decode()


def tensor(span: Any, files: Sequence[int]) -> dict[str, int]:
    """An mc_tensor from a located span (None: absent); files maps the span's file numbers to ids."""
    if span is None:
        return {"file": -1, "scale_file": -1}
    scaled = span.scale_file is not None
    return {
        "file": files[span.file],
        "dtype": DTYPES[span.dtype],
        "offset": span.offset,
        "rows": span.rows,
        "cols": span.cols,
        "scale_file": files[span.scale_file] if scaled else -1,
        "scale_dtype": DTYPES[span.scale_dtype] if scaled else 0,
        "scale_offset": span.scale_offset if scaled else 0,
        "block_rows": span.block[0] if scaled else 0,
        "block_cols": span.block[1] if scaled else 0,
        "record": lib.MC_CRC_NONE if span.crc is None else lib.MC_CRC_TENSOR,
        "crc": span.crc or 0,
    }


class Linear(Handle):
    def __init__(self, engine: Engine, weight: dict[str, int], resident: bool = True) -> None:
        self.rows, self.cols, self.resident = weight["rows"], weight["cols"], resident
        desc = ffi.new("mc_tensor *", weight)
        self._own = create(lib.mc_linear_create, "mc_linear", engine, desc, int(resident))

    def check_rows(self, crc: np.ndarray) -> None:
        """crc (rows,) uint32: of each row of a matrix that is not resident, checked when it is read."""
        if len(crc) != self.rows:
            raise ValueError(f"{self.rows} rows, CRCs of {len(crc)}")
        call(lib.mc_linear_row_crc, self, ints(crc, "uint32_t"))

    def forward(self, x: np.ndarray, y: np.ndarray) -> None:
        """y (n, rows) = x (n, cols) W^T."""
        n = x.shape[0]
        call(lib.mc_linear_forward, self, floats(x, n, self.cols), n, floats(y, n, self.rows))

    def pick(self, ids: np.ndarray, y: np.ndarray) -> None:
        """y (n, cols) = the rows ids (int32) of the matrix."""
        call(lib.mc_linear_rows, self, ints(ids), len(ids), floats(y, len(ids), self.cols))


class Head(Handle):
    def __init__(
        self, engine: Engine, norm_desc: dict[str, Any], weight: Linear, max_tok: int
    ) -> None:
        self.rows, self.cols = weight.rows, weight.cols
        desc = ffi.new("mc_norm *", norm_desc)
        self._own = create(lib.mc_head_create, "mc_head", engine, desc, weight, max_tok)

    def forward(self, x: np.ndarray, pick: np.ndarray, y: np.ndarray) -> None:
        """y (n, vocab) = logits of rows pick (int32) of x."""
        n = len(pick)
        call(
            lib.mc_head_forward,
            self,
            floats(x, 1, self.cols),
            ints(pick),
            n,
            floats(y, n, self.rows),
        )


class Kv(Handle):
    """The pool of KV pages, and the shape of a session."""

    def __init__(self, engine: Engine, desc: dict[str, Any]) -> None:
        self.engine = engine
        self._own = create(lib.mc_kv_create, "mc_kv", engine, ffi.new("mc_kv_desc *", desc))


class SessionHandle(Handle):
    def __init__(self, own: Any) -> None:
        self._own = own

    @classmethod
    def new(cls, kv: Kv) -> SessionHandle:
        return cls(create(lib.mc_session_create, "mc_session", kv))

    @classmethod
    def load(cls, kv: Kv, path: str, model: bytes, room: int) -> tuple[SessionHandle, bytes]:
        """The session and the caller's bytes that were saved with it."""
        meta, own = ffi.new("uint8_t[]", room), _owner("mc_session")
        n = call(lib.mc_session_load, kv, _path(path), model, meta, room, own)
        return cls(own), bytes(ffi.buffer(meta, n))

    def save(self, path: str, model: bytes, meta: bytes) -> None:
        call(
            lib.mc_session_save,
            self,
            _path(path),
            model,
            meta,
            len(meta),
        )

    def fork(self) -> SessionHandle:
        return SessionHandle(create(lib.mc_session_fork, "mc_session", self))

    def snapshot(self) -> None:
        call(lib.mc_session_snapshot, self)

    def rewind(self, n: int) -> None:
        call(lib.mc_session_rewind, self, n)

    def forget(self, n: int) -> None:
        call(lib.mc_session_forget, self, n)

    def rest(self) -> None:
        call(lib.mc_session_rest, self)

    @property
    def position(self) -> int:
        own = self.pin()
        return lib.mc_session_position(own[0])


class Step(Handle):
    """Moves sessions forward together; commit keeps the work, abort (or an error) leaves no trace."""

    def __init__(self, engine: Engine) -> None:
        self._own = create(lib.mc_step_create, "mc_step", engine)

    def begin(self, sessions: Sequence[SessionHandle]) -> None:
        owners = [s.pin() for s in sessions]
        call(lib.mc_step_begin, self, [own[0] for own in owners], len(owners))

    def chunk(self, counts: Sequence[int]) -> None:
        call(lib.mc_step_chunk, self, counts)

    def commit(self) -> None:
        call(lib.mc_step_commit, self)

    def abort(self) -> None:
        own = self.pin()
        lib.mc_step_abort(own[0])


class Mixer(Handle):
    """Full attention ("attn") or gated delta rule ("delta"), from its C description."""

    def __init__(self, engine: Engine, kind: str, desc: dict[str, Any]) -> None:
        self._forward = getattr(lib, f"mc_{kind}_forward")
        self._own = create(
            getattr(lib, f"mc_{kind}_create"), f"mc_{kind}",
            engine, ffi.new(f"mc_{kind}_desc *", desc),
        )  # fmt: skip

    def forward(self, step: Step, x: np.ndarray) -> None:
        """x (n_tok, hidden) += mixer(norm(x))."""
        call(self._forward, self, step, floats(x))


class Store(Handle):
    """The routed experts of all layers, and the cache."""

    def __init__(
        self, engine: Engine, n_layer: int, n_expert: int, top_k: int, policy: str
    ) -> None:
        self._own = create(
            lib.mc_store_create, "mc_store", engine, n_layer, n_expert, top_k,
            POLICIES[policy],
        )  # fmt: skip

    def tier(self, device: int, after: int, window: int, size: int) -> None:
        """A cache in VRAM, as mc_tier_opts has it; size: bytes of VRAM."""
        fields = {"device": device, "after": after, "window": window, "bytes": size}
        call(lib.mc_store_tier, self, ffi.new("mc_tier_opts *", fields))

    def open(self, slots: int, ahead: int = 0) -> None:
        """ahead: slabs for experts that are read before a layer asks for them."""
        call(lib.mc_store_open, self, slots, ahead)

    def resize(self, slots: int) -> None:
        call(lib.mc_store_resize, self, slots)


class Moe(Handle):
    def __init__(
        self, engine: Engine, store: Store | None, desc: dict[str, Any], experts: np.ndarray | None
    ) -> None:
        """experts: (n, 3) array laid out as mc_tensor, with file numbers of the engine."""
        pointer = ffi.NULL
        if experts is not None:
            if experts.nbytes != experts.shape[0] * ffi.sizeof("mc_expert"):
                raise ValueError("experts: layout differs from mc_expert")
            pointer = ffi.cast("mc_expert *", ffi.from_buffer(experts))
        self._own = create(
            lib.mc_moe_create, "mc_moe", engine,
            ffi.NULL if store is None else store, ffi.new("mc_moe_desc *", desc), pointer,
        )  # fmt: skip

    def forward(
        self,
        step: Step,
        x: np.ndarray,
        routed: np.ndarray | None = None,
        forced: np.ndarray | None = None,
    ) -> None:
        """x (n_tok, hidden) += moe(norm(x)); routed (n_tok, top_k) int32 receives the expert ids; forced: the
        ids to use in place of the router's choice, of the same shape."""
        out = ffi.NULL if routed is None else ints(routed)
        given = ffi.NULL if forced is None else ints(forced)
        call(lib.mc_moe_forward, self, step, floats(x), given, out)
