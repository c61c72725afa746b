"""States in a folder: one file a state, found again by its tokens.

A file is what Session.save writes; its name is a hash of the weights and of the tokens. The index is made of the
heads of the files as they are at the start: what other processes do to the folder later is found out when a file is
read. Files of other models stay and count; what has such a name and is damaged goes, with a note; all other files are
left alone.

    | "MCSESS\\n\\0" | version, header bytes | model (32) | shape (12 x int64) | position, pages, meta bytes | tokens |

The shape's fourth number is the KV dtype.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mosaic_c.engine import DTYPES
from mosaic_c.errors import MosaicError
from mosaic_c.jsonfile import reason, shown_path
from mosaic_c.model import Model
from mosaic_c.session import Session, common

HEAD = struct.Struct("<8sII32s12q3q")
MAGIC = b"MCSESS\n\0"
NAME = re.compile(r"[0-9a-f]{32}\.state")
HALF = re.compile(r"[0-9a-f]{32}\.state\.\w{6}")  # what a kill leaves of a file being written
HALF_SECONDS = 600
LEAST = 32  # tokens: fewer are taken to be evaluated faster than a file is read (states.DISK_GAIN)
DISK_BYTES = 8 << 30  # dozens of long conversations, and of most disks a small part


@dataclass
class _File:
    bytes: int
    tokens: np.ndarray | None  # None: of another model


class Disk:
    """The files of a folder, of most_bytes in all; the least recently used go first. One thread saves, another may do
    the rest meanwhile."""

    def __init__(self, model: Model, folder: Path, most_bytes: int) -> None:
        self.model, self.folder, self.most_bytes = model, folder, most_bytes
        self._files: OrderedDict[Path, _File] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()  # of the index; never held while a state is written
        self._failing = False
        self._model = hashlib.sha256(model.fingerprint() + model.memory.kv.encode()).digest()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            self.model._note(f"{shown_path(folder)}: no states are kept there: {reason(error)}")
            self.most_bytes = 0

    def __len__(self) -> int:
        with self._lock:
            return sum(file.tokens is not None for file in self._files.values())

    def find(self, ids: np.ndarray, most: int, hybrid: bool, least: int) -> tuple[Path, int] | None:
        """The file that gives the most of ids[:most], and how many tokens; None where all give fewer than `least`.
        hybrid: a file's tokens have to be used whole."""
        found = None
        with self._lock:
            files = list(self._files.items())
        for path, file in files:
            if file.tokens is None or len(file.tokens) > self.model.ctx:
                continue
            n = min(common(file.tokens, ids), most)
            if n >= least and not (hybrid and n < len(file.tokens)):
                found, least = (path, n), n + 1
        return found

    def save(self, session: Session) -> bool:
        """Writes a state that is not there yet; False where that failed, of which the first in a row is noted."""
        tokens = np.asarray(session.tokens, np.int32)
        path = self._path(tokens)
        if len(tokens) < LEAST or not self.most_bytes:
            return True
        if path in self._files:
            self.used(path)
            return True
        try:
            session.save(path)
            file = _File(path.stat().st_size, tokens)
        except (MosaicError, OSError) as error:
            if not self._failing:  # a full disk would say so for every state
                self.model._note(f"a state was not saved: {error}")
            self._failing = True
            return False
        self._failing = False
        with self._lock:
            self._files[path] = file
            while sum(f.bytes for f in self._files.values()) > self.most_bytes:
                self.drop(next(iter(self._files)))
        return True

    def used(self, path: Path) -> None:
        with self._lock:
            if path in self._files:
                self._files.move_to_end(path)
        try:
            os.utime(path)
        except OSError:
            pass  # read-only, or gone: a load will tell

    def drop(self, path: Path, why: str | None = None) -> None:
        """Removes a file; why: what was wrong with it."""
        with self._lock:
            self._files.pop(path, None)
        if why is not None:
            self.model._note(f"a saved state was removed: {why}")
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.model._note(f"{shown_path(path)}: cannot be removed: {reason(error)}")

    def leave(self, path: Path, why: str) -> None:
        """A file cannot be read now: it stays and counts, and is not looked at again. One that is gone is no news."""
        with self._lock:
            file = self._files.get(path)
            if path.exists() and file is not None:
                self.model._note(f"a saved state cannot be read: {why}")
                file.tokens = None
            else:
                self._files.pop(path, None)

    def _path(self, tokens: np.ndarray) -> Path:
        name = hashlib.sha256(self._model + tokens.tobytes()).hexdigest()[:32]
        return self.folder / f"{name}.state"

    def _scan(self) -> None:
        found = []
        for entry in os.scandir(self.folder):
            path = Path(entry.path)
            if not entry.is_file(follow_symlinks=False):
                continue
            if HALF.fullmatch(entry.name):
                if time.time() - entry.stat().st_mtime > HALF_SECONDS:
                    self.drop(path)
            elif NAME.fullmatch(entry.name):
                found.append((entry.stat().st_mtime_ns, path, entry.stat().st_size))
        for _, path, size in sorted(found):
            try:
                self._files[path] = _File(size, self._tokens(path, size))
            except (OSError, ValueError) as error:
                self.drop(path, f"{shown_path(path)}: {error}")

    def _tokens(self, path: Path, size: int) -> np.ndarray | None:
        """The tokens of a file, None for one of another model; ValueError for what is no state."""
        with open(path, "rb") as file:
            head = file.read(HEAD.size)
            if len(head) < HEAD.size:
                raise ValueError(f"expected {HEAD.size} bytes or more, got {len(head)}")
            magic, _, length, model, *numbers = HEAD.unpack(head)
            kv, (position, _, meta) = numbers[3], numbers[-3:]
            if magic != MAGIC or length != HEAD.size:
                raise ValueError("not a session file")
            if model != self.model.fingerprint() or kv != DTYPES[self.model.memory.kv.upper()]:
                return None
            if not 0 < position < 2**31 or meta != 4 * position or HEAD.size + meta > size:
                raise ValueError("damaged header")
            tokens = np.frombuffer(file.read(meta), np.int32)
        if self._path(tokens) != path:
            raise ValueError("its tokens are not those of its name")
        return tokens
