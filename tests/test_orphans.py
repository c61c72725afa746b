"""Commands that run models in processes of their own leave none of them behind, however they end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mosaic_c import synth


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orphans") / "tiny"
    synth.write(folder, "tiny", progress=False)
    config = folder / "config.json"  # room for runs that take far longer than the test waits
    config.write_text(config.read_text().replace('_embeddings": 4096', '_embeddings": 200000'))
    return folder


def ended(pid):
    """Gone, or a zombie: whoever inherits it need not collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition):
    until = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    "command",
    [["verify", "--tokens", "199000"], ["bench", "sweep", "--tokens", "199000", "--slots", "4"]],
    ids=["verify", "sweep"],
)
def test_a_killed_command_takes_its_runs_with_it(tiny, command, number):
    """A run left behind holds a model's memory: verify's for ever, waiting for someone to read its results."""
    p = subprocess.Popen(
        [sys.executable, "-m", "mosaic_c", *command, "-m", str(tiny), "--ram", "512M"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    children = Path(f"/proc/{p.pid}/task/{p.pid}/children")
    wait_for(children.read_text)
    time.sleep(0.5)
    children = children.read_text().split()
    p.send_signal(number)
    p.wait()
    assert children and wait_for(lambda: all(ended(pid) for pid in children))
