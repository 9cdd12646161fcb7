import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import ENCODINGS, GATES, Call, activate, run_isa

from moechat import _native
from moechat.geometry import Gate


@pytest.fixture(autouse=True)
def _keep_threads():
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


@pytest.mark.parametrize("isa", _native.available_isas())
def test_outputs_match_a_float64_reference_on_every_instruction_set(isa):
    done = run_isa("import forward_child; forward_child.main()", isa)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["isa"] == isa
    assert len(result["errors"]) == len(ENCODINGS) * 5 * 2 * len(GATES) * 3

    def bound(name: str) -> float:
        # Error by quantisation of inputs and activations; weights of 16 bits use float activations.
        if name.startswith("16 bits") or name.endswith(", 32"):
            return 3e-6
        return 2e-4 if name.endswith(", 16") else 5e-2

    assert {name: e for name, e in result["errors"].items() if not e < bound(name)} == {}
    assert {name: equal for name, equal in result["equal"].items() if not all(equal)} == {}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    encoding=st.sampled_from(ENCODINGS),
    hidden=st.integers(1, 400),
    neurons=st.integers(1, 400),
    bias=st.booleans(),
    tokens=st.integers(1, 11),
    threads=st.integers(1, 4),
    data=st.data(),
)
def test_bits_do_not_depend_on_threads_cuts_or_other_tokens(
    seed, encoding, hidden, neurons, bias, tokens, threads, data
):
    bits, fp16 = encoding
    call = Call.random(seed, hidden, neurons, bits, fp16=fp16, bias=bias, tokens=tokens)
    _native.set_num_threads(1)
    expected = call.run(activation_bits=32)
    cuts = data.draw(st.lists(st.integers(0, len(call.entries)), max_size=4))
    _native.set_num_threads(threads)
    assert np.array_equal(expected, call.run(activation_bits=32))
    assert np.array_equal(expected, call.run(cuts=cuts, activation_bits=32))
    token = data.draw(st.integers(0, tokens - 1))
    assert np.array_equal(expected[token], call.alone(token, activation_bits=32))


def test_bits_do_not_depend_on_threads_where_all_of_them_have_work():
    call = Call.random(7, 1000, 600, 4, bias=True, tokens=9, experts=6)
    _native.set_num_threads(1)
    expected = call.run()
    for threads in (2, 3, 4, 7):
        _native.set_num_threads(threads)
        for _ in range(20):
            assert np.array_equal(expected, call.run())


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("mixed", [False, True])
def test_few_tokens_have_the_same_bits_in_whole_blocks_and_in_two_phases(bits, tokens, mixed):
    call = Call.random(11, 1000, 600, bits, bias=True, tokens=tokens, experts=6)
    if mixed:
        np.random.default_rng(0).shuffle(call.entries)
    _native.set_num_threads(7)
    lonely = call.run(cuts=range(1, len(call.entries)))  # too few blocks at a time to share them
    for threads in (1, 2, 3, 4, 7):
        _native.set_num_threads(threads)
        for _ in range(20):
            assert np.array_equal(lonely, call.run())
        assert np.array_equal(lonely, call.run(cuts=[len(call.entries) // 2 + 3]))


@pytest.mark.parametrize(("hidden", "tokens"), [(8192, 700), (64, 60_000)])
def test_more_tokens_than_scratch_holds_change_nothing(hidden, tokens):
    # 700 x 8192 inputs exceed the input scratch, 60000 tokens of one row the activation scratch.
    call = Call.random(3, hidden, 64, 4, tokens=tokens, experts=2)
    together = call.run()
    rng = np.random.default_rng(0)
    for token in [0, tokens - 1, *rng.integers(0, tokens, 20)]:
        assert np.array_equal(together[token], call.alone(int(token)))
    once = np.zeros_like(call.x)
    for entry in call.entries:
        _native.moe_forward(call.layout, _native.Gate(), call.x, *call.arrays([entry]), once)
    assert np.array_equal(together, once)


def test_a_token_may_appear_twice_in_a_row_and_out_accumulates():
    call = Call.random(5, 96, 64, 4, tokens=3, experts=1)
    call.tokens_of = [np.array([1, 1, 1, 1, 1], np.int32)]
    call.weights_of = [np.full(5, 0.5, np.float32)]
    out = np.ones_like(call.x)
    _native.moe_forward(call.layout, _native.Gate(), call.x, *call.arrays(), out, 32)
    assert (out[[0, 2]] == 1).all()
    reference = call.reference("silu")  # assignment there, so one of the five
    assert np.allclose(out[1], 1 + 5 * reference[1], rtol=1e-5, atol=1e-6)


def test_empty_lists_leave_out_alone():
    call = Call.random(5, 96, 64, 4, tokens=3, experts=1)
    out = np.ones_like(call.x)
    _native.moe_forward(call.layout, _native.Gate(), call.x, *call.arrays([]), out)
    call.tokens_of, call.weights_of = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
    _native.moe_forward(call.layout, _native.Gate(), call.x, *call.arrays(), out)
    nothing = np.empty((0, 96), np.float32)
    _native.moe_forward(call.layout, _native.Gate(), nothing, *call.arrays(), nothing.copy())
    assert (out == 1).all()


class TestRefusals:
    def setup_method(self):
        self.call = Call.random(5, 96, 130, 4, tokens=3, experts=2)
        self.out = np.zeros_like(self.call.x)
        names = ("block_ptr", "block_index", "block_row", "row_start", "row_token", "row_weight")
        self.arguments = dict(zip(names, self.call.arrays(), strict=True))
        self.arguments |= {
            "x": self.call.x,
            "out": self.out,
            "gate": _native.Gate(),
        }

    def refused(self, words: str, **changes: object) -> None:
        with pytest.raises(ValueError, match=words):
            _native.moe_forward(self.call.layout, **{**self.arguments, **changes})
        assert not self.out.any()

    def changed(self, name: str, at: int, value: int) -> dict[str, np.ndarray]:
        array = self.arguments[name].copy()
        array[at] = value
        return {name: array}

    def test_addresses_of_zero(self):
        self.refused(r"block_ptr\[2\] is null", **self.changed("block_ptr", 2, 0))

    def test_indices_out_of_range(self):
        self.refused(
            r"block_index\[1\] is 3; it must be between 0 and 2", **self.changed("block_index", 1, 3)
        )
        self.refused(r"block_index\[0\] is -1", **self.changed("block_index", 0, -1))
        self.refused(r"block_row\[4\] is 2; it must be between 0 and 1", **self.changed("block_row", 4, 2))
        self.refused(r"row_token\[1\] is 3; it must be between 0 and 2", **self.changed("row_token", 1, 3))
        self.refused(r"row_token\[0\] is -1", **self.changed("row_token", 0, -1))

    def test_row_starts_that_do_not_ascend_to_the_end(self):
        last = len(self.arguments["row_token"])
        self.refused(r"row_start\[0\] is 1", **self.changed("row_start", 0, 1))
        self.refused(r"row_start\[1\] is -2", **self.changed("row_start", 1, -2))
        self.refused(rf"row_start\[1\] is {last + 1}", **self.changed("row_start", 1, last + 1))
        self.refused(r"row_start\[2\]", **self.changed("row_start", 2, last + 1))
        self.refused("row_start is empty", row_start=np.empty(0, np.int32))

    def test_shapes_types_and_order(self):
        self.refused(r"x has shape \[3, 95\]; it must be \[3, 96\]", x=np.zeros((3, 95), np.float32))
        self.refused("x has 1 dimensions", x=np.zeros(96, np.float32))
        self.refused("x has dtype float64", x=np.zeros((3, 96)))
        self.refused("x is not C-contiguous", x=np.asfortranarray(self.call.x))
        self.refused(r"out has shape \[2, 96\]", out=np.zeros((2, 96), np.float32))
        self.refused("out overlaps x", out=self.call.x)
        self.refused("block_ptr has dtype int64", block_ptr=self.arguments["block_ptr"].astype(np.int64))
        self.refused("block_index has shape", block_index=self.arguments["block_index"][:-1])
        self.refused("row_weight has shape", row_weight=self.arguments["row_weight"][:-1])
        frozen = np.zeros_like(self.out)
        frozen.flags.writeable = False
        self.refused("out is read-only", out=frozen)


def test_gates_that_cannot_be_computed_are_refused():
    with pytest.raises(ValueError, match='activation "none" is unknown; choose one of: silu, gelu'):
        _native.Gate("none")
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"limit is .*; it must be positive"):
            _native.Gate(limit=limit)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_gates_follow_their_formulas_to_float32_precision(gate):
    rng = np.random.default_rng(0)
    rows = np.concatenate([np.linspace(-20, 20, 4001), rng.standard_normal(1000) * 3]).astype(np.float32)
    up = (3 * rng.standard_normal(len(rows))).astype(np.float32)
    got = _native.apply_gate(gate.native, rows, up)
    want = activate(gate, rows, up)
    # Where an argument of exp or erf is itself rounded, the error is relative to the input.
    slack = 0 if gate == Gate() else 2e-7 * np.abs(rows) * (np.abs(up) + 1)
    assert (np.abs(got - want) <= 1e-6 * np.abs(want) + slack + 1e-30).all()


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_gates_stay_finite_for_huge_inputs_and_keep_nan(gate):
    rows = np.array([-3e38, -1e30, -1e4, -200, -104, -88, 88, 104, 1e4, 1e30, 3e38, 0.0, -0.0], np.float32)
    up = np.full_like(rows, 0.25)
    got = _native.apply_gate(gate.native, rows, up)
    with np.errstate(over="ignore"):  # a square may be infinite
        assert (np.isfinite(got) == np.isfinite(activate(gate, rows, up).astype(np.float32))).all()
    assert (np.abs(got[:4]) < 1e-6).all()
    nan = np.array([np.nan], np.float32)
    one = np.ones(1, np.float32)
    assert np.isnan(_native.apply_gate(gate.native, nan, one)).all()
    assert np.isnan(_native.apply_gate(gate.native, one, nan)).all()


def test_exponential_is_within_two_ulp():
    # silu(x) / x = 1 / (1 + e^-x): e^x for x << 0, up to a rounding each of sum, quotient and product.
    x = np.linspace(-80, -18, 200_001).astype(np.float32)
    got = _native.apply_gate(_native.Gate(), x, np.ones_like(x)).astype(np.float64) / x
    want = np.exp(x.astype(np.float64)) / (1 + np.exp(x.astype(np.float64)))
    assert (np.abs(got / want - 1) < 2 * 2.0**-23 + 1.5 * 2.0**-23).all()


def test_calls_from_several_python_threads_do_not_disturb_each_other():
    _native.set_num_threads(3)
    calls = [Call.random(seed, 300, 200, bits, tokens=5) for seed, bits in enumerate((2, 3, 4, 6, 8, 16))]
    expected = [call.run() for call in calls]
    failures: list[int] = []

    def work(index: int) -> None:
        for _ in range(30):
            if not np.array_equal(expected[index], calls[index].run()):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for count in (1, 4, 2, 3):
        _native.set_num_threads(count)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert failures == []
