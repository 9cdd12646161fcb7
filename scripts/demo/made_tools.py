"""Dialogues made by rule: calls of tools, answers from their results, facts as JSON (used by corpus.py).

Names of tools, of their parameters and all values are drawn from lists, so a model can only get them right
by copying them from the description and the question.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from made_answers import made_answer
from made_stories import (
    ANIMALS,
    BOYS,
    GIRLS,
    LOOKS,
    THINGS,
    a,
    invented_name,
    made_story,
    phrases,
    pick,
    words,
)

Rng = np.random.Generator
Message = dict[str, Any]

CITIES = phrases(
    "Paris, London, Berlin, Rome, Madrid, Vienna, Prague, Oslo, Stockholm, Helsinki, Warsaw, Dublin, "
    "Lisbon, Athens, Cairo, Tokyo, Kyoto, Beijing, Delhi, Mumbai, Sydney, Boston, Chicago, Dallas, Denver, "
    "Seattle, Toronto, Montreal, Lima, Bogota, Hamburg, Munich, Zurich, Geneva, Milan, Naples, Venice, "
    "Porto, Seville, Lyon, Nice, Bern, Basel, Graz, Krakow, Riga, Tallinn, Vilnius, Sofia, Dresden, "
    "Leipzig, Bremen, York, Leeds, Oxford, Bath, Cork, Bergen, Turin, Florence, Nairobi, Accra, Lagos, "
    "Tunis, Dubai, Seoul, Osaka, Hanoi, Manila, Perth, Austin, Miami, New York, San Diego, Cape Town, Hong "
    "Kong, Los Angeles, Rio, Havana, Quito"
)
FOODS = words(
    "apples pears plums cherries tomatoes potatoes carrots onions beans peas rice pasta bread cheese eggs "
    "milk butter fish chicken beef mushrooms spinach corn pumpkin garlic lemons oranges bananas chocolate "
    "honey nuts oats tofu salmon tuna lentils cabbage broccoli peppers olives berries strawberries grapes "
    "yogurt noodles"
)
SKIES = words("sunny rainy cloudy windy snowy foggy clear stormy")
DISHES = phrases(
    "soup, salad, pie, stew, cake, pancakes, curry, sandwich, risotto, muffins, pudding, omelette, bread, "
    "pizza"
)
SUBJECTS = phrases(
    "the moon, trains, whales, old castles, trees, birds, rivers, the sea, bees, stars, dragons, horses, "
    "music, snow, clouds, ships, mountains, robots, gardens, cats, dogs, bridges, planets, volcanoes, rain, "
    "ants, bread, tea"
)
ROOMS = phrases("kitchen, bedroom, bathroom, garden, hall, garage, office, living room, attic, cellar")
LANGUAGES = words("French German Spanish Italian Dutch Polish Greek Latin Swedish Turkish Danish Irish")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday today tomorrow")
TASKS = phrases(
    "buy milk, call Grandma, feed the cat, water the flowers, clean the room, send the letter, bake a cake, "
    "go to bed, walk the dog, pay the bill, fix the bike, read a book, take a nap, wash the car, pick up "
    "Tom, write to Anna"
)


def number(low: int, high: int) -> Callable[[Rng], int]:
    return lambda rng: int(rng.integers(low, high + 1))


def one_of(options: list[str]) -> Callable[[Rng], str]:
    return lambda rng: pick(rng, options)


def any_name(rng: Rng) -> str:
    return invented_name(rng) if rng.random() < 0.2 else pick(rng, GIRLS + BOYS)


@dataclass(frozen=True)
class Parameter:
    names: list[str]
    type: str
    value: Callable[[Rng], Any]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of tool.

    Attributes:
        names: Ways to name it, in words with underscores.
        descriptions: Ways to describe it.
        parameters: What it takes.
        asks: Questions that need it, with ``{0}``, ``{1}`` for the values.
        result: The fields of a result, from the values.
        tells: Answers from the result, with ``{0}`` for values and ``{field}`` for fields.
    """

    names: list[str]
    descriptions: list[str]
    parameters: list[Parameter]
    asks: list[str]
    result: Callable[[Rng, list[Any]], dict[str, Any]]
    tells: list[str]


def _fields(**draws: Callable[[Rng], Any]) -> Callable[[Rng, list[Any]], dict[str, Any]]:
    return lambda rng, values: {name: draw(rng) for name, draw in draws.items()}


KINDS = [
    Kind(
        words("get_weather weather find_weather check_weather weather_now current_weather"),
        ["The weather in a city.", "Get the weather of a place.", "Tells the weather now."],
        [Parameter(words("city place town location where"), "string", one_of(CITIES))],
        [
            "What is the weather in {0}?",
            "What is the weather like in {0}?",
            "How is the weather in {0} today?",
            "Tell me the weather in {0}.",
            "Is it sunny in {0}?",
            "Will I need an umbrella in {0}?",
            "weather in {0} please",
            "Is it warm in {0} today?",
        ],
        _fields(temperature=number(-9, 36), sky=one_of(SKIES)),
        ["It is {sky} in {0}, with {temperature} degrees.", "In {0} it is {sky} and {temperature} degrees."],
    ),
    Kind(
        words("get_temperature temperature read_temperature find_temperature"),
        ["The temperature of a room.", "How warm a room is."],
        [Parameter(words("room place where"), "string", one_of(ROOMS))],
        ["How warm is it in the {0}?", "What is the temperature in the {0}?", "Is the {0} cold?"],
        _fields(degrees=number(8, 30)),
        ["It is {degrees} degrees in the {0}.", "The {0} has {degrees} degrees."],
    ),
    Kind(
        words("set_timer start_timer timer new_timer make_timer"),
        ["Start a timer.", "Sets a timer for some minutes.", "A timer that rings."],
        [Parameter(words("minutes time length duration mins"), "integer", number(1, 90))],
        [
            "Set a timer for {0} minutes.",
            "Please set a timer for {0} minutes.",
            "Start a timer of {0} minutes.",
            "Can you set a timer for {0} minutes?",
            "I need a timer for {0} minutes.",
            "Wake me in {0} minutes.",
        ],
        lambda rng, values: {"status": "ok", "minutes": values[0]},
        ["The timer is set for {0} minutes.", "I set a timer for {0} minutes."],
    ),
    Kind(
        words("add plus add_numbers sum calculate_sum"),
        ["Add two numbers.", "The sum of two numbers.", "Adds numbers."],
        [
            Parameter(words("a x first number1 left"), "integer", number(0, 999)),
            Parameter(words("b y second number2 right"), "integer", number(0, 999)),
        ],
        [
            "What is {0} plus {1}?",
            "Add {0} and {1}.",
            "How much is {0} + {1}?",
            "What is {0} + {1}?",
            "Can you add {0} and {1}?",
            "Please add {0} and {1}.",
        ],
        lambda rng, values: {"result": values[0] + values[1]},
        ["{0} plus {1} is {result}.", "The answer is {result}."],
    ),
    Kind(
        words("multiply times product multiply_numbers"),
        ["Multiply two numbers.", "The product of two numbers."],
        [
            Parameter(words("a x first number1 left"), "integer", number(2, 99)),
            Parameter(words("b y second number2 right"), "integer", number(2, 99)),
        ],
        ["What is {0} times {1}?", "Multiply {0} by {1}.", "How much is {0} times {1}?"],
        lambda rng, values: {"result": values[0] * values[1]},
        ["{0} times {1} is {result}.", "The answer is {result}."],
    ),
    Kind(
        words("search_recipes find_recipe recipes get_recipe search_recipe find_recipes"),
        ["Find recipes with an ingredient.", "Search for recipes.", "Recipes for cooking."],
        [Parameter(words("ingredient food query with item"), "string", one_of(FOODS))],
        [
            "Find a recipe with {0}.",
            "What can I cook with {0}?",
            "I have {0}. What can I make?",
            "Search for recipes with {0}.",
            "Show me a recipe with {0}.",
            "Do you know a recipe with {0}?",
        ],
        _fields(dish=one_of(DISHES), minutes=number(5, 90)),
        ["You can make {dish} with {0}. It takes {minutes} minutes.", "How about {dish} with {0}?"],
    ),
    Kind(
        words("search_books find_book books get_book search_library look_up_book"),
        ["Find books about something.", "Search the library.", "Looks for a book."],
        [Parameter(words("topic subject about query word"), "string", one_of(SUBJECTS))],
        [
            "Find a book about {0}.",
            "I want to read about {0}.",
            "Is there a book about {0}?",
            "Search for books about {0}.",
        ],
        lambda rng, values: {"title": f"All about {values[0]}", "pages": int(rng.integers(20, 400))},
        ["I found the book {title}. It has {pages} pages.", "There is {title}, with {pages} pages."],
    ),
    Kind(
        words("translate translate_word find_word translation"),
        ["Translate a word.", "A word in another language."],
        [
            Parameter(words("word text english"), "string", one_of(THINGS + ANIMALS)),
            Parameter(words("language to target"), "string", one_of(LANGUAGES)),
        ],
        ["What is {0} in {1}?", "Translate {0} to {1}.", "How do you say {0} in {1}?"],
        lambda rng, values: {"word": invented_name(rng).lower()},
        ["In {1}, {0} is {word}.", "{0} is {word} in {1}."],
    ),
    Kind(
        words("set_light switch_light light turn_light lamp"),
        ["Turn a light on or off.", "Switches the light of a room."],
        [
            Parameter(words("room place where"), "string", one_of(ROOMS)),
            Parameter(words("state mode switch"), "string", one_of(["on", "off"]), ("on", "off")),
        ],
        [
            "Turn {1} the light in the {0}.",
            "Switch {1} the lamp in the {0}.",
            "Please turn the {0} light {1}.",
        ],
        lambda rng, values: {"status": "ok"},
        ["The light in the {0} is {1}.", "I turned {1} the light in the {0}."],
    ),
    Kind(
        words("add_note remember make_note save_note write_note add_task"),
        ["Save a note.", "Write something down.", "Add to the list of tasks."],
        [Parameter(words("text note task what content"), "string", one_of(TASKS))],
        ["Remind me to {0}.", "Please write down: {0}.", "Make a note: {0}.", "Add {0} to my list."],
        lambda rng, values: {"saved": True},
        ["I wrote it down: {0}.", "Done. I will remember: {0}."],
    ),
    Kind(
        words("play_song play_music music play start_music"),
        ["Play music.", "Plays songs about something."],
        [Parameter(words("topic title query song"), "string", one_of(SUBJECTS))],
        ["Play a song about {0}.", "I want to hear music about {0}.", "Play some music about {0}."],
        lambda rng, values: {"playing": f"Song of {values[0]}"},
        ["Now you hear {playing}.", "I am playing {playing}."],
    ),
    Kind(
        words("send_message message write_to text_friend send"),
        ["Send a message to a person.", "Writes to a friend."],
        [
            Parameter(words("to name person friend"), "string", any_name),
            Parameter(
                words("text message content"),
                "string",
                one_of(
                    [
                        "hello",
                        "I am late",
                        "good night",
                        "see you soon",
                        "happy birthday",
                        "come home",
                        "thank you",
                        "dinner is ready",
                        "call me",
                    ]
                ),
            ),
        ],
        ["Send {0} a message: {1}.", "Tell {0}: {1}.", 'Write "{1}" to {0}.'],
        lambda rng, values: {"sent": True},
        ["I sent the message to {0}.", "Done. {0} has your message."],
    ),
    Kind(
        words("get_age find_age age how_old"),
        ["The age of a person.", "How old somebody is."],
        [Parameter(words("name person who"), "string", any_name)],
        ["How old is {0}?", "What is the age of {0}?", "Do you know how old {0} is?"],
        _fields(age=number(1, 99)),
        ["{0} is {age} years old."],
    ),
    Kind(
        words("find_train train trains next_train get_train"),
        ["The next train between two cities.", "Find a train."],
        [
            Parameter(words("from start origin from_city"), "string", one_of(CITIES)),
            Parameter(words("to end target to_city"), "string", one_of(CITIES)),
        ],
        [
            "When is the next train from {0} to {1}?",
            "Find a train from {0} to {1}.",
            "I want to go from {0} to {1}.",
        ],
        lambda rng, values: {"time": f"{int(rng.integers(5, 24))}:{int(rng.integers(10, 60))}"},
        ["The next train from {0} to {1} goes at {time}."],
    ),
    Kind(
        words("get_time time clock what_time current_time"),
        ["The time in a city.", "Tells what time it is."],
        [Parameter(words("city place town where"), "string", one_of(CITIES))],
        ["What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"],
        lambda rng, values: {"time": f"{int(rng.integers(0, 24))}:{int(rng.integers(10, 60))}"},
        ["It is {time} in {0}."],
    ),
    Kind(
        words("order_drink buy_drink order order_coffee get_drink"),
        ["Order a drink.", "Orders drinks at a coffee bar."],
        [
            Parameter(
                words("drink name item"),
                "string",
                one_of(phrases("latte, tea, coffee, cocoa, espresso, milk, juice, water, mocha")),
            ),
            Parameter(words("number count amount"), "integer", number(1, 9)),
        ],
        ["Order {1} cups of {0}.", "Please order {1} of {0}.", "I would like {1} times {0}."],
        lambda rng, values: {"price": int(rng.integers(2, 40))},
        ["I ordered {1} cups of {0}. That makes {price} dollars."],
    ),
    Kind(
        words("count_animals find_animals animals count how_many"),
        ["Count the animals of a kind.", "How many animals there are at the zoo."],
        [Parameter(words("animal kind name"), "string", one_of([x for x in ANIMALS if x[-1] not in "shxy"]))],
        ["How many {0}s are there?", "Count the {0}s.", "How many {0}s are at the zoo?"],
        _fields(count=number(0, 60)),
        ["There are {count} of them.", "I counted {count}."],
    ),
]
# Tools without parameters.
_PLAIN_RESULTS: list[tuple[list[str], list[str], list[str], str, Callable[[Rng], Any], str]] = [
    (
        words("get_date date today"),
        ["The date of today."],
        ["What day is it?", "What is the date?"],
        "day",
        one_of(DAYS[:7]),
        "Today is {day}.",
    ),
    (
        words("roll_dice dice roll"),
        ["Roll a die."],
        ["Roll the dice.", "Roll a die for me."],
        "result",
        number(1, 6),
        "You rolled a {result}.",
    ),
    (
        words("tell_joke joke get_joke"),
        ["A joke."],
        ["Tell me a joke.", "Do you know a joke?"],
        "joke",
        one_of(
            [
                "What is red and smells like blue paint? Red paint.",
                "Why did the hen cross the road? To get to the other side.",
            ]
        ),
        "{joke}",
    ),
]
for _names, _descriptions, _asks, _field, _draw, _tell in _PLAIN_RESULTS:
    KINDS.append(Kind(_names, _descriptions, [], _asks, _fields(**{_field: _draw}), [_tell]))

VERBS = words("find get search list show check open read count buy sell move make send look_up start stop")
NOUNS = words(
    "songs films toys maps games trains boats hats flowers birds stones letters photos cars shops parks "
    "schools rooms houses friends prices planets colors shoes cakes"
)


def invented_kind(rng: Rng) -> Kind:
    """A tool that no list has: a verb, a noun and a word to look for."""
    verb, noun = pick(rng, VERBS), pick(rng, NOUNS)
    said = verb.replace("_", " ")
    return Kind(
        [f"{verb}_{noun}"],
        [f"{said.capitalize()} {noun}."],
        [
            Parameter(
                words("query word name color place kind city person"),
                "string",
                one_of(CITIES + LOOKS + FOODS + GIRLS),
            )
        ],
        [
            f"{said.capitalize()} {noun} with {{0}}.",
            f"Please {said} {noun} for {{0}}.",
            f"Can you {said} {noun} of {{0}}?",
        ],
        _fields(found=number(0, 99)),
        [f"I found {{found}} {noun} for {{0}}."],
    )


@dataclass(frozen=True)
class Tool:
    """A drawn tool; ``kind`` says what can be asked of it."""

    kind: Kind
    name: str
    description: str
    parameters: dict[str, Parameter]

    def schema(self) -> dict[str, Any]:
        """As clients of the chat API write it."""
        properties = {
            name: {"type": p.type} | ({"enum": list(p.options)} if p.options else {})
            for name, p in self.parameters.items()
        }
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = {
            "type": "object",
            "properties": properties,
            "required": list(self.parameters),
        }
        return {"type": "function", "function": function}


def draw_tool(kind: Kind, rng: Rng) -> Tool:
    name = pick(rng, kind.names)
    if rng.random() < 0.15:  # another style: getWeather
        first, *rest = name.split("_")
        name = first + "".join(part.capitalize() for part in rest)
    parameters: dict[str, Parameter] = {}
    for p in kind.parameters:
        free = [n for n in p.names if n not in parameters]
        parameters[pick(rng, free)] = p
    described = rng.random() < 0.85
    return Tool(kind, name, pick(rng, kind.descriptions) if described else "", parameters)


def _said(text: str, rng: Rng) -> str:
    """The question as people type it."""
    draw = rng.random()
    if draw < 0.08:
        return text.rstrip(".?")
    return text[0].lower() + text[1:] if draw < 0.14 else text


def tool_dialogue(rng: Rng) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages, and the tools that they were offered."""
    kinds = [KINDS[int(i)] for i in rng.permutation(len(KINDS))[: int(rng.integers(1, 4))]]
    if rng.random() < 0.3:
        kinds[0] = invented_kind(rng)
    tools = [draw_tool(kind, rng) for kind in kinds]
    order = [tools[int(i)] for i in rng.permutation(len(tools))]
    schemas = [tool.schema() for tool in order]
    messages: list[Message] = []
    if rng.random() < 0.25:
        system = pick(rng, ["You are a helpful assistant.", "You are a friendly helper.", "Use the tools."])
        messages.append({"role": "system", "content": system})
    if rng.random() < 0.12:  # a question that needs none of them
        question, answer = made_story(rng) if rng.random() < 0.5 else made_answer(rng)
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*messages, *chat], schemas
    for tool in tools[: 2 if rng.random() < 0.2 else 1]:
        messages += _use(tool, rng)
    return messages, schemas


def _use(tool: Tool, rng: Rng) -> list[Message]:
    """A question, the call, its result and the answer."""
    kind = tool.kind
    values = [p.value(rng) for p in tool.parameters.values()]
    result = kind.result(rng, values)
    arguments = dict(zip(tool.parameters, values, strict=True))
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
    question = _said(pick(rng, kind.asks).format(*values), rng)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps(result)},
        {"role": "assistant", "content": pick(rng, kind.tells).format(*values, **result)},
    ]


# ------------------------------------------------------------------------------------------------------ JSON

# Facts about a person or an animal: the names of the field, how to draw it, how a sentence says it.
FACTS: list[tuple[list[str], Callable[[Rng], Any], list[str]]] = [
    (words("age years"), number(1, 99), ["is {v} years old"]),
    (words("animal pet"), one_of(ANIMALS), ["has a pet {v}", "has a {v}", "plays with a {v}"]),
    (words("color colour favorite_color"), one_of(LOOKS[:10]), ["likes the color {v}", "loves {v} things"]),
    (words("city town home place"), one_of(CITIES), ["lives in {v}", "comes from {v}"]),
    (words("food dish meal"), one_of(FOODS), ["likes {v}", "eats {v} every day", "loves {v}"]),
    (words("toy object thing item"), one_of(THINGS), ["has a new {v}", "found a {v}", "lost a {v}"]),
    (words("friend best_friend"), any_name, ["has a friend named {v}", "plays with {v}"]),
    (words("day date"), one_of(DAYS[:7]), ["comes on {v}", "was born on {v}"]),
    (words("count number books"), number(2, 60), ["has {v} books", "reads {v} books a year"]),
    (
        words("job work"),
        one_of(words("teacher baker doctor farmer sailor painter singer pilot nurse cook")),
        ["is a {v}", "works as a {v}"],
    ),
]


def json_dialogue(rng: Rng) -> list[Message]:
    """A sentence about somebody, and the asked facts as a JSON object."""
    name = any_name(rng)
    chosen = [FACTS[int(i)] for i in rng.permutation(len(FACTS))[: int(rng.integers(1, 5))]]
    said, found = [], {pick(rng, ["name", "name", "name", "who", "person"]): name}
    for keys, draw, sentences in chosen:
        value = draw(rng)
        said.append(pick(rng, sentences).format(v=value))
        found[pick(rng, [k for k in keys if k not in found] or keys)] = value
    order = [int(i) for i in rng.permutation(len(said))]
    text = f"{name} " + said[order[0]]
    joins = [" and ", ", and ", ". She " if name in GIRLS else ". He "]
    for i in order[1:]:
        text += pick(rng, joins) + said[i]
    text += "."
    keys = list(found)
    if len(keys) > 2 and rng.random() < 0.3:  # not everything is asked for
        del found[keys.pop(int(rng.integers(1, len(keys))))]
    if rng.random() < 0.3:
        keys = [keys[int(i)] for i in rng.permutation(len(keys))]
    listed = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
    shape = "{" + ", ".join(f'"{key}": ...' for key in keys) + "}"
    request = pick(
        rng,
        [
            f"{text} Answer as JSON: {shape}",
            f"{text} Write {listed} as JSON.",
            f"As JSON with {listed}: {text}",
            f"Give {listed} as JSON: {text}",
            f"Fill in {shape}: {text}",
            f"{text}\n\nAnswer as JSON with the keys {listed}.",
            f"{text} Give me the {listed} as JSON.",
            f"Put this in JSON: {shape}\n{text}",
        ],
    )
    answer = json.dumps({key: found[key] for key in keys})
    return [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]


def story_json(rng: Rng) -> list[Message]:
    """A request for JSON about a sentence of a story: its animal, name and object."""
    name, animal, look, thing = any_name(rng), pick(rng, ANIMALS), pick(rng, LOOKS), pick(rng, THINGS)
    verb = pick(rng, words("found had lost saw wanted liked made"))
    text = pick(
        rng,
        [
            f"{name} the {animal} {verb} {a(f'{look} {thing}')}.",
            f"{a(animal).capitalize()} named {name} {verb} {a(f'{look} {thing}')}.",
        ],
    )
    fields = {"name": name, "animal": animal, "object": thing, "color": look}
    keys = [list(fields)[int(i)] for i in rng.permutation(4)[: int(rng.integers(2, 5))]]
    shape = "{" + ", ".join(f'"{key}": ...' for key in keys) + "}"
    listed = ", ".join(keys[:-1]) + " and " + keys[-1]
    request = pick(
        rng,
        [
            f"{text} Answer as JSON: {shape}",
            f"Give {listed} as JSON: {text}",
            f"{text} As JSON with {listed}.",
        ],
    )
    answer = json.dumps({key: fields[key] for key in keys})
    return [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
