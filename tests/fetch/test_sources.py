"""Which repository, file and bits are proposed, on every reference machine."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hub_server import COMMIT
from plan_support import desktop

from moechat.errors import DoesNotFitError
from moechat.fetch.repository import RemoteFile, RemoteRepository
from moechat.fetch.sources import (
    FEWER_BITS,
    USUAL_BITS,
    WORTH_A_BIT,
    Choice,
    Source,
    bits_in_name,
    choose_source,
    list_sources,
    speeds_by_bits,
)
from moechat.hardware.profile_file import reference_names, reference_profile
from moechat.planning.expect import Expected

GIB = 1 << 30
MAKER, FP8, GGUF = "maker/Model-35B", "maker/Model-35B-FP8", "people/Model-35B-GGUF"


def repository(name: str, files: Mapping[str, float]) -> RemoteRepository:
    """A repository with files of so many GiB."""
    return RemoteRepository(
        name,
        None,
        COMMIT,
        {path: RemoteFile(path, int(size * GIB), "0" * 64, None) for path, size in files.items()},
        None,
    )


MAKERS = repository(
    MAKER,
    {
        "config.json": 0,
        "model.safetensors.index.json": 0,
        "model-00001-of-00002.safetensors": 35,
        "model-00002-of-00002.safetensors": 35,
        "original/model-1.safetensors": 70,
    },
)
OTHERS = [
    repository(FP8, {"model.safetensors": 36}),
    repository(
        GGUF,
        {
            "Model-35B-Q8_0-00001-of-00002.gguf": 20,
            "Model-35B-Q8_0-00002-of-00002.gguf": 17,
            "Model-35B-Q6_K.gguf": 28,
            "UD/Model-35B-UD-Q4_K_XL.gguf": 22,
            "Model-35B-IQ4_XS.gguf": 19,
            "Model-35B-BF16-00001-of-00003.gguf": 30,  # two parts are missing
            "mmproj-F16.gguf": 1,
        },
    ),
]


def all_sources() -> list[Source]:
    return [
        *list_sources(MAKERS, original=True),
        *(source for remote in OTHERS for source in list_sources(remote, original=False)),
    ]


def speed(rate: float, *, far: str | None = None, bits: int = 4) -> Expected:
    return Expected(rate, None, None, "measured", 1, 1, bits, 1, 1, 1.0, far, 1, "ram")  # type: ignore[arg-type]


def test_sources_are_complete_models_with_the_size_of_their_weights() -> None:
    found = {source.name: (source.nbytes // GIB, source.bits, source.original) for source in all_sources()}
    assert found == {
        MAKER: (70, 16.0, True),
        FP8: (36, 8.0, False),
        f"{GGUF}:Model-35B-Q8_0-00001-of-00002.gguf": (37, 8.5, False),
        f"{GGUF}:Model-35B-Q6_K.gguf": (28, 6.56, False),
        f"{GGUF}:Model-35B-UD-Q4_K_XL.gguf": (22, 4.5, False),
        f"{GGUF}:Model-35B-IQ4_XS.gguf": (19, 4.25, False),
    }


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("m-Q4_K_M.gguf", 4.85),
        ("m-q8_0.gguf", 8.5),
        ("m-UD-Q3_K_XL.gguf", 3.5),
        ("m-UD-IQ2_XXS.gguf", 2.06),
        ("m-IQ1_M.gguf", 1.75),
        ("m-UD-Q1_0_XL.gguf", 1.5),
        ("gpt-oss-20b-mxfp4.gguf", 4.25),
        ("m.gguf", None),
        ("Q8-model.gguf", None),
    ],
)
def test_bits_are_read_from_names(name: str, bits: float | None) -> None:
    assert bits_in_name(name) == bits


def kinds(chosen: Choice) -> list[str]:
    return [source.name.rpartition("-")[2].partition(".")[0] for source in chosen.sources]


def test_the_smallest_download_that_loses_hardly_anything_when_converted_comes_first() -> None:
    chosen = choose_source(all_sources(), {4: speed(10)}, bits=4)
    assert (chosen.bits, chosen.stays) == (4, False)
    # FP8 before Q8_0 before the maker's 16 bits; then those with too few bits, most bits first.
    assert kinds(chosen) == ["FP8", "00002", "35B", "Q6_K", "Q4_K_XL", "IQ4_XS"]
    assert chosen.why == "the smallest of 3 downloads that lose hardly anything at 4 bits"
    # For a store of 3 bits Q6_K has enough bits; for one of 8 only the maker's have.
    assert choose_source(all_sources(), {3: speed(10)}, bits=3).sources[0].bits == 6.56
    for_eight = choose_source(all_sources(), {8: speed(10)}, bits=8)
    assert for_eight.sources[0].name == MAKER
    assert for_eight.why == "the only one of 6 that loses hardly anything at 8 bits"


def test_files_that_stay_as_they_are_lose_nothing() -> None:
    chosen = choose_source(all_sources(), {4: speed(10)})
    assert chosen.stays
    assert kinds(chosen) == ["IQ4_XS", "Q4_K_XL", "FP8", "00002", "35B", "Q6_K"]
    # Bits that the user gave are made, whatever the files have.
    assert kinds(choose_source(all_sources(), {4: speed(10)}, bits=4))[0] == "FP8"


def test_the_makers_own_format_counts_as_the_original_at_any_size() -> None:
    release = repository("maker/Small-FP4", {"model.safetensors": 12})
    files = repository("people/Small-GGUF", {"Small-MXFP4.gguf": 11})
    sources = [*list_sources(release, original=True), *list_sources(files, original=False)]
    assert choose_source(sources, {4: speed(10)}, bits=4).sources[0].name == "maker/Small-FP4"


def test_without_the_makers_repository_the_next_best_is_taken() -> None:
    only = [source for source in all_sources() if source.bits in (4.5, 4.25)]
    chosen = choose_source(only, {4: speed(10)}, bits=4)
    assert chosen.sources[0].bits == 4.5
    assert chosen.why == "the files with most bits; converting them to 4 bits adds a second loss"
    with pytest.raises(DoesNotFitError, match="none of the repositories"):
        choose_source([], {4: speed(10)})


@pytest.mark.parametrize(
    ("speeds", "bits", "why"),
    [
        ({4: speed(3, far="disk"), 3: speed(3.1, far="disk")}, 4, ""),
        ({4: speed(3, far="disk"), 3: speed(6)}, 3, "would wait for the disk: 2.0 times as fast"),
        ({4: speed(3, far="ram"), 3: speed(9)}, 4, ""),  # RAM is no disk
        ({3: speed(6)}, 3, "4 do not fit into memory"),
        ({}, None, "does not fit"),
    ],
)
def test_fewer_bits_are_proposed_only_where_they_pay(
    speeds: dict[int, Expected], bits: int | None, why: str
) -> None:
    if bits is None:
        with pytest.raises(DoesNotFitError, match=why):
            choose_source(all_sources(), speeds)
        return
    chosen = choose_source(all_sources(), speeds)
    assert chosen.bits == bits
    assert why in chosen.why
    assert choose_source(all_sources(), speeds, bits=4).bits == 4  # given


@pytest.mark.parametrize("machine", reference_names())
def test_every_reference_machine_gets_a_source_and_bits_that_its_memory_can_use(machine: str) -> None:
    profile = reference_profile(machine)
    speeds = speeds_by_bits("gpt-oss", None, profile=profile)
    chosen = choose_source(all_sources(), speeds)
    assert chosen.sources[0].keeps(chosen.bits, stays=chosen.stays)
    tier = profile.ram if profile.gpu is None else profile.gpu.vram
    assert 0 < speeds[chosen.bits].near_bytes <= tier.value
    # All shipped machines hold gpt-oss-20b in RAM and graphics memory, but for one without a GPU.
    waits = machine == "ssd-only-16g"
    assert speeds[USUAL_BITS].reads_disk == (FEWER_BITS in speeds) == waits
    if waits:
        gain = speeds[FEWER_BITS].tokens_per_s / speeds[USUAL_BITS].tokens_per_s
        assert gain > 1
        assert chosen.bits == (FEWER_BITS if gain >= WORTH_A_BIT else USUAL_BITS)
    else:
        assert chosen.bits == USUAL_BITS


def test_a_model_that_fits_with_no_bits_is_refused_but_for_bits_that_the_user_gave() -> None:
    tiny = desktop(ram=2 * GIB, gpu=False)
    with pytest.raises(DoesNotFitError, match="the least that works is"):
        speeds_by_bits("qwen3", None, profile=tiny)
    assert speeds_by_bits("qwen3", 4, profile=tiny) == {}
    assert speeds_by_bits("org/unknown", None, profile=tiny) == {}
