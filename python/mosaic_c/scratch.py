"""A temporary folder that goes with the process that made it, however that ends.

`python -m mosaic_c.scratch FOLDER` waits for the end of its standard input, which only that process holds, and removes
the folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mosaic_c.errors import MosaicError
from mosaic_c.jsonfile import reason, shown_path

PREFIX = "mosaic_c-"


@contextmanager
def scratch(parent: str | os.PathLike[str] | None, need: int, free: str) -> Iterator[Path]:
    """A new folder in parent (None: the system's for temporary files) with `need` bytes free. free: what makes that
    fewer, for the refusal."""
    from mosaic_c.limits import format_size

    where = Path(tempfile.gettempdir() if parent is None else parent)
    try:
        room = shutil.disk_usage(where).free
        if room < need:
            raise MosaicError(
                f"not enough disk space: needs {format_size(need)}, {shown_path(where)} has {format_size(room)} free; "
                f"{free}", "ENOSPC",
            )  # fmt: skip
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
    except OSError as error:
        raise MosaicError(f"{shown_path(where)}: cannot be used: {reason(error)}", "EIO") from None
    watcher = None
    try:
        watcher = subprocess.Popen(
            [sys.executable, "-m", "mosaic_c.scratch", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if watcher is not None and watcher.stdin is not None:
            watcher.stdin.close()
            watcher.wait()


if __name__ == "__main__":
    sys.stdin.read()
    shutil.rmtree(sys.argv[1], ignore_errors=True)
