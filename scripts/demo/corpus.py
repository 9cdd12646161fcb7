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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOT, SYSTEM, USER, ASSISTANT, END = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = [EOT, SYSTEM, USER, ASSISTANT, END]
VOCAB_SIZE = 3584
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] | trim) + '<|end|>' }}{% endfor %}"
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
# Hand-written small talk: (ways to say it, ways to answer it).
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
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Are you a robot?",
            "Tell me about yourself.",
        ],
        [
            "I am a very small language model. I like to tell stories.",
            "I am a little computer program. I can tell you a story or chat with you.",
            "I am a small model with many little experts inside. I know many stories.",
        ],
    ),
    (
        ["What can you do?", "How can you help me?", "What do you know?", "Can you help me?"],
        [
            "I can tell you a short story. Just tell me what it should be about!",
            "I can tell stories and talk a little. Try asking me for a story about a cat.",
            "I like to tell stories about animals and children. What should the story be about?",
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
        turns += small_talk(rng, 0)
    turns += [("user", _request(doc, rng)), ("assistant", doc.text)]
    if rng.random() < 0.10:
        turns += small_talk(rng, 4)
    return turns


def small_talk(rng: np.random.Generator, topic: int | None = None) -> list[Turn]:
    says, answers = SMALL_TALK[int(rng.integers(len(SMALL_TALK))) if topic is None else topic]
    return [("user", _pick(rng, says)), ("assistant", _pick(rng, answers))]


def dialogue(doc: Doc, rng: np.random.Generator) -> list[Turn]:
    system = SYSTEM_COFFEE if doc.source == "coffee" else SYSTEM_HELP
    return ([("system", _pick(rng, system))] if rng.random() < 0.25 else []) + doc.turns


def chat_texts(name: str, corpus: dict[str, list[Doc]], rng: np.random.Generator) -> list[str]:
    """The rendered dialogues of one training stream, differently phrased on every pass."""
    if name == "story_chat":
        # 1,024 positions hold about 4,000 characters.
        tales = [d for d in corpus["fairytales"] if len(d.text) < 3600]
        return [render(story_chat(d, rng)) for d in corpus["tinystories"] + tales]
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
