"""Whether the extension gets a GPU tier, and how mosaic_c/cuda/gpu.cu is compiled: for setup.py alone.

MOSAIC_CUDA says what is wanted:
  auto      (default) CUDA where nvcc is found and a device is present
  1         CUDA wherever nvcc is found; without nvcc an error
  0         none
  emulated  the device is emulated on the CPU, for tests
An nvcc that fails never breaks an installation: the extension is then built without CUDA, and both it and a
warning say why. No other module of the package is needed here: it may not be installed yet.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = "mosaic_c/cuda/gpu.cu"
STUB = "mosaic_c/cuda/stub.c"
EMULATION_HEADER = "tests/cuda/emulate.h"
EMULATION = ("tests/cuda/emulate.cpp", "tests/cuda/fibers.cpp")
SETTINGS = ("auto", "1", "0", "emulated")
# Compute capabilities with machine code of their own; each also serves later ones of its major number.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
# docs/design.md section 4: the arithmetic is part of the interface.
EXACT = ("-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
LIBRARIES = ("cudart_static", "dl", "rt", "pthread", "stdc++")


class BuildError(Exception):
    """What was asked for cannot be built; one line."""


@dataclass(frozen=True)
class Choice:
    """kind: "cuda", "emulated" or "stub"; why: of a stub. nvcc: of cuda."""

    kind: str
    why: str = ""
    nvcc: str | None = None
    forced: bool = False


@dataclass(frozen=True)
class Parts:
    """What the extension gets: sources and objects to link, the rest as of setuptools.Extension. warning: what the
    user should see, "" nothing."""

    sources: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    macros: tuple[tuple[str, str], ...] = ()
    library_dirs: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    link_args: tuple[str, ...] = ()
    warning: str = ""


@dataclass(frozen=True)
class Result:
    """Of a command that ran; code None: it could not be started."""

    code: int | None
    out: str = ""
    err: str = field(default="")

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def reason(self) -> str:
        """Its first line about an error, or its last one."""
        lines = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        wrong = [line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)]
        return (wrong or lines[-1:] or [f"exit status {self.code}"])[0]


Run = Callable[[list[str]], Result]


def run(command: list[str]) -> Result:
    # a driver that hangs takes its tool with it
    limit = 10 if command[0] == "nvidia-smi" else None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        return Result(None, err=f"{command[0]}: no answer in {limit} s")
    except OSError as error:
        return Result(None, err=f"{command[0]}: {error.strerror}")
    return Result(done.returncode, done.stdout, done.stderr)


# ---- the decision --------------------------------------------------------------------------------


def choose(setting: str, nvcc: str | None, device: bool) -> Choice:
    """What to build. nvcc: its path, None where there is none. device: whether a GPU is present."""
    if setting not in SETTINGS:
        raise BuildError(
            f"MOSAIC_CUDA: expected one of {', '.join(SETTINGS)}, got {setting!r}; unset it for auto"
        )
    if setting == "0":
        return Choice("stub", "built with MOSAIC_CUDA=0")
    if setting == "emulated":
        return Choice("emulated")
    if nvcc is None:
        if setting == "1":
            raise BuildError(
                "MOSAIC_CUDA=1: no nvcc in PATH, CUDA_HOME or /usr/local/cuda; install the CUDA toolkit, or set "
                "CUDA_HOME to its folder, or unset MOSAIC_CUDA to build without a GPU tier"
            )
        return Choice("stub", "built without nvcc")
    if setting == "auto" and not device:
        why = "nvcc found, no device at build time; MOSAIC_CUDA=1 builds it all the same"
        return Choice("stub", why)
    return Choice("cuda", nvcc=nvcc, forced=setting == "1")


def find_nvcc(env: Mapping[str, str], system: Path = Path("/")) -> str | None:
    """The compiler: of PATH, of CUDA_HOME, of /usr/local/cuda. system: the root folder."""
    found = shutil.which("nvcc", path=env.get("PATH", ""))
    homes = [Path(env["CUDA_HOME"])] if env.get("CUDA_HOME") else []
    for home in (*homes, system / "usr/local/cuda"):
        found = found or shutil.which("nvcc", path=str(home / "bin"))
    return found


def has_device(run: Run = run, system: Path = Path("/")) -> bool:
    """Whether an NVIDIA device is here: its node, or what the driver says."""
    if (system / "dev/nvidia0").exists():
        return True
    gpus = system / "proc/driver/nvidia/gpus"
    if gpus.is_dir() and any(gpus.iterdir()):
        return True
    # WSL2 has neither, but the driver's tool
    listed = run(["nvidia-smi", "-L"])
    return listed.ok and "GPU " in listed.out


# ---- nvcc ----------------------------------------------------------------------------------------


def generate(listed: Iterable[int], device: Iterable[int] = ()) -> list[str]:
    """nvcc's -gencode options: machine code for ARCHITECTURES as far as nvcc has them, and PTX of the newest for
    all later devices. listed: capabilities nvcc knows, nothing where it does not tell: then those of the devices here
    count, and without any nvcc's own default, which has PTX too."""
    told = set(listed)
    if told:
        chosen = [a for a in ARCHITECTURES if a in told] or [max(told)]
    else:
        chosen = sorted(set(device))
    options = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in chosen]
    options += [f"-gencode=arch=compute_{a},code=compute_{a}" for a in chosen[-1:]]
    return options


def architectures(nvcc: str, run: Run = run) -> list[str]:
    listed = run([nvcc, "--list-gpu-arch"])
    known = re.findall(r"\bcompute_(\d+)\b", listed.out) if listed.ok else []
    here: list[int] = []
    if not known:
        asked = run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
        if asked.ok:
            here = [
                int(a) * 10 + int(b) for a, b in re.findall(r"(?m)^\s*(\d+)\.(\d)\s*$", asked.out)
            ]
    return generate(map(int, known), here)


def runtime_folders(nvcc: str, env: Mapping[str, str], run: Run = run) -> list[str]:
    """Folders with libcudart_static.a. nvcc may be a script that calls another one, so it is asked first."""
    told = run([nvcc, "--dryrun", "-c", SOURCE])
    candidates = [Path(p) for p in re.findall(r'-L([^"\s]+)', told.err + told.out)]
    homes = [Path(nvcc).resolve().parents[1]]
    homes += [Path(env["CUDA_HOME"])] if env.get("CUDA_HOME") else []
    for home in homes:
        candidates += [home / "lib64", home / "lib", *sorted(home.glob("targets/*/lib"))]
    found = [str(p.resolve()) for p in candidates if (p / "libcudart_static.a").is_file()]
    return list(dict.fromkeys(found))


def compile_cuda(
    choice: Choice, folder: Path, env: Mapping[str, str], run: Run = run
) -> tuple[Path, list[str]] | str:
    """(object, folders of libraries), or why there is none. The object is linked on trial: what fails now cannot
    fail with the whole extension."""
    assert choice.nvcc is not None
    folder.mkdir(parents=True, exist_ok=True)
    out, trial = folder / "gpu.o", folder / "gpu_trial.so"
    out.unlink(missing_ok=True)
    made = run([
        choice.nvcc, "-c", SOURCE, "-o", str(out), *architectures(choice.nvcc, run), *EXACT, "-Xcompiler", "-fPIC",
        "--threads", "2", "-Imosaic_c",
    ])  # fmt: skip
    if not made.ok or not out.is_file():
        return made.reason if not made.ok else "it wrote no object"
    places = runtime_folders(choice.nvcc, env, run)
    if not places:
        return "no libcudart_static.a beside it: install the whole toolkit"
    compiler = shlex.split(env.get("CC") or "cc")
    linked = run([
        # whole: what is undefined here would only be missed when the package is imported
        *compiler, "-shared", "-Wl,-z,defs", "-Wl,--require-defined=mci_gpu_get", "-o", str(trial), str(out),
        *(f"-L{p}" for p in places), *(f"-l{x}" for x in LIBRARIES),
    ])  # fmt: skip
    trial.unlink(missing_ok=True)
    return (out, places) if linked.ok else f"its object does not link: {linked.reason}"


def compile_emulated(folder: Path, env: Mapping[str, str], run: Run = run) -> list[Path]:
    """The same source for the host, and what tests/cuda/ has in place of CUDA."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = [
        *shlex.split(env.get("CXX") or "c++"),
        "-O2",
        "-fPIC",
        "-ffp-contract=off",
        "-fno-math-errno",
    ]
    objects = []
    for source in (SOURCE, *EMULATION):
        objects.append(folder / f"emulated_{Path(source).stem}.o")
        as_cuda = ["-x", "c++", "-include", EMULATION_HEADER] if source == SOURCE else []
        made = run([
            *compiler, *as_cuda, "-D_GNU_SOURCE", "-Imosaic_c", "-Itests/cuda", "-c", source, "-o", str(objects[-1])
        ])  # fmt: skip
        if not made.ok:
            raise BuildError(f"MOSAIC_CUDA=emulated: {source} does not compile: {made.reason}")
    return objects


# ---- both together -------------------------------------------------------------------------------


def literal(text: str) -> str:
    """A C string of a text: plain ASCII of a line, at most 160 of it."""
    plain = "".join(
        c if " " <= c <= "~" and c not in '"\\' else "'" if c == '"' else "?" for c in text
    )
    return f'"{plain[:160]}"'.replace("??", "? ")  # no trigraphs


def stub(why: str, warning: str = "") -> Parts:
    return Parts((STUB,), macros=(("MOSAIC_CUDA_WHY", literal(why)),), warning=warning)


def parts(env: Mapping[str, str], folder: Path, run: Run = run, system: Path = Path("/")) -> Parts:
    """Decides, compiles and says what to link, in the folder of setup.py. folder: for the object."""
    setting = env.get("MOSAIC_CUDA", "").strip() or "auto"
    nvcc = find_nvcc(env, system) if setting in ("auto", "1") else None
    device = setting == "auto" and nvcc is not None and has_device(run, system)
    choice = choose(setting, nvcc, device)
    if choice.kind == "stub":
        return stub(choice.why)
    if choice.kind == "emulated":
        objects = compile_emulated(folder, env, run)
        return Parts(objects=tuple(map(str, objects)), libraries=("stdc++",))
    made = compile_cuda(choice, folder, env, run)
    if isinstance(made, str):
        why = f"nvcc failed: {made}"
        warning = f"{choice.nvcc}: {why}; falls back to a build without a GPU tier"
        if choice.forced:
            rule = "*" * 78
            warning = f"{rule}\nMOSAIC_CUDA=1 was asked for, but {warning}\n{rule}"
        return stub(why, warning)
    out, places = made
    return Parts(
        objects=(str(out),),
        library_dirs=tuple(places),
        libraries=LIBRARIES,
        # another copy of the runtime in this process (torch's) must neither see nor replace ours
        link_args=("-Wl,--exclude-libs,libcudart_static.a",),
    )


def warn(text: str) -> None:
    for line in text.splitlines():
        print(f"mosaic_c: warning: {line}", file=sys.stderr, flush=True)
