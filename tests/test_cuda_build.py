"""What the build makes of MOSAIC_CUDA, of compilers and devices that are there or not, and of an nvcc that fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mosaic_c import _cuda_build as build

ROOT = Path(__file__).resolve().parents[1]
# An nvcc that knows some architectures and compiles by the host's compiler whatever it is given.
NVCC = """#!/bin/sh
echo "$*" >> "{log}"
case "$*" in
  --list-gpu-arch) {listing}; exit;;
  --dryrun*) echo '#$ LIBRARIES=  "-L{folder}/lib/stubs" "-L{folder}/lib"' >&2; exit;;
esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && out="$2"; shift; done
{body}
"""
CODE = 'extern "C" int mci_gpu_get; int mci_gpu_get;'
OBJECT = f"echo '{CODE}' > " + '"{folder}/t.cc" && {cc} -x c++ -fPIC -c "{folder}/t.cc" -o "$out"'


class Toolkit:
    """A fake CUDA toolkit in a folder, with a runtime that is an empty archive."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "cuda", folder / "log"
        (self.folder / "bin").mkdir(parents=True)
        (self.folder / "lib").mkdir()
        subprocess.run(["ar", "rc", self.folder / "lib/libcudart_static.a"], check=True)
        self.log.touch()
        self.nvcc()

    def nvcc(
        self, listing="printf 'compute_75\\ncompute_90\\ncompute_103\\n'", body=OBJECT
    ) -> None:
        path = self.folder / "bin/nvcc"
        body = body.format(folder=self.folder, cc=os.environ.get("CC", "cc"))
        path.write_text(NVCC.format(log=self.log, listing=listing, folder=self.folder, body=body))
        path.chmod(0o755)

    def env(self, **more: str) -> dict[str, str]:
        path = f"{self.folder}/bin:/usr/bin:/bin"
        return {"PATH": path, "MOSAIC_CUDA": "1"} | more


@pytest.fixture
def toolkit(tmp_path):
    return Toolkit(tmp_path)


def why(parts) -> str:
    ((name, text),) = parts.macros
    assert name == "MOSAIC_CUDA_WHY" and parts.sources == (build.STUB,)
    return text


@pytest.mark.parametrize(("setting", "nvcc", "device", "kind", "word"), [
    ("auto", "n", True, "cuda", ""),
    ("auto", "n", False, "stub", "no device at build time"),
    ("auto", None, True, "stub", "without nvcc"),
    ("1", "n", False, "cuda", ""),
    ("0", "n", True, "stub", "MOSAIC_CUDA=0"),
    ("emulated", None, False, "emulated", ""),
])  # fmt: skip
def test_the_choice(setting, nvcc, device, kind, word):
    choice = build.choose(setting, nvcc, device)
    assert choice.kind == kind and word in choice.why and bool(choice.why) == (kind == "stub")


def test_what_cannot_be_built_is_refused_in_a_line():
    for setting, nvcc, words in (
        ("1", None, ["no nvcc", "CUDA_HOME", "/usr/local/cuda"]),
        ("yes", "n", ["auto, 1, 0, emulated", "'yes'"]),
    ):
        with pytest.raises(build.BuildError) as info:
            build.choose(setting, nvcc, True)
        text = str(info.value)
        assert "MOSAIC_CUDA" in text and "\n" not in text and all(w in text for w in words)


def test_nvcc_is_found_in_path_then_cuda_home_then_the_usual_place(tmp_path):
    for place in ("a", "b/bin", "usr/local/cuda/bin"):
        file = tmp_path / place / "nvcc"
        file.parent.mkdir(parents=True)
        file.write_text("")
        file.chmod(0o755)
    env = {"PATH": str(tmp_path / "a"), "CUDA_HOME": str(tmp_path / "b")}
    assert build.find_nvcc(env, tmp_path) == str(tmp_path / "a/nvcc")
    env["PATH"] = "/none"
    assert build.find_nvcc(env, tmp_path) == str(tmp_path / "b/bin/nvcc")
    assert build.find_nvcc({}, tmp_path) == str(tmp_path / "usr/local/cuda/bin/nvcc")
    assert build.find_nvcc({"PATH": ""}, tmp_path / "none") is None


def test_a_device_is_found_by_its_node_the_driver_or_its_tool(tmp_path):
    silent = lambda command: build.Result(None)  # noqa: E731
    assert not build.has_device(silent, tmp_path)
    assert build.has_device(lambda c: build.Result(0, "GPU 0: X (UUID: GPU-1)\n"), tmp_path)
    assert not build.has_device(lambda c: build.Result(0, "No devices found\n"), tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert build.has_device(silent, tmp_path)
    other = tmp_path / "other"
    (other / "dev").mkdir(parents=True)
    (other / "dev/nvidia0").touch()
    assert build.has_device(silent, other)


@pytest.mark.parametrize(("listed", "device", "want"), [
    ([75, 80, 86, 87, 89, 90, 100, 103, 120, 121], [], ["75", "80", "86", "89", "90", "100", "120"]),
    ([50, 60, 70, 75, 80], [90], ["75", "80"]),
    ([50, 60], [], ["60"]),
    ([], [86], ["86"]),
    ([], [], []),
])  # fmt: skip
def test_machine_code_for_what_nvcc_knows_and_ptx_for_later_devices(listed, device, want):
    options = build.generate(listed, device)
    code = [o.split(",code=")[1] for o in options]
    assert code == [f"sm_{a}" for a in want] + [f"compute_{a}" for a in want[-1:]]
    assert all(f"arch=compute_{c.split('_')[1]}," in o for c, o in zip(code, options, strict=True))


def test_cuda_is_compiled_with_the_exact_flags_and_linked_with_its_static_runtime(
    toolkit, tmp_path
):
    parts = build.parts(toolkit.env(), tmp_path / "temp")
    assert parts.objects == (str(tmp_path / "temp/gpu.o"),) and Path(parts.objects[0]).is_file()
    assert not parts.sources and not parts.macros and not parts.warning
    assert parts.library_dirs == (str(toolkit.folder / "lib"),)
    assert {"cudart_static", "dl", "rt", "pthread"} <= set(parts.libraries)
    assert "cuda" not in parts.libraries
    line = next(x for x in toolkit.log.read_text().splitlines() if "gpu.o" in x).split()
    for flag in ("-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-fPIC",
                 "-gencode=arch=compute_90,code=compute_90", "mosaic_c/cuda/gpu.cu"):  # fmt: skip
        assert flag in line
    assert line[line.index("--threads") + 1] == "2"


def test_an_old_nvcc_that_lists_nothing_gets_its_own_default(toolkit, tmp_path):
    def run(command):  # whatever devices are here
        return build.Result(None) if command[0] == "nvidia-smi" else build.run(command)

    toolkit.nvcc(listing="echo unknown option >&2; exit 1")
    build.parts(toolkit.env(), tmp_path / "temp", run)
    assert "-gencode" not in toolkit.log.read_text()


def test_the_tests_compile_with_the_same_flags_for_the_same_architectures():
    text = (ROOT / "tests/c/Makefile").read_text()
    flags = re.search(r"^NVCC_FLAGS = (.*)$", text, re.M)[1].split()
    archs = re.search(r"^GPU_ARCHS = (.*)$", text, re.M)[1].split()
    assert tuple(flags) == build.EXACT and tuple(map(int, archs)) == build.ARCHITECTURES


@pytest.mark.parametrize(("body", "word"), [
    ("echo 'x.cu(3): error: no such type'; exit 2", "no such type"),
    ("exit 3", "exit status 3"),
    ("exit 0", "no object"),
    ("echo text > \"$out\"", "does not link"),
    (OBJECT.replace("mci_gpu_get", "mci_other"), "does not link"),
])  # fmt: skip
def test_an_nvcc_that_fails_leaves_a_build_without(toolkit, tmp_path, body, word):
    toolkit.nvcc(body=body)
    parts = build.parts(toolkit.env(), tmp_path / "temp")
    assert why(parts).startswith('"nvcc failed: ') and word in why(parts)
    assert "MOSAIC_CUDA=1" in parts.warning and "falls back" in parts.warning
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    quiet = build.parts(toolkit.env(MOSAIC_CUDA=""), tmp_path / "temp", system=tmp_path)
    assert word in why(quiet) and quiet.warning.count("\n") == 0 < len(quiet.warning)


def test_a_toolkit_without_the_static_runtime_counts_as_failed(toolkit, tmp_path):
    (toolkit.folder / "lib/libcudart_static.a").unlink()
    assert "libcudart_static.a" in why(build.parts(toolkit.env(), tmp_path / "temp"))


def test_auto_does_not_call_nvcc_without_a_device(toolkit, tmp_path):
    parts = build.parts(
        toolkit.env(MOSAIC_CUDA="auto"), tmp_path / "temp", lambda c: build.Result(None), tmp_path
    )
    assert "MOSAIC_CUDA=1 builds it" in why(parts) and not toolkit.log.read_text()


def test_the_emulated_device_is_compiled_by_the_hosts_compiler(tmp_path):
    commands = []

    def run(command):
        commands.append(command)
        return build.Result(0)

    parts = build.parts({"MOSAIC_CUDA": "emulated", "CXX": "ccache g++"}, tmp_path, run)
    assert [c[c.index("-c") + 1] for c in commands] == [build.SOURCE, *build.EMULATION]
    assert all(c[:2] == ["ccache", "g++"] and "-ffp-contract=off" in c for c in commands)
    first = commands[0]
    assert first[first.index("-include") + 1] == build.EMULATION_HEADER
    assert first[first.index("-x") + 1] == "c++" and "-include" not in commands[1]
    assert parts.objects == tuple(c[-1] for c in commands) and len(set(parts.objects)) == 3
    assert parts.libraries == ("stdc++",) and not parts.sources
    with pytest.raises(build.BuildError, match="emulated: .*gpu.cu does not compile: fatal: gone"):
        build.parts(
            {"MOSAIC_CUDA": "emulated"}, tmp_path, lambda c: build.Result(1, err="fatal: gone")
        )


def test_any_text_becomes_a_c_string(tmp_path):
    odd = 'a "b" \\n ??/ \x1b é' + "x" * 300
    source = tmp_path / "t.c"
    source.write_text(f"const char *t = {build.literal(odd)};\n")
    subprocess.run(
        ["cc", "-std=c11", "-Wall", "-Werror", "-c", source, "-o", tmp_path / "t.o"], check=True
    )
    assert len(build.literal(odd)) <= 170


@pytest.mark.parametrize("macro", [[], ['-DMOSAIC_CUDA_WHY="built without nvcc"']])
def test_the_stub_says_why(tmp_path, macro):
    source = tmp_path / "t.c"
    source.write_text(
        '#include <stdio.h>\n#include "cuda/gpu.h"\n'
        "int main(void) { const char *w; return mci_gpu_get(&w) || puts(w) < 0; }\n"
    )
    program = tmp_path / "t"
    subprocess.run(
        ["cc", "-std=c11", *macro, f"-I{ROOT}/mosaic_c", source, ROOT / build.STUB, "-o", program], check=True
    )  # fmt: skip
    out = subprocess.run([program], capture_output=True, text=True, check=True).stdout.strip()
    assert out == "this build has no GPU tier" + (": built without nvcc" if macro else "")


def test_setup_refuses_an_unknown_setting_in_one_line(tmp_path):
    pytest.importorskip("setuptools")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path],
        cwd=ROOT, env=os.environ | {"MOSAIC_CUDA": "maybe"}, capture_output=True, text=True,
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("mosaic_c: MOSAIC_CUDA: expected one of")
