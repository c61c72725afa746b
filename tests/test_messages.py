"""What commands print of names that somebody else chose: one line that a terminal only shows."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import VECTORS
from helpers_checkpoint import refusal

from mosaic_c import synth
from mosaic_c.cli import PATHS, main, parser
from mosaic_c.errors import MosaicError
from mosaic_c.jsonfile import parse
from mosaic_c.tokenizer import Tokenizer

ODD = "a\x1b[31m\nb  c"  # a colour, a new line, two spaces
SHOWN = r"a\u001b[31m\nb  c"
FILES = {"DIR", "FILE", "PATH", "SRC", "DST", "TRACE", "CONFIG_OR_DIR", "HASH|DIR"}  # metavars


def arguments(of: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from arguments(command)
        else:
            yield action


def test_every_path_of_every_command_is_known_to_be_one():
    """So an empty one, of an unset variable of a shell, is refused and not taken for this folder."""
    found = {x.dest for x in arguments(parser()) if x.metavar in FILES}
    assert found == set(PATHS)


@pytest.mark.parametrize("option", ["--text", "--folder"])
def test_an_empty_path_is_refused(capsys, option):
    assert main(["bench", "quality", "-m", "x", option, ""]) == 2
    assert f"{option[2:]}: expected a file or folder, got ''" in capsys.readouterr().err


def test_errors_are_text():
    odd = MosaicError(f"{ODD}: \udcff \x7f \u202e é")
    assert str(odd) == r"a\x1b[31m b  c: \udcff \x7f \u202e é"


def test_names_are_quoted_where_a_terminal_would_obey_them(tmp_path, capsys):
    source, dst, text = tmp_path / ODD / "m", tmp_path / ODD / "p", tmp_path / f"{ODD}.txt"
    source.parent.mkdir()
    synth.write(source, "tiny", progress=False)
    text.write_text("The quick brown fox")
    convert = ["convert", str(source), str(dst), "--experts", "int4-g64", "--quiet"]
    quality = ["bench", "quality", "-m", str(source), "--text", str(text), "--variant", "+int8"]
    quality += ["--ram", "400M", "--folder"]
    for args, status in (
        (convert, 0),
        (convert, 2),
        ([*convert[:3], "--verify", "--quiet"], 0),
        (["synth", str(tmp_path / ODD / "s"), "--shape", "tiny", "--quiet"], 0),
        (["synth", str(source), "--shape", "tiny"], 2),
        (["inspect", str(tmp_path / ODD)], 1),
        ([*quality, str(tmp_path)], 0),
        ([*quality, str(tmp_path / ODD / "gone")], 1),
        (["simulate", str(tmp_path / ODD / "gone"), "--share", "0.5"], 1),
    ):
        assert main(args) == status, args
        got = capsys.readouterr()
        assert "\x1b" not in got.out + got.err, args
        assert SHOWN in (got.out if status == 0 else got.err), args


def test_an_error_of_the_system_names_its_file_in_one_line(monkeypatch, capsys, tmp_path):
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error", str(tmp_path / ODD))

    monkeypatch.setattr(synth, "write", fail)
    assert main(["synth", str(tmp_path / "s")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and SHOWN in err and "\x1b" not in err


def test_messages_of_libraries_are_put_in_our_words(tmp_path):
    refusal(
        lambda: parse(b'{"a": "\n"}', "x"),
        "x is not JSON: Invalid control character at character 7",
    )
    synth.write(tmp_path / "m", "tiny", progress=False)
    (tmp_path / "m" / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {}}}')
    refusal(lambda: Tokenizer(tmp_path / "m"), "tokenizer_config.json: added_tokens_decoder: expected token ids",
            'got {"x": {}}', code="EFORMAT")  # fmt: skip


def test_names_that_are_not_utf8(tmp_path, capsys):
    dst = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    shutil.copytree(VECTORS / "qwen2_bf16_tied", tmp_path / "m")
    args = ["convert", str(tmp_path / "m"), dst, "--experts", "fp8", "--quiet"]
    assert main(args) == 0 and main(args) == 2
    got = capsys.readouterr()
    assert r"\udcff" in got.out and r"\udcff" in got.err and Path(dst).is_dir()
