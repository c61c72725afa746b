"""Where a pack may be written: never into its source, never over a file of anybody else's.

DST.partial may have been made by anyone: what is in it is looked at before anything is written there, and no file is
written through a link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import shown_path

JOURNAL, FOLDER = "journal", "pack"  # all that DST.partial holds


def partial_of(dst: Path) -> Path:
    return dst.with_name(f"{dst.name}.partial")


def check_place(src: str, dst: Path) -> None:
    """src: as given. The folder that is written, and its partial one, lie outside the source and the source outside
    them."""
    source = Path(os.path.realpath(src))
    for path in (dst, partial_of(dst)) if dst.name else (dst,):
        real = Path(os.path.realpath(path))
        if real == source:
            raise UsageError(f"{shown_path(path)} is the source itself: choose another folder")
        if source in real.parents:
            raise UsageError(
                f"{shown_path(path)} lies in the source: choose a folder outside {shown_path(source)}"
            )
        if path != dst and real in source.parents:
            raise UsageError(
                f"{shown_path(source)}: the source lies in {shown_path(path)}, where the pack would be made: "
                "choose another folder"
            )


def check_partial(partial: Path, known: Collection[str]) -> None:
    """What an earlier run left, and nothing else: no links, no files of other names."""
    folder = partial / FOLDER
    for path in (partial, folder):
        if os.path.islink(path):
            raise UsageError(f"{shown_path(path)}: a link; remove it, or choose another folder")
    for path, names in ((partial, (JOURNAL, FOLDER)), (folder, known)):
        if not path.is_dir():
            continue
        for name in os.listdir(path):
            if name not in names or os.path.islink(path / name):
                raise MosaicError(
                    f"{shown_path(path / name)}: not a file of this pack; remove it, or choose another folder",
                    "EEXIST",
                )


def open_own(path: Path) -> int:
    """A descriptor of a file that holds what earlier runs wrote, or is new. A link, or a file that another name
    shares, is refused: it may be the source's."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        os.close(fd)
        raise UsageError(f"{shown_path(path)}: expected a file of this pack alone; remove it")
    return fd


def create(path: Path) -> int:
    """A new file in place of whatever has its name."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
