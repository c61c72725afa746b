"""Writes what is kept beside the model: the exact texts that tests compare, and held-out text for `bench quality`.

python vectors.py FOLDER ../../tests/vectors/demo.json ../../python/mosaic_c/texts
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import documents
from evaluate import answer, chat, questions, right
from words import clean

import mosaic_c

ASKS = (
    "Tell me a story about Mia and a kite.",
    "Write a short story about a fox named Pip.",
    "Who are you?",
    "Tom has a blue boat. Sara has a green lantern. Tom ate some honey.\nWho had the lantern?",
)
QUESTIONS = 60


def held_out_stories(size: int) -> str:
    """Stories with pairs of words that training never saw together, some `size` characters of them."""
    rng, texts = random.Random("held-out stories"), []
    while sum(map(len, texts)) < size:
        text = str(documents.story(rng)[0])
        if not clean(text):
            texts.append(text + "\n")
    return "\n".join(texts)


def main() -> None:
    folder, out, texts_folder = sys.argv[1:4]
    with mosaic_c.open(folder, ram="300M") as model:
        texts = [chat(ask) for ask in ASKS] + ["There once was a curious"]
        asked = questions(QUESTIONS, "vectors", unseen=True)
        result = {
            "texts": [{"prompt": t, "text": answer(model, t, 400, strip=False)[0]} for t in texts],
            "questions": [
                {"prompt": prompt, "text": text, "right": right(text, fact, kind)}
                for prompt, fact, kind in asked
                for text in [answer(model, prompt, 24, strip=False)[0]]
            ],
        }
    command = [
        sys.executable,
        "-m",
        "mosaic_c",
        "generate",
        "Once upon a time",
        "-n",
        "60",
        "-q",
        "-m",
        folder,
    ]
    result["first command"] = subprocess.run(
        command, capture_output=True, check=True, text=True
    ).stdout
    (Path(texts_folder) / "stories.txt").write_text(held_out_stories(12_000))
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
