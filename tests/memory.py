"""Does a memory budget hold? Runs a model in control groups and counts every page, by three methods.

    python tests/memory.py MODEL RAM [TOKENS]      e.g. /data/q35 1700M 60

(a) in a memory control group of 4 x RAM, so that the kernel cannot keep the promise for us: peak usage, page
    cache included, stays under RAM.
(b) in one of exactly RAM: no kill, major faults flat after the first third, tok/s close to (a).
(c) anywhere: VmHWM plus the pages of the shards found in the page cache (mincore) stay under RAM.

(a) and (b) need the right to make a control group (version 1 or 2); without it they are reported as not run.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

from mosaic_c.limits import format_size, parse_size

CHILD = """
import json, sys, mosaic_c
model, ram, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with mosaic_c.open(model, ram=ram) as m:
    prompt = [i * 37 % m.vocab for i in range(40)]
    run = m.generate(prompt, max_new_tokens=tokens, temperature=0, ignore_eos=True)
    early = None
    for i, piece in enumerate(run):
        if i == tokens // 3:
            early = m.stats().major_faults
    s = m.stats()
    print(json.dumps({"peak_rss": s.peak_rss, "tok_s": s.decode_tok_s, "faults": s.major_faults - early,
        "evictions": s.evictions, "misses": s.misses, "slots": s.slots, "files": [str(f) for f in m.files]}))
"""


class Group:
    """A memory control group with a limit; None from make() where the system gives none."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.v2 = folder, (folder / "memory.max").exists()
        self._write("memory.max" if self.v2 else "memory.limit_in_bytes", limit)

    @classmethod
    def make(cls, limit: int) -> Group | None:
        for parent in cls._parents():
            folder = parent / f"mosaic-memory-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            try:
                group = cls(folder, limit)
                if group.peak() is not None:
                    return group
            except OSError:
                pass
            folder.rmdir()
        return None

    @staticmethod
    def _parents() -> list[Path]:
        root, found = Path("/sys/fs/cgroup"), []
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found += [root / "memory" / path.lstrip("/"), root / "memory"]
            elif number == "0":
                found += [root / path.lstrip("/"), root]
        return found

    def _write(self, name: str, value: object) -> None:
        (self.folder / name).write_text(str(value))

    def enter(self) -> None:
        self._write("cgroup.procs", os.getpid())

    def peak(self) -> int | None:
        path = self.folder / ("memory.peak" if self.v2 else "memory.max_usage_in_bytes")
        return int(path.read_text()) if path.exists() else None

    def remove(self) -> None:
        self.folder.rmdir()


def cached_bytes(paths: list[str]) -> int:
    """Bytes of these files in the page cache."""
    libc, total = ctypes.CDLL(None, use_errno=True), 0
    for path in paths:
        size = os.path.getsize(path)
        with (
            open(path, "rb") as f,
            mmap.mmap(f.fileno(), size, flags=mmap.MAP_PRIVATE, prot=3) as m,
        ):
            pages = -(-size // mmap.PAGESIZE)
            vec = (ctypes.c_ubyte * pages)()
            here = ctypes.c_char.from_buffer(m)
            if libc.mincore(ctypes.c_void_p(ctypes.addressof(here)), ctypes.c_size_t(size), vec):
                raise OSError(ctypes.get_errno(), "mincore")
            total += sum(b & 1 for b in bytes(vec)) * mmap.PAGESIZE
            del here
    return total


def drop(paths: list[str]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def run(model: str, ram: int, tokens: int, limit: int | None) -> dict | None:
    """One run in a group of `limit` (None: no group); None where no group can be made."""
    group = None
    if limit is not None:
        group = Group.make(limit)
        if group is None:
            return None
    drop([str(p) for x in ("*.safetensors", "*.bin") for p in Path(model).glob(x)])
    try:
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(model), str(ram), str(tokens)],
            preexec_fn=group.enter if group else None,
            stdout=subprocess.PIPE,
            text=True,
        )
        if child.returncode:
            raise AssertionError(f"the run in a group of {limit} ended with {child.returncode}")
        out = json.loads(child.stdout)
        out["cached"] = cached_bytes(out["files"])
        out["group_peak"] = group.peak() if group else None
        return out
    finally:
        if group:
            group.remove()


def main() -> None:
    model, ram = sys.argv[1], parse_size(sys.argv[2])
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 60
    a, b, c = (run(model, ram, tokens, limit) for limit in (4 * ram, ram, None))
    if a is None or b is None:
        print("(a), (b): not run, no memory control group can be made here")
    else:
        peak = format_size(a["group_peak"])
        print(f"(a) group of 4 x RAM: peak {peak} of {format_size(ram)}, {a['tok_s']:.2f} tok/s")
        print(
            f"(b) group of RAM: major faults after warm-up {b['faults']}, {b['tok_s']:.2f} tok/s, "
            f"{b['tok_s'] / a['tok_s']:.2f} of (a)"
        )
    print(
        f"(c) VmHWM {format_size(c['peak_rss'])} + shard pages {format_size(c['cached'])} of {format_size(ram)}, "
        f"{c['tok_s']:.2f} tok/s, {c['evictions']} evictions, {c['slots']} slots"
    )
    failed = c["peak_rss"] + c["cached"] > ram or a is not None and a["group_peak"] > ram
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
