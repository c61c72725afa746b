"""Downloads of a model hub, by huggingface_hub, into the user's ordinary Hugging Face cache.

Only what running a model needs is fetched, and the weights last: an architecture that does not run here is refused by
its config.json. A download that was cut short is resumed by huggingface_hub; until it is whole the folder does not
open, since shards are missing.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mosaic_c import families
from mosaic_c.checkpoint import INDEX, MAX_CONFIG, SINGLE
from mosaic_c.errors import MosaicError
from mosaic_c.header import MAX_HEADER
from mosaic_c.jsonfile import load, reason, show
from mosaic_c.pull import check_room

CONFIG = "config.json"
BESIDE = (
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def pull(repo: str, revision: str = "main", progress: bool = True) -> Path:
    """The folder of ORG/NAME, downloaded where it is not there yet. MosaicError, of one line, for what goes wrong."""
    try:
        import huggingface_hub as hub
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise MosaicError(
            f"{repo} is downloaded by the package huggingface_hub, which is not installed: "
            "pip install huggingface_hub",
            "ENOENT",
        ) from None
    if not progress:
        disable_progress_bars()
    with _explained(repo, revision):
        info = hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {x.rfilename: x.size or 0 for x in info.siblings or []}
        if CONFIG not in sizes:
            raise MosaicError(
                f"{repo}: no {CONFIG} in it: not a model in Hugging Face format", "EFORMAT"
            )

        def fetch(name: str) -> Path:
            return Path(hub.hf_hub_download(repo, name, revision=revision))

        families.plan_for(load(fetch(CONFIG), MAX_CONFIG), f"{repo}: {CONFIG}")
        wanted = [CONFIG, *(x for x in BESIDE if x in sizes), *_weights(repo, sizes, fetch)]
        missing = [x for x in wanted if not _cached(hub, repo, x, info.sha)]
        check_room(Path(hub.constants.HF_HUB_CACHE), sum(sizes[x] for x in missing))
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))


def _cached(hub: Any, repo: str, name: str, commit: str | None) -> bool:
    return isinstance(hub.try_to_load_from_cache(repo, name, revision=commit), str)


def _weights(repo: str, sizes: dict[str, int], fetch: Any) -> list[str]:
    """The files of the weights: those that the index names, and it, or the only one."""
    if INDEX in sizes:
        files = load(fetch(INDEX), MAX_HEADER).get("weight_map")
        names = sorted(set(map(str, files.values()))) if isinstance(files, dict) else []
        lost = [x for x in names if x not in sizes]
        if lost or not names:
            what = f"{show(lost[0])}, which it does not have" if lost else "no files"
            raise MosaicError(f"{repo}: {INDEX} names {what}", "EFORMAT")
        return [INDEX, *names]
    if SINGLE in sizes:
        return [SINGLE]
    raise MosaicError(
        f"{repo}: neither {INDEX} nor {SINGLE}: expected safetensors weights", "EFORMAT"
    )


@contextmanager
def _explained(repo: str, revision: str) -> Iterator[None]:
    """Turns what huggingface_hub and the network raise into one line that says what to do."""
    from huggingface_hub import constants, errors

    host = constants.ENDPOINT
    # newer releases raise errors of their HTTP client, older ones OSError
    transport = (OSError, getattr(errors, "HTTPError", OSError))
    try:
        yield
    except MosaicError:
        raise
    except errors.GatedRepoError:
        problem, code = (
            f"{host} asks for its terms to be accepted on the model's page; then: hf auth login",
            "EACCES",
        )
    except errors.RevisionNotFoundError:
        problem, code = (
            f"no revision {show(revision)} at {host}; expected a branch, tag or commit",
            "ENOENT",
        )
    except errors.RepositoryNotFoundError:
        problem, code = (
            f"no such model at {host}; check the name, or log in where it is private: hf auth login",
            "ENOENT",
        )
    except errors.HFValidationError:
        problem, code = "not a name of a model: expected ORG/NAME", "EINVAL"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        problem, code = _unreachable(host, error.__cause__ or error), "EIO"
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        advice = "log in: hf auth login" if status in (401, 403) else "try again later"
        problem, code = f"{host} answered {status}; {advice}", "EIO"
    except transport as error:
        problem, code = _unreachable(host, error), "EIO"
    else:
        return
    raise MosaicError(f"{repo}: {problem}", code) from None


def _unreachable(host: str, error: BaseException) -> str:
    if getattr(error, "errno", None) == errno.ENOSPC:
        return (
            "the disk of the Hugging Face cache is full; free some, then the same command resumes"
        )
    return f"cannot download from {host}: {reason(error)}; check the network and the same command resumes"
