"""What a check of `doctor` returns, and where it reads the system: recorded trees may replace it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mosaic_c.errors import MosaicError
from mosaic_c.limits import Limits, default_budget, read_limits

LEVELS = ("ok", "note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """advice: what to do, one line, "" where there is nothing. data: the figures behind the text."""

    topic: str
    level: str
    text: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Roots:
    """Where the system is read. seconds: how long reads are measured, 0: not at all."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    cgroup: Path = Path("/sys/fs/cgroup")
    seconds: float = 1.0

    def read(self, path: str) -> str:
        """A small file by its usual name, "proc/meminfo"; stripped, "" where it is absent or refused."""
        root, _, rest = path.partition("/")
        try:
            text = ({"proc": self.proc, "sys": self.sys}[root] / rest).read_bytes()
            return text.decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        text = self.read(path)
        return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None

    def limits(self) -> Limits:
        return read_limits(self.proc, self.cgroup)


def budget_of(roots: Roots) -> int | None:
    """What a command without --ram may use; None: not known."""
    try:
        return default_budget(roots.limits())[0]
    except MosaicError:
        return None
