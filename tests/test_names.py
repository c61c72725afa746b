"""Names in place of folders, and `pull ORG/NAME` from a hub on loopback."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
from conftest import VECTORS

import mosaic_c
from mosaic_c import cli, names

MODEL = VECTORS / "qwen2_bf16_tied"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def cached(hub, revision="main", commit=COMMIT):
    """A model in a Hugging Face cache, as huggingface_hub lays it down."""
    repo = hub / "models--some-org--Some.Model"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / revision).write_text(commit)
    shutil.copytree(MODEL, repo / "snapshots" / commit)
    return repo / "snapshots" / commit


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", ""])
def test_a_model_of_the_hub_cache_is_found(variable, tmp_path, monkeypatch):
    if not variable:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
    else:
        monkeypatch.setenv(variable, str(tmp_path / "x"))
    below = {"HF_HUB_CACHE": "x", "HF_HOME": "x/hub", "XDG_CACHE_HOME": "x/huggingface/hub"}
    want = cached(tmp_path / below.get(variable, ".cache/huggingface/hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # it is not needed
    assert names.find("some-org/Some.Model") == want
    assert names.find(f"some-org/Some.Model@{COMMIT}") == want
    with pytest.raises(mosaic_c.MosaicError, match="pull some-org/Some.Model --revision v2"):
        names.find("some-org/Some.Model@v2")


def test_names_are_taken_by_open_and_by_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = cached(tmp_path / "hub")
    with mosaic_c.open("some-org/Some.Model", ram="512M") as model:
        assert model.plan.family == "qwen2_moe"
    name = "some-org/Some.Model"
    for argv in (
        ["inspect", name],
        ["inspect", "--model", name],
        ["plan", name, "--ram", "512M"],
        ["plan", "-m", name, "--ram", "512M"],
        ["doctor", name],
        ["generate", "-m", name, "--ids", "1,2,3", "-n", "1", "--ram", "512M"],
    ):
        cli.main(argv)
        out, err = capsys.readouterr()
        assert out and "no such folder" not in out + err, argv
    assert cli.main(["inspect", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(folder)


def test_what_exists_is_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached(tmp_path / "hub")
    (tmp_path / "some-org" / "Some.Model").mkdir(parents=True)
    (tmp_path / "smollm2-moe").mkdir()
    for name in (
        "some-org/Some.Model",
        "smollm2-moe",
        "no-such-model",
        "/a/b",
        "a/b/c",
        "a/config.json",
    ):
        assert str(names.find(name)) == name


def test_a_model_that_is_not_here_says_how_to_get_it(capsys):
    for name, command in (
        ("smollm2-moe", "python -m mosaic_c pull smollm2-moe"),
        ("Org/Model", "python -m mosaic_c pull Org/Model"),
    ):
        assert cli.main(["inspect", name]) == 1
        err = capsys.readouterr().err
        assert command in err and len(err.splitlines()) == 1
        with pytest.raises(mosaic_c.MosaicError, match=command):
            mosaic_c.open(name)


def test_no_reference_leads_out_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = cached(tmp_path / "hub").parents[1]
    for text in ("../..", "..", ".", "", "a/b", "no-such-commit"):
        (repo / "refs" / "main").write_text(text)
        assert names.hub_folder("some-org", "Some.Model") is None, text
    assert names.hub_name("../x") is None and names.hub_name("a/..") is None


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves the files of MODEL as org/good, and repositories that are refused in different ways."""

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        self.server.asked.append(self.path)
        if "down" in parts:
            return self.answer(503, b"{}")
        if "gated" in parts:
            return self.answer(403, b"{}", [("X-Error-Code", "GatedRepo")])
        if parts[0] == "api":
            if parts[3] == "missing":
                return self.answer(404, b"{}", [("X-Error-Code", "RepoNotFound")])
            if parts[-1] == "v9":
                return self.answer(404, b"{}", [("X-Error-Code", "RevisionNotFound")])
            files = self.files(parts[3])
            info = {"_id": "1", "id": f"org/{parts[3]}", "modelId": f"org/{parts[3]}", "sha": COMMIT,
                    "private": False, "tags": [], "downloads": 0, "likes": 0}  # fmt: skip
            if "tree" in parts:
                tree = [
                    {"type": "file", "path": n, "size": len(b), "oid": "0" * 40}
                    for n, b in files.items()
                ]
                return self.answer(200, json.dumps(tree).encode())
            info["siblings"] = [{"rfilename": n, "size": len(b)} for n, b in files.items()]
            return self.answer(200, json.dumps(info).encode())
        data = self.files(parts[1])[parts[-1]]
        self.answer(200, data, [("ETag", f'"{parts[1]}-{parts[-1]}"'), ("X-Repo-Commit", COMMIT)])

    do_HEAD = do_GET

    def files(self, name):
        files = {
            p.name: p.read_bytes() for p in MODEL.iterdir() if p.suffix in (".json", ".safetensors")
        }
        files |= {"pytorch_model.bin": b"x" * 100, "original.onnx": b"x" * 100, "README.md": b"x"}
        if name == "other":
            files["config.json"] = b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
        return files

    def answer(self, status, data, headers=()):
        self.send_response(status)
        for key, value in [("Content-Length", str(len(data))), *headers]:
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def pull(endpoint, *args):
    root = os.path.dirname(os.path.dirname(mosaic_c.__file__))
    env = os.environ | {"HF_ENDPOINT": endpoint, "PYTHONPATH": root, "HF_HUB_DISABLE_XET": "1"}
    argv = [sys.executable, "-m", "mosaic_c", "pull", *args]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)


def test_pull_from_a_hub_takes_what_running_needs(hub):
    done = pull(f"http://127.0.0.1:{hub.server_port}", "org/good")
    assert done.returncode == 0, done.stderr
    folder = names.find("org/good")
    assert done.stdout == f"{folder}\n" and "Traceback" not in done.stderr
    have = {p.name for p in folder.iterdir()}
    assert {"config.json"} < have and any(x.endswith(".safetensors") for x in have)
    assert not have & {"pytorch_model.bin", "original.onnx", "README.md"}
    with mosaic_c.open("org/good", ram="512M") as model:
        assert model.plan.family == "qwen2_moe"


# one process for all refusals: it is the import of huggingface_hub that takes the time
REFUSALS = """
import sys
from mosaic_c import cli
for line in sys.stdin: print(cli.main(["pull", "--quiet", *line.split()]), file=sys.stderr)
"""


def test_refusals_are_one_line_each_and_come_before_the_weights(hub):
    cases = {
        "org/other": "llama",
        "org/missing": "no such model",
        "org/gated": "terms",
        "org/good --revision v9": "no revision",
    }
    root = os.path.dirname(os.path.dirname(mosaic_c.__file__))
    env = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", REFUSALS], input="\n".join(cases), env=env,
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(cases), done.stderr
    for (name, word), line, status in zip(cases.items(), lines[::2], lines[1::2], strict=True):
        assert (
            status == "1" and line.startswith(f"mosaic_c pull: {name.split()[0]}") and word in line
        )
    assert not [x for x in hub.asked if "safetensors" in x]


def test_no_network_is_one_line():
    done = pull("http://127.0.0.1:9", "org/good", "--quiet")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "cannot download from http://127.0.0.1:9" in done.stderr and "network" in done.stderr
