"""Files of known size, written at disk speed without filling the page cache."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

# Written pages are pushed to disk and dropped at this interval, so that making a model larger than
# memory neither fills the page cache nor stalls on it.
_SYNC = 64 << 20
_IOV_BYTES = 4 << 20
_IOV_COUNT = 512  # below IOV_MAX (1024)


@contextmanager
def writing(path: Path, size: int, bar: tqdm) -> Iterator[Stream]:
    """A new file that must get exactly `size` bytes; they are on disk at the end. OSError as it comes."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _reserve(fd, size)
        file = Stream(fd, bar)
        yield file
        file.finish()
        if file.done != size:
            raise AssertionError(f"{path}: wrote {file.done} bytes of {size}")
    finally:
        os.close(fd)


def _reserve(fd: int, size: int) -> None:
    """Fails before the work when the disk is full, and makes the syncs later twice as fast."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


class Stream:
    """Gathers buffers into large writes, and drops what is written from the page cache."""

    def __init__(self, fd: int, bar: tqdm) -> None:
        self.fd, self.bar = fd, bar
        self.parts: list[bytes | memoryview] = []
        self.pending = self.done = self.synced = 0

    def add(self, part: bytes | memoryview) -> None:
        self.parts.append(part)
        self.pending += len(part)
        if self.pending >= _IOV_BYTES or len(self.parts) >= _IOV_COUNT:
            self.flush()

    def flush(self) -> None:
        parts, self.parts, self.pending = self.parts, [], 0
        while parts:
            n = os.writev(self.fd, parts)
            self.done += n
            self.bar.update(n)
            while parts and n >= len(parts[0]):
                n -= len(parts.pop(0))
            if n:  # a short write ends inside a buffer
                parts[0] = memoryview(parts[0])[n:]
        if self.done - self.synced >= _SYNC:
            self.sync()

    def sync(self) -> None:
        os.fdatasync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.synced = self.done

    def finish(self) -> None:
        self.flush()
        self.sync()
