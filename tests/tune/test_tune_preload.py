"""Training the predictor of experts by the prompt: where it starts, what it learns, how it is judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tune_support import SMALL, write_model

from moechat.hub.names import resolve
from moechat.tune.adapted import routed_pass
from moechat.tune.batches import make_batch
from moechat.tune.data import Example
from moechat.tune.preload_training import PromptRouting, covered_share, record_prompts, train_preload
from moechat.tune.router_taps import RouterTaps
from moechat.tune.source import build_model, open_source

LAYERS, EXPERTS, SIZE = 2, 8, 16
TABLE = torch.randn(50, SIZE, generator=torch.Generator().manual_seed(1))


def prompts(count: int, seed: int) -> list[PromptRouting]:
    """Of two kinds, by their words; each kind has an expert that it uses most."""
    rng = np.random.default_rng(seed)
    found = []
    for at in range(count):
        kind = at % 2
        ids = tuple(int(token) for token in rng.integers(25 * kind, 25 * kind + 25, 6))
        target = torch.full((LAYERS, EXPERTS), 0.05)
        target[:, [kind, 7 - kind]] = torch.tensor([0.5, 0.2])
        target /= target.sum(1, keepdim=True)
        counts = np.stack([rng.multinomial(20, row / row.sum()) for row in target.double().numpy()])
        found.append(PromptRouting(ids, TABLE[list(ids)].mean(0), target, counts))
    return found


def test_the_predictor_starts_at_the_popular_experts() -> None:
    data = prompts(20, seed=0)
    predictor = train_preload(data, TABLE, replace(SMALL, preload_epochs=0))
    expected = torch.stack([prompt.target for prompt in data]).mean(0)
    for prompt in data[:3]:
        shares = torch.from_numpy(predictor.scores(prompt.prompt)).softmax(-1)
        torch.testing.assert_close(shares, expected)


def test_the_predictor_learns_which_prompts_use_which_experts() -> None:
    settings = replace(SMALL, preload_epochs=60, preload_rate=0.02, preload_hidden=32, preload_batch=8)
    trained, held_out = prompts(120, seed=0), prompts(60, seed=1)
    predictor = train_preload(trained, TABLE, settings)
    popular = np.sum([prompt.counts for prompt in trained], 0)
    by_prompt = covered_share(lambda prompt: predictor.scores(prompt.prompt), held_out, 1)
    by_popularity = covered_share(lambda _prompt: popular, held_out, 1)
    best = covered_share(lambda prompt: prompt.counts, held_out, 1)
    assert by_popularity < 0.35
    assert 0.4 < by_prompt <= best
    again = train_preload(trained, TABLE, settings)
    assert np.array_equal(again.scores([1, 2]), predictor.scores([1, 2]))


def test_the_share_that_is_covered_counts_choices() -> None:
    (prompt,) = prompts(1, seed=0)
    prompt = replace(prompt, counts=np.array([[4, 3, 2, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 9]]))
    scores = np.array([[9, 8, 0, 0, 0, 0, 0, 0], [9, 8, 0, 0, 0, 0, 0, 0]])
    assert covered_share(lambda _prompt: scores, [prompt], 2) == pytest.approx(8 / 20)
    assert covered_share(lambda _prompt: scores, [prompt], 8) == 1


def test_only_answers_to_prompts_are_recorded(tmp_path: Path) -> None:
    write_model(tmp_path)
    model, entries = build_model(open_source(resolve(str(tmp_path)), lambda progress: None), torch.float32)
    taps = RouterTaps(model, entries)
    model.eval()

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return model.get_input_embeddings()(ids).detach()  # type: ignore[no-any-return]

    def example(line: int, length: int, prompt: int) -> Example:
        return Example(line, tuple(range(line, line + length)), (False, *[True] * (length - 1)), prompt)

    examples = [example(1, 6, 4), example(2, 9, 3), example(3, 5, 0)]
    device = torch.device("cpu")
    found = record_prompts(model, taps, examples, embed, size=2, device=device)
    assert [prompt.prompt for prompt in found] == [(2, 3, 4), (1, 2, 3, 4)]
    for prompt, of in zip(found, (examples[1], examples[0]), strict=True):
        routed = routed_pass(model, taps, make_batch([of]), device)
        answer = len(of.ids) - of.prompt
        torch.testing.assert_close(prompt.target, routed.probabilities[:, 0, of.prompt :].mean(1))
        assert prompt.counts.sum() == len(entries) * answer * routed.chosen.shape[-1]
        torch.testing.assert_close(prompt.mean, embed(torch.tensor(prompt.prompt)).mean(0))
