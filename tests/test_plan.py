"""`plan` on a config.json, with and without weights beside it, and the prediction it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import VECTORS

from mosaic_c import cli, synth
from mosaic_c.predict import OVERLAP, token_seconds

CONFIGS = VECTORS / "configs"
FLASH = json.loads((CONFIGS / "deepseek-ai--DeepSeek-V4-Flash_config.json").read_text())
QWEN = json.loads((CONFIGS / "Qwen--Qwen3.5-35B-A3B_config.json").read_text())


def test_seconds_of_a_token():
    assert token_seconds(3e9, 1.5e9, 0.0, 0.0) == 2.0
    assert token_seconds(3e9, 1e9, 1.0, 0.0) == 4.0  # nothing runs beside reads
    assert token_seconds(3e9, 1e9, 1.0, 1.0) == 3.0  # all of it does
    assert token_seconds(3e9, 1e9, 1.0, 0.25) == 3.75
    assert token_seconds(0, 1e9, 1.0, 0.25) == 1.0  # no reads: compute alone, whatever overlaps
    assert token_seconds(0.5e9, 1e9, 4.0, 0.25) == 4.0  # reads hide behind the experts


@pytest.fixture
def command(capsys):
    def call(*args):
        status = cli.main(["plan", *map(str, args)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def flash(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FLASH))
    return path


def test_command_on_a_config_and_its_folder(command, flash):
    status, out, err = command(flash)
    assert (status, err) == (0, "") and command(flash.parent) == (0, out, "")
    line = {x.split("  ")[0].strip(): x for x in out.splitlines() if x}
    assert "13,369,344" in line["one expert"] and "25,167,360" in line["one expert"]
    assert "258 experts" in line["read a token at worst"] and "147.2 GB" in line["all experts"]
    assert "8.846 GB" in line["resident set"] and "159.6 GB" in line["disk"]
    assert "32768 tokens" in line["smallest useful budget"]
    assert "6,880 bytes a token" in line["KV cache"]
    assert "tokens a second" not in out and "Python and libraries" not in out


def test_command_predicts(command, flash):
    status, out, _ = command(flash, "--disk", "3GB", "--json")
    got = json.loads(out)
    shipped = got["columns"]["as_shipped"]
    assert [p["hit"] for p in shipped["predicted"]] == [0, 0.5, 0.8, 0.9, 1]
    assert shipped["predicted"][0]["tokens_per_s"] == pytest.approx(3e9 / shipped["token_bytes"])
    assert shipped["predicted"][-1]["tokens_per_s"] is None  # reads alone: no bound
    assert got["memory"] is None is got["memory_plan"] and got["disk"] == 3_000_000_000
    out = command(flash, "--disk", "3GB", "--memory", "10GB", "--hit", "0.25,1", "--json")[1]
    low, high = json.loads(out)["columns"]["as_shipped"]["predicted"]
    touched = shipped["active_bytes"] + shipped["token_bytes"]
    assert high["tokens_per_s"] == pytest.approx(1e10 / touched)
    alone = (1 - OVERLAP) * touched / 1e10
    assert low["tokens_per_s"] == pytest.approx(1 / (alone + 0.75 * shipped["token_bytes"] / 3e9))
    out = command(flash, "--disk", "3G")[1]
    assert "a ceiling" in out and "at 3 GB/s from disk" in out
    assert json.loads(command(flash, "--disk", "3G", "--json")[1])["disk"] == 3_000_000_000
    assert "a ceiling" not in command(flash, "--disk", "3G", "--memory", "9G")[1]
    assert status == 0


def test_command_counts_what_a_budget_caches(command, flash):
    got = json.loads(command(flash, "--ram", "16G", "--ctx", 1000, "--kv", "f32", "--json")[1])
    c = got["columns"]["as_shipped"]
    fixed = c["resident_bytes"] + 1000 * 6880 * 2 + 2 * got["state_bytes"]
    assert c["cached_experts"] == (16 * 2**30 - fixed) // c["expert_bytes"]
    assert got["ctx"] == 1000 and got["kv_token_bytes"] == 6880 * 2
    assert "too small" in command(flash, "--ram", "8G")[1]
    assert (
        json.loads(command(flash, "--ram", "8T", "--json")[1])["columns"]["4_bit"]["cached_experts"]
        == 11008
    )


def test_command_on_a_checkpoint_adds_the_memory_plan(command):
    folder = VECTORS / "qwen35_fp8"
    status, out, err = command(folder, "--ram", "1G", "--ctx", 256)
    assert (
        status == 0
        and "one expert" in out
        and "expert cache" in out
        and out.rstrip().endswith("fits")
    )
    got = json.loads(command(folder, "--ram", "1G", "--ctx", 256, "--json")[1])
    alone = json.loads(command("--model", folder, "--ram", "1G", "--ctx", 256, "--json")[1])
    assert (
        got["memory_plan"].keys() == alone.keys() and got["memory_plan"]["ctx"] == got["ctx"] == 256
    )
    only = command("--model", folder, "--ram", "1G")[1]
    assert "one expert" not in only and "expert cache" in only
    config_alone = json.loads(command(folder / "config.json", "--json")[1])
    assert config_alone["memory_plan"] is None


def test_a_pack_is_shown_as_its_manifest_has_it(command, tmp_path):
    folder = tmp_path / "m"
    synth.write(folder, "tiny", progress=False, records="int4-row")
    got = json.loads(command(folder, "--ram", "1G", "--disk", "1G", "--json")[1])
    manifest = json.loads((folder / "mosaic.json").read_text())
    size, total = manifest["layers"][0]["record_bytes"], manifest["files"][0]["bytes"]
    c = got["columns"]["as_shipped"]
    assert (c["expert"], c["expert_bytes"], c["all_experts_bytes"]) == ("int4-row", size, total)
    assert c["token_bytes"] == got["token_experts"] * size
    assert c["disk_bytes"] >= total + c["resident_bytes"]
    assert abs(c["disk_bytes"] - sum(f.stat().st_size for f in folder.iterdir())) < 50_000
    assert got["columns"]["fp8"]["expert"] == "FP8 128x128"
    # no weights are needed, nor the folder's name
    (folder / "experts-00001.bin").unlink()
    alone = json.loads(command(folder / "config.json", "--disk", "1G", "--json")[1])
    assert alone["columns"]["as_shipped"].items() <= c.items() and alone["memory_plan"] is None
    manifest["layers"][0]["record_bytes"] += 4096
    (folder / "mosaic.json").write_text(json.dumps(manifest))
    status, out, err = command(folder / "config.json")
    assert (status, out) == (1, "") and "record_bytes" in err


def test_command_says_why_there_is_no_memory_plan(command, flash):
    (flash.parent / "model.safetensors").write_bytes(b"")
    status, out, _ = command(flash.parent)
    assert status == 0 and "note: no memory plan" in out and "deepseek_v4" in out
    notes = json.loads(command(flash.parent, "--json")[1])["notes"]
    assert any("no memory plan" in note for note in notes)


def test_command_does_not_hide_a_damaged_checkpoint(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "model.safetensors").write_bytes(b"")
    status, out, err = command(tmp_path)
    assert (status, out) == (1, "") and "model.safetensors" in err and err.count("\n") == 1


def test_command_sees_quantisation_said_elsewhere(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    got = json.loads(command(tmp_path, "--json")[1])
    assert list(got["columns"]) == ["fp8", "4_bit"] and "modelopt" in got["notes"][0]


@pytest.mark.parametrize("args,words", [
    (["--hit", "0.5"], "--disk"),
    (["--memory", "9G"], "--disk"),
    (["--disk", "0"], "more than 0"),
    (["--disk", "fast"], "fast"),
    (["--disk", "1G", "--hit", "0,2"], "'2'"),
    (["--disk", "1G", "--hit", "nan"], "'nan'"),
    (["--disk", "1G", "--hit", ""], "from 0 to 1"),
    (["--disk", "1G", "--memory", "0"], "--memory"),
    (["--ctx", "0"], "--ctx 0"),
    (["--ctx", "1048577"], "1048576"),
    (["--threads", "2"], "--threads"),
    (["--policy", "lru"], "--policy"),
    (["--io", "pread"], "--io"),
    (["--slots", "9"], "--slots"),
    (["--model", "x"], "either"),
])  # fmt: skip
def test_command_refuses_what_it_would_ignore(command, flash, args, words):
    status, out, err = command(flash, *args)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_command_refuses_what_is_no_config(command, tmp_path):
    assert command()[0] == 2
    assert command("--model", VECTORS / "qwen35_fp8", "--disk", "1G")[0] == 2
    path = tmp_path / "config.json"
    texts = (b"", b"[1]", b"nonsense", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"{}", b'{"a": NaN}',
             b'{"model_type": "gpt_oss", "hidden_size": ' + b"9" * 2000 + b"}")  # fmt: skip
    for text in texts:
        path.write_bytes(text)
        status, out, err = command(path)
        assert (status, out) == (1, "") and err.count("\n") == 1 and str(path) in err, text[:20]
    assert "no such file" in command(tmp_path / "nothing")[2]
    path.unlink()
    assert "no such file" in command(tmp_path)[2]


def test_command_does_not_predict_what_it_cannot_know(command, tmp_path):
    odd = {"model_type": "new_moe", "hidden_size": 1024, "num_hidden_layers": 10, "num_experts": 64,
           "num_experts_per_tok": 4, "moe_intermediate_size": 256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(odd))
    status, out, _ = command(tmp_path, "--disk", "1G", "--ram", "4G")
    assert status == 0 and out.count("unknown") >= 10 and "note: model_type" in out
    assert command(tmp_path, "--disk", "1G", "--memory", "9G")[0] == 2
    got = json.loads(command(tmp_path, "--ram", "4G", "--json")[1])
    assert got["columns"]["fp8"]["cached_experts"] is None is got["kv_token_bytes"]
