"""Writes tests/vectors/demo.json from the shipped model.

python vectors.py FOLDER ../../tests/vectors/demo.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from evaluate import answer, chat, questions

import mosaic_c

ASKS = (
    "Tell me a story about Mia and a kite.",
    "Write a short story about a fox named Pip.",
    "Who are you?",
    "Tom has a blue boat. Sara has a green lantern. Tom ate some honey.\nWho had the lantern?",
)
QUESTIONS = 60


def main() -> None:
    folder, out = sys.argv[1:3]
    with mosaic_c.open(folder, ram="300M") as model:
        texts = [chat(ask) for ask in ASKS] + ["There once was a curious"]
        asked = questions(QUESTIONS, "vectors", unseen=True)
        result = {
            "texts": [{"prompt": t, "text": answer(model, t, 400, strip=False)[0]} for t in texts],
            "questions": [
                [prompt, fact.value, answer(model, prompt, 24, strip=False)[0]]
                for prompt, fact, _ in asked
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
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
