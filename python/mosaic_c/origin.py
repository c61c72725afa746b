"""What an expert pack was made of: the hash of its source, and whether that is the one asked for."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mosaic_c.checkpoint import Checkpoint
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import open_regular, path_text, read_exact, show, shown_path
from mosaic_c.limits import default_threads, read_limits

CHUNK = 4 << 20
LEAST = 12  # hex digits of a hash that is cut short


def folder_hash(
    folder: Path, names: Sequence[str], threads: int, progress: Callable[[int], object]
) -> str:
    """Of what `sha256sum` prints for config.json and then the weight files `names`, by name. progress: bytes of weight
    files."""

    def one(name: str) -> str:
        return _sha256(folder / name, progress if name != "config.json" else lambda n: None)

    names = ["config.json", *sorted(names)]
    with ThreadPoolExecutor(threads) as pool:
        digests = pool.map(one, names)
        lines = [f"{x}  {name}\n" for x, name in zip(digests, names, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _sha256(path: Path, progress: Callable[[int], object]) -> str:
    out, at = hashlib.sha256(), 0
    fd, size = open_regular(path)
    try:
        while at < size:
            raw = read_exact(fd, min(CHUNK, size - at), at, path)
            out.update(raw)
            os.posix_fadvise(fd, at, len(raw), os.POSIX_FADV_DONTNEED)
            at += len(raw)
            progress(len(raw))
    finally:
        os.close(fd)
    return out.hexdigest()


def check(checkpoint: Checkpoint, source: str | os.PathLike[str]) -> None:
    """Refuses a model that is not a pack of `source`: a hash, at least its first LEAST hex digits; or a folder: a
    pack, whose hash is in its manifest, or a checkpoint, all of which is read and hashed."""
    where = shown_path(checkpoint.folder)
    if checkpoint.pack is None:
        raise UsageError(
            f"{where}: not an expert pack: only those say what they were made of; leave the source out"
        )
    got = checkpoint.pack.source.get("sha256")
    text = path_text(source)
    if os.path.isdir(text):
        wanted = _of_folder(text)
    elif re.fullmatch(rf"[0-9a-fA-F]{{{LEAST},64}}", text):
        wanted = text.lower()
    else:
        raise UsageError(
            f"source: expected a folder, or {LEAST} to 64 hex digits of a hash, got {show(text)}"
        )
    if not isinstance(got, str) or not got.startswith(wanted):
        made = f"sha256 {got}" if isinstance(got, str) else "no checkpoint (synthetic)"
        raise MosaicError(
            f"{where}: made of another source: expected sha256 {wanted}, got {made}; open the pack of that source, or "
            "convert it again", "ESOURCE",
        )  # fmt: skip


def _of_folder(path: str) -> str:
    given = Checkpoint.open(path)
    if given.pack is None:
        threads = default_threads(read_limits())
        return folder_hash(given.folder, given.names, threads, lambda n: None)
    digits = given.pack.source.get("sha256")
    if not isinstance(digits, str):
        raise UsageError(f"source: {shown_path(given.folder)} is a pack of no checkpoint")
    return digits
