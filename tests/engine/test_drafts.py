"""Tokens that are guessed from the text so far: where they come from, how many, and the same answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from hypothesis import given
from hypothesis import strategies as st
from mtp_support import HAS_MTP, NO_MTP, write_with_head
from tiny import write_tiny_checkpoint

import moechat
from moechat import Engine, Grammar, MoechatError, UsageError
from moechat.cli.commands.run_arguments import RunOptions
from moechat.configurator.systems import CacheSettings
from moechat.engine.answer import TokenChooser
from moechat.engine.draft_lengths import Choice, DraftLengths
from moechat.engine.drafts import Match, PromptLookup
from moechat.models.cache_memory import EMPTY
from moechat.models.cache_rollback import CacheRollback
from moechat.models.cache_states import tensors_of
from moechat.offload.settings import OffloadOptions
from moechat.steps import MOST_DRAFT

# Full attention, a sliding window, latents, linear attention, convolutions, Mamba-2, and layers that are of
# several kinds.
FAMILIES = ("qwen3_moe", "gpt_oss", "glm4_moe_lite", "qwen3_next", "lfm2_moe", "nemotron_h", "gemma4_text")
# And with a head for multi-token prediction: keys and values, latents, and states.
HEADS = ("glm4_moe", "glm4_moe_lite", "qwen3_next")
PROMPT = torch.randint(3, 100, (120,), generator=torch.Generator().manual_seed(5)).tolist()
# Few tokens are drawn, so that most of the text occurred before.
BIAS = dict.fromkeys((5, 6, 7), 90.0)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "seed": 11},
    "penalised": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
}


# ---- where guesses come from


def longest(tokens: Sequence[int]) -> Match | None:
    """What the lookup finds, as its docstring says it, for texts of fewer places than it compares."""
    best = None
    for end in range(len(tokens) - 1, 1, -1):
        length = 0
        while length < min(end, 32) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= 2 and (best is None or length > best.length):
            best = Match(end, length)
    return best


@given(st.lists(st.integers(0, 2), max_size=17), st.lists(st.integers(0, 2), max_size=6))
def test_the_longest_and_latest_place_is_found_while_the_text_grows(
    first: list[int], rest: list[int]
) -> None:
    tokens = list(first)
    lookup = PromptLookup(tokens)
    for token in rest:
        assert len(tokens) > 17 or lookup.find() == longest(tokens)
        tokens.append(token)
        lookup.append(token)
    assert len(tokens) > 17 or lookup.find() == longest(tokens)


def test_a_draft_repeats_what_followed_and_goes_on_with_itself() -> None:
    tokens = [9, 1, 2, 3, 4, 5, 1, 2]
    lookup = PromptLookup(tokens)
    found = lookup.find()
    assert found == Match(3, 2)
    assert lookup.draft(found, 3) == [3, 4, 5]
    assert lookup.draft(found, 9) == [3, 4, 5, 1, 2, 3, 4, 5, 1]


def test_an_expected_text_is_looked_up_too() -> None:
    lookup = PromptLookup([7, 8], [1, 2, 3, 4])
    assert lookup.find() is None
    lookup.append(1)
    lookup.append(2)
    found = lookup.find()
    assert found is not None
    assert lookup.draft(found, 2) == [3, 4]


# ---- how many


def test_drafts_are_as_long_as_pays() -> None:
    lengths = DraftLengths()
    assert lengths.choose(2, 16).guesses == 0
    assert lengths.choose(32, 16).guesses > lengths.choose(5, 16).guesses
    assert lengths.choose(32, 4).guesses == 3
    for _ in range(20):
        lengths.verified(2, 15, 15)
    assert lengths.choose(2, 16).guesses == 15
    for _ in range(60):
        lengths.verified(32, 15, 0)
    assert lengths.choose(32, 16).guesses == 0


def test_drafts_end_where_passes_of_several_tokens_take_too_long() -> None:
    lengths = DraftLengths()
    for _ in range(60):
        lengths.passed(1, 0.01)
        for size in (2, 4, 8, 16):
            lengths.passed(size, 0.01 * size)
    assert [lengths.choose(length, 16).guesses for length in (2, 5, 32)] == [0, 0, 0]
    for _ in range(60):
        lengths.passed(4, 0.012)
    assert lengths.choose(32, 16).guesses == 3


def test_one_interruption_does_not_change_the_lengths() -> None:
    lengths = DraftLengths()
    lengths.passed(1, 0.01)
    before = [lengths.choose(length, 16).guesses for length in (2, 5, 10, 32)]
    for size in (2, 4, 8, 16):
        lengths.passed(size, 100.0)
    assert [lengths.choose(length, 16).guesses for length in (2, 5, 10, 32)] == before


def test_a_size_that_was_slow_is_tried_again() -> None:
    lengths = DraftLengths()
    for _ in range(60):
        lengths.passed(1, 0.01)
        for size in (2, 4, 8, 16):
            lengths.passed(size, 0.01 * size)
    assert lengths.choose(32, 16).guesses == 0
    for _ in range(400):
        lengths.passed(1, 0.01)
    assert lengths.choose(32, 16).guesses > 0


def test_drafts_are_rarer_where_right_guesses_are_computed_again() -> None:
    lengths = DraftLengths()
    assert lengths.choose(32, 16, kept=0).guesses > 0
    for _ in range(60):
        lengths.verified(7, 4, 3)
    assert lengths.choose(7, 16).guesses > lengths.choose(7, 16, kept=0).guesses


def test_a_head_guesses_where_that_pays() -> None:
    lengths = DraftLengths()
    lengths.passed(1, 0.01)
    assert lengths.choose_mtp(16).guesses >= 1
    assert lengths.choose_mtp(1).guesses == 0
    for _ in range(40):
        lengths.mtp_verified(3, 3)
    assert lengths.choose_mtp(16).guesses == 3
    assert lengths.choose_mtp(3).guesses == 2
    assert lengths.choose_mtp(3, 2).guesses == 1
    for _ in range(40):
        lengths.mtp_verified(2, 0)
    assert lengths.choose_mtp(16).guesses == 0


def test_a_head_whose_guesses_take_too_long_is_left_alone_and_tried_again() -> None:
    lengths = DraftLengths()
    for _ in range(40):
        lengths.passed(1, 0.01)
        lengths.mtp_took(1, 0.02)
    assert lengths.choose_mtp(16).guesses == 0
    for _ in range(40):
        lengths.passed(1, 0.01)
        if lengths.choose_mtp(16).guesses:
            break
    assert lengths.choose_mtp(16).guesses > 0


def test_one_slow_start_does_not_end_the_guesses_of_a_head() -> None:
    lengths = DraftLengths()
    lengths.passed(1, 0.01)
    lengths.mtp_took(1, 1.0)
    lengths.passed(2, 0.03)
    assert lengths.choose_mtp(16).guesses > 0


def test_passes_of_three_tokens_are_measured_too() -> None:
    lengths = DraftLengths()
    for _ in range(60):
        lengths.passed(1, 0.01)
        lengths.passed(2, 0.012)
        lengths.passed(3, 0.03)
        lengths.mtp_verified(2, 2)
    assert lengths.choose_mtp(3).guesses == 1


# ---- answers stay the same


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, home: Path) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("drafts")
    for family in FAMILIES:
        config = tiny_family(family)
        config.eos_token_id = None
        if family == "qwen3_next":  # fewer heads are not native
            config.linear_num_key_heads, config.linear_num_value_heads = 4, 8
        write_tiny_checkpoint(directory / family, config)
    for family in HEADS if HAS_MTP else ():
        write_with_head(
            directory / f"{family}-head", family, linear_num_key_heads=4, linear_num_value_heads=8
        )
    return {path.name: path for path in directory.iterdir()}


# The mixers of Nemotron-H are not native with versions of transformers that have no empty layers of caches.
_OLD = pytest.mark.skipif(not EMPTY, reason="transformers is too old")


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=_OLD if name == "nemotron_h" else ()) for name in FAMILIES),
        *(pytest.param(f"{name}-head", marks=NO_MTP) for name in HEADS),
    ],
)
def family_engine(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[Engine]:
    with moechat.load(checkpoints[request.param], bits=4) as engine:
        yield engine


@pytest.fixture
def bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are as long as possible, whatever they cost, and by the head if there is one; many guesses are
    wrong.
    """

    def choose(_: DraftLengths, __: int, most: int, behind: int = 1, *, kept: int = 15) -> Choice:
        return Choice(max(0, most - behind), 1.0)

    def choose_mtp(_: DraftLengths, most: int, behind: int = 1, *, kept: int = 15) -> Choice:
        return Choice(max(0, min(3, most - behind)), 2.0)

    monkeypatch.setattr(DraftLengths, "choose", choose)
    monkeypatch.setattr(DraftLengths, "choose_mtp", choose_mtp)


def answer(engine: Engine, prompt: list[int] = PROMPT, count: int = 60, **options: Any) -> list[int]:
    options = {"logit_bias": BIAS, "temperature": 0.0, **options}
    return [step.token_id for step in engine.generate(prompt, max_new_tokens=count, **options)]


def layers_of(engine: Engine) -> list[list[torch.Tensor]]:
    latest = engine.decoder.prompt_cache.latest
    assert latest is not None
    return [[rows.clone() for rows in tensors_of(layer)] for layer in latest.cache.layers]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("bold")
def test_an_answer_and_its_cache_are_the_same_with_guesses(family_engine: Engine, way: str) -> None:
    engine, found, caches = family_engine, [], []
    assert engine.decoder.most_verified >= 8
    for draft in (0, MOST_DRAFT, 3):
        engine.drop_prompt_cache()
        found.append(answer(engine, draft_tokens=draft, **WAYS[way]))
        caches.append(layers_of(engine))
        least = 2 if engine.loaded.mtp is None else 0  # the heads are random, too
        assert (engine.stats.accepted_tokens > least) == (draft > 0)
        assert engine.stats.output_tokens == 60
    assert found[1:] == found[:1] * 2
    assert all(same(cache, caches[0]) for cache in caches[1:])
    # All but the last token are there for the next turn.
    answer(engine, [*PROMPT, *found[0], 9], 1, draft_tokens=0)
    assert engine.stats.reused_tokens == len(PROMPT) + 59


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "bits"), [("float32", 16), ("bfloat16", 16), ("bfloat16", 8)])
def test_attention_of_successive_tokens_has_the_bits_of_single_ones(
    heads: int, dtype: str, bits: int, tmp_path: Path, home: Path
) -> None:
    config = tiny_family("qwen3_moe")
    config.num_key_value_heads = heads
    write_tiny_checkpoint(tmp_path, config)
    tokens = torch.randint(3, 100, (250,), generator=torch.Generator().manual_seed(7)).tolist()
    with moechat.load(tmp_path, bits=4, dtype=dtype, kv_bits=bits) as engine, torch.inference_mode():
        decoder, passes = engine.decoder, engine.passes
        held = 0
        (_, ours), (_, theirs) = (decoder.feed(tokens[:100], decoder.new_cache()) for _ in range(2))
        for count in (5, 16, 16, 2, 16, 9):  # across the borders of units of 128 keys
            new = tokens[100 + held : 100 + held + count]
            held += count
            assert all(layer.make_room(count) for layer in ours.layers)
            found = passes.run_successive(new, ours)
            wanted = [decoder.step(torch.tensor([[token]]), theirs)[0] for token in new]
            assert found is not None
            assert torch.equal(found, torch.stack(wanted))
        pairs = zip(ours.layers, theirs.layers, strict=True)
        assert all(all(map(torch.equal, tensors_of(mine), tensors_of(other))) for mine, other in pairs)


def kept(engine: Engine) -> tuple[list[int], list[list[torch.Tensor]]]:
    """Tokens and contents of the cache of the last answer."""
    latest = engine.decoder.prompt_cache.latest
    assert latest is not None
    return list(latest.tokens), layers_of(engine)


def same(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> bool:
    return all(all(map(torch.equal, *layers)) for layers in zip(ours, theirs, strict=True))


@pytest.mark.usefixtures("bold")
def test_an_answer_that_is_closed_leaves_the_cache_that_it_leaves_without_guesses(
    family_engine: Engine,
) -> None:
    engine = family_engine
    for count in range(20, 32):
        found = []
        for draft in (0, MOST_DRAFT):
            engine.drop_prompt_cache()
            options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.0, "logit_bias": BIAS}
            with closing(engine.generate_in_turns(PROMPT, draft_tokens=draft, **options)) as steps:
                for _ in range(count):
                    next(steps)
            assert not engine.decoder.rollback.in_use
            found.append(kept(engine))
        assert found[0][0] == found[1][0]
        assert len(found[0][0]) == len(PROMPT) + count - 1
        assert same(found[0][1], found[1][1])


@pytest.mark.usefixtures("bold")
def test_an_answer_that_ends_inside_a_draft_leaves_the_cache_that_it_leaves_without(
    family_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = family_engine
    partly = []
    keep = engine.decoder.rollback.keep

    def counting(cache: Any, tokens: int) -> int:
        partly.append(cache.get_seq_length() > tokens)
        return keep(cache, tokens)

    monkeypatch.setattr(engine.decoder.rollback, "keep", counting)
    for count in range(20, 32):
        found = []
        for draft in (0, MOST_DRAFT):
            engine.drop_prompt_cache()
            left = iter([False] * (count - 1))
            monkeypatch.setattr(TokenChooser, "complete", property(lambda _, left=left: next(left, True)))
            assert len(answer(engine, draft_tokens=draft)) == count
            found.append(kept(engine))
        assert found[0][0] == found[1][0]
        assert len(found[0][0]) == len(PROMPT) + count - 1
        assert same(found[0][1], found[1][1])
    assert any(partly)


@pytest.mark.usefixtures("bold")
def test_an_interruption_behind_a_pass_with_a_draft_leaves_no_guesses(
    family_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = family_engine
    engine.drop_prompt_cache()
    wanted = answer(engine, draft_tokens=0)
    for owner, name in ((engine.decoder.meter, "add_shares"), (engine.decoder.lengths, "verified")):
        engine.drop_prompt_cache()

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                answer(engine)
        assert not engine.decoder.rollback.in_use
        assert answer(engine) == wanted
        assert engine.stats.accepted_tokens > 0


def test_only_the_cache_with_guesses_is_taken_back(family_engine: Engine) -> None:
    decoder, rollback = family_engine.decoder, CacheRollback()
    with torch.inference_mode():
        (_, ours), (_, other) = (decoder.feed(PROMPT[:20], decoder.new_cache()) for _ in range(2))
        assert rollback.begin(ours, 1, 3)
        assert family_engine.passes.run_successive([5, 6, 7, 8], ours) is not None
        assert rollback.keep(other, 3) == 3
        rollback.forget(other)
        assert rollback.in_use
        assert rollback.keep(ours, 22) in (20, 22)
        assert not rollback.in_use
        assert ours.get_seq_length() in (20, 22)
        assert other.get_seq_length() == 20


def test_a_short_draft_goes_back_to_any_of_its_tokens(family_engine: Engine) -> None:
    decoder, rollback = family_engine.decoder, CacheRollback(3)
    tokens = [5, 6, 7, 8, 9]
    with torch.inference_mode():
        for right in range(4):
            (_, ours), (_, theirs) = (decoder.feed(PROMPT[:20], decoder.new_cache()) for _ in range(2))
            assert rollback.begin(ours, 2, 3)
            found = family_engine.passes.run_successive(tokens, ours, rollback.copies(ours))
            assert found is not None
            assert rollback.keep(ours, 22 + right) == 22 + right
            for token in tokens[: 2 + right]:
                decoder.step(torch.tensor([[token]]), theirs)
            pairs = zip(ours.layers, theirs.layers, strict=True)
            assert all(all(map(torch.equal, tensors_of(mine), tensors_of(other))) for mine, other in pairs)


@pytest.mark.usefixtures("bold")
def test_a_pass_with_a_draft_that_fails_leaves_the_engine_usable(
    family_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = family_engine
    engine.drop_prompt_cache()
    wanted = answer(engine, draft_tokens=0)
    engine.drop_prompt_cache()
    with monkeypatch.context() as patch:
        steps = engine.generate_in_turns(PROMPT, max_new_tokens=60, temperature=0.0, logit_bias=BIAS)
        for _ in range(10):
            next(steps)
        real = engine.passes.run_successive

        def failing(*arguments: Any) -> Any:
            real(*arguments)
            raise MoechatError("the disk is gone")

        patch.setattr(engine.passes, "run_successive", failing)
        with pytest.raises(MoechatError, match="disk is gone"):
            list(steps)
    assert not engine.decoder.rollback.in_use
    assert answer(engine) == wanted


@pytest.fixture
def demo() -> Iterator[Engine]:
    with moechat.load("demo", conversations=2) as engine:
        yield engine


@pytest.mark.usefixtures("bold")
def test_experts_in_pages_give_the_same_answer(demo: Engine) -> None:
    text = "Once there was a cat. The cat liked milk. " * 4
    wanted = [step.token_id for step in demo.generate(text, max_new_tokens=40, seed=2, draft_tokens=0)]
    pages = OffloadOptions(pages=12, cache=CacheSettings(prefetch="next-router"))
    with moechat.load("demo", offload=pages) as engine:
        found = [step.token_id for step in engine.generate(text, max_new_tokens=40, seed=2)]
        assert engine.stats.accepted_tokens > 0
        assert engine.stats.misses > 0
    assert found == wanted


@pytest.mark.usefixtures("bold")
def test_stops_probabilities_and_grammars_see_each_token(demo: Engine) -> None:
    text = "one two three one two three one two"
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": ["one", "two"]}, "maxItems": 12})
    for options in ({"logprobs": 3}, {"stop": "three one"}, {"grammar": grammar}):
        steps = []
        for draft in (0, MOST_DRAFT):
            demo.drop_prompt_cache()
            found = demo.generate(text, max_new_tokens=40, temperature=0.0, draft_tokens=draft, **options)
            steps.append(list(found))
        assert steps[0] == steps[1]


@pytest.mark.usefixtures("bold")
def test_answers_side_by_side_share_the_one_place_for_guesses(demo: Engine) -> None:
    texts = ["The cat liked milk. " * 6, "Mia had a red kite. " * 6]
    wanted = []
    for text in texts:
        demo.drop_prompt_cache()
        wanted.append(
            [step.token_id for step in demo.generate(text, max_new_tokens=30, draft_tokens=0, seed=4)]
        )
    demo.drop_prompt_cache()
    running = [demo.generate_in_turns(text, max_new_tokens=30, seed=4) for text in texts]
    found: list[list[int]] = [[], []]
    with_drafts = set()
    while not all(turns.ended for turns in running):
        for number, turns in enumerate(running):
            step = next(turns, None)
            if step is not None:
                found[number].append(step.token_id)
            if demo.decoder.rollback.in_use:
                with_drafts.add(number)
    assert found == wanted
    assert with_drafts


def test_an_expected_text_is_guessed_and_changes_nothing(demo: Engine) -> None:
    question = [{"role": "user", "content": "Tell me a story about a fox named Mia and a red kite."}]
    wanted = list(demo.generate(question, temperature=0.0, draft_tokens=0))
    text = "".join(step.text for step in wanted)
    half = len(wanted) // 2
    # Of a long text the beginning counts.
    for expected, least in ((text, half), (text + " zebra" * 20_000, half), ("Nothing of this is said.", 0)):
        demo.drop_prompt_cache()
        assert list(demo.generate(question, temperature=0.0, expected=expected)) == wanted
        assert demo.stats.accepted_tokens >= least
        assert demo.stats.drafted_tokens >= demo.stats.accepted_tokens
    with pytest.raises(UsageError, match="expected is of type int"):
        demo.generate("a", expected=3)  # type: ignore[arg-type]


def test_drafts_of_a_wrong_number_are_refused(demo: Engine) -> None:
    with pytest.raises(UsageError, match="draft_tokens is 16; it must be at least 0 and at most 15"):
        demo.generate("a", draft_tokens=16)


@pytest.mark.usefixtures("bold")
def test_an_answer_that_is_garbage_computes_nothing(
    family_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = family_engine
    computed: list[Sequence[int]] = []
    for count in range(20, 30):
        engine.drop_prompt_cache()
        steps = engine.generate_in_turns(PROMPT, max_new_tokens=60, temperature=0.0, logit_bias=BIAS)
        for _ in range(count):
            next(steps)
        with monkeypatch.context() as patch:
            patch.setattr(engine.passes, "run_successive", lambda tokens, *_: computed.append(tokens))
            del steps
        assert not engine.decoder.rollback.in_use
        left = kept(engine)
        engine.drop_prompt_cache()
        answer(engine, count=len(left[0]) - len(PROMPT) + 1, draft_tokens=0)
        tokens, layers = kept(engine)
        assert tokens == left[0]
        assert same(layers, left[1])
    assert computed == []


def test_drafts_of_the_settings_file_do_not_exclude_other_servers() -> None:
    url = "http://127.0.0.1:9/v1"
    with pytest.raises(UsageError, match="excludes --draft-tokens"):
        RunOptions(model="m", remote=url, draft_tokens=3)
    options = RunOptions(model="m", remote=url, draft_tokens=3, origins={"draft_tokens": "from config.toml"})
    assert "draft_tokens" not in options.settings.arguments
    assert RunOptions(model="m", draft_tokens=3).settings.arguments["draft_tokens"] == 3
