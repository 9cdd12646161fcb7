"""The recorder notes what layers are given, and puts passes together to sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from moechat.errors import UnsupportedModelError, UsageError
from moechat.models.router_search import Router, Scoring
from moechat.offload import recorder as recording
from moechat.offload.experts import attach
from moechat.offload.recorder import RoutingRecorder


class Doubling:
    """Stands for what computes a layer."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return 2 * hidden


def modules(count: int = 2) -> list[nn.Module]:
    made = [nn.Module() for _ in range(count)]
    for module in made:
        attach(module, Doubling())
    return made


def feed(
    module: nn.Module,
    index: list[list[int]],
    weights: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    chosen = torch.tensor(index)
    given_hidden = torch.ones(len(index), 3) if hidden is None else hidden
    given = torch.full(chosen.shape, 0.5) if weights is None else weights
    out: torch.Tensor = module._moechat_layer.forward(given_hidden, chosen, given)  # type: ignore[union-attr]
    return out


def test_passes_become_sequences() -> None:
    first, second = modules()
    recorder = RoutingRecorder([first, second], 8)
    with recorder.attached():
        assert torch.equal(feed(first, [[0, 1], [2, 3], [4, 5]]), torch.full((3, 3), 2.0))
        feed(second, [[1, 0], [3, 2], [5, 4]])
        feed(first, [[6, 7]])
        assert recorder.rows == 3
        feed(second, [[7, 6]], torch.tensor([[0.75, 0.25]], dtype=torch.bfloat16))
        assert recorder.rows == 4
        # The last token was drawn, but not computed.
        assert recorder.end_sequence([10, 11, 12, 13, 14], 3) == 4
        assert recorder.rows == 0
        # An interrupt: the second layer has not computed its token.
        feed(first, [[1, 2]])
        feed(second, [[1, 2]])
        feed(first, [[3, 4]])
        assert recorder.end_sequence([20, 21], 5) == 1
        feed(first, [[3, 4]])
        assert recorder.end_sequence([30], 1) == 0
    assert isinstance(first._moechat_layer, Doubling)
    assert (recorder.sequences, recorder.tokens, recorder.prompt_tokens) == (2, 5, 4)
    trace = recorder.trace()
    assert trace.experts[:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [1, 2]]
    assert trace.experts[:, 1].tolist() == [[1, 0], [3, 2], [5, 4], [7, 6], [1, 2]]
    assert trace.offsets.tolist() == [0, 4, 5]
    assert trace.num_experts == 8
    assert trace.weights is not None
    assert trace.weights[3].tolist() == [[0.5, 0.5], [0.75, 0.25]]
    assert trace.token_ids is not None
    assert trace.token_ids.tolist() == [10, 11, 12, 13, 20]
    assert trace.prompt_lengths is not None
    assert trace.prompt_lengths.tolist() == [3, 1]


def test_the_recorder_copies_the_routing() -> None:
    (module,) = modules(1)
    recorder = RoutingRecorder([module], 8)
    index, weights = torch.tensor([[1, 2]], dtype=torch.int32), torch.ones((1, 2), dtype=torch.float16)
    with recorder.attached():
        module._moechat_layer.forward(torch.ones(1, 3), index, weights)  # type: ignore[union-attr,operator]
    index.fill_(7)
    weights.fill_(7)
    recorder.end_sequence([0], 0)
    assert recorder.trace().experts.tolist() == [[[1, 2]]]
    np.testing.assert_array_equal(recorder.trace().weights, np.ones((1, 1, 2)))


def test_forgotten_rows_are_not_in_the_trace() -> None:
    (module,) = modules(1)
    recorder = RoutingRecorder([module], 8)
    with recorder.attached():
        feed(module, [[0], [1], [2], [3]])
        feed(module, [[4], [5]])
        recorder.forget(2, 4)
        recorder.forget(3, 3)
        assert recorder.rows == 4
        recorder.end_sequence([0, 1, 4, 5], 2)
    assert recorder.trace().experts.ravel().tolist() == [0, 1, 4, 5]


def test_modules_are_restored_after_an_error() -> None:
    made = modules()
    recorder = RoutingRecorder(made, 8)
    with pytest.raises(KeyboardInterrupt), recorder.attached():
        raise KeyboardInterrupt
    assert all(isinstance(module._moechat_layer, Doubling) for module in made)
    with pytest.raises(ValueError, match="nothing was recorded"):
        recorder.trace()


@pytest.mark.parametrize(
    ("index", "reason"),
    [([[8, 0]], "expert 8 of 8"), ([[-1, 0]], "expert -1 of 8"), ([[0]], "1 to 2 experts by turns")],
)
def test_routing_outside_the_range_of_a_trace_is_refused(index: list[list[int]], reason: str) -> None:
    (module,) = modules(1)
    recorder = RoutingRecorder([module], 8)
    with recorder.attached():
        feed(module, [[1, 2]])
        feed(module, index)
        with pytest.raises(UnsupportedModelError, match=reason):
            recorder.end_sequence([0, 1], 1)
        assert recorder.rows == 0


def test_distributions_of_the_routers_are_recorded_with_the_embeddings_of_the_tokens() -> None:
    first, second = modules()
    weight = torch.randn((8, 3), generator=torch.Generator().manual_seed(1))
    table = torch.randn((40, 5), generator=torch.Generator().manual_seed(2))
    recorder = RoutingRecorder(
        [first, second], 8, routers=[Router(weight), None], embed=lambda ids: table[ids]
    )
    hidden = torch.randn((4, 3), generator=torch.Generator().manual_seed(3))
    with recorder.attached():
        for module in (first, second):
            feed(module, [[0, 1], [2, 3]], hidden=hidden[:2])
        for module in (first, second):
            feed(module, [[4, 5]], hidden=hidden[2:3])
        recorder.forget(1, 2)
        feed(first, [[6, 7]], hidden=hidden[3:])  # the second layer was interrupted
        recorder.end_sequence([30, 10, 5], 1)
    trace = recorder.trace()
    assert trace.gates is not None
    expected = torch.nn.functional.linear(hidden[[0, 2]], weight).softmax(-1)
    assert np.allclose(trace.gates.gates[:, 0], expected, atol=1e-3)
    assert (trace.gates.gates[:, 1] == 0).all()  # its router is unknown
    assert trace.gates.embedding_ids.tolist() == [10, 30]
    assert np.allclose(trace.gates.embeddings, table[[10, 30]], atol=2e-3)


def test_a_sigmoid_router_gives_shares_before_its_correction() -> None:
    weight = torch.randn((4, 3), generator=torch.Generator().manual_seed(1))
    hidden = torch.randn((6, 3), generator=torch.Generator().manual_seed(2))
    router = Router(weight, scoring=Scoring.SIGMOID, correction=torch.tensor([9.0, 0.0, 0.0, 0.0]))
    scores = (hidden @ weight.T).sigmoid()
    assert torch.allclose(router.distribution(hidden), scores / scores.sum(dim=1, keepdim=True))


def test_more_distributions_than_a_trace_can_hold_are_refused_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (module,) = modules(1)
    recorder = RoutingRecorder([module], 8, routers=[None], embed=lambda ids: torch.zeros((len(ids), 2)))
    monkeypatch.setattr(recording, "MAX_GATES", 8 * 3)
    with recorder.attached():
        feed(module, [[0, 1], [2, 3]])
        recorder.end_sequence([1, 2], 1)
        feed(module, [[0, 1], [2, 3]])
        with pytest.raises(UsageError, match="3 tokens of this model, and 4"):
            recorder.end_sequence([1, 2], 1)
    assert recorder.trace().tokens == 2
