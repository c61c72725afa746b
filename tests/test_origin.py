"""The source that a pack must have been made of: a hash, a part of it, or a folder."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import open_small
from helpers_checkpoint import refusal

from mosaic_c import synth
from mosaic_c.cli import main
from mosaic_c.convert import convert


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sources, a pack of each, two of one; a synthetic pack."""
    root = tmp_path_factory.mktemp("origin")
    for seed, name in enumerate("ab"):
        synth.write(root / name, "tiny", dtype="bf16", uniform=True, seed=seed, progress=False)
        convert(root / name, root / f"{name}4", "int4-g64", progress=False)
    convert(root / "a", root / "a8", "fp8", progress=False, dense="int8")
    synth.write(root / "made", "tiny", uniform=True, progress=False, records="int4-g64")
    return {x.name: x for x in root.iterdir()}


def test_what_is_taken_and_what_is_refused(made):
    digits = {
        x: json.loads((made[x] / "mosaic.json").read_text())["source"]["sha256"]
        for x in ("a4", "b4")
    }
    a = digits["a4"]
    for source in (a, a[:12], a[:40].upper(), made["a"], str(made["a"]), made["a4"], made["a8"]):
        open_small(made["a4"], source=source).close()
    for source, wanted in ((digits["b4"], digits["b4"]), (digits["b4"][:12],) * 2, (made["b"], digits["b4"]),
                           (made["b4"], digits["b4"])):  # fmt: skip
        refusal(
            lambda s=source: open_small(made["a4"], source=s), f"{made['a4']}: made of another source",
            f"expected sha256 {wanted}, got sha256 {a}", code="ESOURCE",
        )  # fmt: skip
    for source in (a[:11], a + "0", "", "here", "g" * 12):
        refusal(
            lambda s=source: open_small(made["a4"], source=s),
            "expected a folder, or 12 to 64 hex digits", code="EINVAL",
        )  # fmt: skip
    refusal(lambda: open_small(made["a"], source=a), "not an expert pack", code="EINVAL")
    refusal(lambda: open_small(made["made"], source=a), "got no checkpoint (synthetic)")
    refusal(lambda: open_small(made["a4"], source=made["made"]), "is a pack of no checkpoint")
    refusal(lambda: open_small(made["a4"], source=5), "path: expected a text or a path")


@pytest.mark.parametrize(
    "command",
    [["generate", "x", "-n", "1"], ["inspect"], ["verify"], ["plan"], ["bench", "sweep"]],
    ids=lambda c: c[-1] if c[0] == "bench" else c[0],
)
def test_commands_check_it(made, command, capsys):
    args = [*command, "--model", str(made["a4"]), "--source"]
    assert main([*args, str(made["b4"])]) == 1
    out, err = capsys.readouterr()
    assert not out and "made of another source: expected sha256" in err and err.count("\n") == 1
    assert main([*args, ""]) == 2


def test_inspect_shows_it(made, capsys):
    assert main(["inspect", str(made["a8"]), "--source", str(made["a"])]) == 0
    out = capsys.readouterr().out
    want = subprocess.run(
        "sha256sum config.json *.safetensors | sha256sum", shell=True, cwd=made["a"], check=True,
        capture_output=True, text=True,
    ).stdout.split()[0]  # fmt: skip
    assert f"sha256 {want}" in out and "int8-g128, CRC-32C" in out
