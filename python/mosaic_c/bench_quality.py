"""What formats of experts and of dense matrices cost a model's text: perplexity on texts, and the distance of its
predictions from those of the model as it is.

Every variant is made by `convert` in a temporary folder, run over the same windows of tokens, and removed. The logits
of the model as it is wait in a file, so one model is open at a time and memory is that of a few rows of logits.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mosaic_c.bind import F8
from mosaic_c.checkpoint import DTYPE_CODES
from mosaic_c.convert import DENSE, FILE_BYTES, FORMATS, convert, plan
from mosaic_c.convert_source import Source
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import read_small, reason, shown_path
from mosaic_c.opening import open_model
from mosaic_c.scratch import scratch
from mosaic_c.synth_shapes import LABEL
from mosaic_c.tokenizer import Tokenizer

TEXTS = Path(__file__).parent / "texts"
MAX_TEXT = 64_000_000  # bytes of a text
WINDOW = 512
ROWS = 8  # of logits that are compared at once
SPARE = 64 << 20  # room beside logits and the largest variant
AS_IS = "as it is"
# (experts, dense); None: as they are. The last three are the rule: experts at four bits, dense at eight.
VARIANTS: tuple[tuple[str | None, str | None], ...] = (
    ("bf16", None), ("fp8", None), ("int4-g32", None), ("int4-g64", None), ("int4-row", None), ("mxfp4", None),
    (None, "fp8"), (None, "int8"), (None, "int4-g64"),
    ("int4-g64", "fp8"), ("int4-g64", "int8"), ("int4-g64", "int4-g64"),
)  # fmt: skip


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a text; the first has nothing before it and is not predicted."""

    text: int
    ids: list[int]

    @property
    def scored(self) -> int:
        return len(self.ids) - 1


@dataclass(frozen=True)
class Text:
    name: str
    tokens: int
    scored: int


@dataclass
class Run:
    """One variant. Sums over the predicted tokens of each window: of -log p of the token, of the KL divergence from
    the model as it is over the whole vocabulary (nats), and how many tokens have its first choice. expert_bytes,
    dense_bytes: of routed experts and of the matrices of the layers, with scales; bytes: of all tensors."""

    experts: str
    dense: str
    expert_bytes: int
    dense_bytes: int
    bytes: int
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    top1: list[int] = field(default_factory=list)
    convert_s: float = 0.0
    run_s: float = 0.0


@dataclass(frozen=True)
class Report:
    """runs[0] is the model as it is. notes: variants that cannot be made or whose logits are
    not finite, and why."""

    model: str
    synthetic: bool
    vocab: int
    window: int
    texts: list[Text]
    windows: list[tuple[int, int]]  # (text, predicted tokens) of each
    runs: list[Run]
    notes: list[str]


Progress = Callable[[str, int, int], None]  # what, windows done, windows in all


# ---- statistics ----------------------------------------------------------------------------------


def mean(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float | None]:
    """(mean of a token, its standard error) of sums over windows. Tokens of a window are not independent, windows are
    taken to be: the error is that of a ratio of sums over them. None: there is one window."""
    total = sum(counts)
    m = sum(sums) / total
    if len(sums) < 2:
        return m, None
    off = sum((s - m * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return m, math.sqrt(off * len(sums) / (len(sums) - 1)) / total


def difference(
    a: Sequence[float], b: Sequence[float], counts: Sequence[int]
) -> tuple[float, float | None]:
    """(mean of a less that of b, its standard error): paired, window by window."""
    return mean([x - y for x, y in zip(a, b, strict=True)], counts)


# ---- tokens and variants -------------------------------------------------------------------------


def windows_of(
    tokenizer: Tokenizer, paths: Sequence[Path], size: int, most: int | None, vocab: int
) -> tuple[list[Text], list[Window]]:
    """Texts as the tokenizer encodes them (text of special tokens is plain text), cut into windows of `size` tokens
    without overlap, the last one shorter; most: tokens of each text, None: all; vocab: tokens that the model has."""
    texts, windows = list[Text](), list[Window]()
    for path in paths:
        try:
            text = read_small(path, MAX_TEXT).decode()
        except UnicodeDecodeError as error:
            raise MosaicError(
                f"{shown_path(path)}: not UTF-8 at byte {error.start}; save the text as UTF-8",
                "EFORMAT",
            ) from None
        ids = tokenizer.encode(text, specials=False)[:most]
        if ids and max(ids) >= vocab:
            raise MosaicError(
                f"{shown_path(tokenizer.folder / 'tokenizer.json')}: makes token {max(ids)} of {shown_path(path)}, "
                f"expected 0..{vocab - 1} as config.json has it: another model's; copy that of this one", "EFORMAT",
            )  # fmt: skip
        parts = [ids[i : i + size] for i in range(0, len(ids), size)]
        mine = [Window(len(texts), part) for part in parts if len(part) > 1]
        if not mine:
            raise UsageError(
                f"{shown_path(path)}: expected 2 tokens or more, got {len(ids)}; give a longer text"
            )
        texts.append(Text(path.name, len(ids), sum(x.scored for x in mine)))
        windows += mine
    return texts, windows


def variants_of(names: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """Of texts such as int4-g64 (experts alone), +int8 (dense alone), int4-g64+int8."""
    out = []
    for name in names:
        experts, _, dense = name.partition("+")
        if (
            (experts and experts not in FORMATS)
            or (dense and dense not in DENSE)
            or not name.strip("+")
        ):
            raise UsageError(
                f"variant {name!r}: expected EXPERTS, +DENSE or EXPERTS+DENSE with experts in {', '.join(FORMATS)} and "
                f"dense in {', '.join(DENSE)}"
            )  # fmt: skip
        out.append((experts or None, dense or None))
    return out


def _kept(source: Source) -> tuple[str, bool]:
    """(format of packs that is nearest to the experts as they are, whether it keeps every bit)."""
    codes = {code for e in source.experts for code in np.unique(e["dtype"]).tolist()}
    return "fp8" if codes == {F8} else "bf16", codes in ({F8}, {DTYPE_CODES["BF16"]})


def _changes(source: Source, experts: str | None, dense: str | None) -> bool:
    """Whether a variant differs from the model as it is, and by its dense matrices too where it names a format."""
    kept, whole = _kept(source)
    if dense is not None:
        return any(x.turned for shard in source.shards(DENSE[dense]) for x in shard.pieces)
    return not (whole and experts in (None, kept))


def _sized(source: Source, experts: str | None, dense: str | None) -> Run:
    """A run without results: names and bytes."""
    form, matrices = (
        None if dense is None else DENSE[dense],
        {w.name for w in source.plan.matrices()},
    )
    (kept, whole), first = _kept(source), experts is dense is None
    rest = dense_bytes = 0
    for shard in source.shards(form):
        for x in shard.pieces:
            rest += x.nbytes
            if x.stored is not None and x.name in matrices:
                dense_bytes += x.stored.nbytes
    if first:
        routed = sum(source.expert_bytes(i) for i in range(len(source.experts)))
    else:
        routed = sum(plan(source, FORMATS[experts or kept], "", FILE_BYTES).sizes)
    name = experts or (AS_IS if first or whole else kept)
    return Run(name, dense or AS_IS, routed, dense_bytes, routed + rest)


# ---- running -------------------------------------------------------------------------------------


def quality(
    model: str | os.PathLike[str],
    texts: Sequence[str | os.PathLike[str]] | None = None,
    variants: Sequence[str] | None = None,
    window: int | None = None,
    tokens: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: Progress = lambda what, done, total: None,
    rows: Callable[[Report], None] = lambda report: None,
    **options: Any,
) -> Report:
    """Runs the model as it is and every variant; rows gets the report after each. variants: as variants_of has them,
    None: VARIANTS; window: tokens, None: WINDOW or the model's limit. options: of open_model."""
    paths = [Path(x) for x in texts] if texts else sorted(TEXTS.glob("*.txt"))
    chosen = VARIANTS if variants is None else variants_of(variants)
    if tokens is not None and tokens < 2:
        raise UsageError(f"tokens of each text: expected 2 or more, got {tokens}")
    with Source(model) as source:
        plan_ = source.plan
        if plan_.max_positions < 2:
            raise UsageError(
                f"{shown_path(source.folder)}: a context of 1 token: nothing is predicted"
            )
        if window is None:
            window = min(WINDOW, plan_.max_positions)
        if not 2 <= window <= plan_.max_positions:
            raise UsageError(f"window: expected 2 to {plan_.max_positions} tokens, got {window}")
        found, windows = windows_of(Tokenizer(source.folder), paths, window, tokens, plan_.vocab)
        todo = [(e, d) for e, d in chosen if _changes(source, e, d) or variants is not None]
        sized = [_sized(source, e, d) for e, d in ((None, None), *todo)]
        kept, synthetic = _kept(source)[0], bool(source.checkpoint.config.get(LABEL))
    scored = [x.scored for x in windows]
    need = sum(scored) * plan_.vocab * 4 + max(x.bytes for x in sized) + SPARE
    report = Report(
        str(source.folder), synthetic, plan_.vocab, window, found,
        [(x.text, x.scored) for x in windows], [], [],
    )  # fmt: skip
    options |= {"ctx": window, "vram": 0}  # the bits are the same
    way = "choose another --folder, or fewer --tokens"
    with scratch(folder, need, way) as temporary, _disk(temporary, way):
        logits = temporary / "logits"
        for run, (experts, dense) in zip(sized, ((None, None), *todo), strict=True):
            name = f"{run.experts} + {run.dense}" if run.dense != AS_IS else run.experts
            done = (len(report.runs) + len(report.notes)) * len(windows)
            progress(name, done, len(sized) * len(windows))
            path, start = source.folder, time.perf_counter()
            if report.runs:
                path = temporary / "variant"
                try:
                    convert(
                        source.folder, path, experts or kept, progress=False, dense=dense,
                        threads=options.get("threads"),
                    )  # fmt: skip
                except MosaicError as error:
                    if error.code == "ENOSPC":  # filled since: convert's way out is not ours
                        where = shown_path(temporary)
                        raise MosaicError(
                            f"{where}: no room left for {name}; {way}", "ENOSPC"
                        ) from None
                    if error.code != "EFORMAT":  # values that the format cannot hold
                        raise
                    report.notes.append(f"{name}: {error}")
                    shutil.rmtree(temporary / "variant.partial", ignore_errors=True)
                    continue
            run.convert_s, start = time.perf_counter() - start, time.perf_counter()
            with (
                open_model(path, **options) as opened,
                open(logits, "r+b" if report.runs else "w+b", buffering=0) as file,
            ):
                compare = _Compare(file.fileno(), plan_.vocab, run, first=not report.runs)
                odd = ""
                for i, x in enumerate(windows):
                    compare.window(opened, x.ids)
                    if not math.isfinite(run.nll[-1] + run.kl[-1]):
                        odd = f"logits of {shown_path(found[x.text].name)} are NaN or infinite"
                        break
                    progress(name, done + i + 1, len(sized) * len(windows))
            if odd and not report.runs:
                raise MosaicError(
                    f"{shown_path(source.folder)}: {odd}, so nothing can be compared with them; a damaged copy of the "
                    "checkpoint does that: fetch it anew", "EFORMAT",
                )  # fmt: skip
            run.run_s = time.perf_counter() - start
            if report.runs:
                shutil.rmtree(path)
            if odd:
                report.notes.append(f"{name}: {odd}")
                continue
            report.runs.append(run)
            rows(report)
    return report


@contextmanager
def _disk(folder: Path, way: str) -> Iterator[None]:
    """A disk that fills or fails on the way is an error that says where, and what to do."""
    try:
        yield
    except BrokenPipeError:  # of what rows prints
        raise
    except OSError as error:
        where = error.filename or folder
        raise MosaicError(f"{shown_path(where)}: {reason(error)}; {way}", "EIO") from None


class _Compare:
    """Logits of a model against those in a file, or into it (first)."""

    def __init__(self, fd: int, vocab: int, run: Run, first: bool) -> None:
        self.fd, self.vocab, self.run, self.first = fd, vocab, run, first
        self.at = 0  # bytes of the file

    def window(self, model: Any, ids: list[int]) -> None:
        nll, kl, top1 = 0.0, 0.0, 0

        def take(at: int, z: np.ndarray) -> None:
            nonlocal nll, kl, top1
            z = z[: len(ids) - 1 - at]  # nothing follows the last token
            for i in range(0, len(z), ROWS):
                part = z[i : i + ROWS]
                if not np.isfinite(part).all():
                    nll = math.nan
                    return
                q = log_softmax(part)
                targets = ids[at + i + 1 : at + i + 1 + len(part)]
                nll -= float(q[np.arange(len(part)), targets].sum())
                if self.first:
                    self._write(part)
                    top1 += len(part)
                    continue
                reference = self._read(len(part))
                p = log_softmax(reference)
                top1 += int((part.argmax(axis=1) == reference.argmax(axis=1)).sum())
                q -= p
                kl -= float((np.exp(p, out=p) * q).sum())

        with model.session() as session:
            session.each(ids, take)
        self.run.nll.append(nll)
        self.run.kl.append(kl)
        self.run.top1.append(top1)

    def _write(self, z: np.ndarray) -> None:
        rest = memoryview(np.ascontiguousarray(z)).cast("B")
        while rest:
            n = os.pwrite(self.fd, rest, self.at)
            self.at, rest = self.at + n, rest[n:]

    def _read(self, n: int) -> np.ndarray:
        out = np.empty((n, self.vocab), np.float32)
        rest = memoryview(out).cast("B")
        while rest:
            got = os.preadv(self.fd, [rest], self.at)
            if not got:
                raise MosaicError("the file of logits ends early", "EIO")
            self.at, rest = self.at + got, rest[got:]
        return out


def log_softmax(z: np.ndarray) -> np.ndarray:
    """(n, vocab) float64."""
    out = z.astype(np.float64)
    out -= out.max(axis=1, keepdims=True)
    return np.subtract(out, np.log(np.exp(out).sum(axis=1, keepdims=True)), out=out)
