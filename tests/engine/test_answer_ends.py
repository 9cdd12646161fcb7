"""Where answers end, which tokens they may have, and how likely these were."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moechat
from moechat import Engine, Grammar, MoechatError, Step, UsageError
from moechat.engine.stop_text import StopText

STORY = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with moechat.load("demo") as engine:
        yield engine


def answer(engine: Engine, prompt: object = STORY, count: int = 40, **options: object) -> list[Step]:
    greedy = {"temperature": 0.0, "max_new_tokens": count, **options}
    return list(engine.generate(prompt, **greedy))  # type: ignore[arg-type]


def text_of(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


# ---- stop texts


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stop_text_is_found_however_the_text_is_divided(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    def run(pieces: list[str]) -> tuple[str, str | None]:
        stop, passed = StopText(stops), ""
        for piece in pieces:
            found, match = stop.push(piece)
            passed += found
            if match is not None:
                return passed, match
        return passed + stop.flush(), None

    whole = run(list(text))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    assert run([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])[0] is not None
    # The definition: the shortest beginning of the text that ends in a stop, without the longest such stop.
    ends = [n for n in range(1, len(text) + 1) if text[:n].endswith(tuple(stops))] if stops else []
    if ends:
        match = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert whole == (text[: ends[0] - len(match)], match)
    else:
        assert whole == (text, None)


def test_an_answer_ends_before_a_stop_text_and_says_which(demo: Engine) -> None:
    free = text_of(answer(demo))
    stop = free[20:26]
    steps = answer(demo, stop=["never in it", stop])
    assert text_of(steps) == free[: free.index(stop)]
    assert (steps[-1].finish_reason, steps[-1].stop) == ("stop", stop)
    assert all(step.finish_reason is None for step in steps[:-1])


def test_text_that_only_begins_a_stop_is_given_at_the_end(demo: Engine) -> None:
    free = text_of(answer(demo))
    steps = answer(demo, stop=free[-3:] + "\0")
    assert text_of(steps) == free
    assert (steps[-1].finish_reason, steps[-1].stop) == ("length", None)


def test_a_special_token_can_be_a_stop_text(demo: Engine) -> None:
    tokenizer = demo.prompts.tokenizer
    mark = next(text for text in tokenizer.all_special_tokens if text != tokenizer.eos_token)
    token = tokenizer.convert_tokens_to_ids(mark)
    steps = answer(demo, stop=mark, logit_bias={token: 100.0})
    assert [(step.token_id, step.stop, step.finish_reason) for step in steps] == [(token, mark, "stop")]


@pytest.mark.parametrize("stop", ["", ["a", ""], [1], 5, ["x"] * 65, ["y" * 5000]])
def test_bad_stop_texts_are_refused(demo: Engine, stop: object) -> None:
    with pytest.raises(UsageError, match="stop"):
        answer(demo, stop=stop)


# ---- probabilities


def test_logprobs_are_those_of_the_models_logits() -> None:
    # Without rounding of activations a decoded token has the logits of a long pass.
    with moechat.load("demo", dtype="float32", dense_bits=16, activation_bits=32) as engine:
        steps = answer(engine, count=6, logprobs=3, temperature=0.7, seed=3, presence_penalty=1.0)
        tokens = engine.encode(STORY)
        wanted = engine.logits([*tokens, *(step.token_id for step in steps)]).log_softmax(-1)
    for place, step in enumerate(steps, len(tokens) - 1):
        assert step.logprob == pytest.approx(float(wanted[place][step.token_id]), abs=1e-3)
        values, ids = wanted[place].topk(3)
        assert [one.token_id for one in step.top_logprobs] == ids.tolist()
        assert [one.logprob for one in step.top_logprobs] == pytest.approx(values.tolist(), abs=1e-3)


def test_without_logprobs_there_are_none(demo: Engine) -> None:
    assert {(step.logprob, step.top_logprobs) for step in answer(demo, count=3)} == {(None, ())}
    step = answer(demo, count=1, logprobs=0)[0]
    assert step.logprob is not None
    assert step.top_logprobs == ()


# ---- bias and penalties


def test_a_bias_forbids_and_forces_tokens(demo: Engine) -> None:
    first = answer(demo, count=1)[0].token_id
    assert answer(demo, count=1, logit_bias={first: -100})[0].token_id != first
    other = demo.encode(" dragon")[-1]
    assert [step.token_id for step in answer(demo, count=3, logit_bias={str(other): 100})] == [other] * 3


@pytest.mark.parametrize("bias", [[1], {"x": 1}, {-1: 1}, {10**9: 1}, {1: 101}, {1: "1"}, {1: float("nan")}])
def test_bad_biases_are_refused(demo: Engine, bias: object) -> None:
    with pytest.raises(UsageError, match="bias"):
        answer(demo, logit_bias=bias)


def test_penalties_count_tokens_of_the_answer_only(demo: Engine) -> None:
    first = answer(demo, count=1)[0].token_id
    # The prompt has the token, and no penalty keeps it from being drawn once.
    prompt = [first, *demo.encode(STORY)]
    assert answer(demo, prompt, count=1, presence_penalty=2.0) == answer(demo, prompt, count=1)
    tokens = [
        step.token_id for step in answer(demo, count=60, frequency_penalty=2.0, logit_bias={first: 8.0})
    ]
    free = [step.token_id for step in answer(demo, count=60, logit_bias={first: 8.0})]
    assert tokens[0] == free[0] == first
    assert 1 < tokens.count(first) < free.count(first)


# ---- grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "owl"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["animal", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(8))
def test_answers_follow_a_json_schema(demo: Engine, seed: int) -> None:
    steps = answer(demo, CHAT, 100, temperature=1.5, seed=seed, grammar=Grammar.json_schema(SCHEMA))
    assert steps[-1].finish_reason == "stop"
    found = json.loads(text_of(steps))
    assert found.keys() == {"animal", "age"}
    assert found["animal"] in ("fox", "owl")
    assert found["age"] in range(1, 10)


def test_answers_follow_a_regular_expression_and_end_with_it(demo: Engine) -> None:
    steps = answer(demo, CHAT, 100, temperature=1.0, seed=1, grammar=Grammar.regex("[a-c]{3}-[0-9]{2}"))
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", text_of(steps))
    assert steps[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "rules",
    [
        'start: ("fox" | "owl") " sees " NUMBER\nNUMBER: /[0-9]{1,3}/',
        'root ::= ("fox" | "owl") " sees " [0-9] [0-9]?',
    ],
)
def test_answers_follow_rules_of_lark_and_gbnf(demo: Engine, rules: str) -> None:
    steps = answer(demo, CHAT, 100, temperature=1.0, seed=1, grammar=Grammar.lark(rules))
    assert re.fullmatch("(fox|owl) sees [0-9]{1,3}", text_of(steps))


def test_a_grammar_can_begin_behind_a_text(demo: Engine) -> None:
    free = text_of(answer(demo))
    mark = free[10:14]
    steps = answer(demo, grammar=Grammar.regex("[0-9]{5}", after=mark))
    assert re.fullmatch(re.escape(free[:14]) + r"\D*[0-9]{5}", text_of(steps))


def test_an_answer_that_meets_its_limit_is_cut_within_the_grammar(demo: Engine) -> None:
    steps = answer(demo, CHAT, 3, grammar=Grammar.json_schema(SCHEMA))
    assert len(steps) == 3
    assert steps[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: Grammar.json_schema("{"), "JSON schema"),
        (lambda: Grammar.json_schema("[]"), "not an object"),
        (lambda: Grammar.json_schema({"type": "objet"}), "objet"),
        (lambda: Grammar.json_schema({"$ref": "#/nowhere"}), "nowhere"),
        (lambda: Grammar.json_schema({"$ref": "#"}), "no answer"),
        (lambda: Grammar.lark("start: missing"), "missing"),
        (lambda: Grammar.lark("root ::= missing"), "missing"),
        (lambda: Grammar.regex("(a"), "regular expression"),
    ],
)
def test_malformed_grammars_are_refused_before_any_work(demo: Engine, make: object, fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        answer(demo, grammar=make())  # type: ignore[operator]


def test_the_bytes_of_tokens_join_to_the_text(demo: Engine) -> None:
    text = "A fox \N{FOX FACE} said: \N{LATIN SMALL LETTER E WITH ACUTE}"
    assert b"".join(map(demo.token_bytes, demo.encode(text))).decode().strip() == text


def test_a_model_without_tokenizer_has_no_grammars(demo: Engine) -> None:
    from moechat.engine.grammar import GrammarCompiler

    with pytest.raises(UsageError, match="tokenizer"):
        GrammarCompiler(None, 100, frozenset()).begin(Grammar.json_object())


def test_logits_that_are_not_finite_are_an_error_with_a_grammar_too(demo: Engine) -> None:
    grammar = demo.decoder.grammars.begin(Grammar.json_object())
    from moechat.models.sampling import Sampler, SamplingSettings

    broken = torch.full((demo.decoder.vocabulary,), torch.nan)
    with pytest.raises(MoechatError, match="not finite"):
        Sampler(SamplingSettings(), 0).draw(torch.tensor([[1]]), broken, grammar.forbidden())


def test_drawn_seeds_are_exact_in_every_reader_of_json(demo: Engine) -> None:
    seeds = set()
    for _ in range(20):
        answer(demo, count=1)
        seeds.add(demo.stats.seed)
    assert len(seeds) == 20
    assert all(seed == int(float(seed)) for seed in seeds)
    answer(demo, count=1, seed=(1 << 63) - 1)
    assert demo.stats.seed == (1 << 63) - 1
