"""The words of the small world that stories and questions are about, and which pairs of them are never taught.

A held-out pair, such as the kite that is never red or Mia who never goes to the harbour, occurs in no training
document, not even as two words far apart: `clean` is the test that documents pass, and the audit in evaluate.py
searches for them in its own way. So a right answer about such a pair was read from the passage, not remembered.
"""

from __future__ import annotations

import re
from itertools import combinations
from zlib import crc32

GIRLS = "Mia Anna Lily Sara Nora Ella Ruby Ivy Clara Rosa Maya Zoe Tess Wren June Hana Lena Amy Kate Olga".split()
BOYS = "Tom Ben Max Leo Sam Finn Jack Hugo Omar Theo Noah Eli Ravi Luca Paul Emil Jonas Karl Ned Yusuf".split()
ANIMAL_NAMES = "Pip Momo Dot Biscuit Pepper Nutmeg Tiko Bramble Olli Pebble Juno Kip".split()
ANIMALS = "fox|rabbit|bear|mouse|owl|hedgehog|squirrel|frog|duck|turtle|badger|otter|goat|crow|mole|deer".split(
    "|"
)
PETS = "cat|dog|pony|parrot|hamster|lizard|goose|lamb".split("|")
OBJECTS = (
    "kite|boat|lantern|drum|ball|hat|scarf|basket|bell|umbrella|book|flute|whistle|cart|blanket|key|cup|map|"
    "ribbon|wagon|puppet|mirror|button|coat"
).split("|")
COLOURS = "red|blue|green|yellow|white|black|purple|orange|pink|brown|silver|golden".split("|")
PLACES = (
    "forest|beach|market|garden|river|hill|farm|lake|meadow|harbour|castle|library|mill|bridge|orchard|cave"
).split("|")
SPOTS = (
    "an old bench|a tall oak|a big stone|a heap of leaves|a rose bush|a wooden gate|a broken wall|a pile of hay"
).split("|")
FOODS = "bread|soup|apples|honey|pancakes|cheese|pears|carrots|berries|cake|nuts|porridge|plums|rice|pie|milk".split(
    "|"
)
WEATHERS = "sunny|rainy|windy|snowy|foggy|cloudy".split("|")
JOBS = "baker|farmer|sailor|teacher|gardener|painter|doctor|fisher|singer|weaver".split("|")
TRAITS = "kind|brave|curious|shy|clever|quiet|cheerful|careful|proud|gentle".split("|")
SKILLS = "swim|climb|sing|dance|paint|skate|juggle|whistle a tune|ride a horse|bake bread".split(
    "|"
)

NAMES = GIRLS + BOYS + ANIMAL_NAMES
CLASSES = {
    "name": NAMES, "animal": ANIMALS, "pet": PETS, "object": OBJECTS, "colour": COLOURS, "place": PLACES,
    "food": FOODS, "job": JOBS,
}  # fmt: skip
# Which classes hold pairs out, and one in how many.
HELD_CLASSES = (
    ("name", "object"), ("name", "place"), ("name", "food"), ("name", "pet"), ("name", "job"), ("object", "colour"),
)  # fmt: skip
ONE_IN = 12
CLASS = {word: kind for kind, words in CLASSES.items() for word in words}
_WORD = re.compile("[A-Za-z]+")


def held(a: str, b: str) -> bool:
    """Is this pair, in the order of HELD_CLASSES, kept out of training?"""
    if (CLASS.get(a), CLASS.get(b)) not in HELD_CLASSES:
        return False
    return crc32(f"{a}+{b}".encode()) % ONE_IN == 0


def held_pairs(first: str, second: str) -> list[tuple[str, str]]:
    return [(a, b) for a in CLASSES[first] for b in CLASSES[second] if held(a, b)]


def singular(word: str) -> str:
    """kites -> kite, for the test below; words of the lists that end in s stay."""
    return word[:-1] if word not in CLASS and word.endswith("s") and word[:-1] in CLASS else word


def clean(text: str) -> bool:
    """True where no held-out pair occurs in the text."""
    found = sorted({w for w in map(singular, _WORD.findall(text)) if w in CLASS})
    return not any(held(a, b) or held(b, a) for a, b in combinations(found, 2))
