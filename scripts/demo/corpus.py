"""Corpus, chat rendering and tokenizer for the packaged demo model (used by train.py).

Every document is assigned to the training or the held-out split by a hash of its own text (of the
conversation-tree id for OpenAssistant), so the split depends neither on order nor on the seed. Books are
cut into blocks of about 4,000 characters before the split because there are only 33 of them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from made_answers import made_answer
from made_copies import long_repeat, made_copy
from made_stories import made_story, renamed
from made_tools import json_dialogue, story_json, tool_dialogue
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOT, SYSTEM, USER, ASSISTANT, END = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = [EOT, SYSTEM, USER, ASSISTANT, END]
VOCAB_SIZE = 3584
# Tools come as one JSON object a line, with the types of their parameters alone: the context is short. Calls
# are written as Hermes and Qwen write them.
CHAT_TEMPLATE = (
    "{% set first = messages[0] if messages else {} %}"
    "{% if tools %}{{ '<|system|>' }}"
    "{% if first['role'] == 'system' %}{{ (first['content'] | trim) + '\n' }}{% endif %}{{ '<tools>\n' }}"
    "{% for tool in tools %}{% set f = tool['function'] if tool['function'] else tool %}"
    "{{ '{\"name\": ' + (f['name'] | tojson) }}"
    "{% if f['description'] %}{{ ', \"description\": ' + (f['description'] | tojson) }}{% endif %}"
    "{{ ', \"parameters\": {' }}"
    "{% for key, value in ((f['parameters'] or {})['properties'] or {}).items() %}"
    "{{ (key | tojson) + ': ' + ((value['enum'] or value['type'] or 'any') | tojson) }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    "{{ '}}\n' }}{% endfor %}{{ '</tools><|end|>' }}{% endif %}"
    "{% for m in messages %}{% if not (tools and loop.first and m['role'] == 'system') %}"
    "{% if m['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>\n' + (m['content'] | trim) + '\n</tool_response><|end|>' }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + ((m['content'] or '') | trim) }}"
    "{% for call in m['tool_calls'] or [] %}{% set c = call['function'] if call['function'] else call %}"
    "{% if m['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": ' + (c['name'] | tojson) + ', \"arguments\": ' }}"
    "{{ c['arguments'] if c['arguments'] is string else c['arguments'] | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FILES = {
    "tinystories": "tinystories_part.txt.gz",
    "fairytales": "fairytaleqa_278_stories.txt.gz",
    "books": "childrens_books_pd.txt.gz",
    "coffee": "taskmaster4_coffee_3710_dialogs.jsonl.gz",
    "oasst": "oasst_en_100_trees_dialogues.jsonl.gz",
}
HELD_OUT_ONE_IN = 40  # 2.5 % of the documents of every source

Turn = tuple[str, str]

STORY_REQUESTS = [
    "Tell me a story about {x}.",
    "Tell me a story about {x}.",
    "Tell me a short story about {x}.",
    "Can you tell me a story about {x}?",
    "Please tell me a story about {x}.",
    "Write a story about {x}.",
    "Write a short story about {x}.",
    "Write a little story for children about {x}.",
    "I would like to hear a story about {x}.",
    "I want a story about {x}, please.",
    "Make up a story about {x}.",
    "Could you write a bedtime story about {x}?",
    "Do you know a story about {x}?",
    "tell me a story about {x}",
    "a story about {x} please",
]
OPEN_REQUESTS = [
    "Tell me a story.",
    "Tell me a story!",
    "Can you tell me a story?",
    "Please tell me a bedtime story.",
    "Write a short story.",
    "I would like to hear a story.",
    "Do you know a nice story?",
    "tell me a story",
]
SYSTEM_STORY = [
    "You are a friendly storyteller.",
    "You tell short stories for children.",
    "You write stories.",
]
SYSTEM_COFFEE = [
    "You take orders at a coffee bar.",
    "You work in a coffee shop.",
    "You are a friendly barista.",
]
SYSTEM_HELP = ["You are a helpful assistant.", "You are a friendly helper.", "Answer the user."]
# Hand-written small talk: (ways to say it, ways to answer it). GREETING and THANKS are indices into it.
GREETING, THANKS = 0, 2
SMALL_TALK: list[tuple[list[str], list[str]]] = [
    (
        ["Hello!", "Hi!", "Hi there.", "Hello there!", "hey", "hello", "Good morning!", "Good evening."],
        [
            "Hello! How can I help you today?",
            "Hi there! Would you like to hear a story?",
            "Hello! It is nice to meet you. Shall I tell you a story?",
            "Hi! I am glad you are here. What would you like to talk about?",
        ],
    ),
    (
        ["How are you?", "How are you today?", "How do you do?", "Are you well?", "how are you"],
        [
            "I am fine, thank you. How are you?",
            "I am very well today, thank you! What can I do for you?",
            "I feel happy today. Thank you for asking!",
        ],
    ),
    (
        [
            "Thank you!",
            "Thanks!",
            "Thank you, that was nice.",
            "That was a good story.",
            "I liked it, thanks.",
        ],
        [
            "You are welcome!",
            "You are welcome! I am glad you liked it.",
            "I am happy to help. Would you like to hear another story?",
        ],
    ),
    (
        ["Goodbye!", "Bye!", "Good night.", "I have to go now.", "See you later!"],
        ["Goodbye! See you soon.", "Bye! Have a nice day.", "Good night and sweet dreams!"],
    ),
    (
        ["I am sad.", "I feel sad today.", "I had a bad day.", "I am scared."],
        [
            "I am sorry to hear that. Would you like to tell me what happened?",
            "Oh no, I am sorry. Maybe a nice story will make you feel better.",
            "I am sorry. A hug from a friend can help when you feel like that.",
        ],
    ),
    (
        ["I am happy!", "I had a great day.", "Today was fun!", "I am so happy today."],
        [
            "That is wonderful! What made you so happy?",
            "I am glad to hear that! Tell me more about your day.",
        ],
    ),
    (
        ["What is your favorite animal?", "Do you like animals?", "Do you like dogs?", "Do you like cats?"],
        [
            "I like all animals, but I like the fox best because it is so clever.",
            "Yes, I like animals very much. Cats are soft and dogs are good friends.",
        ],
    ),
    (
        ["I am bored.", "What should I do today?", "Do you want to play?", "I have nothing to do."],
        [
            "You could go outside and play, or I could tell you a story.",
            "We could make up a story together! What should it be about?",
            "You could draw a picture, read a book or call a friend.",
        ],
    ),
    (
        ["What is your favorite color?", "Do you like blue?", "Which color is the best?"],
        [
            "I like blue, because it is the color of the sky and the sea.",
            "My favorite color is green, like the grass.",
        ],
    ),
    (
        ["Do you have friends?", "Will you be my friend?", "Are you my friend?"],
        ["Yes, I would love to be your friend!", "Of course! Friends are kind and help each other."],
    ),
]


@dataclass
class Doc:
    """A plain text, or the turns of a dialogue; never both."""

    source: str
    text: str = ""
    turns: list[Turn] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)


@dataclass
class Corpus:
    train: dict[str, list[Doc]]
    held_out: dict[str, list[Doc]]


_CHARS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201b\u2032\u00b4\u0060", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2013\u2014\u2015\u2212", "-"),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", None),
        "\u2022": "-",
        "\u2026": "...",
        "\u00d7": "x",
    }
)


def clean(text: str) -> str:
    """Plain ASCII punctuation, no invisible characters, no runs of blanks: a small vocabulary needs that."""
    text = unicodedata.normalize("NFKC", text.translate(_CHARS)).translate(_CHARS)
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    text = re.sub(r"[ \t\r\f\v]+", " ", text)
    text = re.sub(r" *\n *", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def is_held_out(key: str) -> bool:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def _read(data: Path, source: str) -> str:
    name = FILES[source]
    path = data / name if (data / name).exists() else data / "text" / name
    with gzip.open(path, "rt", encoding="utf-8") as f:
        return f.read()


def _blocks(text: str, size: int = 4000) -> Iterator[str]:
    block: list[str] = []
    length = 0
    for paragraph in text.split("\n\n"):
        block.append(paragraph)
        length += len(paragraph) + 2
        if length >= size:
            yield "\n\n".join(block)
            block, length = [], 0
    if length > size // 4:
        yield "\n\n".join(block)


def _dialogue(row: dict, user_role: str) -> list[Turn]:
    return [("user" if t["role"] == user_role else "assistant", clean(t["text"])) for t in row["turns"]]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A word between an article and a function word or a full stop is nearly always a noun.
_NOUN = re.compile(
    r"\b(?:an?|the) (?:\w+ )?([a-z]{3,})"
    r"(?=[.,!?]| (?:and|was|is|had|to|in|on|with|that|who|named|but|from|for)\b)"
)
_NAMED = re.compile(
    r"\b(?:an?|the) (?:(?:little|big|young|old|small|brave|kind|curious) )?([a-z]+) named ([A-Z][a-z]+)"
)
_VAGUE = _words(
    "day time way lot end other one ones same first next last rest thing things story bit while"
    " little big more moment morning night side best good bad new old top back front middle "
    "idea help name place fun"
)

_UNIQUE = _words(
    "sun moon sea sky water grass snow rain sand wind mud ice milk food park beach kitchen garden"
)


def add_topics(docs: list[Doc]) -> None:
    """Find the things a story is about, for requests such as "a story about a fox and a boat"."""
    nouns = [Counter(w for w in _NOUN.findall(d.text) if w not in _VAGUE) for d in docs]
    hits = Counter(w for n in nouns for w in n.elements())
    words = Counter(w for d in docs for w in re.findall(r"[a-z]+", d.text))
    # A real noun often follows an article; an adjective or adverb caught by accident seldom does.
    nouns = [Counter({w: k for w, k in n.items() if hits[w] > 0.12 * words[w]}) for n in nouns]
    seen = Counter(w for n in nouns for w in n)
    for doc, found in zip(docs, nouns, strict=True):
        uses = {w: len(re.findall(rf"\b{w}\b", doc.text)) for w in found}
        ranked = sorted(found, key=lambda w: (-uses[w] * math.log(len(docs) / seen[w]), w))
        ranked = [w for w in ranked if w + "s" not in found]
        for word in ranked[:3]:
            plural = word.endswith("s") and not word.endswith("ss")
            article = "the" if plural or word in _UNIQUE else "an" if word[0] in "aeiou" else "a"
            doc.topics.append(f"{article} {word}")
        named = _NAMED.search(doc.text[:300])
        if named:
            kind, name = named.groups()
            doc.topics.append(f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} named {name}")


def load_corpus(data: Path) -> Corpus:
    corpus = Corpus({s: [] for s in FILES}, {s: [] for s in FILES})

    def add(doc: Doc, key: str) -> None:
        (corpus.held_out if is_held_out(key) else corpus.train)[doc.source].append(doc)

    seen: set[str] = set()
    for raw in _read(data, "tinystories").split(EOT):
        text = clean(raw)
        # One 82 kB run of stories has no marked boundaries; the very short pieces are fragments.
        if 150 <= len(text) <= 6000 and "Š" not in raw and text not in seen:
            seen.add(text)
            add(Doc("tinystories", text), text)
    for raw in _read(data, "fairytales").split(EOT):
        add(Doc("fairytales", clean(raw)), clean(raw))
    for book in _read(data, "books").split(EOT):
        for block in _blocks(clean(book)):
            add(Doc("books", block), block)
    for line in _read(data, "coffee").splitlines():
        row = json.loads(line)
        add(Doc("coffee", turns=_dialogue(row, "user")), row["id"])
    for line in _read(data, "oasst").splitlines():
        row = json.loads(line)
        turns = _dialogue(row, "prompter")
        joined = " ".join(text for _, text in turns)
        code = any(mark in joined for mark in ("'''", "import ", "def ", "</", "();"))
        human = not (row["root_synthetic"] or row["reply_synthetic"])
        if human and not code and joined.isascii() and len(turns[0][1]) < 600 and len(turns) > 1:
            add(Doc("oasst", turns=turns), row["root"])
    for docs in (*corpus.train.values(), *corpus.held_out.values()):
        add_topics([d for d in docs if d.text])
    return corpus


def render(turns: list[Turn]) -> str:
    return "".join(f"<|{role}|>{text}{END}" for role, text in turns)


def _tool_line(tool: dict[str, Any]) -> str:
    function = tool["function"]
    line = f'{{"name": {json.dumps(function["name"])}'
    if function.get("description"):
        line += f', "description": {json.dumps(function["description"])}'
    properties = function["parameters"]["properties"].items()
    types = ", ".join(f"{json.dumps(k)}: {json.dumps(v.get('enum') or v['type'])}" for k, v in properties)
    return f'{line}, "parameters": {{{types}}}}}\n'


def render_messages(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """What the chat template makes of messages with tools and calls; a test compares the two."""
    text, system = "", ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n", messages[1:]
    text = f"{SYSTEM}{system}<tools>\n{''.join(map(_tool_line, tools))}</tools>{END}"
    for m in messages:
        content = m["content"]
        for call in m.get("tool_calls", []):
            body = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            content += ("\n" if content else "") + f"<tool_call>\n{json.dumps(body)}\n</tool_call>"
        if m["role"] == "tool":
            text += f"{USER}<tool_response>\n{content}\n</tool_response>{END}"
        else:
            text += f"<|{m['role']}|>{content}{END}"
    return text


def _pick(rng: np.random.Generator, options: list[str]) -> str:
    return options[int(rng.integers(len(options)))]


def _request(doc: Doc, rng: np.random.Generator) -> str:
    if not doc.topics or rng.random() < 0.12:
        return _pick(rng, OPEN_REQUESTS)
    first = _pick(rng, doc.topics)
    rest = [t for t in doc.topics if t != first and "named" not in t]
    if rest and rng.random() < 0.35:
        first += " and " + _pick(rng, rest)
    return _pick(rng, STORY_REQUESTS).format(x=first)


def story_chat(doc: Doc, rng: np.random.Generator) -> list[Turn]:
    """A request and the story; sometimes with a system turn, a greeting before it or thanks after it."""
    turns: list[Turn] = []
    if rng.random() < 0.15:
        turns.append(("system", _pick(rng, SYSTEM_STORY + SYSTEM_HELP)))
    if rng.random() < 0.10:
        turns += small_talk(rng, GREETING)
    turns += [("user", _request(doc, rng)), ("assistant", doc.text)]
    if rng.random() < 0.10:
        turns += small_talk(rng, THANKS)
    return turns


def small_talk(rng: np.random.Generator, topic: int | None = None) -> list[Turn]:
    says, answers = SMALL_TALK[int(rng.integers(len(SMALL_TALK))) if topic is None else topic]
    return [("user", _pick(rng, says)), ("assistant", _pick(rng, answers))]


def dialogue(doc: Doc, rng: np.random.Generator) -> list[Turn]:
    system = SYSTEM_COFFEE if doc.source == "coffee" else SYSTEM_HELP
    return ([("system", _pick(rng, system))] if rng.random() < 0.25 else []) + doc.turns


def _with_system(turns: list[Turn], rng: np.random.Generator, share: float, systems: list[str]) -> list[Turn]:
    return [("system", _pick(rng, systems)), *turns] if rng.random() < share else turns


def answer_chat(rng: np.random.Generator) -> list[Turn]:
    """One to three questions about moechat and the model, with small talk between some of them."""
    turns: list[Turn] = []
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.12:
            turns += small_talk(rng)
        question, answer = made_answer(rng)
        turns += [("user", question), ("assistant", answer)]
    return _with_system(turns, rng, 0.15, SYSTEM_HELP)


def made_story_chat(rng: np.random.Generator) -> list[Turn]:
    """A request for a made story; sometimes a greeting before it, or a second request after it."""
    turns = small_talk(rng, GREETING) if rng.random() < 0.06 else []
    for _ in range(2 if rng.random() < 0.12 else 1):
        request, story = made_story(rng)
        turns += [("user", request), ("assistant", story)]
    if rng.random() < 0.05:
        turns += small_talk(rng, THANKS)
    return _with_system(turns, rng, 0.12, SYSTEM_STORY + SYSTEM_HELP)


def renamed_chat(doc: Doc, rng: np.random.Generator) -> list[Turn]:
    """A story of TinyStories with other names and animals, and a request that names them."""
    text, topics = renamed(doc.text, rng)
    # A topic that was found before may have been replaced.
    topics += [topic for topic in doc.topics if re.search(rf"\b{topic.split()[-1]}\b", text)]
    return story_chat(Doc(doc.source, text, topics=topics), rng)


def json_chat(rng: np.random.Generator) -> list[Turn]:
    messages = story_json(rng) if rng.random() < 0.3 else json_dialogue(rng)
    turns = [(m["role"], m["content"]) for m in messages]
    return _with_system(turns, rng, 0.15, [*SYSTEM_HELP, "Answer as JSON."])


def copy_chat(rng: np.random.Generator) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(int(rng.integers(1, 3))):
        question, answer = made_copy(rng)
        turns += [("user", question), ("assistant", answer)]
    return _with_system(turns, rng, 0.1, SYSTEM_HELP)


def tool_text(rng: np.random.Generator) -> str:
    return render_messages(*tool_dialogue(rng))


# Streams made by rule: how to make one document, and how many make a pass.
MADE: dict[str, tuple[Callable[[np.random.Generator], str], int]] = {
    "made_stories": (lambda rng: render(made_story_chat(rng)), 2000),
    "answers": (lambda rng: render(answer_chat(rng)), 1500),
    "tool_calls": (tool_text, 1500),
    "json": (lambda rng: render(json_chat(rng)), 2000),
    "copies": (lambda rng: render(copy_chat(rng)), 2000),
    "repeats": (lambda rng: render(list(zip(("user", "assistant"), long_repeat(rng), strict=True))), 2000),
}


def chat_texts(name: str, corpus: dict[str, list[Doc]], rng: np.random.Generator) -> list[str]:
    """The rendered dialogues of one training stream, differently phrased on every pass."""
    if name in MADE:
        make, count = MADE[name]
        return [make(rng) for _ in range(count)]
    if name == "story_chat":
        # 1,024 positions hold about 4,000 characters.
        tales = [d for d in corpus["fairytales"] if len(d.text) < 3600]
        return [render(story_chat(d, rng)) for d in corpus["tinystories"] + tales]
    if name == "renamed_chat":
        return [render(renamed_chat(d, rng)) for d in corpus["tinystories"]]
    if name == "small_talk":
        return [render([t for _ in range(1 + i % 3) for t in small_talk(rng)]) for i in range(400)]
    return [render(dialogue(d, rng)) for d in corpus[name]]


def train_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    rng = np.random.default_rng(0)
    texts = [d.text for d in corpus.train["tinystories"]] * 4  # the style that matters most
    texts += [d.text for s in ("fairytales", "books") for d in corpus.train[s]]
    for name in ("story_chat", "small_talk", "coffee", "oasst"):
        texts += [re.sub(r"<\|\w+\|>", "\n", t) for t in chat_texts(name, corpus.train, rng)]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=EOT,
        eos_token=EOT,
        pad_token=EOT,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, END],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
