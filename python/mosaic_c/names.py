"""Names of models: what stands for a folder wherever one is taken.

find() is the one place that turns a name into a folder. The command line and mosaic_c.open call it; all below them
take folders. This module is also the only reader of the environment, and only where a name is no folder or a command
asks: where this program keeps files of its own (XDG_CACHE_HOME, XDG_STATE_HOME), where the user's Hugging Face cache
is (HF_HUB_CACHE, HF_HOME). It needs no package: what was downloaded is found without huggingface_hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import path_text, shown_path

BUILT = {
    "smollm2-moe": "mosaic_c.smollm2_moe"
}  # what `pull` makes of a package: name -> module with its pull()
DEMO = "demo"  # the model in the box

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(rf"({_PART})/({_PART})(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_FILE = re.compile(r"\.(json|safetensors|gguf|bin|csv|txt)$")  # no model's name ends so


def find(name: str | os.PathLike[str]) -> Path:
    """The folder that a model's name or path means.

    What exists is a path. Otherwise `demo` is the model in the box, `smollm2-moe` the one that `pull smollm2-moe`
    made, and ORG/NAME, or ORG/NAME@REVISION, the one in the user's Hugging Face cache. Raises MosaicError ENOENT, with
    the command that gets the model, for a name of which nothing is there; a text that is no name comes back as a path.
    """
    text = path_text(name)
    if not text:
        raise UsageError("model: expected a folder or a name, got ''")
    if not isinstance(name, str) or os.path.lexists(text):
        return Path(text)
    if text == DEMO:
        return demo_folder()
    if text in BUILT:
        folder = built_folder(text)
        if folder.is_dir():
            return folder
        raise MosaicError(
            f"{text}: not here yet; get it by: python -m mosaic_c pull {text}", "ENOENT"
        )
    repo = hub_name(text)
    if repo is None:
        return Path(text)
    folder = hub_folder(*repo)
    if folder is not None:
        return folder
    organisation, model, revision = repo
    chosen = "" if revision == "main" else f" --revision {revision}"
    raise MosaicError(
        f"{text}: no such folder, and none of this name in {shown_path(hub_cache())}; download it by: "
        f"python -m mosaic_c pull {organisation}/{model}{chosen}",
        "ENOENT",
    )


def demo_folder() -> Path:
    """The folder of the model in the box: a checkpoint like any other, shipped with the package."""
    return Path(__file__).parent / "demo"


def hub_name(text: str) -> tuple[str, str, str] | None:
    """(organisation, model, revision) of ORG/NAME or ORG/NAME@REVISION, None for other texts."""
    parts = _HUB.fullmatch(text)
    if parts is None or _FILE.search(text):
        return None
    return parts[1], parts[2], parts[3] or "main"


def hub_folder(organisation: str, model: str, revision: str = "main") -> Path | None:
    """The snapshot of a model in the Hugging Face cache; None when it has none of that revision."""
    repo = hub_cache() / f"models--{organisation}--{model}"
    commit = revision
    try:
        commit = (repo / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        pass  # a revision may be a commit, which has no reference
    folder = repo / "snapshots" / commit
    return folder if re.fullmatch(r"\w[\w.-]*", commit) and folder.is_dir() else None


def built_folder(name: str) -> Path:
    return cache_folder() / "models" / name


def cache_folder() -> Path:
    """Where this program keeps files of its own for the user."""
    return _cache() / "mosaic_c"


def state_folder() -> Path:
    """Where this program keeps what the user typed."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "mosaic_c"


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloads."""
    told = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or _cache() / "huggingface"
    return Path(os.path.expandvars(os.path.expanduser(told or Path(home) / "hub")))


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
