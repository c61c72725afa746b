"""Measures the demo model by the engine itself: questions, stories, perplexity; the figures of its model card.

    python evaluate.py FOLDER [--questions 1000] [--stories 200] [--audit STEPS] [--json FILE]

- Questions are about pairs of words that no training document holds (words.py), read from a passage or a story. An
  answer is right when it has the value asked for and no other word of its kind.
- Stories are asked for with a hero and a thing that were never seen together, or were. A sentence is grammatical when
  the grammar could have written it: with its words of the small world replaced by their kinds it is one of the forms
  that many drawn stories have. A story is on topic when hero and thing are in at least three and two of its sentences
  and no other thing is in it.
- --audit looks for held-out pairs in the rows of that many steps of training: there must be none.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections import Counter
from pathlib import Path

import documents
import plots
import world
from corpus import ROWS, WORKERS, Packer, chapters
from tokenizers import Tokenizer
from words import (
    CLASS,
    CLASSES,
    HELD_CLASSES,
    SKILLS,
    SPOTS,
    TRAITS,
    WEATHERS,
    held,
    held_pairs,
    singular,
)
from words import clean as is_clean

import mosaic_c

# Remove when the model is trained anew: a system message of its early training documents was "You are a friendly
# teacher.", above texts with any names.
HEARD = "teacher"
KINDS = ("place", "food", "object", "pet", "job", "colour")  # of held-out attributes


def chat(*turns: str) -> str:
    roles = ("user", "assistant")
    text = "".join(documents.turn(roles[i % 2], t) for i, t in enumerate(turns))
    return text + documents.START + "assistant\n"


def questions(count: int, seed: str, unseen: bool) -> list[tuple[str, world.Fact, str]]:
    """(prompt, fact, kind of the value), as many of each kind, half of them from stories; unseen: of held-out pairs."""
    rng, out = random.Random(seed), []
    quota = Counter(
        {(kind, form): -(-count // (2 * len(KINDS))) for kind in KINDS for form in (False, True)}
    )
    # Stories say nothing of a hero's own pet or, seldom, of work: those come from passages alone.
    while sum(quota.values()) > 0:
        t = world.Tale(rng)
        told = rng.random() < 0.5
        if told:
            rng.choice(plots.PLOTS)(t)
        else:
            documents.passage(t, rng.choice((1, 2, 2, 3)))
        text = str(t)
        if not unseen and not is_clean(text):
            continue
        for fact in t.facts:
            kind = CLASS.get(fact.value, "")
            if (
                quota[kind, told] > 0
                and fact.value != HEARD
                and fact.pair[1] == fact.value
                and held(*fact.pair) == unseen
            ):
                quota[kind, told] -= 1
                out.append((chat(documents.read(text, rng.choice(fact.asks), rng)), fact, kind))
                break
    return out[:count]


def right(answer: str, fact: world.Fact, kind: str) -> bool:
    found = {w for w in map(singular, re.findall("[A-Za-z]+", answer)) if CLASS.get(w) == kind}
    return found == {singular(fact.value)} or found == {fact.value}


_SLOTS = [
    *((w, "kind") for kind in ("animal", "pet", "object", "colour", "place", "food", "job") for w in CLASSES[kind]),
    *((w, "name") for w in CLASSES["name"]),
    *((w, "trait") for w in TRAITS), *((w, "weather") for w in WEATHERS), *((w, "skill") for w in SKILLS),
    *((w.split(" ", 1)[1], "spot") for w in SPOTS),
]  # fmt: skip
_SLOT = re.compile(
    r"\b(" + "|".join(re.escape(w) for w, _ in sorted(_SLOTS, key=lambda s: -len(s[0]))) + r")\b"
)
_KIND = {w: CLASS.get(w, slot) for w, slot in _SLOTS}


def form(sentence: str) -> str:
    """The sentence with its words of the small world replaced by their kinds."""
    text = _SLOT.sub(lambda m: f"<{_KIND[m[1]]}>", sentence)
    text = re.sub(r"\b(in|on|at|by) the <place>", "at the <place>", text)
    return re.sub(r"\b(an?) <", "a <", text)


def sentences(text: str) -> list[str]:
    return [s for s in re.split(r'(?<=[.!?])\s+(?=["A-Z])|(?<=[.!?]["])\s+', text.strip()) if s]


def known_forms(count: int = 60_000) -> set[str]:
    rng = random.Random("forms")
    return {form(s) for _ in range(count) for s in sentences(str(documents.story(rng)[0]))}


def answer(
    model: mosaic_c.Model, prompt: str, limit: int, seed: int | None = None, strip: bool = True
) -> tuple[str, bool]:
    """(text, did it end by itself); greedy, or drawn at temperature 0.8."""
    how = {"temperature": 0.0} if seed is None else {"temperature": 0.8, "seed": seed}
    count, text = 0, ""
    for piece in model.generate(prompt, max_new_tokens=limit, **how):
        count, text = count + 1, text + piece.text
    return text.strip() if strip else text, count < limit


def measure_questions(model: mosaic_c.Model, count: int, unseen: bool) -> dict:
    hits, asked, wrong = Counter(), Counter(), []
    for prompt, fact, kind in questions(count, f"questions/{unseen}", unseen):
        said, _ = answer(model, prompt, 24)
        asked[kind] += 1
        if right(said, fact, kind):
            hits[kind] += 1
        elif len(wrong) < 5:
            wrong.append({"prompt": prompt, "said": said, "value": fact.value})
    return {
        "asked": sum(asked.values()), "accuracy": round(sum(hits.values()) / sum(asked.values()), 4),
        "by_kind": {k: round(hits[k] / asked[k], 4) for k in KINDS if asked[k]}, "wrong": wrong,
    }  # fmt: skip


def measure_stories(model: mosaic_c.Model, count: int, seed: int | None, unseen: bool) -> dict:
    rng, forms = random.Random("stories"), known_forms()
    pairs = [(a, b) for a in CLASSES["name"] for b in CLASSES["object"] if held(a, b) == unseen]
    total = good = topical = ended = 0
    odd, samples, lengths = [], [], []
    for i in range(count):
        hero, thing = rng.choice(pairs)
        said, stopped = answer(
            model,
            chat(f"Tell me a story about {hero} and {world.a(thing)}."),
            300,
            None if seed is None else seed + i,
        )
        parts = sentences(said)
        lengths.append(len(parts))
        total += len(parts)
        bad = [s for s in parts if form(s) not in forms]
        good += len(parts) - len(bad)
        odd += bad
        things = {
            w for w in map(singular, re.findall("[A-Za-z]+", said)) if CLASS.get(w) == "object"
        }
        about = sum(hero in s for s in parts) >= 3 and sum(thing in s for s in parts) >= 2
        topical += about and things <= {thing, "blanket"}  # one plot hides the hero under a blanket
        ended += stopped
        if i < 4:
            samples.append({"hero": hero, "thing": thing, "text": said})
    return {
        "stories": count, "sentences": round(total / count, 2), "shortest": min(lengths),
        "grammatical": round(good / total, 4), "on_topic": round(topical / count, 4),
        "ended": round(ended / count, 4), "odd": odd[:8], "samples": samples,
    }  # fmt: skip


def perplexity(model: mosaic_c.Model, texts: list[str], window: int = 384) -> dict:
    """exp of the mean loss a token, in windows that start afresh after an end of text."""
    total, count = 0.0, 0
    for text in texts:
        ids = model.tokenizer.encode(text)
        for at in range(0, len(ids), window - 1):
            part = [model.tokenizer.encode("<|endoftext|>")[0], *ids[at : at + window - 1]]
            if len(part) > 1:
                logp = model.session().score(part)
                total, count = total - float(logp.sum()), count + len(logp)
    return {"tokens": count, "perplexity": round(math.exp(total / count), 3)}


def audit(model: mosaic_c.Model, steps: int) -> dict:
    """Looks for held-out pairs in the rows that the first steps of training read, by a search of its own."""
    packer = Packer(Tokenizer.from_file(str(model.folder / "tokenizer.json")), **ROWS)
    pairs = [pair for kinds in HELD_CLASSES for pair in held_pairs(*kinds) if HEARD not in pair]
    documents = found = 0
    for step in range(steps):
        for worker in range(WORKERS):
            for row in packer.batch(step, worker)[0].tolist():
                for text in model.tokenizer.decode(row, skip_special=False).split("<|endoftext|>"):
                    documents += bool(text)
                    words = set(re.sub("[^A-Za-z]+", " ", text).split())
                    found += any(a in words and b in words for a, b in pairs)
    return {"documents": documents, "with a held-out pair": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p = parser.add_argument
    p("folder")
    p("--questions", type=int, default=1000)
    p("--stories", type=int, default=200)
    p("--audit", type=int, default=0, metavar="STEPS")
    p("--json", type=Path)
    args = parser.parse_args()
    result: dict = {}
    with mosaic_c.open(args.folder, ram="400M") as model:
        result["unseen pairs"] = measure_questions(model, args.questions, unseen=True)
        result["seen pairs"] = measure_questions(model, args.questions // 4, unseen=False)
        result["stories, unseen pairs"] = measure_stories(model, args.stories, None, True)
        result["stories, seen pairs"] = measure_stories(model, args.stories, None, False)
        result["stories, unseen pairs, temperature 0.8"] = measure_stories(
            model, args.stories, 1, True
        )
        rng = random.Random("held-out stories")
        result["prose"] = perplexity(model, chapters()[1])
        result["documents"] = perplexity(model, [documents.document(rng) for _ in range(300)])
        if args.audit:
            result["audit"] = audit(model, args.audit)
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
