"""`convert` where it could do harm: odd places, a source that changes, a disk that fills, kills at every step."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import VECTORS
from helpers_checkpoint import refusal

from mosaic_c import convert as conversion
from mosaic_c.cli import main
from mosaic_c.convert import convert

NAME = "qwen2_bf16_tied"
# What changes a disk on the way.
CALLS = ("write", "pwrite", "writev", "posix_fallocate", "fsync", "fdatasync", "ftruncate", "rename", "mkdir",
         "unlink", "rmdir")  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*") if x.is_file()}


def run(source: Path, dst: Path | str, **options: Any) -> Callable[[], Any]:
    return lambda: convert(
        source, dst, "int4-g32", progress=False, threads=1, dense="int8", **options
    )


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A copy of a small model that must be as it was at the end."""
    folder = Path(shutil.copytree(VECTORS / NAME, tmp_path / "source"))
    yield folder
    if folder.exists():
        assert contents(folder) == contents(VECTORS / NAME)


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("want") / "p"
    run(VECTORS / NAME, folder)()
    return contents(folder)


def test_a_source_where_the_pack_would_be_made(source, tmp_path):
    moved = source.rename(tmp_path / "p.partial")
    refusal(run(moved, tmp_path / "p"), "p.partial is the source itself", code="EINVAL")
    moved = moved.rename(source)
    (tmp_path / "p.partial").mkdir()
    inside = source.rename(tmp_path / "p.partial" / "model")
    refusal(run(inside, tmp_path / "p"), "the source lies in", code="EINVAL")
    inside.rename(source)
    (tmp_path / "p.partial").rmdir()
    for link in ("p.partial", "q.partial/pack"):
        (tmp_path / link).parent.mkdir(exist_ok=True)
        os.symlink(source, tmp_path / link)
    refusal(run(source, tmp_path / "p"), "p.partial is the source itself", code="EINVAL")
    refusal(run(source, tmp_path / "q"), "pack: a link; remove it", code="EINVAL")


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize(
    "name", ["experts-00001.bin", "config.json", "model.safetensors", "mosaic.json"]
)
def test_nothing_is_written_through_a_link(source, tmp_path, want, link, name):
    folder = tmp_path / "p.partial" / "pack"
    folder.mkdir(parents=True)
    link(source / "model.safetensors", folder / name)
    if link is os.symlink or name.startswith("experts"):
        refusal(run(source, tmp_path / "p"), name, "remove it")
        (folder / name).unlink()
    run(source, tmp_path / "p")()
    assert contents(tmp_path / "p") == want


def test_files_of_others_are_kept(source, tmp_path, want):
    for place in ("p.partial/thesis.txt", "p.partial/pack/thesis.txt"):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept")
        refusal(run(source, tmp_path / "p"), f"{path}: not a file of this pack", code="EEXIST")
        assert path.read_text() == "kept"
        path.unlink()
    run(source, tmp_path / "p")()
    assert contents(tmp_path / "p") == want


def test_places_that_cannot_be_written(source, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    refusal(run(source, "/proc/nowhere/p"), "not enough disk space", code="ENOSPC")
    for dst in (tmp_path / "file" / "p", tmp_path / ("x" * 250)):
        refusal(run(source, dst), "cannot write the pack: ", code="EIO")
    refusal(run(source, "/"), "exists already", code="EEXIST")
    refusal(run(source, "a\0b"), "expected no NUL", code="EINVAL")
    refusal(run(Path("a\0b"), tmp_path / "p"), "expected no NUL", code="EINVAL")
    refusal(lambda: convert(source, tmp_path / "p", "fp8", threads=1 << 20), "expected 1 to 256")
    assert main(["convert", str(source), "/proc/p", "--experts", "fp8", "--quiet"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_source_that_changes(source, tmp_path, monkeypatch, want):
    """Nothing made of it is kept; as it was before, it is converted from what had been finished until then."""
    path, before = source / "model.safetensors", (source / "model.safetensors").stat()
    real, calls = conversion.record, 0

    def record(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            os.utime(path, ns=(1, before.st_mtime_ns + 1))
        return real(*args)

    with monkeypatch.context() as m:
        m.setattr(conversion, "record", record)
        refusal(run(source, tmp_path / "p"), f"{path}: changed while it was", code="ESTALE")
    assert not (tmp_path / "p").exists()
    os.utime(path, ns=(1, before.st_mtime_ns))
    s = run(source, tmp_path / "p")()
    assert 0 < s.resumed < s.bytes and contents(tmp_path / "p") == want


def test_a_journal_of_a_pack_that_was_finished(source, tmp_path, monkeypatch, want):
    """Killed right after the rename: the journal is of no pack, once that one is moved away."""
    with monkeypatch.context() as m:
        m.setattr(conversion, "suppress", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            run(source, tmp_path / "p")()
    assert contents(tmp_path / "p") == want
    (tmp_path / "p").rename(tmp_path / "q")
    assert run(source, tmp_path / "p")().resumed == 0
    assert contents(tmp_path / "p") == want


@pytest.mark.parametrize("finished", [False, True])
def test_another_that_ends_while_this_one_begins(source, tmp_path, monkeypatch, want, finished):
    """Its journal is removed after this one opened it: a lock of that keeps nobody out; or the pack is there."""
    partial = tmp_path / "p.partial"

    def flock(fd: int, how: int) -> None:
        if finished:
            (tmp_path / "p").mkdir()
        else:
            (partial / "journal").unlink()

    with monkeypatch.context() as m:
        m.setattr(conversion.fcntl, "flock", flock)
        m.setattr(conversion.Source, "sha256", lambda *_: pytest.fail("work was begun"))
        if finished:
            refusal(run(source, tmp_path / "p"), "p exists already, since just now", code="EEXIST")
            assert not partial.exists() and not list((tmp_path / "p").iterdir())
            (tmp_path / "p").rmdir()
        else:
            refusal(run(source, tmp_path / "p"), "another convert is writing it", code="EBUSY")
    run(source, tmp_path / "p")()
    assert contents(tmp_path / "p") == want


def test_a_journal_of_somebody_else(source, tmp_path):
    (tmp_path / "p.partial" / "pack").mkdir(parents=True)
    for text in ("[" * 100_000 + "\n", "\n", "{}\n", "\xff\n", "1\n"):
        (tmp_path / "p.partial" / "journal").write_text(text, encoding="latin-1")
        refusal(run(source, tmp_path / "p"), "is of another conversion", "remove it", code="EEXIST")


def test_what_was_finished_and_then_damaged(source, tmp_path, monkeypatch):
    """What to do is one thing, and said first; a flipped bit that only --verify reads again says it, too."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "p.partial" / "pack"
    for name, damage in (
        ("model.safetensors", -1),
        ("experts-00001.bin", -1),
        ("experts-00001.bin", 1),
    ):
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(conversion._Job, "_write_texts", killed)
            run(source, tmp_path / "p")()
        raw = bytearray((folder / name).read_bytes())
        if damage < 0:
            (folder / name).write_bytes(raw[:damage])
            advice = f"^damaged since an earlier run: remove {tmp_path}/p.partial and convert again"
        else:
            raw[5] ^= 1
            (folder / name).write_bytes(raw)
            advice = f"remove {tmp_path}/p and convert again$"
        text = refusal(run(source, tmp_path / "p", verify=True), name)
        assert re.search(advice, text), text
        shutil.rmtree(tmp_path / "p.partial", ignore_errors=True)


@contextmanager
def at_call(number: int, act: Callable[[], None]) -> Iterator[None]:
    """act() in place of the call of that number, of all that change a disk."""
    left, kept = number, {name: getattr(os, name) for name in CALLS}

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                act()
            if name in ("write", "pwrite") and len(args[1]) > 7:  # short writes as well
                args = (args[0], args[1][: max(len(args[1]) // 2, 7)], *args[2:])
            return kept[name](*args, **options)

        return call

    try:
        for name in CALLS:
            setattr(os, name, watched(name))
        yield
    finally:
        for name, real in kept.items():
            setattr(os, name, real)


def test_a_disk_that_fills_at_every_step(source, tmp_path, want):
    """One line each time, no pack; once there is room, the same command goes on."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    dst, steps = tmp_path / "p", 0
    for number in range(0, 1000, 8):
        with at_call(number, full):
            try:
                run(source, dst)()
                break
            except conversion.MosaicError as error:
                assert "cannot write the pack" in str(error) and "No space left" in str(error)
                assert error.code == "ENOSPC" and not dst.exists()
                steps += 1
    assert steps > 4 and contents(dst) == want


def test_a_kill_at_every_step(source, tmp_path, want):
    dst, steps = tmp_path / "p", 0
    for number in range(0, 1000, 16):
        child = os.fork()
        if not child:
            with at_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                run(source, dst)()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        steps += 1
        if number % 3 == 0 and not dst.exists():  # from the start now and then, else on from there
            shutil.rmtree(tmp_path / "p.partial", ignore_errors=True)
        if dst.exists():  # killed behind the rename
            break
    assert steps > 4 and contents(dst) == want
