"""Gives the tensors of a checkpoint their place in a plan: every weight found, its shape, type and
FP8 scale checked, the routed experts as arrays that C reads as they are.

What is missing, beyond the config, unknown or of a kind the engine does not compute with is one
MosaicError naming tensor, expected and got: an ignored bias would be wrong text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mosaic_c.checkpoint import DTYPE_CODES, TENSOR_DTYPE, Checkpoint, TensorTable
from mosaic_c.dtypes import BITS
from mosaic_c.errors import MosaicError
from mosaic_c.header import DTYPES
from mosaic_c.jsonfile import few, show, shown_path
from mosaic_c.pack import MANIFEST, PackLayer
from mosaic_c.pack_format import ALLOWED
from mosaic_c.pack_tensors import SCALE, Stored
from mosaic_c.plan import Experts, ModelPlan, Weight

F8 = DTYPE_CODES["F8_E4M3"]
# The types that official checkpoints of our families have.
WEIGHT_DTYPES = ("F32", "BF16", "F16", "F8_E4M3")
CODE_NAMES = tuple(DTYPE_CODES)
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
BLOCK = 128  # edge of the blocks of FP8 that share a scale
ENOUGH = 100_000  # missing tensors after which nobody counts further

_CODE_BITS = np.array([BITS[x] for x in CODE_NAMES], np.int64)
# Index into header.DTYPES -> mc_tensor.dtype, -1 where the engine has no such type.
_CODE_OF = np.array([DTYPE_CODES.get(x, -1) for x in DTYPES], np.int32)
_WEIGHT_OK = np.array([x in WEIGHT_DTYPES for x in DTYPES])
_SCALE_OK = np.array([x in SCALE_DTYPES for x in DTYPES])
_HARMLESS = (".rotary_emb.inv_freq",)  # computed from the config; some old checkpoints store it


@dataclass(frozen=True)
class Span:
    """One matrix (rows, cols) in a file; a vector has rows 1. offset: bytes. No scale: None."""

    file: int
    dtype: str
    offset: int
    rows: int
    cols: int
    scale_file: int | None = None
    scale_dtype: str | None = None
    scale_offset: int | None = None
    block: tuple[int, int] = (BLOCK, BLOCK)  # rows and columns that share a scale
    crc: int | None = None  # CRC-32C of its bytes, then of its scales'; None: not known

    @property
    def nbytes(self) -> int:
        return self.rows * -(-self.cols * BITS[self.dtype] // 8)

    @property
    def scale_nbytes(self) -> int:
        if self.scale_dtype is None:
            return 0
        rows, cols = self.block[0], self.block[1] or self.cols  # 0: the whole row
        return -(-self.rows // rows) * -(-self.cols // cols) * BITS[self.scale_dtype] // 8


@dataclass(frozen=True)
class Located:
    """A plan whose weights are all found. It keeps nothing of the Checkpoint alive.

    plan: with the head of a tied checkpoint that stores one after all. spans: by tensor name, all
    but the experts. experts: for each of plan.moe_layers a contiguous array (count, 3) of
    TENSOR_DTYPE (gate, up, down), which C reads as mc_expert[count]. skipped: prefix -> (tensors,
    bytes). ignored: names of harmless tensors without use. row_crc: (vocab,) uint32, CRC-32C of the
    rows of the embedding; None: not known.
    """

    plan: ModelPlan
    files: list[Path]
    spans: dict[str, Span]
    experts: list[np.ndarray]
    skipped: dict[str, tuple[int, int]]
    ignored: list[str] = field(default_factory=list)
    row_crc: np.ndarray | None = None

    def span(self, weight: Weight) -> Span:
        return self.spans[weight.name]

    def named(self, error: MosaicError) -> MosaicError:
        """An error of C about damage at a place, with the name of the tensor there, which C does not know."""
        for name, s in self.spans.items():
            if str(error).startswith(f"{self.files[s.file]}, byte {s.offset}: "):
                return MosaicError(f"tensor {show(name)}: {error}", error.code)
        return error


def matrix_bytes(e: np.ndarray) -> np.ndarray:
    """Bytes of each matrix of an array of TENSOR_DTYPE, rows from whole bytes on."""
    return e["rows"] * -(-e["cols"] * _CODE_BITS[e["dtype"]] // 8)


def scale_bytes(e: np.ndarray) -> np.ndarray:
    """Bytes of the scales of each, 0 where there are none."""
    scaled = e["scale_file"] >= 0
    rows = np.where(scaled, e["block_rows"], 1)
    cols = np.where(e["block_cols"] > 0, e["block_cols"], e["cols"])
    count = -(-e["rows"] // rows) * -(-e["cols"] // np.maximum(cols, 1))
    return np.where(scaled, count * _CODE_BITS[e["scale_dtype"]] // 8, 0)


def locate(checkpoint: Checkpoint, plan: ModelPlan) -> Located:
    """Finds every weight of the plan. Raises MosaicError (EFORMAT, EUNSUPPORTED)."""
    binder = _Binder(checkpoint, plan)
    if plan.head is None and plan.spare_head and plan.spare_head.name in checkpoint.tensors:
        plan = replace(plan, head=plan.spare_head)
    spans = {w.name: span for w in plan.weights() if (span := binder.dense(w)) is not None}
    experts = []
    for i, layer in enumerate(plan.moe_layers):
        assert layer.experts is not None
        experts.append(binder.experts(layer.experts, i))
    binder.check_missing()
    skipped, ignored = binder.leftovers()
    stored = binder.stored.get(plan.embed.name)
    rows = None if stored is None else stored.rows
    return Located(plan, checkpoint.files, spans, experts, skipped, ignored, rows)


class _Binder:
    def __init__(self, checkpoint: Checkpoint, plan: ModelPlan) -> None:
        self.folder = shown_path(checkpoint.folder)
        self.paths = [checkpoint.folder / name for name in checkpoint.names]
        self.t: TensorTable = checkpoint.tensors
        self.plan, self.pack = plan, checkpoint.pack
        self.stored = (checkpoint.pack and checkpoint.pack.tensors) or {}
        self.used = np.zeros(len(self.t), bool)
        self.missing: list[str] = []  # the first few
        self.n_missing = 0

    # ---- dense -------------------------------------------------------------------------------

    def dense(self, w: Weight) -> Span | None:
        row = self.t.row(w.name)
        if row < 0:
            self._lack([w.name])
            return None
        rows, cols = (1, w.shape[0]) if len(w.shape) == 1 else (w.shape[0], w.shape[-1])
        if (stored := self.stored.get(w.name)) is not None:
            return self._listed(w, row, stored, rows, cols)
        out = np.zeros(1, TENSOR_DTYPE)
        scale = (-(-rows // BLOCK), -(-cols // BLOCK)) if len(w.shape) == 2 else None
        self._fill(
            out, np.array([row]), np.array([self.t.row(w.name + SCALE)]), w.shape, scale,
            lambda i: w.name,
        )  # fmt: skip
        r = out[0]
        span = Span(int(r["file"]), CODE_NAMES[r["dtype"]], int(r["offset"]), rows, cols)
        if r["scale_file"] < 0:
            return span
        return replace(
            span,
            scale_file=int(r["scale_file"]),
            scale_dtype=CODE_NAMES[r["scale_dtype"]],
            scale_offset=int(r["scale_offset"]),
        )

    def _listed(self, w: Weight, row: int, x: Stored, rows: int, cols: int) -> Span:
        """From a pack that lists its tensors; the headers agree with the list."""
        if x.shape != w.shape:
            self._fail(row, w.name, f"expected shape {list(w.shape)}", list(x.shape))
        scales, blocks = ALLOWED.get(x.form.dtype, (("no type of weights",), ()))
        if (x.form.scale is None) != (not scales):
            text = f"{x.form.dtype} without the scales that it needs, or not a type of weights"
            self._fail_text(row, w.name, f"stored as {text}", "EUNSUPPORTED")
        if w == self.plan.embed and x.rows is None:
            self._fail_text(row, w.name, f"{MANIFEST} has no rows_crc32c for the embedding")
        t, self.used[row] = self.t, True
        span = Span(int(t.file[row]), x.form.dtype, int(t.offset[row]), rows, cols, crc=x.crc)
        if x.form.scale is None:
            return span
        scale = t.row(w.name + SCALE)
        self.used[scale] = True
        return replace(
            span, scale_file=int(t.file[scale]), scale_dtype=x.form.scale, scale_offset=int(t.offset[scale]),
            block=x.form.block,
        )  # fmt: skip

    # ---- experts -----------------------------------------------------------------------------

    def experts(self, e: Experts, index: int) -> np.ndarray:
        """index: of the layer among those with experts."""
        if self.pack is not None:
            return self._records(e, self.pack.layers[index])
        if self.n_missing > ENOUGH:  # an absurd config: it will be refused, and soon
            return np.zeros((0, 3), TENSOR_DTYPE)
        fused = [name for name in e.fused if name in self.t]
        single = [self._rows(name, e.count) for name in e.per_expert]
        if fused and any((rows >= 0).any() for rows in single):
            found = [bool((rows >= 0).any()) for rows in single]
            first = e.per_expert[found.index(True)]
            raise MosaicError(
                f"{self.folder}: experts both fused ({show(fused[0])}) and one by one "
                f"({show(first)}), expected one of the two",
                code="EFORMAT",
            )
        for pattern, rows in zip(e.per_expert, single, strict=True):
            if not fused:
                self._lack(pattern.format(e=i) for i in np.flatnonzero(rows < 0).tolist())
        if self.n_missing:
            return np.zeros((0, 3), TENSOR_DTYPE)
        out = np.zeros((e.count, 3), TENSOR_DTYPE)
        if fused:
            self._fused(e, out)
            return out
        shapes = ((e.width, e.hidden), (e.width, e.hidden), (e.hidden, e.width))
        parts = zip(e.per_expert, single, shapes, strict=True)
        for part, (pattern, rows, shape) in enumerate(parts):
            scale_rows = self._rows(pattern + SCALE, e.count)
            scale = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            self._fill(out[:, part], rows, scale_rows, shape, scale, _numbered(pattern))
            out["rows"][:, part], out["cols"][:, part] = shape
        return out

    def _records(self, e: Experts, x: PackLayer) -> np.ndarray:
        """From a pack, whose manifest has been checked against the plan."""
        for name in (*e.fused, *(pattern.format(e=0) for pattern in e.per_expert)):
            if name in self.t:
                self._fail_text(self.t.row(name), name, f"the experts lie in records ({MANIFEST})")
        assert self.pack is not None
        out = np.zeros((x.count, 3), TENSOR_DTYPE)
        out["file"] = len(self.paths) - len(self.pack.files) + x.file
        out["scale_file"] = -1
        out["record"], out["crc"] = 1, x.crc[:, None]
        start = x.offset + np.arange(x.count, dtype=np.int64) * x.record_bytes
        for k, (form, shape) in enumerate(zip(x.formats, x.shapes, strict=True)):
            col = out[:, k]
            col["dtype"], col["offset"] = DTYPE_CODES[form.dtype], start + x.parts[k]
            col["rows"], col["cols"] = shape
            if form.scale is not None:
                col["scale_file"], col["scale_dtype"] = col["file"], DTYPE_CODES[form.scale]
                col["scale_offset"] = start + x.parts[3 + k]
                col["block_rows"], col["block_cols"] = form.block
        return out

    def _rows(self, pattern: str, count: int) -> np.ndarray:
        before, _, after = pattern.partition("{e}")
        row = self.t.row
        return np.array([row(f"{before}{i}{after}") for i in range(count)], np.int64)

    def _fused(self, e: Experts, out: np.ndarray) -> None:
        """gate_up (count, 2 * width, hidden) and down (count, hidden, width): equal steps from the
        start of each, of weights and of scales."""
        shapes = ((e.count, 2 * e.width, e.hidden), (e.count, e.hidden, e.width))
        whole = np.zeros(2, TENSOR_DTYPE)
        for i, (name, shape) in enumerate(zip(e.fused, shapes, strict=True)):
            row = self.t.row(name)
            if row < 0:
                self._lack([name])
                return
            scale = (e.count, -(-shape[1] // BLOCK), -(-shape[2] // BLOCK))
            scale_row = self.t.row(name + SCALE)
            if i == 0 and scale_row >= 0 and e.width % BLOCK:
                raise MosaicError(
                    f"{self.folder}: FP8 tensor {show(name)}: gate and up share scale blocks, "
                    f"expected an expert width that is a multiple of 128, got {e.width}",
                    code="EUNSUPPORTED",
                )
            self._fill(
                whole[i : i + 1], np.array([row]), np.array([scale_row]), shape, scale,
                _numbered(name),
            )  # fmt: skip
        index = np.arange(e.count, dtype=np.int64)
        half = e.width * e.hidden  # elements of one matrix, the same for all three
        blocks = -(-e.width // BLOCK) * -(-e.hidden // BLOCK)  # scales of one matrix, likewise
        for part, (source, first, step) in enumerate(((0, 0, 2), (0, 1, 2), (1, 0, 1))):
            w, col = whole[source], out[:, part]
            col[:] = w
            col["rows"], col["cols"] = (e.hidden, e.width) if part == 2 else (e.width, e.hidden)
            col["offset"] += (index * step + first) * half * int(_CODE_BITS[w["dtype"]]) // 8
            if w["scale_file"] >= 0:
                bits = int(_CODE_BITS[w["scale_dtype"]])
                col["scale_offset"] += (index * step + first) * blocks * bits // 8

    # ---- one check for all -------------------------------------------------------------------

    def _fill(
        self,
        out: np.ndarray,
        rows: np.ndarray,
        scale_rows: np.ndarray,
        shape: tuple[int, ...],
        scale_shape: tuple[int, ...] | None,
        name: Callable[[int], str],
    ) -> None:
        """Checks tensors of one shape and writes their mc_tensor records, but for rows and cols.

        rows, scale_rows: rows of the table, scale -1 where absent. scale_shape None: cannot be
        quantised. name: of the i-th, for messages.
        """
        t = self.t

        def first(bad: np.ndarray) -> int | None:
            found = np.flatnonzero(bad)
            return int(found[0]) if len(found) else None

        if (i := first(t.shape[rows] != t.shape_id(shape))) is not None:
            self._fail(rows[i], name(i), f"expected shape {list(shape)}", self._shape(rows[i]))
        codes = _CODE_OF[t.dtype[rows]]
        if (i := first(~_WEIGHT_OK[t.dtype[rows]])) is not None:
            expected = f"expected dtype {', '.join(WEIGHT_DTYPES)} (nothing else is supported yet)"
            self._fail(rows[i], name(i), expected, DTYPES[t.dtype[rows[i]]], "EUNSUPPORTED")
        f8, scaled = codes == F8, scale_rows >= 0
        if (i := first(scaled & ~f8)) is not None:
            self._fail(
                rows[i], name(i), f"has a scale {show(name(i) + SCALE)}: expected dtype F8_E4M3",
                CODE_NAMES[codes[i]],
            )  # fmt: skip
        if f8.any():
            self._check_quantised(int(np.flatnonzero(f8)[0]), rows, name, scale_shape)
            if (i := first(f8 & ~scaled)) is not None:
                other = name(i) + "_scale"
                got = f"{show(other)} (another scheme)" if other in t else "no such tensor"
                self._fail_text(
                    rows[i], name(i), f"FP8 needs its scale {show(name(i) + SCALE)}, got {got}"
                )
            if (i := first(f8 & ~_SCALE_OK[t.dtype[scale_rows]])) is not None:
                expected = (
                    f"expected a scale of {', '.join(SCALE_DTYPES)} (nothing else is supported yet)"
                )
                got = DTYPES[t.dtype[scale_rows[i]]]
                self._fail(scale_rows[i], name(i) + SCALE, expected, got, "EUNSUPPORTED")
            assert scale_shape is not None
            if (i := first(f8 & (t.shape[scale_rows] != t.shape_id(scale_shape)))) is not None:
                expected = f"expected shape {list(scale_shape)}, a scale for each 128x128 block"
                got_shape = self._shape(scale_rows[i])
                self._fail(scale_rows[i], name(i) + SCALE, expected, got_shape)
        out["file"], out["offset"], out["dtype"] = t.file[rows], t.offset[rows], codes
        out["scale_file"] = np.where(scaled, t.file[scale_rows], -1)
        out["scale_dtype"] = np.where(scaled, _CODE_OF[t.dtype[scale_rows]], 0)
        out["scale_offset"] = np.where(scaled, t.offset[scale_rows], 0)
        out["block_rows"] = out["block_cols"] = np.where(scaled, BLOCK, 0)
        self.used[rows] = True
        self.used[scale_rows[scaled]] = True

    def _check_quantised(
        self, i: int, rows: np.ndarray, name: Callable[[int], str], scale_shape: object
    ) -> None:
        if self.plan.weight_block is None:
            self._fail_text(
                rows[i], name(i), "F8_E4M3, but config.json has no quantization_config "
                '(expected quant_method "fp8" with weight_block_size [128, 128])',
            )  # fmt: skip
        if scale_shape is None:
            expected = "expected F32, BF16 or F16 for a tensor that is not a matrix"
            self._fail(rows[i], name(i), expected, "F8_E4M3", "EUNSUPPORTED")

    def _shape(self, row: int) -> list[int]:
        return list(self.t.shapes[int(self.t.shape[row])])

    def _fail(self, row: int, name: str, rule: str, got: object, code: str = "EFORMAT") -> None:
        self._fail_text(row, name, f"{rule}, got {got}", code)

    def _fail_text(self, row: int, name: str, text: str, code: str = "EFORMAT") -> None:
        path = shown_path(self.paths[self.t.file[row]])
        raise MosaicError(f"{path}: tensor {show(name)}: {text}", code=code)

    # ---- what is left over -------------------------------------------------------------------

    def _lack(self, names: Iterable[str]) -> None:
        for name in names:
            self.n_missing += 1
            if len(self.missing) < 5:
                self.missing.append(name)

    def check_missing(self) -> None:
        if self.n_missing:
            spare = (name for row, name in enumerate(self.t) if not self.used[row])
            example = next(spare, next(iter(self.t), "none"))
            more = " or more" if self.n_missing > ENOUGH else ""
            raise MosaicError(
                f"{self.folder}: missing {self.n_missing}{more} of the tensors that its config.json "
                f"asks for: {few(self.missing, self.n_missing)}; found {len(self.t)} tensors such "
                f"as {show(example)}",
                code="EFORMAT",
            )

    def leftovers(self) -> tuple[dict[str, tuple[int, int]], list[str]]:
        """(skipped by prefix, ignored); refuses every other tensor that nothing uses."""
        skipped: dict[str, tuple[int, int]] = {}
        ignored: list[str] = []
        unknown: list[str] = []
        used, prefixes = self.used.tolist(), self.plan.skip
        for row, name in enumerate(self.t):
            if used[row]:
                continue
            if name.startswith(prefixes):
                prefix = next(x for x in prefixes if name.startswith(x))
                count, size = skipped.get(prefix, (0, 0))
                skipped[prefix] = (count + 1, size + int(self.t.nbytes[row]))
            elif name.endswith(_HARMLESS):
                ignored.append(name)
            else:
                unknown.append(name)
        if unknown:
            self._refuse(unknown)
        return skipped, ignored

    def _refuse(self, unknown: list[str]) -> None:
        layers = len(self.plan.layers)
        experts = max((m.experts.count for m in self.plan.moe_layers if m.experts), default=0)
        for key, pattern, limit in (
            ("num_hidden_layers", r"(?:^|\.)layers\.(\d+)\.", layers),
            ("num_experts", r"\.experts\.(\d+)\.", experts),
        ):
            find = re.compile(pattern)
            over = [x for x in unknown if (m := find.search(x)) and int(m[1][:20]) >= limit]
            if over:
                raise MosaicError(
                    f"{self.folder}: {len(over)} tensors beyond the config, which says {key} = "
                    f"{limit}: {few(over, limit=3)}",
                    code="EFORMAT",
                )
        raise MosaicError(
            f"{self.folder}: {len(unknown)} tensors that this family does not know: "
            f"{few(unknown)}; without them the text would be wrong",
            code="EUNSUPPORTED",
        )


def _numbered(pattern: str) -> Callable[[int], str]:
    return lambda i: pattern.format(e=i)
