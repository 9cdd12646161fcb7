"""Trains the predictor that ranks experts by the prompt (equation 7), on the routing of the tuned model.

The paper records the model's own answers. Here the answers of the data are used: they need one pass instead
of one for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moechat.predict.preload import Embed, PreloadPredictor, embedding_width, mean_embedding
from moechat.tune.adapted import routed_pass
from moechat.tune.batches import make_batch, micro_batches
from moechat.tune.data import Example
from moechat.tune.router_taps import RouterTaps
from moechat.tune.settings import TuneSettings

_LEAST_SPREAD = 1e-6


@dataclass(frozen=True)
class PromptRouting:
    """How one prompt was answered.

    Attributes:
        prompt: Its token ids.
        mean: Mean embedding of the prompt, float32 ``[embedding size]``.
        target: Mean probabilities of the routers over the answer, float32 ``[layers, experts]``; rows sum
            to 1.
        counts: Choices in the answer, int64 ``[layers, experts]``.
    """

    prompt: tuple[int, ...]
    mean: torch.Tensor
    target: torch.Tensor
    counts: NDArray[np.int64]


def record_prompts(
    model: Any,
    taps: RouterTaps,
    examples: Sequence[Example],
    embed: Embed,
    *,
    size: int,
    device: torch.device,
    advance: Callable[[int], None] = lambda done: None,
) -> list[PromptRouting]:
    """Record the routing of the answers; sequences without a prompt are left out.

    Args:
        model: The tuned transformers model.
        taps: Its routers.
        examples: The sequences.
        embed: Its embeddings of tokens.
        size: Sequences of a batch.
        device: Where the model is.
        advance: Called with the number of sequences done.
    """
    model.eval()
    width = embedding_width(embed)
    found: list[PromptRouting] = []
    usable = [example for example in examples if 0 < example.prompt < len(example.ids)]
    done = 0
    for group in micro_batches(sorted(usable, key=lambda example: -len(example.ids)), size):
        routed = routed_pass(model, taps, make_batch(group), device)
        for row, example in enumerate(group):
            answer = slice(example.prompt, len(example.ids))
            target = routed.probabilities[:, row, answer].mean(1).cpu()
            chosen = routed.chosen[:, row, answer].cpu().numpy()
            counts = np.stack([np.bincount(layer.ravel(), minlength=taps.experts) for layer in chosen])
            prompt = example.ids[: example.prompt]
            found.append(PromptRouting(prompt, mean_embedding(embed, prompt, width), target, counts))
        done += len(group)
        advance(done)
    return found


def train_preload(prompts: Sequence[PromptRouting], embed: Embed, settings: TuneSettings) -> PreloadPredictor:
    """Train the predictor on the CPU.

    Inputs are standardised, which is then folded into the first weights. Training begins with the experts
    that are popular everywhere: the last weights start at 0, their bias at the logarithm of the mean target.

    Args:
        prompts: At least one.
        embed: The model's embeddings of tokens.
        settings: See there.
    """
    inputs = torch.stack([prompt.mean for prompt in prompts])
    targets = torch.stack([prompt.target for prompt in prompts])  # [N, layers, experts]
    layers, experts = targets.shape[1:]
    centre = inputs.mean(0)
    spread = (inputs - centre).pow(2).mean(0).sqrt().clamp(min=_LEAST_SPREAD)
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        first = nn.Linear(inputs.shape[1], settings.preload_hidden)
        second = nn.Linear(settings.preload_hidden, layers * experts)
    with torch.no_grad():
        second.weight.zero_()
        second.bias.copy_(targets.mean(0).clamp(min=1e-8).log().flatten())
    optimizer = torch.optim.SGD(
        [*first.parameters(), *second.parameters()], lr=settings.preload_rate, momentum=0.9
    )
    standard = (inputs - centre) / spread
    for _ in range(settings.preload_epochs):
        order = torch.randperm(len(prompts), generator=generator)
        for at in range(0, len(prompts), settings.preload_batch):
            rows = order[at : at + settings.preload_batch]
            scores = second(first(standard[rows]).relu()).reshape(-1, layers, experts)
            # One distribution for each layer: the sum over layers, the mean over prompts.
            loss = nn.functional.kl_div(scores.log_softmax(-1), targets[rows], reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    weight = first.weight / spread
    bias = first.bias - weight @ centre
    return PreloadPredictor((weight, bias), (second.weight, second.bias), layers, embed)


def covered_share(
    rank: Callable[[PromptRouting], NDArray[Any]], prompts: Sequence[PromptRouting], capacity: int
) -> float:
    """Share of the choices of answers that are among the ``capacity`` experts ranked highest in each layer.

    Args:
        rank: Scores ``[layers, experts]`` for a prompt.
        prompts: At least one.
        capacity: C.
    """
    hits = total = 0
    for prompt in prompts:
        best = np.argsort(-rank(prompt), axis=1, kind="stable")[:, :capacity]
        hits += int(np.take_along_axis(prompt.counts, best, 1).sum())
        total += int(prompt.counts.sum())
    return hits / max(total, 1)
