"""Figures as pictures, where the extra `plot` is installed."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import check_writable

_SUFFIXES = (".png", ".pdf", ".svg")


def check(path: str | os.PathLike[str]) -> None:
    """Raises what would keep a picture from being written, before the work that it shows."""
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--plot {path}: expected a name that ends in {', '.join(_SUFFIXES)}")
    check_writable(path)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MosaicError(
            f"--plot needs matplotlib, the extra `plot`: pip install 'mosaic_c[plot]' ({error})",
            "ENOENT",
        ) from None


def sweep(
    names: Sequence[str],
    table: Sequence[Sequence[dict[str, Any]]],
    title: str,
    path: str | os.PathLike[str],
) -> None:
    """Hit rate, speed and resident memory against the size of the cache, a line for each series."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(1, 3)
    slots = [rows[0]["slots"] for rows in table]
    for axes, label, key, factor in zip(
        panels,
        ("hits, % of expert calls", "decode, tokens/s (median)", "resident memory, MB"),
        ("hit_rate", "tok_s", "rss"),
        (100, 1, 1e-6),
        strict=True,
    ):
        for i, name in enumerate(names):
            values = [rows[i][key] * factor for rows in table]
            axes.plot(slots, values, marker="o", label=name, color=f"C{i}")
            if key == "rss":
                before = [rows[i]["rss_before"] * factor for rows in table]
                axes.plot(slots, before, ls=":", color=f"C{i}", label=f"{name}, no expert touched")
        axes.set_xscale("log", base=2)
        axes.set_xticks(slots, list(map(str, slots)))
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("cache, experts per layer")
        axes.set_title(label, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    drawn = (
        io.BytesIO()
    )  # a disk that fills up must not cost the picture that is there, nor leave half of one
    figure.savefig(drawn, dpi=120, format=Path(path).suffix[1:].lower())
    target = os.path.realpath(path)  # a link stays
    partial = f"{target}.partial-{os.getpid()}"
    try:
        try:
            Path(partial).write_bytes(drawn.getbuffer())
            os.replace(partial, target)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise MosaicError(
            f"{os.fspath(path)}: cannot write the picture: {error.strerror}", "EIO"
        ) from None
