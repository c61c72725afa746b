"""The stories: a plot is a function that writes sentences to a Tale and notes facts on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import world as w
from words import COLOURS, FOODS, JOBS, OBJECTS, PETS, PLACES, SKILLS, SPOTS, TRAITS, WEATHERS
from world import Fact, Someone, Tale, a, at, under


@dataclass
class Cast:
    """Who and what a story is about, as a request would name it."""

    hero: Someone
    thing: str = ""
    colour: str = ""
    place: str = ""


def opening(t: Tale, who: Someone, place: str) -> str:
    """Introduces the hero; returns the hero's trait."""
    trait = t.draw(TRAITS)
    kind = (
        f"{a(trait)} {who.kind}" if who.kind in ("girl", "boy") else f"{a(trait)} little {who.kind}"
    )
    t.say(
        f"Once upon a time there was {kind} named {who.name}.",
        f"Once upon a time, {kind} named {who.name} lived near the {place}.",
        f"There once was {kind} called {who.name}.",
        f"{who.name} was {kind} who lived near the {place}.",
        f"Long ago, near the {place}, there lived {kind} called {who.name}.",
        f"In a small house by the {place} lived {kind} named {who.name}.",
        f"This is the story of {who.name}, {kind}.",
    )
    if who.kind not in ("girl", "boy"):
        t.facts.append(w.fact_kind(who))
    return trait


SIGNS = {
    "sunny": ("The sun was warm and the birds were singing.", "There was not a cloud in the sky."),
    "rainy": (
        "The rain fell on the roofs and made a soft sound.",
        "There were puddles everywhere.",
    ),
    "windy": (
        "The wind blew through the trees and shook the leaves.",
        "The clouds ran over the sky.",
    ),
    "snowy": ("The snow was deep and everything was quiet.", "White flakes fell from the sky."),
    "foggy": (
        "The fog was so thick that the trees looked like giants.",
        "It was hard to see the path.",
    ),
    "cloudy": ("Big grey clouds hung over the land.", "The sky was grey, but it was not cold."),
}


def weather(t: Tale) -> None:
    """Begins a sentence with the weather; joined() ends it."""
    kind = t.draw(WEATHERS)
    t.say(
        f"One {kind} morning, ", f"One {kind} day, ", f"On a {kind} afternoon, ", f"It was a {kind} day, and ",
    )  # fmt: skip
    t.facts.append(w.fact_weather(kind))
    t.sign = t.rng.choice(SIGNS[kind]) if t.rng.random() < 0.4 else ""


def joined(t: Tale, *forms: str) -> None:
    """Ends the sentence that weather() began."""
    t.text[-1] += t.rng.choice(forms)
    if t.sign:
        t.text.append(t.sign)


def treasure(t: Tale, who: Someone) -> tuple[str, str]:
    """The hero's thing and its colour."""
    thing, colour = t.draw(OBJECTS), t.draw(COLOURS)
    t.say(
        f"{who.He} had {a(colour)} {thing} that {who.he} loved very much.",
        f"{who.name} had {a(colour)} {thing} and took it everywhere.",
        f"{who.his.capitalize()} favourite thing in the world was {a(colour)} {thing}.",
        f"For {who.his} birthday {who.he} had been given {a(colour)} {thing}.",
        f"{who.name} never went anywhere without {who.his} {colour} {thing}.",
        f"Of all the things {who.he} had, {who.name} liked {who.his} {colour} {thing} best.",
    )
    t.facts += [
        w.fact_colour(thing, colour, who),
        w.fact_owner(who, thing),
        w.fact_whose(who, thing),
    ]
    return thing, colour


def ending(t: Tale, who: Someone, *feelings: str) -> None:
    feeling = t.rng.choice(feelings or ("happy", "proud", "glad", "thankful", "calm"))
    t.say(
        f"{who.name} felt {feeling} all the way home.",
        f"That night {who.name} felt {feeling} and slept well.",
        f"{who.name} felt {feeling}, and the day ended with a smile.",
        f"From that day on, {who.name} felt {feeling} when {who.he} thought of it.",
        f"When the stars came out, {who.name} felt {feeling} and fell asleep.",
        f"{who.name} told everyone about it at dinner and felt {feeling}.",
        f"It had been a long day, but {who.name} felt {feeling}.",
    )
    t.facts.append(w.fact_feeling(who, feeling))


def lost(t: Tale) -> Cast:
    hero, place = t.anyone(), t.draw(PLACES)
    opening(t, hero, t.draw(PLACES))
    thing, colour = treasure(t, hero)
    weather(t)
    joined(t, f"{hero.name} went to the {place}.", f"{hero.name} walked to the {place} to play.")
    t.facts.append(w.fact_place(hero, place))
    t.say(
        f"{hero.He} played for hours, but when it was time to go home, the {thing} was gone.",
        f"On the way {hero.he} looked down and saw that the {thing} was missing.",
        f"A strong wind came, and suddenly the {thing} was nowhere to be seen.",
    )
    t.say(f'"Oh no," said {hero.name}. "Where is my {thing}?"', f'"My {thing} is lost!" cried {hero.name}.',
          f"{hero.name} sat down and began to cry.")  # fmt: skip
    friend, spot = t.anyone(), t.draw(SPOTS)
    who = (
        f"{friend.name}"
        if friend.kind in ("girl", "boy")
        else f"{a(friend.kind)} named {friend.name}"
    )
    t.say(
        f"Just then {who} came by.",
        f"Then {who} heard the noise and came to see.",
        f"Soon {who} stopped to help.",
    )
    if friend.kind not in ("girl", "boy"):
        t.facts.append(w.fact_kind(friend))
    t.say(f'"Do not worry," said {friend.name}. "We will look for it together."',
          f'"I will help you," said {friend.name} in a kind voice.')  # fmt: skip
    t.say(
        f"They looked high and low, and at last they found the {thing} {under(spot)}.",
        f"They searched the whole place until {friend.name} saw something {colour} {under(spot)}. It was the {thing}!",
    )
    t.facts += [w.fact_spot(thing, spot), w.fact_helper(hero, friend)]
    t.say(f'"Thank you, {friend.name}," said {hero.name}, and held the {thing} tight.',
          f"{hero.name} thanked {friend.name} and gave {friend.him} a hug.")  # fmt: skip
    t.maybe(
        "They walked home together and talked the whole way.",
        f"{friend.name} smiled and waved goodbye.",
        p=0.4,
    )
    ending(t, hero)
    return Cast(hero, thing, colour, place)


def shared_meal(t: Tale) -> Cast:
    hero, place, food = t.anyone(), t.draw(PLACES), t.draw(FOODS)
    opening(t, hero, place)
    weather(t)
    joined(t, f"{hero.name} packed some {food} and went to the {place}.",
           f"{hero.name} took some {food} to the {place}.")  # fmt: skip
    t.facts += [w.fact_place(hero, place), w.fact_food(hero, food)]
    friend = t.animal()
    t.say(f"There {hero.he} met {a(friend.kind)} named {friend.name}, who looked sad.",
          f"{hero.He} saw {a(friend.kind)} called {friend.name} sitting all alone.")  # fmt: skip
    t.facts.append(w.fact_kind(friend))
    t.say(
        f'"What is wrong?" asked {hero.name}.', f'"Why are you so sad?" {hero.name} asked softly.'
    )
    t.say(
        f'"I have had nothing to eat all day," said {friend.name}.',
        f'"I am hungry and I have no friends," said {friend.name}.',
    )
    t.say(
        f"{hero.name} smiled and gave {friend.him} half of the {food}.",
        f'"Then we will share," said {hero.name}, and cut the meal in two.',
        f"{hero.name} did not think twice and put the {food} between them.",
    )
    t.maybe(
        "They sat down side by side and ate.",
        f'"This is the best meal of my life," said {friend.name}.',
    )
    t.maybe(f"The {food} tasted even better together.", "They ate until nothing was left.")
    t.say(f"From then on {hero.name} and {friend.name} met {at(place)} every week.",
          f"After the meal they played {at(place)} until the sun went down.")  # fmt: skip
    ending(t, hero, "happy", "glad", "warm inside")
    return Cast(hero, food, "", place)


def broken(t: Tale) -> Cast:
    hero, place, job = t.person(), t.draw(PLACES), t.draw(JOBS)
    opening(t, hero, place)
    thing, colour = treasure(t, hero)
    weather(t)
    joined(t, f"{hero.name} ran so fast that {hero.he} fell, and the {thing} broke.",
           f"the {thing} slipped out of {hero.his} hands and broke in two.")  # fmt: skip
    t.say(f"{hero.name} wanted to hide it, but {hero.he} knew that was not right.",
          f"{hero.He} tried to mend it, but it was too hard.")  # fmt: skip
    old = t.person()
    t.say(f"So {hero.he} went to the {place} to see {old.name}, the {job}.",
          f"{hero.He} walked to the {place}, where {old.name} the {job} lived.")  # fmt: skip
    t.facts += [w.fact_place(hero, place), w.fact_job(old, job), w.fact_helper(hero, old)]
    t.say(
        f'"Can you help me?" asked {hero.name}.',
        f'"Please, can you mend my {thing}?" asked {hero.name}.',
    )
    t.say(
        f'"Yes, but you must do it with me," said {old.name}.',
        f'"Let us see," said {old.name}. "We can do it together."',
    )
    t.say(f"They worked all afternoon, and {hero.name} learned how to use glue and string.",
          "Slowly and with care they put the pieces together.")  # fmt: skip
    t.say(
        f"When they were done, the {colour} {thing} was as good as new.",
        f"In the end the {thing} looked better than before.",
    )
    ending(t, hero, "proud", "thankful", "happy")
    return Cast(hero, thing, colour, place)


def gift(t: Tale) -> Cast:
    hero, friend, place = t.anyone(), t.anyone(), t.draw(PLACES)
    opening(t, hero, t.draw(PLACES))
    thing, colour = t.draw(OBJECTS), t.draw(COLOURS)
    t.say(f"{hero.his.capitalize()} best friend was {friend.name}, and tomorrow was {friend.name}'s birthday.",
          f"It was the birthday of {hero.his} friend {friend.name}, and {hero.name} had no present.")  # fmt: skip
    weather(t)
    joined(
        t,
        f"{hero.name} went to the {place} to look for a gift.",
        f"{hero.name} set out for the {place}.",
    )
    t.facts.append(w.fact_place(hero, place))
    t.say(f"There {hero.he} saw {a(colour)} {thing}, but {hero.he} had no money.",
          f"{hero.He} saw {a(colour)} {thing}, and it was perfect, but it cost too much.")  # fmt: skip
    t.say(f"So {hero.he} worked all day, carrying water and sweeping the floor.",
          f'"I will work for it," said {hero.name}, and picked up a broom.')  # fmt: skip
    t.say(
        f"In the evening the {thing} was {hero.his} to give.",
        f"At the end of the day {hero.he} was given the {thing}.",
    )
    t.say(f'When {friend.name} opened the box and saw the {thing}, {friend.he} jumped for joy.',
          f'"A {thing}!" cried {friend.name}. "It is just what I wanted."' if thing[0] not in "aeiou"
          else f'"An {thing}!" cried {friend.name}. "It is just what I wanted."')  # fmt: skip
    t.facts += [w.fact_colour(thing, colour), Fact((f"What did {friend.name} get?",
                f"What was the gift for {friend.name}?"), f"{friend.name} got {a(thing)}.", thing,
                (friend.name, thing))]  # fmt: skip
    ending(t, hero, "happy", "proud", "glad")
    return Cast(hero, thing, colour, place)


def learning(t: Tale) -> Cast:
    hero, teacher, skill, place = t.anyone(), t.anyone(), t.draw(SKILLS), t.draw(PLACES)
    opening(t, hero, place)
    t.say(
        f"More than anything, {hero.name} wanted to learn to {skill}.",
        f"{hero.name} dreamed that one day {hero.he} would {skill}.",
    )
    t.say(
        f'"I am afraid that I will fail," {hero.he} said.', f"But {hero.he} was too afraid to try."
    )
    weather(t)
    joined(
        t,
        f"{hero.name} met {teacher.name} {at(place)}.",
        f"{teacher.name} found {hero.name} sitting {at(place)}.",
    )
    t.facts += [w.fact_skill(hero, skill), w.fact_helper(hero, teacher), w.fact_place(hero, place)]
    t.say(f'"I was afraid too, once," said {teacher.name}. "Let us try together."',
          f'"Nobody can {skill} on the first day," said {teacher.name}.')  # fmt: skip
    t.say(
        "The first try went wrong, and so did the second.",
        f"At first {hero.name} made many mistakes.",
    )
    t.say(
        f'"Try again," said {teacher.name}.',
        f"But {teacher.name} only laughed and told {hero.him} to go on.",
    )
    t.say(
        "Day after day they practised, and little by little it got better.",
        "They came back every day, and each day was a little easier.",
    )
    t.say(
        f"Then one day {hero.name} could {skill} all alone.",
        f"At last {hero.name} could {skill}, and everyone clapped.",
    )
    ending(t, hero, "proud", "happy", "brave")
    return Cast(hero, "", "", place)


def quarrel(t: Tale) -> Cast:
    hero, other, place = t.anyone(), t.anyone(), t.draw(PLACES)
    opening(t, hero, place)
    thing, colour = t.draw(OBJECTS), t.draw(COLOURS)
    weather(t)
    joined(
        t,
        f"{hero.name} and {other.name} went to the {place}.",
        f"{hero.name} met {other.name} {at(place)}.",
    )
    t.facts.append(w.fact_place(hero, place))
    t.say(
        f"They both saw {a(colour)} {thing} lying on the ground.",
        f"There they found {a(colour)} {thing} in the grass.",
    )
    t.facts.append(w.fact_colour(thing, colour))
    t.say(f'"I saw it first!" said {hero.name}.', f'"It is mine!" shouted {other.name}.')
    t.maybe(
        f"Each of them held one end of the {thing}.",
        f"Nobody wanted to let go of the {thing}.",
        p=0.4,
    )
    t.say(
        "They pulled and pulled, and both of them got angry.",
        "They did not speak to each other for a long time.",
    )
    t.say(f"Then {hero.name} had an idea.", f"After a while {hero.name} felt sorry.")
    t.say(f'"You can have the {thing} today, and I will have it tomorrow," {hero.he} said.',
          f'"Let us use the {thing} together," {hero.he} said.')  # fmt: skip
    t.say(
        f"{other.name} nodded and said sorry too.",
        f'"That is fair," said {other.name}, and they shook hands.',
    )
    t.say(f"Soon they were laughing, and the {colour} {thing} was the best toy of the whole summer.",
          f"They played with the {thing} until it was dark, and nobody was angry any more.")  # fmt: skip
    ending(t, hero, "happy", "glad", "calm")
    return Cast(hero, thing, colour, place)


def rescue(t: Tale) -> Cast:
    hero, place, pet = t.person(), t.draw(PLACES), t.draw(PETS)
    opening(t, hero, t.draw(PLACES))
    thing, colour = treasure(t, hero)
    weather(t)
    joined(t, f"{hero.name} was walking {at(place)} when {hero.he} heard a small cry.",
           f"{hero.name} heard a strange sound {at(place)}.")  # fmt: skip
    t.facts.append(w.fact_place(hero, place))
    t.say(
        f"It was {a(pet)}, and it could not get out of a deep hole.",
        f"A little {pet} was stuck in the mud.",
    )
    t.facts.append(Fact(("Which animal was stuck?", "What animal needed help?", f"What did {hero.name} save?"),
                        f"It was {a(pet)}.", pet, (hero.name, pet)))  # fmt: skip
    t.say(
        f'"Hold on," said {hero.name}. "I will get you out."',
        f"{hero.name} was afraid, but {hero.he} did not run away.",
    )
    t.say(
        f"{hero.He} looked at {hero.his} {thing} and had an idea.",
        f"All {hero.he} had was the {colour} {thing}.",
    )
    t.say(f"With the {thing} {hero.he} pulled the {pet} out, very slowly.",
          f"{hero.He} let the {thing} down, and the {pet} climbed onto it.")  # fmt: skip
    t.say(
        f"The {pet} shook itself and stayed close to {hero.name}.",
        f"The {pet} was wet and cold, but it was safe.",
    )
    t.say(
        f"{hero.name} took the {pet} home and gave it a warm place to sleep.",
        f"After that the {pet} followed {hero.name} everywhere.",
    )
    ending(t, hero, "brave", "happy", "proud")
    return Cast(hero, thing, colour, place)


def night(t: Tale) -> Cast:
    hero, friend, place = t.anyone(), t.animal(), t.draw(PLACES)
    opening(t, hero, place)
    thing, colour = t.draw(OBJECTS), t.draw(COLOURS)
    t.say(
        "One night there was a strange noise outside.",
        f"Late one night {hero.name} heard a knock at the door.",
    )
    t.say("Tap, tap, tap, it went.", "It was a soft and slow sound, like steps in the dark.")
    t.say(f"{hero.name} pulled the blanket over {hero.his} head." if thing != "blanket"
          else f"{hero.name} hid under the bed.", f"{hero.name} was afraid and did not move.")  # fmt: skip
    t.say(f"But {hero.he} wanted to know what it was, so {hero.he} opened the door.",
          f'"Who is there?" {hero.he} called, and went outside.')  # fmt: skip
    t.say(
        f"There stood {a(friend.kind)} with {a(colour)} {thing}.",
        f"It was only {a(friend.kind)} who carried {a(colour)} {thing}.",
    )
    t.say(f'"My name is {friend.name}," said the {friend.kind}. "I have lost my way to the {place}."',
          f'"I am {friend.name}," said the {friend.kind}. "Can you show me the way to the {place}?"')  # fmt: skip
    t.facts += [
        w.fact_kind(friend),
        w.fact_colour(thing, colour),
        w.fact_owner(friend, thing),
        w.fact_whose(friend, thing),
    ]
    t.say(
        f"{hero.name} laughed, for there was nothing to be afraid of.",
        f"{hero.name} was so glad that {hero.he} laughed out loud.",
    )
    t.say(
        f"Together they walked to the {place} under the stars.",
        f"{hero.name} took {friend.him} to the {place}, and the moon showed them the way.",
    )
    t.facts.append(w.fact_place(hero, place))
    t.maybe(f'"Keep the {thing}," said {friend.name}. "You are a good friend."')
    ending(t, hero, "brave", "glad", "happy")
    return Cast(hero, thing, colour, place)


PLOTS: tuple[Callable[[Tale], Cast], ...] = (
    lost,
    shared_meal,
    broken,
    gift,
    learning,
    quarrel,
    rescue,
    night,
)
