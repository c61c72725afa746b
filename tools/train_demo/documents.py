"""Documents of the small world: stories, passages with questions, and talk, as chats or as plain text.

`document(rng)` draws one. Questions are asked about the facts that a Tale noted, so each answer is known. Everything is
drawn from one random.Random, so a seed is a corpus.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import world as w
from plots import PLOTS, Cast
from words import COLOURS, FOODS, JOBS, NAMES, OBJECTS, PETS, PLACES, clean
from world import Fact, Tale, a, at

Rng = random.Random
END, START = "<|im_end|>\n", "<|im_start|>"

# Passages: short facts of several people, where only reading tells whose is what.


def passage(t: Tale, people: int) -> None:
    for _ in range(people):
        who = t.person()
        facts: list[tuple[tuple[str, ...], list[Fact]]] = []
        thing, colour = t.draw(OBJECTS), t.draw(COLOURS)
        facts.append(((f"{who.name} has {a(colour)} {thing}.", f"{who.name} owns {a(colour)} {thing}.",
                       f"The {colour} {thing} belongs to {who.name}."),
                      [w.fact_colour(thing, colour, who), w.fact_owner(who, thing),
                       w.fact_whose(who, thing)]))  # fmt: skip
        place, job = t.draw(PLACES), t.draw(JOBS)
        food, pet = t.draw(FOODS), t.draw(PETS)
        facts.append(((f"{who.name} went to the {place}.", f"Today {who.name} walked to the {place}.",
                       f"{who.name} spent the day {at(place)}."), [w.fact_place(who, place)]))  # fmt: skip
        facts.append(
            ((f"{who.name} works as {a(job)}.", f"{who.name} is {a(job)}."), [w.fact_job(who, job)])
        )
        facts.append(
            (
                (f"{who.name} ate some {food}.", f"For lunch {who.name} had {food}."),
                [w.fact_food(who, food)],
            )
        )
        facts.append(
            (
                (f"{who.name} has {a(pet)} at home.", f"{who.name} keeps {a(pet)}."),
                [w.fact_pet(who, pet)],
            )
        )
        for forms, known in t.rng.sample(
            facts, t.rng.choice((1, 2, 2, 3)) if people > 1 else t.rng.choice((2, 3, 4))
        ):
            t.say(*forms)
            t.facts += known
    t.rng.shuffle(t.text)


def question(t: Tale, fact: Fact) -> tuple[str, str]:
    """A question about a fact and its answer; sometimes as one that is answered by yes or no."""
    if fact.wrong and t.rng.random() < 0.15:
        if t.rng.random() < 0.5:
            return fact.wrong.format(fact.value), f"Yes. {fact.answer}"
        other = t.rng.choice([o for o in fact.others if o != fact.value])
        ask = fact.wrong.replace(" a {}", f" {a(other)}").format(other)
        return ask, f"No. {fact.answer}"
    return t.rng.choice(fact.asks), fact.answer


UNKNOWN = "The text does not say."


def unknown(t: Tale) -> tuple[str, str]:
    who, thing = t.person(), t.draw(OBJECTS)
    return t.rng.choice((f"What did {who.name} have?", f"What colour was the {thing}?", f"Where did {who.name} go?",
                         f"Who had the {thing}?", f"What did {who.name} eat?")), UNKNOWN  # fmt: skip


# Talk that is no story.

TALK = (
    (("Hello!", "Hi.", "Hello.", "Good morning.", "Hey there!"), "Hello! Shall I tell you a story?"),
    (("Who are you?", "What are you?", "What is your name?", "Are you a person?"),
     "I am a very small language model. I tell short stories and answer questions about them."),
    (("What can you do?", "Help", "How can you help me?", "What do you know?"),
     "I can tell short stories, and I can answer questions about a text that you give me. I know very little else."),
    (("Thank you!", "Thanks.", "That was nice.", "Thank you very much."), "You are welcome!"),
    (("Bye.", "Goodbye!", "Good night.", "See you."), "Goodbye!"),
)  # fmt: skip
STRANGE = (
    "Why is the {} {}?", "What is {}?", "How do I make {}?", "How do I {} a {}?", "Who was the first {}?",
    "What is the capital of {}?", "Explain {} to me.", "Write a program for {}.", "What is {} plus {}?",
    "Give me a list of {}.", "Translate {} for me.",
    "How many {} are there?", "When did {} begin?", "Where is {}?", "Can you solve {}?", "What do you think of {}?",
)  # fmt: skip
STRANGE_WORDS = (
    "sky|blue|water|physics|France|the moon|history|war|two|seven|ten|gravity|a computer|money|green|Python|"
    "light|music|numbers|the sun|Germany|electricity|king|planets|cars|weather|code|mathematics|engine|atoms|love|"
    "the internet|football|time|run|build|fix"
).split("|")  # fmt: skip
SORRY = (
    "I am too small to know that. I can tell you a story, or answer questions about a text that you give me.",
)


def strange(rng: Rng) -> str:
    form = rng.choice(STRANGE)
    return form.format(*rng.sample(STRANGE_WORDS, form.count("{}")))


# Documents.


def turn(role: str, text: str) -> str:
    return f"{START}{role}\n{text}{END}"


def request(t: Tale, cast: Cast) -> str:
    """How a user might ask for the story that was written."""
    hero, r = cast.hero, t.rng.random()
    who = t.rng.choice((hero.name, f"{a(hero.kind)} named {hero.name}"))
    tell = t.rng.choice(
        (
            "Tell me a story",
            "Write a story",
            "Tell me a short story",
            "Write a short story",
            "Can you tell me a story",
        )
    )
    stop = "?" if tell.startswith("Can") else "."
    thing = f"{a(cast.colour)} {cast.thing}" if cast.colour and t.rng.random() < 0.4 else cast.thing
    thing = thing if not cast.colour or thing != cast.thing else a(cast.thing)
    if r < 0.12:
        return tell + stop
    if r < 0.30:  # the story's first words
        words = str(t).split(" ")
        return " ".join(words[: t.rng.choice((4, 4, 4, 6, 8, 10))])
    if r < 0.55 and cast.thing:
        return f"{tell} about {who} and {thing}{stop}"
    if r < 0.7 and cast.place:
        return f"{tell} about {who} {at(cast.place)}{stop}"
    if r < 0.8 and cast.thing:
        return f"{tell} about {thing}{stop}"
    if r < 0.88:
        return f"{tell} about {a(hero.kind)}{stop}"
    return f"{tell} about {who}{stop}"


def story(rng: Rng) -> tuple[Tale, Cast]:
    t = Tale(rng)
    cast = rng.choice(PLOTS)(t)
    return t, cast


def ask(t: Tale, count: int) -> list[tuple[str, str]]:
    pairs = [question(t, f) for f in t.rng.sample(t.facts, min(count, len(t.facts)))]
    if t.rng.random() < 0.12:
        pairs.insert(t.rng.randrange(len(pairs) + 1), unknown(t))
    return pairs


def read(text: str, ask_: str, rng: Rng) -> str:
    """A user's message with a text and a question about it."""
    return rng.choice(
        (
            f"{text}\n\n{ask_}",
            f"{text} {ask_}",
            f"Read this: {text}\n{ask_}",
            f"{text}\nQuestion: {ask_}",
        )
    )


SYSTEM = (
    "You are a helpful assistant.",
    "You are a storyteller.",
    "Answer in plain words.",
    "You are a friendly helper.",
)


def answers(pairs: list[tuple[str, str]]) -> str:
    return "".join(turn("user", q) + turn("assistant", x) for q, x in pairs)


def echo(rng: Rng) -> str:
    """A text to say again: the plainest form of reading, from which the others are learned far sooner."""
    t = Tale(rng)
    if rng.random() < 0.5:
        passage(t, 1)
        text = str(t)
    else:
        text = ", ".join(
            t.draw([*OBJECTS, *COLOURS, *PLACES, *FOODS, *PETS, *JOBS, *NAMES])
            for _ in range(rng.randint(2, 9))
        )
    order = rng.choice(
        (
            "Say this again: {}",
            "Repeat: {}",
            "Repeat after me: {}",
            "Say: {}",
            "{}\nSay that again.",
        )
    )
    return turn("user", order.format(text)) + turn("assistant", text)


def draft(rng: Rng) -> str:
    r = rng.random()
    if r < 0.06:
        return str(story(rng)[0])
    if r < 0.42:
        t, cast = story(rng)
        told = turn("user", request(t, cast)) + turn("assistant", str(t))
        return told + answers(ask(t, rng.choice((0, 0, 1, 2, 3))))
    if r < 0.52:
        t, _ = story(rng)
        (first, answer), *rest = ask(t, rng.choice((1, 2, 3)))
        return turn("user", read(str(t), first, rng)) + turn("assistant", answer) + answers(rest)
    if r < 0.84:
        t = Tale(rng)
        passage(t, rng.choice((1, 1, 2, 2, 3)))
        (first, answer), *rest = ask(t, rng.choice((1, 2, 3)))
        return turn("user", read(str(t), first, rng)) + turn("assistant", answer) + answers(rest)
    if r < 0.96:
        return echo(rng)
    if r < 0.98:
        asks, reply = rng.choice(TALK)
        return turn("user", rng.choice(asks)) + turn("assistant", reply)
    return turn("user", strange(rng)) + turn("assistant", rng.choice(SORRY))


def document(rng: Rng, kind: Callable[[Rng], str] = draft) -> str:
    """A document without held-out pairs."""
    while True:
        text = kind(rng)
        if text.startswith(START) and rng.random() < 0.06:
            text = turn("system", rng.choice(SYSTEM)) + text
        if clean(text):
            return text
