"""What stories and passages are made of: people, sentences drawn at random, and facts with their questions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from words import ANIMAL_NAMES, ANIMALS, BOYS, COLOURS, GIRLS, JOBS, PLACES

Rng = random.Random


@dataclass(frozen=True)
class Someone:
    name: str
    kind: str  # girl, boy or an animal
    he: str
    him: str
    his: str

    @property
    def He(self) -> str:
        return self.he.capitalize()


@dataclass(frozen=True)
class Fact:
    """What is true of a story: question forms, the answer as a sentence, and its one word that counts."""

    asks: tuple[str, ...]
    answer: str
    value: str
    pair: tuple[str, str] = ("", "")  # entity and attribute
    wrong: str = ""  # "Is it ...?" with a slot for another value of its kind
    others: tuple[str, ...] = ()


@dataclass
class Tale:
    rng: Rng
    text: list[str] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    sign: str = ""  # a sentence about the weather, said after the one that names it

    def say(self, *forms: str) -> None:
        """One of these sentences."""
        self.text.append(self.rng.choice(forms))

    def maybe(self, *forms: str, p: float = 0.5) -> None:
        if self.rng.random() < p:
            self.say(*forms)

    def draw(self, words: list[str]) -> str:
        """A word that this story has not used."""
        word = self.rng.choice([w for w in words if w not in self.used])
        self.used.add(word)
        return word

    def person(self) -> Someone:
        if self.rng.random() < 0.5:
            return Someone(self.draw(GIRLS), "girl", "she", "her", "her")
        return Someone(self.draw(BOYS), "boy", "he", "him", "his")

    def animal(self) -> Someone:
        he, him, his = self.rng.choice((("he", "him", "his"), ("she", "her", "her")))
        return Someone(self.draw(ANIMAL_NAMES), self.draw(ANIMALS), he, him, his)

    def anyone(self) -> Someone:
        return self.person() if self.rng.random() < 0.65 else self.animal()

    def __str__(self) -> str:
        return " ".join(self.text)


def a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def at(place: str) -> str:
    return {
        "forest": "in the forest", "beach": "on the beach", "market": "at the market", "garden": "in the garden",
        "river": "by the river", "hill": "on the hill", "farm": "on the farm", "lake": "by the lake",
        "meadow": "in the meadow", "harbour": "at the harbour", "castle": "at the castle", "library": "in the library",
        "mill": "at the mill", "bridge": "at the bridge", "orchard": "in the orchard", "cave": "in the cave",
    }[place]  # fmt: skip


def under(spot: str) -> str:
    behind = ("a wooden gate", "a broken wall", "a big stone")
    return f"{'behind' if spot in behind else 'under'} {spot}"


# What is known of a story. Each returns a Fact; places, colours and the like are the values.


def fact_colour(thing: str, colour: str, owner: Someone | None = None) -> Fact:
    whose = (f"{owner.name}'s {thing}",) if owner else ()
    asks = tuple(
        f"What colour {verb} {it}?" for it in (f"the {thing}", *whose) for verb in ("is", "was")
    )
    wrong = f"Was the {thing} {{}}?"
    return Fact(asks, f"The {thing} was {colour}.", colour, (thing, colour), wrong, tuple(COLOURS))


def fact_place(who: Someone, place: str) -> Fact:
    asks = (
        f"Where did {who.name} go?",
        f"Which place did {who.name} visit?",
        f"Where was {who.name}?",
    )
    answer = f"{who.name} went to the {place}."
    return Fact(
        asks, answer, place, (who.name, place), f"Did {who.name} go to the {{}}?", tuple(PLACES)
    )


def fact_owner(who: Someone, thing: str) -> Fact:
    asks = (
        f"What did {who.name} have?",
        f"What thing did {who.name} own?",
        f"What belonged to {who.name}?",
    )
    return Fact(asks, f"{who.name} had {a(thing)}.", thing, (who.name, thing), "", ())


def fact_whose(who: Someone, thing: str) -> Fact:
    asks = (f"Whose {thing} was it?", f"Who had the {thing}?", f"Who owned the {thing}?")
    return Fact(asks, f"The {thing} belonged to {who.name}.", who.name, (who.name, thing))


def fact_food(who: Someone, food: str) -> Fact:
    asks = (
        f"What did {who.name} eat?",
        f"What did {who.name} bring to eat?",
        f"Which food did {who.name} have?",
    )
    return Fact(asks, f"{who.name} had {food}.", food, (who.name, food))


def fact_kind(who: Someone) -> Fact:
    asks = (f"What animal was {who.name}?", f"What kind of animal was {who.name}?")
    return Fact(asks, f"{who.name} was {a(who.kind)}.", who.kind, (who.name, who.kind))


def fact_pet(who: Someone, pet: str) -> Fact:
    asks = (f"What pet did {who.name} have?", f"Which animal did {who.name} keep?")
    return Fact(asks, f"{who.name} had {a(pet)}.", pet, (who.name, pet))


def fact_job(who: Someone, job: str) -> Fact:
    asks = (
        f"What was {who.name}'s work?",
        f"What work did {who.name} do?",
        f"What did {who.name} work as?",
    )
    return Fact(
        asks,
        f"{who.name} was {a(job)}.",
        job,
        (who.name, job),
        f"Was {who.name} a {{}}?",
        tuple(JOBS),
    )


def fact_spot(thing: str, spot: str) -> Fact:
    asks = (f"Where was the {thing} found?", f"Where did they find the {thing}?")
    return Fact(asks, f"The {thing} was {under(spot)}.", spot.split(" ", 1)[1])


def fact_helper(who: Someone, helper: Someone) -> Fact:
    asks = (f"Who helped {who.name}?", f"Who gave {who.name} help?")
    return Fact(asks, f"{helper.name} helped {who.name}.", helper.name)


def fact_weather(weather: str) -> Fact:
    return Fact(
        ("What was the weather like?", "How was the weather that day?"),
        f"It was {weather}.",
        weather,
    )


def fact_feeling(who: Someone, feeling: str) -> Fact:
    asks = (f"How did {who.name} feel at the end?",)
    return Fact(asks, f"{who.name} felt {feeling} at the end.", feeling)


def fact_skill(who: Someone, skill: str) -> Fact:
    asks = (f"What did {who.name} want to learn?", f"What did {who.name} learn?")
    return Fact(asks, f"{who.name} learned to {skill}.", skill)
