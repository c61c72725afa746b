"""The tree keeps its own rules: dependencies point one way, files stay small, the header is the truth."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
C = ROOT / "mosaic_c"
CUDA = [
    path for path in sorted((C / "cuda").iterdir()) if path.suffix in (".c", ".h", ".cu", ".cuh")
]
PY = ROOT / "python" / "mosaic_c"
# The benchmarks are linked into the extension: what holds for the engine holds for them.
BENCH = ROOT / "tests" / "c"
BENCH_FILES = [
    BENCH / name
    for stem in ("bench", "bench_io", "cases", "cases_moe", "peaks", "yardstick", "rng")
    for name in (f"{stem}.c", f"{stem}.h")
    if (BENCH / name).exists()
]
BENCH_LEVELS = [{"rng", "peaks", "yardstick", "cases"}, {"cases_moe"}, {"bench", "bench_io"}]

# docs/design.md section 2: a file may include headers of its own level's left side only.
LEVELS = [
    {"mosaic_c"},
    {"gpu"},
    {"base"},
    {"error", "crc", "cpu"},
    {"pool", "forecast", "replay"},
    {"dtype", "policy", "hot", "trial", "io_file", "io_uring"},
    {"ops", "io", "slot"},
    {"io_load"},
    {"engine"},
    {"acts"},
    {"expert", "slabs"},
    {"ahead", "measure", "upload"},
    {"tier"},
    {"store_parts"},
    {"linear", "kv", "session", "session_file", "store"},
    {"attn", "delta", "moe", "handles", "store_line"},
]


def level(name: str) -> int:
    for i, names in enumerate(LEVELS):
        if name in names or ("ops" in names and name.startswith("ops_")):
            return i
    raise AssertionError(f"{name}: give it a level in test_layout.py and docs/design.md")


def includes(path: Path) -> set[str]:
    text = path.read_text(encoding="ascii")
    found = re.findall(r'^#include "(?:cuda/|\.\./)?(\w+)\.h"', text, re.M)
    return set(found) - {path.stem}


@pytest.mark.parametrize("path", sorted(C.glob("*.[ch]")), ids=lambda p: p.name)
def test_c_dependencies_point_one_way(path):
    mine = level(path.stem)
    for name in includes(path):
        ok = level(name) < mine or (
            level(name) == mine and (name == "session" or name.startswith("ops"))
        )
        assert ok, f"{path.name} includes {name}.h"
    if path.stem not in ("moe", "store_line"):
        assert "store" not in includes(path)
    if path.stem not in ("store", "store_line"):
        assert "store_parts" not in includes(path)


@pytest.mark.parametrize("path", CUDA, ids=lambda p: p.name)
def test_a_device_knows_slots_alone(path):
    assert includes(path) <= {"mosaic_c", "ops_poly", "gpu"}


@pytest.mark.parametrize("path", BENCH_FILES, ids=lambda p: p.name)
def test_the_benchmark_sits_on_the_engine(path):
    own = set().union(*BENCH_LEVELS)
    mine = next(i for i, names in enumerate(BENCH_LEVELS) if path.stem in names)
    below = set().union(*BENCH_LEVELS[: mine + 1])
    for name in includes(path):
        ok = name in below if name in own else level(name) <= level("linear")
        assert ok, f"{path.name} includes {name}.h"
    # the other way round: the engine knows nothing of it
    assert not any(includes(engine) & own for engine in C.glob("*.[ch]"))


def test_the_extension_takes_the_whole_benchmark():
    text = (PY / "_build.py").read_text(encoding="utf-8")
    built = re.search(r"^BENCH = \((.*?)\)", text, re.M | re.S)
    stems = {path.stem for path in BENCH_FILES if path.suffix == ".c"}
    assert built and set(re.findall(r'"(\w+)"', built[1])) == stems


@pytest.mark.parametrize(
    "path",
    sorted([*C.glob("*.c"), *CUDA, *(p for p in BENCH_FILES if p.suffix == ".c")]),
    ids=lambda p: p.name,
)
def test_the_library_never_exits_prints_or_reads_the_environment(path):
    code = re.sub(r'/\*.*?\*/|"(\\.|[^"\\])*"', "", path.read_text(encoding="ascii"), flags=re.S)
    assert not re.search(r"\b(exit|abort|getenv|printf|puts|perror|fprintf)\s*\(", code)
    # no mutable file-scope state
    for line in re.findall(r"^static [^(]*?[=;].*$", code, re.M):
        if line.startswith("static __shared__"):  # of a block of threads, while it runs
            continue
        assert "const" in line or "_Thread_local" not in line and "(" in line, line


@pytest.mark.parametrize(
    "path",
    sorted([*C.glob("*.[ch]"), *CUDA, *BENCH_FILES, *PY.rglob("*.py")]),
    ids=lambda p: p.name,
)
def test_files_stay_small(path):
    limit = 700 if path.name == "cases.c" else 500  # the table grows with every format
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize(
    "path",
    sorted(
        [
            *C.rglob("*.[ch]"),
            *C.rglob("*.cu*"),
            *(ROOT / "tests" / "c").glob("*.[ch]"),
            *(ROOT / "tests" / "cuda").glob("*.[ch]*"),
        ]
    ),
    ids=lambda p: p.name,
)
def test_lines_of_c_end_by_column_100(path):
    lines = path.read_text(encoding="ascii").splitlines()
    assert not [i for i, line in enumerate(lines, 1) if len(line) > 100 or line != line.rstrip()]


def imports(path: Path) -> set[str]:
    out = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            out |= {f"{node.module}.{a.name}" for a in node.names} | {str(node.module)}
        elif isinstance(node, ast.ImportFrom):
            parts = path.relative_to(PY.parent).with_suffix("").parts
            base = ".".join(parts[: len(parts) - node.level])
            module = f"{base}.{node.module}" if node.module else base
            out |= {f"{module}.{a.name}" for a in node.names} | {module}
    return out


@pytest.mark.parametrize("path", sorted(PY.rglob("*.py")), ids=lambda p: str(p.relative_to(PY)))
def test_python_dependencies(path):
    found = imports(path)
    if path.stem not in ("engine", "engine_pure", "engine_bench"):
        assert not any("_engine" in name for name in found), (
            "only engine.py, engine_pure.py and engine_bench.py talk to C"
        )
    if path.stem not in ("__main__",):
        assert not any(name.startswith("mosaic_c.cli") for name in found), "nothing imports cli"
    if path.parent.name == "families":
        own = {n for n in found if n.startswith("mosaic_c.")}
        allowed = ("mosaic_c.plan", "mosaic_c.families", "mosaic_c.errors")
        assert all(n.startswith(allowed) for n in own), own
    if path.parent.name == "architectures":  # sizes know of configs, not of plans or files
        own = {n for n in found if n.startswith("mosaic_c.")}
        allowed = ("mosaic_c.architectures", "mosaic_c.families.config", "mosaic_c.errors")
        assert all(n.startswith(allowed) for n in own), own
    assert not any(name.split(".")[0] == "ctypes" for name in found)


@pytest.mark.parametrize(("enum", "names"), [("IO", "IO_MODES"), ("POLICY", "POLICIES")])
def test_names_of_settings_are_those_of_the_header(enum, names):
    from mosaic_c import engine, modes

    found = re.findall(
        rf"\bMC_{enum}_(\w+) = (\d+)", (C / "mosaic_c.h").read_text(encoding="ascii")
    )
    want = {name.lower().replace("_", "-"): int(value) for name, value in found}
    assert getattr(engine, names) == want and set(getattr(modes, names)) == set(want)
    assert set(modes.PER_LAYER) | set(modes.REPLAY_ONLY) < set(modes.POLICIES)


HEADERS = [C / "mosaic_c.h", BENCH / "bench.h", BENCH / "bench_io.h"]


@pytest.mark.parametrize("header", HEADERS, ids=lambda p: p.name)
def test_every_declaration_of_the_header_is_bound(header):
    text = header.read_text(encoding="ascii")
    body = text.split("/* cffi begin */")[1].split("/* cffi end */")[0]
    assert "#" not in re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    from mosaic_c._engine import lib

    for name in re.findall(r"\b(mc_\w+)\s*\(", re.sub(r"/\*.*?\*/", "", body, flags=re.S)):
        assert hasattr(lib, name), name
