"""Expert layers of decoded tokens on a GPU: what native code decides, copies and launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fake_cuda import VARIABLE, FakeCuda, FakeStream
from fake_kernels import FakeKernel

from moechat import _native

LAYERS, EXPERTS, BLOCKS, PICKS, HIDDEN = 3, 6, 2, 2, 64
PAGES = 18
LISTS = ("entry_page", "entry_slot", "row_entry", "row_block", "row_item", "item_token")
CAPACITY = 96


@pytest.fixture(scope="module")
def driver() -> Iterator[FakeCuda]:
    """The fake driver, opened by this process."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda()
        patch.setenv(VARIABLE, str(cuda.path))
        assert _native.cuda_driver_version() == 12080
        yield cuda


@dataclass
class Launched:
    """A launch: its kernel, and copies of the lists that it was given the places of."""

    kernel: str
    lists: dict[str, list[int]]
    clear: bool = False


@dataclass
class Layers:
    """Three layers over a real runner, cache and link, whose kernels note what they are given."""

    cuda: FakeCuda
    inputs: bool = False
    capacity: int = CAPACITY
    launches: list[Launched] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = _native.BlockLayout(HIDDEN, 64 * BLOCKS, 4)
        record = self.layout.record_bytes
        self.stream: FakeStream = self.cuda.stream()
        self.near = self.cuda.pages(PAGES, record)
        self.far = np.zeros((EXPERTS, BLOCKS, record), np.uint8)
        self.lists = np.full(self.capacity, -7, np.int32)
        self.there = np.full(self.capacity, -9, np.int32)
        self.far_out = np.full((1, HIDDEN), np.nan, np.float32)
        self.far_there = np.full((1, HIDDEN), np.nan, np.float32)
        self.pinned = [
            self.far.reshape(-1),
            self.lists.view(np.uint8),
            self.far_out.reshape(-1).view(np.uint8),
        ]
        for memory in self.pinned:
            _native.cuda_pin(memory)
        for memory in (self.there, self.far_there):
            self.cuda.adopt(memory.ctypes.data, memory.nbytes)
        self.runner = _native.ExpertRunner(
            self.layout,
            _native.Gate(),
            layers=LAYERS,
            experts=EXPERTS,
            pages=PAGES,
            targets=np.array([[2, BLOCKS]] * LAYERS, np.int32),
            reserve=4,
            policy=_native.EvictionPolicy("lru", LAYERS, EXPERTS),
            link=_native.cuda_link([(self.far, self.far.nbytes, True, "", 0)] * LAYERS),
            top_k=PICKS,
            near_memory=self.near.ctypes.data,
            far_records=[self.far.reshape(-1)] * LAYERS if self.inputs else [],
        )
        words = 2 * PICKS + EXPERTS + (HIDDEN if self.inputs else 0)
        self.packed = np.zeros((LAYERS, words), np.int32)
        self.kernels: list[Any] = []
        blocks = self._prepared("blocks", [*LISTS, "clear"])
        total, with_far = (
            self._prepared(name, ["token_item", "item_weight"]) for name in ("sum", "with far")
        )
        self.native = _native.DeviceLayers(
            self.runner,
            device=0,
            picks=PICKS,
            work=1 << 18,
            lists=self.lists,
            lists_there=self.there.ctypes.data,
            launch_size=3 * 4 + 3 * 4,
            far_out=self.far_out if self.inputs else None,
            far_there=self.far_there.ctypes.data,
            layers=[
                (row, [(1, (at + 1) % LAYERS)], self.inputs, blocks, total, with_far)
                for at, row in enumerate(self.packed)
            ],
        )

    def _prepared(self, name: str, names: list[str]) -> _native.PreparedLaunch:
        kinds = "".join("i" if each == "clear" else "p" for each in names)
        fake = FakeKernel.of(kinds)

        def run() -> None:
            self.stream.synchronize()
            given = dict(zip(names, list(fake.values), strict=False))
            clear = bool(given.pop("clear", 0))
            self.launches.append(Launched(name, {each: self._list(at) for each, at in given.items()}, clear))

        fake.run = type(fake.run)(run)
        self.kernels.append(fake)
        kernel = _native.CudaKernel(fake.address, 32, 0, kinds)
        return _native.PreparedLaunch(kernel, (PICKS, 1, 1), list(names))

    def _list(self, address: int) -> list[int]:
        """What lies on the GPU from there on."""
        place = (address - self.there.ctypes.data) // 4
        assert 0 <= place < self.capacity
        assert place % 4 == 0, "lists begin at multiples of 16 bytes"
        return self.there[place : place + 4].tolist()

    def ask(self, layer: int, experts: list[int], weights: tuple[float, ...] = (0.75, 0.25)) -> None:
        """The router's choice, and scores that name experts 4 and 5 of the next layer."""
        self.packed[layer, :PICKS] = experts
        self.packed[layer, PICKS : 2 * PICKS] = np.float32(weights).view(np.int32)
        scores = np.zeros(EXPERTS, np.float32)
        scores[[4, 5]] = 2, 1
        self.packed[layer, 2 * PICKS : 2 * PICKS + EXPERTS] = scores.view(np.int32)

    def token(self, **changes: Any) -> None:
        usual: dict[str, Any] = {
            "predicted": 1, "experts": 2, "max_bytes": None, "ahead": "ranked", "lookahead": 1,
            "stream_tokens": 0, "miss": "fetch",
        }  # fmt: skip
        self.native.begin_token(self.stream.handle, **{**usual, **changes})

    def run(self, layer: int, experts: list[int]) -> tuple[int, list[Launched]]:
        self.launches.clear()
        self.ask(layer, experts)
        found = self.native.run(layer)
        return found, list(self.launches)

    def resident(self, layer: int) -> set[int]:
        return set(np.flatnonzero(self.runner.residency().reshape(LAYERS, EXPERTS)[layer] == BLOCKS).tolist())

    def close(self) -> None:
        self.runner.close()
        self.stream.synchronize()
        self.stream.close()
        for memory in self.pinned:
            with suppress(_native.CudaError):  # of a driver that has failed
                _native.cuda_unpin(memory)
        for memory in (self.there, self.far_there, self.near):
            self.cuda.disown(memory.ctypes.data)


@pytest.fixture
def layers(driver: FakeCuda) -> Iterator[Layers]:
    driver.reset()
    made = Layers(driver)
    yield made
    made.close()


def entries(launches: list[Launched]) -> int:
    return sum(each.lists["row_entry"][PICKS] for each in launches if each.kernel == "blocks")


def test_a_layer_computes_all_blocks_of_the_chosen_experts_and_then_their_sum(layers: Layers) -> None:
    layers.token()
    nbytes, launches = layers.run(0, [3, 1])
    assert nbytes == PICKS * BLOCKS * layers.layout.record_bytes
    assert [each.kernel for each in launches][-1] == "sum"
    assert {each.kernel for each in launches[:-1]} == {"blocks"}
    assert entries(launches) == PICKS * BLOCKS
    assert not any(each.clear for each in launches)
    # Rows are experts in ascending order: item 0 is expert 1, which the router named second.
    total = launches[-1].lists
    assert total["token_item"][:PICKS] == [0, 1]
    weights = np.array(total["item_weight"][:PICKS], np.int32).view(np.float32)
    assert weights.tolist() == [0.25, 0.75]
    first = launches[0].lists
    assert first["row_item"][: PICKS + 1] == [0, 1, 2]
    assert first["item_token"][:PICKS] == [0, 0]
    assert layers.runner.check() == ""


def test_what_is_there_is_launched_before_what_is_on_its_way(layers: Layers) -> None:
    layers.token(ahead="none", predicted=0)
    layers.run(0, [0, 1])
    layers.runner.drain()
    layers.cuda.set(latency=0.02)
    _, launches = layers.run(0, [1, 5])
    blocks = [each.lists for each in launches if each.kernel == "blocks"]
    assert [each["row_entry"][: PICKS + 1] for each in blocks] == [[0, BLOCKS, BLOCKS], [0, 0, BLOCKS]]
    assert len({tuple(each["entry_page"][:BLOCKS]) for each in blocks}) == 2


class Clocks:
    def __init__(self) -> None:
        self.told: list[int] = []

    def begin_launch(self, nbytes: int) -> None:
        self.told.append(nbytes)

    def end_launch(self) -> None:
        self.told.append(-1)


def test_clocks_are_told_of_every_launch_of_blocks(layers: Layers) -> None:
    layers.token(ahead="none", predicted=0)
    layers.run(0, [0, 1])
    layers.runner.drain()
    layers.ask(0, [1, 5])
    layers.cuda.set(latency=0.02)
    clocks = Clocks()
    layers.native.run(0, clocks)
    blocks = BLOCKS * layers.layout.record_bytes
    assert clocks.told == [blocks, -1, blocks, -1]


def test_predicted_experts_are_prefetched(layers: Layers) -> None:
    layers.token()
    layers.run(0, [0, 1])
    layers.runner.drain()
    assert layers.resident(1) == {4, 5}
    layers.token(predicted=0)
    layers.run(1, [0, 1])
    layers.runner.drain()
    assert layers.resident(2) == set(), "the scores are there, and are not used"
    layers.token(max_bytes=BLOCKS * layers.layout.record_bytes)
    layers.run(1, [0, 1])
    layers.runner.drain()
    assert layers.resident(2) == {4}, "at most so many bytes"


def test_a_router_that_names_an_expert_twice_is_left_to_the_caller(layers: Layers) -> None:
    layers.token()
    assert layers.run(0, [2, 2]) == (-1, [])
    # The layer has begun: the caller finishes it.
    lists = np.zeros(1 << 10, np.int32)
    seen: list[int] = []
    layers.runner.finish_on_device(
        layers.stream.handle, 1, 1 << 18, lists, 0, lambda *given: seen.append(given[2]) or 0
    )
    assert sum(seen) == BLOCKS
    assert layers.run(0, [2, 3])[0] > 0


def test_lists_that_do_not_fit_behind_one_another_wait_for_the_stream(driver: FakeCuda) -> None:
    driver.reset()
    # Room for the pass and one launch.
    small = Layers(driver, capacity=16 + 24)
    small.token(ahead="none", predicted=0)
    small.run(0, [0, 1])
    small.runner.drain()
    driver.set(latency=0.01)
    _, launches = small.run(0, [1, 5])
    assert entries(launches) == PICKS * BLOCKS
    small.close()


@pytest.mark.parametrize("miss", ["cpu", "both"])
def test_the_part_of_the_cpu_is_copied_and_added(driver: FakeCuda, miss: str) -> None:
    driver.reset()
    shared = Layers(driver, inputs=True)
    shared.token(miss=miss, ahead="none", predicted=0)
    _, launches = shared.run(0, [0, 1])
    far = shared.runner.far_blocks()
    assert far > 0
    assert entries(launches) == PICKS * BLOCKS - far
    assert launches[-1].kernel == "with far"
    assert np.array_equal(shared.far_there, shared.far_out)
    assert not np.isnan(shared.far_out).any()
    # Outputs of experts that no launch adds to are cleared, by a launch without blocks if there is no other.
    assert launches[0].kernel == "blocks"
    assert launches[0].clear
    assert not any(each.clear for each in launches[1:])
    shared.close()


def test_an_error_of_the_driver_ends_the_layer(layers: Layers) -> None:
    layers.token()
    layers.cuda.set(fail_after=0)
    layers.ask(0, [0, 1])
    with pytest.raises((_native.CudaError, _native.LinkError, _native.DeviceLostError)):
        layers.native.run(0)
    layers.runner.abort()


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_there_is_not_is_refused(layers: Layers, layer: int) -> None:
    layers.token()
    with pytest.raises(ValueError, match="layer"):
        layers.native.run(layer)


@pytest.mark.parametrize(
    ("kinds", "values"),
    [("p", ["clear"]), ("i", ["row_item"]), ("p", ["unknown"]), ("pp", ["row_item"]), ("p", ["row_item", 1])],
)
def test_arguments_that_do_not_fit_the_kernel_are_refused(
    driver: FakeCuda, kinds: str, values: list[float | str]
) -> None:
    fake = FakeKernel.of(kinds)
    kernel = _native.CudaKernel(fake.address, 32, 0, kinds)
    with pytest.raises(ValueError, match=r"parameter|called"):
        _native.PreparedLaunch(kernel, (1, 1, 1), values)


def test_a_launch_without_names_can_be_made_at_once(driver: FakeCuda) -> None:
    fake = FakeKernel.of("pif")
    kernel = _native.CudaKernel(fake.address, 32, 0, "pif")
    _native.PreparedLaunch(kernel, (2, 3, 1), [4096, 7, 0.5])(9)
    assert list(fake.launched) == [2, 3, 1, 32, 0, 9]
    assert list(fake.values)[:2] == [4096, 7]
    named = _native.PreparedLaunch(kernel, (1, 1, 1), ["row_item", 7, 0.5])
    with pytest.raises(ValueError, match="not known yet"):
        named(9)
