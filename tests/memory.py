"""Does a memory budget hold? Runs a model in control groups and counts every page, by three methods.

    python tests/memory.py MODEL RAM [TOKENS]      e.g. /data/q35 1700M 60
    python tests/memory.py --squeeze MODEL RAM     needs control groups
    python tests/memory.py --drift MODEL RAM       e.g. /data/q35 1200M

(a) in a memory control group of 4 x RAM, so that the kernel cannot keep the promise for us: peak usage, page
    cache included, stays under RAM.
(b) in one of exactly RAM: no kill, major faults flat after the first third, tok/s close to (a).
(c) anywhere: VmHWM plus the pages of the shards found in the page cache (mincore) stay under RAM.

--squeeze: while it generates in a group of 2 x RAM, the limit is lowered to three quarters of what it uses, and
    raised again: no kill, the same tokens, a smaller cache meanwhile, the full one in the end.

--drift: decodes 2,000 tokens after 200, in KV pages that exist beforehand: resident memory at the end stays within
    1 % of that at the beginning.

(a) and (b) need the right to make a control group (version 1 or 2); without it they are reported as not run.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import mosaic_c
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

# Generates until its input ends; a line for every 20 tokens.
LONG_CHILD = """
import json, select, sys, mosaic_c
model, ram, tokens, end = sys.argv[1], int(sys.argv[2]), [], False
with mosaic_c.open(model, ram=ram) as m:
    for piece in m.generate([i * 37 % m.vocab for i in range(40)], temperature=0, ignore_eos=True):
        tokens.append(piece.token)
        if len(tokens) % 20 == 0:
            print(m.slots, flush=True)
            if select.select([0], [], [], 0)[0]:
                break
    s = m.stats()
    print(json.dumps({"tokens": tokens, "notes": list(m.notes), "shrinks": s.pressure_shrinks, "slots": m.slots,
        "full": m.memory.slots, "hard": m.memory.hard, "faults": s.major_faults}))
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

    def usage(self) -> int:
        name = "memory.current" if self.v2 else "memory.usage_in_bytes"
        return int((self.folder / name).read_text())

    def set_limit(self, limit: int) -> bool:
        """False: version 1 refuses a limit below what cannot be reclaimed."""
        try:
            self._write("memory.max" if self.v2 else "memory.limit_in_bytes", limit)
        except OSError:
            return False
        return True

    def kills(self) -> int:
        text = (self.folder / ("memory.events" if self.v2 else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

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


def squeeze(model: str, ram: int) -> dict | None:
    """What became of a run whose limit was lowered and raised; None where no group can be made."""
    group = Group.make(2 * ram)
    if group is None:
        return None
    child = subprocess.Popen(
        [sys.executable, "-c", LONG_CHILD, model, str(ram)],
        preexec_fn=group.enter,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    slots: list[str] = []
    reader = threading.Thread(target=lambda: slots.extend(child.stdout))
    reader.start()
    try:
        wait_until(lambda: slots, 120)
        wait_until(lambda: steady(group.usage), 60)
        before = group.usage()
        goal = before * 3 // 4

        def lower() -> bool:  # as far as it goes: the cache gives way to each step before the next
            return group.set_limit(max(goal, group.usage() + (1 << 20))) and group.usage() <= goal

        lowered = wait_until(lower, 60)
        low, least = group.usage(), int(slots[-1])
        group.set_limit(2 * ram)
        first = slots[0].strip()
        grown = wait_until(lambda: slots[-1].strip() == first, 120)
        child.stdin.close()
        reader.join(60)
        out = json.loads(slots[-1]) if child.wait() == 0 else {}
        return out | {"status": child.returncode, "kills": group.kills(), "lowered": lowered, "grown": grown,
                      "before": before, "goal": goal, "low": low, "least": least}  # fmt: skip
    finally:
        child.kill()
        child.wait()
        reader.join()
        group.remove()


def wait_until(done: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def steady(read: Callable[[], int]) -> bool:
    first = read()
    time.sleep(1)
    return abs(read() - first) < first // 100


def main_squeeze(model: str, ram: int) -> None:
    out = squeeze(model, ram)
    if out is None:
        sys.exit("not run: no memory control group can be made here")
    print(
        f"group of {format_size(2 * ram)}, {format_size(out['before'])} in use; limit lowered to "
        f"{format_size(out['goal'])}: {format_size(out['low'])}, {out['least']} slots; raised again: grown back "
        f"{out['grown']}; status {out['status']}, {out['kills']} kills"
    )
    print(*out.get("notes", ()), sep="\n")
    same = out["status"] == 0 and out["tokens"] == alone(model, ram, len(out["tokens"]))
    print(f"{len(out.get('tokens', ()))} tokens, the same as without pressure: {same}")
    sys.exit(0 if out["lowered"] and out["grown"] and same and not out["kills"] else 1)


def alone(model: str, ram: int, count: int) -> list[int]:
    with mosaic_c.open(model, ram=ram) as m:
        prompt = [i * 37 % m.vocab for i in range(40)]
        run = m.generate(prompt, max_new_tokens=count, temperature=0, ignore_eos=True)
        return [piece.token for piece in run]


def main_drift(model: str, ram: int, warm: int = 200, tokens: int = 2000) -> None:
    rng, rss = np.random.default_rng(5), []
    with mosaic_c.open(model, ram=ram, ctx=warm + tokens) as m:
        ids = rng.integers(0, m.vocab, warm + tokens).tolist()
        with m.session() as s:  # touches every page of KV
            s.forward(ids, last=True)
        with m.session() as s:
            for i, token in enumerate(ids, 1):
                s.forward([token], last=True)
                if i >= warm and i % 100 == 0:
                    rss.append(m.stats().rss)
    drift = 100 * (rss[-1] / rss[0] - 1)
    print(f"{format_size(rss[0])} after {warm} tokens, {format_size(rss[-1])} after {tokens} more: {drift:+.3f} %; "
          f"least {format_size(min(rss))}, most {format_size(max(rss))}")  # fmt: skip
    sys.exit(abs(drift) >= 1)


def main() -> None:
    if sys.argv[1] in ("--squeeze", "--drift"):
        mode = main_squeeze if sys.argv[1] == "--squeeze" else main_drift
        mode(sys.argv[2], parse_size(sys.argv[3]))
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
