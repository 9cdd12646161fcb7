"""Stories made by rule about what a request names: an animal, a name, an object, a place (used by corpus.py).

TinyStories seldom lets a small model see that a story keeps to its request. Here every asked word comes back
in the story, and the words are drawn anew every time, so the only way to predict them is to copy them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np


def words(text: str) -> list[str]:
    return text.split()


def phrases(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


ANIMALS = words(
    "fox cat dog bear mouse rabbit owl frog duck pig cow horse sheep goat lion tiger elephant monkey zebra "
    "giraffe hippo turtle snake crocodile whale dolphin shark fish crab octopus bird crow eagle parrot "
    "penguin swan goose hen rooster bee ant spider snail worm butterfly ladybug squirrel hedgehog mole "
    "badger wolf deer moose beaver otter seal camel donkey pony kitten puppy bunny chick lamb calf dragon "
    "unicorn robot kangaroo koala panda bat lizard toad pigeon raccoon skunk hamster"
)
PEOPLE = words(
    "girl boy king queen prince princess wizard fairy knight farmer baker sailor pirate teacher giant"
)
GIRLS = words(
    "Mia Lily Anna Ada Ella Emma Nora Lucy Sue Amy Zoe Ruby Rosie Daisy Molly Clara Eva Ida Ivy Luna Maya "
    "Nina Olive Pippa Rita Sara Tina Uma Vera Wendy Yara Zara Betty Carla Dora Fern Gina Hanna Iris Jane "
    "Kate Lola Mona Nelly Polly Rosa Stella Tess Willa Bella Coco Hazel Holly Josie Kiki Lulu Mimi Penny"
)
BOYS = words(
    "Tim Tom Max Ben Sam Jack Leo Finn Bob Bill Fred Hugo Ivan Jim Karl Luke Milo Ned Otto Paul Rex Sid Ted "
    "Umar Vic Will Zack Adam Bruno Carl Dan Eddie Felix Gus Hank Ian Jake Kai Liam Mark Nico Oscar Pete "
    "Ralph Rudy Simon Theo Toby Victor Walt Buddy Charlie Dash Elmo Fritz George Harry Pip Spot Bobo"
)
THINGS = words(
    "kite ball boat hat book drum bell key lamp cup box bag basket balloon bike car train truck doll puppet "
    "ring crown coin map flag flute guitar piano violin whistle spoon fork plate bowl pot kettle bottle jar "
    "cake cookie pie apple pear banana orange cherry carrot pumpkin tomato potato egg acorn nut leaf flower "
    "rose feather shell stone pebble stick rope ladder bucket shovel brush pencil crayon letter card ribbon "
    "scarf coat sock shoe boot mitten blanket pillow chair table clock mirror umbrella wagon sled swing "
    "tent candle lantern star button needle thread hammer wheel wand mask cloak sandwich muffin pancake "
    "rocket teapot suitcase camera telescope"
)
LOOKS = words(
    "red blue green yellow orange purple pink white black brown golden silver big small tiny round long old "
    "new shiny soft warm pretty magic wooden broken striped heavy funny special"
)
NATURES = words(
    "little small young old brave kind clever shy happy lonely sleepy hungry curious funny lazy gentle "
    "proud silly quiet friendly"
)
PLACES = phrases(
    "in the forest, in a small house, near the river, on a farm, by the sea, in the mountains, in a big "
    "city, in a garden, under an old tree, in a cave, on an island, in a castle, in the snow, in the "
    "desert, by a pond, on a hill, in a village, in a meadow, near a lake, in a barn, on a boat, in the "
    "jungle, in a little hut"
)
SPOTS = phrases(
    "under a bush, behind a rock, near the pond, on the path, in the grass, under a tree, by the river, on "
    "the hill, in a hole, next to the fence, behind the barn, in the sand, under the bridge, on a bench"
)
SYLLABLES = words(
    "ba be bi bo da do fa fi ga go ka ki ko la li lo lu ma me mi mo na ni no pa pi ra ri ro sa ta ti to va "
    "vi za zo"
)
ENDS = words("n s r l t nk lla nna ka de ne le ss ma ck rt m g")


def pick(rng: np.random.Generator, options: list[str]) -> str:
    return options[int(rng.integers(len(options)))]


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def invented_word(rng: np.random.Generator) -> str:
    """A word that no list has, so that it can only be copied."""
    word = "".join(pick(rng, SYLLABLES) for _ in range(int(rng.integers(1, 4))))
    return word + pick(rng, ["", "", *ENDS]) if len(word) > 2 else word + pick(rng, ENDS)


def invented_name(rng: np.random.Generator) -> str:
    return invented_word(rng).capitalize()


@dataclass(frozen=True)
class Cast:
    """What a story is about, and what of it the request names.

    Attributes:
        request: The part behind "about": "a fox named Mia and a red kite".
        slots: Words of the story by the names that the templates use.
        beginnings: Of :data:`BEGINNINGS`, those that say what is asked.
    """

    request: str
    slots: dict[str, str]
    beginnings: list[str]


BEGINNINGS = [
    "Once upon a time, there was {a_hero} named {N}. {He} lived {place}.",
    "Once upon a time, there was {a_nice_hero} named {N}. {N} lived {place}.",
    "Once there was {a_nice_hero} called {N}, who lived {place}.",
    "{N} was {a_nice_hero}. {He} lived {place} with {his} family.",
    "Once upon a time, {place}, there lived {a_hero}. {His} name was {N}.",
    "There once was {a_hero} named {N}. Everybody {place} knew {him}.",
    "A long time ago, {a_nice_hero} named {N} lived {place}.",
    "This is a story about {N}, {a_hero} who lived {place}.",
    "One sunny day, {a_hero} named {N} woke up very early.",
    "{a_nice_hero:C} named {N} lived {place}. {He} liked to sing.",
]
ENDINGS = [
    "From that day on, {N} and {M} were best friends.",
    "{N} was the happiest {hero} in the world.",
    "{N} went home and told {his} mom everything. Then {he} fell asleep.",
    "And they all lived happily ever after.",
    "{N} learned that it is good to share. The end.",
    "{N} never forgot that day.",
    '"What a wonderful day!" said {N}. And {he} kept the {thing} forever.',
    "That night, the {hero} slept well, with the {thing} next to {his} bed.",
    "{N} smiled and hugged {M}. They were friends forever.",
    "After that, {N} and {M} played with the {thing} every day.",
]
# Each plot is a row of paragraphs, each paragraph a choice.
PLOTS: dict[str, list[list[str]]] = {
    "lost": [
        [
            "{N} had {a_look_thing}. {He} loved the {thing} very much and took it everywhere.",
            "The {hero}'s favorite toy was {a_look_thing}. {N} played with it all day long.",
            "{His} grandma gave {him} {a_look_thing}. It was the best gift ever.",
        ],
        [
            "One day, the {thing} was gone. {N} looked {spot}, but it was not there. {He} began to cry.",
            "One windy day, {N} lost the {look_thing}. {He} looked everywhere. {He} was very sad.",
            'One morning {N} could not find the {thing}. "Where is my {look_thing}?" {he} asked.',
        ],
        [
            '{a_friend:C} named {M} came by. "Why are you sad?" asked {M}. "I lost my {thing}," said {N}. '
            '"Do not worry. I will help you find it," said the {friend}.',
            'Then {N} met {a_friend} named {M}. "Have you seen my {thing}?" asked {N}. "No," said '
            '{M}, "but let '
            'us look for it together."',
        ],
        [
            "They looked and looked. At last {M} saw something {look} {spot}. It was the {thing}!",
            'The {friend} looked {spot}. "Here it is!" {M} shouted. {N} jumped up and down. The '
            "{thing} was back!",
        ],
        [
            '"Thank you, {M}!" said {N}. They played with the {look_thing} until the sun went down.',
            '{N} gave {M} a big hug. "You are a good friend," said the {hero}.',
        ],
    ],
    "found": [
        [
            "One day, {N} went for a walk and found {a_look_thing} {spot}.",
            "One morning, the {hero} saw something {spot}. It was {a_look_thing}!",
            '"What is that?" said {N} one day. {spot:C} there was {a_look_thing}.',
        ],
        [
            '"How pretty!" said {N}. {He} wanted to keep the {thing}. But whose was it?',
            '{N} picked up the {look_thing}. "I wonder who lost this {thing}," {he} said.',
            "{N} had never seen such a {thing} before. {He} was very happy. Then {he} heard someone cry.",
        ],
        [
            'Soon {N} met {a_friend} named {M}. {M} was sad. "I lost my {thing}," said the {friend}.',
            'Not far away sat {a_friend}. Its name was {M}. "My {look_thing} is gone," said {M}.',
        ],
        [
            '{N} wanted to keep it, but {he} knew what was right. "Here is your {thing}," {he} said.',
            '"Is this your {thing}?" asked {N}, and gave it to the {friend}.',
        ],
        [
            '{M} was so happy! "Thank you, {N}. You are very kind. Let us play with it together!"',
            '"Thank you!" said the {friend}. {M} shared a sweet cake with {N}, and they ate it all up.',
        ],
    ],
    "wish": [
        [
            "{N} had one big wish. {He} wanted {a_look_thing}.",
            "Every night, the {hero} dreamed of {a_look_thing}.",
            "More than anything, {N} wanted to have {a_look_thing}.",
        ],
        [
            '"Mom, can I have {a_thing}?" asked {N}. "You can make one yourself," said {his} mom.',
            'But {a_thing} was not easy to get. "I will work hard for it," said {N}.',
        ],
        [
            "{N} asked {his} friend {M} the {friend} for help. They worked all day.",
            '{a_friend:C} named {M} heard it. "I know how to get {a_thing}," said {M}. "Come with me!"',
        ],
        [
            "It was hard, and they got tired. But they did not give up. In the evening the {thing} "
            "was ready.",
            "They walked a long way. And there, {spot}, was the {look_thing}.",
        ],
        [
            '"It is the best {thing} ever!" said {N}. {He} danced with joy, and {M} danced too.',
            'The {hero} was so proud of the {look_thing}. "We did it, {M}!" {he} said.',
        ],
    ],
    "share": [
        [
            "{N} had {a_look_thing}. All the other animals wanted to see the {thing}.",
            "For {his} birthday, {N} got {a_look_thing}. {He} was very proud of it.",
        ],
        [
            'One day, {a_friend} named {M} came. "Can I play with your {thing}?" asked {M}. "No! It '
            'is mine," '
            "said {N}.",
            '{M} the {friend} asked, "May I have a turn with the {look_thing}?" But {N} shook {his} head.',
        ],
        [
            "{M} was sad and went away. {N} played alone with the {thing}. It was not much fun.",
            "The {friend} began to cry. {N} looked at the {thing}. {He} felt bad.",
        ],
        [
            'So the {hero} ran after {M}. "I am sorry," {he} said. "Let us share the {thing}."',
            '"I was not nice," thought {N}. {He} gave the {look_thing} to {M}. "You can have a turn now."',
        ],
        [
            "They took turns with the {thing} and laughed a lot. It was much more fun with two.",
            "{M} smiled. The {hero} and the {friend} played together until it was dark.",
        ],
    ],
    "help": [
        [
            "{N} liked to help others. Every day {he} went out with {his} {look_thing}.",
            "{He} had {a_look_thing} that {he} always took along.",
        ],
        [
            'One day there was a big storm. {N} heard a small voice. "Help! Help!" It was {a_friend} '
            "named {M}.",
            '{N} was walking along when {he} heard {a_friend} cry. "I am {M}. I am stuck {spot}," it said.',
        ],
        [
            '"Do not be afraid," said {N}. "I have {a_thing}. It will help us."',
            'The {hero} thought hard. Then {he} had an idea. "I can use my {thing}!" {he} said.',
        ],
        [
            "{N} used the {look_thing} and pulled and pulled. Pop! {M} was free.",
            "With the {thing}, {N} made a way for {M}. The {friend} was safe.",
        ],
        [
            '"You are so brave," said {M}. "Thank you, {N}, and thank you, {thing}!" They both laughed.',
            "{M} thanked the {hero} and gave {him} a kiss. Then they went home together.",
        ],
    ],
    "afraid": [
        [
            "{N} was afraid of the dark. Every night {he} held {his} {look_thing} very tight.",
            "One night, {N} heard a strange sound. {He} took {his} {look_thing} and went to look.",
        ],
        [
            '"Who is there?" called the {hero}. Something moved {spot}.',
            "It was very dark. {N} was scared, but {he} did not run away.",
        ],
        [
            'It was only {a_friend}. "I am {M}," it said. "I am lost and I am cold."',
            'Two big eyes looked at {him}. "Please do not be scared. I am {M} the {friend}. I want a '
            'friend."',
        ],
        [
            '"Come in," said {N}. {He} let {M} hold the {thing}, and soon they both felt better.',
            '{N} smiled and showed {M} the {look_thing}. "You can sleep here tonight," said the {hero}.',
        ],
        [
            "In the morning the sun was bright, and the {hero} was not afraid any more.",
            "They talked all night about the {thing}. {N} was not scared of the dark again.",
        ],
    ],
}
REQUESTS = [
    "Tell me a story about {x}.",
    "Tell me a story about {x}.",
    "Tell me a story about {x}.",
    "Tell me a short story about {x}.",
    "Can you tell me a story about {x}?",
    "Please tell me a story about {x}.",
    "Please tell me a short story about {x}.",
    "Write a story about {x}.",
    "Write a short story about {x}.",
    "Write me a story about {x}.",
    "I want a story about {x}, please.",
    "I would like to hear a story about {x}.",
    "Make up a story about {x}.",
    "Could you write a bedtime story about {x}?",
    "Do you know a story about {x}?",
    "tell me a story about {x}",
    "a story about {x} please",
    "story about {x}",
]


def cast(rng: np.random.Generator) -> Cast:
    """Draw who and what a story is about, and a request that names some of it."""
    person = rng.random() < 0.15
    hero = pick(rng, PEOPLE if person else ANIMALS)
    girl = hero in ("girl", "queen", "princess", "fairy") or (
        hero not in ("boy", "king", "prince") and rng.random() < 0.5
    )
    if not person and rng.random() < 0.12:
        hero = invented_word(rng)
    name = invented_name(rng) if rng.random() < 0.3 else pick(rng, GIRLS if girl else BOYS)
    thing, look, place = pick(rng, THINGS), pick(rng, LOOKS), pick(rng, PLACES)
    if rng.random() < 0.12:
        thing = invented_word(rng)
    friend = pick(rng, [animal for animal in ANIMALS if animal != hero])
    friend_name = pick(rng, [n for n in GIRLS + BOYS if n != name])
    nature = pick(rng, NATURES)
    asked_nature, asked_look = rng.random() < 0.15, rng.random() < 0.5
    asked_hero = a(f"{nature} {hero}" if asked_nature else hero)
    asked_thing = a(f"{look} {thing}" if asked_look else thing)
    kind = rng.random()
    called = pick(rng, ["named", "named", "named", "called"])
    if kind < 0.45:
        request = f"{asked_hero} {called} {name} and {asked_thing}"
    elif kind < 0.60:
        request = f"{asked_hero} and {asked_thing}"
    elif kind < 0.70:
        request = f"{asked_hero} {called} {name}"
    elif kind < 0.80:
        request = asked_hero
    elif kind < 0.84:
        request = asked_thing
    elif kind < 0.88:
        request = f"{asked_hero} and {a(friend)}"
    elif kind < 0.92:
        request = f"{asked_hero} {place}"
    elif kind < 0.96:
        whose = pick(rng, ["her" if girl else "his", "the"])
        request = f"{name} the {hero} and {whose} {asked_thing.split(' ', 1)[1]}"
    else:
        request = f"{asked_hero} {called} {name} who finds {asked_thing}"
    nice = asked_hero if asked_nature else a(f"{nature} {hero}")
    slots = {
        "N": name,
        "M": friend_name,
        "hero": hero,
        "a_hero": asked_hero,
        "a_nice_hero": nice,
        "friend": friend,
        "a_friend": a(friend),
        "thing": thing,
        "a_thing": a(thing),
        "look": look,
        "look_thing": f"{look} {thing}",
        "a_look_thing": a(f"{look} {thing}"),
        "place": place,
        "spot": pick(rng, SPOTS),
        "he": "she" if girl else "he",
        "his": "her" if girl else "his",
        "him": "her" if girl else "him",
    }
    slots |= {word.capitalize(): slots[word].capitalize() for word in ("he", "his", "him")}
    beginnings = [b for b in BEGINNINGS if "{place}" in b] if place in request else BEGINNINGS
    return Cast(request, slots, beginnings)


def filled(template: str, slots: dict[str, str]) -> str:
    """The template with its slots; ``{slot:C}`` begins with a capital letter."""

    def value(match: re.Match[str]) -> str:
        found = slots[match[1]]
        return found[0].upper() + found[1:] if match[2] else found

    return re.sub(r"\{(\w+)(:C)?\}", value, template)


def made_story(rng: np.random.Generator) -> tuple[str, str]:
    """A request and its story."""
    found = cast(rng)
    plot = PLOTS[pick(rng, list(PLOTS))]
    parts = [pick(rng, beat) for beat in plot]
    if rng.random() < 0.25:
        parts.pop()
    blank = "\n\n" if rng.random() < 0.5 else " "
    story = [f"{pick(rng, found.beginnings)} {parts[0]}", *parts[1:]]
    story[-1] += " " + pick(rng, ENDINGS)
    request = pick(rng, REQUESTS).format(x=found.request)
    if "please" in request or rng.random() < 0.1:
        request = request.lower().rstrip(".") if rng.random() < 0.1 else request
    return request, filled(blank.join(story), found.slots)


_NAMES = sorted(
    set(GIRLS) | set(BOYS) | {"Timmy", "Sally", "Sarah", "Mary", "Jimmy", "Billy", "Spot", "Fluffy"}
)
_NAME = re.compile(rf"\b({'|'.join(_NAMES)})\b")
_CREATURE = re.compile(rf"\b({'|'.join(ANIMALS)})(s?)\b")
_GIRLS = {*GIRLS, "Sally", "Sarah", "Mary", "Fluffy"}


def renamed(text: str, rng: np.random.Generator) -> tuple[str, list[str]]:
    """The story with other names, and often another animal in place of the one that it mentions most.

    Returns:
        The text, and what requests may name: "a girl named Ada", "a fox".
    """
    names: dict[str, str] = {}
    for name in _NAME.findall(text):
        if name not in names:
            girl = name in _GIRLS
            new = invented_name(rng) if rng.random() < 0.15 else pick(rng, GIRLS if girl else BOYS)
            names[name] = new if new not in names.values() else name
    text = _NAME.sub(lambda m: names[m[1]], text)
    topics = []
    animals = [m[0] for m in _CREATURE.findall(text)]
    if animals:
        most = max(set(animals), key=lambda animal: (animals.count(animal), animal))
        if animals.count(most) >= 2:
            other = pick(rng, [x for x in ANIMALS if x not in animals and x[-1] not in "hyx" and x != "fish"])
            if rng.random() < 0.7 and f"{most}s" not in ("fishs",):
                text = re.sub(rf"\b([Aa])n? ({most})\b", lambda m: f"{m[1]}{a(other)[1:]}", text)
                text = re.sub(rf"\b{most}(s?)\b", rf"{other}\1", text)
                text = re.sub(rf"\b{most.capitalize()}(s?)\b", rf"{other.capitalize()}\1", text)
                most = other
            topics.append(a(most))
    kind = re.search(r"\b(girl|boy|" + "|".join(ANIMALS) + r") (?:named|called) ([A-Z][a-z]+)", text[:300])
    if kind:
        topics.append(f"{a(kind[1])} named {kind[2]}")
    return text, topics
