"""The shipped machines are plausible and sourced; what is not of the form is refused by file and key."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from math import nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from profile_rates import rewritten

from moechat.errors import UsageError
from moechat.hardware import profile_file
from moechat.hardware.profile import Figure, HardwareProfile
from moechat.hardware.profile_file import (
    profile_from_json,
    profile_to_json,
    read_profile,
    reference_names,
    reference_profile,
)

SHIPPED = ROOT / "profiles"
GB = 1e9
# Raw bytes a second of a PCIe lane, after line coding.
PCIE_LANE = {3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130, 5: 32e9 / 8 * 128 / 130}
# Data sheets: GiB of VRAM, GB/s of it, dense 16-bit TFLOPS with 16-bit sums, generation and lanes as it runs.
GPUS = {
    "rtx3060-12g": (12, 360, 51.2, 4, 16),
    "rtx3080-10g": (10, 760, 119, 3, 16),
    "rtx3090-24g": (24, 936, 142, 4, 16),
    "rtx4060ti-16g": (16, 288, 88.2, 4, 8),
    "rtx4070-12g": (12, 504, 116.6, 4, 16),
    "rtx4070ti-super-16g": (16, 672, 176.4, 4, 16),
    "rtx4090-24g": (24, 1008, 330.3, 4, 16),
    "rtx5070ti-16g": (16, 896, 175.8, 5, 16),
    "rtx5080-16g": (16, 960, 225.1, 5, 16),
    "rtx5090-32g": (32, 1792, 419, 5, 16),
    "laptop-rtx4060-8g": (8, 256, 60, 4, 8),
}
# Megatransfers a second, and bytes of each over all channels.
MEMORY = {
    "rtx3060-12g": (3200, 16),
    "rtx3080-10g": (2933, 16),
    "rtx3090-24g": (3200, 16),
    "rtx4060ti-16g": (5200, 16),
    "rtx4070-12g": (5600, 16),
    "rtx4070ti-super-16g": (6000, 16),
    "rtx4090-24g": (6000, 16),
    "rtx5070ti-16g": (5600, 16),
    "rtx5080-16g": (6000, 16),
    "rtx5090-32g": (6400, 16),
    "laptop-rtx4060-8g": (5600, 16),
    "ssd-only-16g": (3200, 16),
    "old-desktop-32g": (2666, 16),
    "strix-halo-128g": (8000, 32),
}
NAMES = sorted(MEMORY)
WITH_GPU = sorted(GPUS)


def figures(value: Any, place: str = "") -> Iterator[tuple[str, Figure]]:
    if isinstance(value, Figure):
        yield place, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from figures(getattr(value, field.name), f"{place}.{field.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from figures(item, f"{place}.{key}")


def test_the_shipped_files_are_the_ones_that_are_checked_here() -> None:
    assert reference_names() == NAMES == sorted(path.stem for path in SHIPPED.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    profile = reference_profile(name)
    assert profile.name == name
    assert profile.key == ""
    found = dict(figures(profile))
    assert len(found) > 25
    for place, figure in found.items():
        assert figure.origin != "measured", f"{place}: nobody has run moechat on this machine"
        assert figure.source.strip(), place
        assert "@" not in figure.source, place
        if figure.origin == "published" or (figure.origin == "datasheet" and place != ".ram"):
            assert "https://" in figure.source, place
        if figure.origin == "estimate":
            assert re.search(r"\d", figure.source) or place.endswith("launch"), f"{place} has no rule"


def ruled(rule: str) -> float | None:
    """What a rule's own arithmetic gives, in 10^9 a second; ``None`` for rules in words."""
    if match := re.match(r"([\d.]+) × \(([\d.]+) - ([\d.]+)\) GB/s", rule):
        share, whole, part = map(float, match.groups())
        return share * (whole - part)
    if match := re.match(r"(\d+) tensor cores × 128 operations × ([\d.]+) GHz", rule):
        return float(match[1]) * 128 * float(match[2])
    if not (match := re.match(r"([\d.]+) × ([\d.]+) (?:GB|GFLOP)/s", rule)):
        return None
    result = float(match[1]) * float(match[2])
    if match := re.search(r"no more than the ([\d.]+) GB/s", rule):
        result = min(result, float(match[1]))
    if match := re.search(r"and ([\d.]+) of that", rule):
        result *= float(match[1])
    return result


@pytest.mark.parametrize("name", NAMES)
def test_estimates_follow_their_rules(name: str) -> None:
    checked = 0
    for place, figure in figures(reference_profile(name)):
        result = ruled(figure.source) if figure.origin == "estimate" else None
        if result is not None:
            assert figure.value == pytest.approx(result * GB, rel=2e-3), place
            checked += 1
    assert checked >= 20


@pytest.mark.parametrize("name", NAMES)
def test_memory_and_processor_are_within_what_they_can_do(name: str) -> None:
    profile = reference_profile(name)
    transfers, width = MEMORY[name]
    assert 0.4 < profile.ram_bandwidth.value / (transfers * 1e6 * width) < 0.95
    assert profile.ram.value % (1 << 30) == 0
    assert profile.ram.value >= 8 << 30
    assert set(profile.expert_rate) == {2, 3, 4, 8, 16}
    for bits, rates in profile.expert_rate.items():
        values = [figure.value for _, figure in sorted(rates.items())]
        assert values == sorted(values), "more threads are not slower"
        assert min(rates) == 1
        assert max(rates) == profile.cores
        assert 3 * GB <= values[0] <= 20 * GB
        assert values[-1] < profile.ram_bandwidth.value
        assert 3 * GB < profile.expert_rate_together[bits].value <= values[-1]
        assert 100e9 <= profile.expert_flops[bits].value <= 5e12


@pytest.mark.parametrize("name", NAMES)
def test_cpu_rates_are_those_of_their_derivation(name: str) -> None:
    text = (SHIPPED / f"{name}.toml").read_text(encoding="utf-8")
    assert rewritten(name, text) == text, "run scripts/bench/profile_rates.py"


@pytest.mark.parametrize("name", NAMES)
def test_derived_cpu_rates_have_ranges_that_the_memory_allows(name: str) -> None:
    profile = reference_profile(name)
    assert profile.clock is not None
    for bits, rates in profile.expert_rate.items():
        derived = [*rates.values(), profile.expert_rate_together[bits], profile.expert_flops[bits]]
        for figure in derived:
            assert figure.low is not None
            assert figure.high is not None
            assert 0.3 * figure.value <= figure.low <= figure.value <= figure.high <= 3 * figure.value
        whole = rates[profile.cores]
        assert whole.high is not None
        assert whole.low is not None
        assert whole.low < whole.value < whole.high < profile.ram_bandwidth.value
        together = profile.expert_rate_together[bits]
        for end in ("low", "high"):
            assert together.at(end).value <= whole.at(end).value


def test_a_profile_at_one_end_has_no_ranges_and_changes_nothing_else() -> None:
    profile = reference_profile("rtx3060-12g")
    for end in ("low", "high"):
        there = profile.with_experts_at(end)
        for bits, rates in profile.expert_rate.items():
            for threads, rate in rates.items():
                found = there.expert_rate[bits][threads]
                assert found.value == getattr(rate, end)
                assert found.low is None
            assert there.expert_rate_together[bits].value == getattr(profile.expert_rate_together[bits], end)
            assert there.expert_flops[bits].value == getattr(profile.expert_flops[bits], end)
        assert (there.links, there.ram_bandwidth) == (profile.links, profile.ram_bandwidth)


@pytest.mark.parametrize(("low", "high"), [(2.0, 3.0), (0.1, 0.9), (0.5, None), (None, 2.0), (nan, 2.0)])
def test_a_figure_outside_of_its_range_is_an_error(low: float | None, high: float | None) -> None:
    with pytest.raises(ValueError, match="range"):
        Figure(1.0, "estimate", "a rule", low, high)


def test_json_of_a_figure_without_a_range_has_no_keys_for_it() -> None:
    found = profile_to_json(reference_profile("rtx3060-12g"))
    assert set(found["ram"]) == {"value", "origin", "source"}
    assert set(found["expert_rate"]["4"]["6"]) == {"value", "origin", "source", "low", "high"}
    with pytest.raises(UsageError, match="a figure has low, origin, source, value"):
        profile_from_json({**found, "ram": {**found["ram"], "low": 1.0}})


def test_json_of_earlier_versions_is_read() -> None:
    found = profile_to_json(reference_profile("rtx3060-12g"))
    del found["clock"]
    assert profile_from_json(found).clock is None


@pytest.mark.parametrize("name", NAMES)
def test_links_are_within_what_they_can_carry(name: str) -> None:
    profile = reference_profile(name)
    assert set(profile.links) == ({"file", "gpu"} if name in GPUS else {"file"})
    for kind, link in profile.links.items():
        sizes = sorted(link.bandwidth)
        values = [link.bandwidth[size].value for size in sizes]
        assert values == sorted(values), "larger transfers are not slower"
        assert sizes[0] == 256 << 10
        assert sizes[-1] >= 16 << 20
        assert link.together is not None
        assert 0.5 * values[-1] < link.together.value <= values[-1]
        # The latency includes the transfer itself.
        assert sizes[0] / values[0] < link.latency.value < 2e-3
        if kind == "file":
            assert 0.4 * GB < values[0] < 15 * GB
        else:
            assert profile.gpu is not None
            most = PCIE_LANE[profile.gpu.pcie_generation] * profile.gpu.pcie_lanes
            assert 0.6 * most < values[-1] < 0.95 * most
            assert values[-1] < profile.ram_bandwidth.value


@pytest.mark.parametrize("name", WITH_GPU)
def test_gpus_are_within_their_data_sheets(name: str) -> None:
    gpu = reference_profile(name).gpu
    assert gpu is not None
    vram, bandwidth, tflops, generation, lanes = GPUS[name]
    assert 0.99 * vram <= gpu.vram.value / (1 << 30) <= vram
    assert gpu.vram_free == gpu.vram
    assert 0.85 * bandwidth <= gpu.bandwidth.value / GB <= bandwidth
    # Consumer GPUs halve the rate when sums have 32 bits; boost clocks beyond the stated ones add some.
    assert 0.4 * tflops <= gpu.flops.value / 1e12 <= 0.6 * tflops
    assert (gpu.pcie_generation, gpu.pcie_lanes) == (generation, lanes)
    assert 1e-6 <= gpu.launch.value <= 20e-6
    # GA10x, AD10x, GB20x: https://developer.nvidia.com/cuda-gpus
    series = int(re.findall(r"RTX (\d)0", gpu.name)[0])
    assert gpu.capability == {3: (8, 6), 4: (8, 9), 5: (12, 0)}[series]
    assert gpu.sms is not None
    assert gpu.l2_bytes is not None
    assert 3 << 20 <= gpu.l2_bytes <= 96 << 20
    # 128 cores an SM, two operations each, four times that with 16-bit sums: what is left is a clock.
    assert 1.4e9 <= tflops * 1e12 / (gpu.sms * 128 * 2 * 4) <= 2.7e9


def test_machines_without_a_gpu_have_none() -> None:
    for name in set(NAMES) - set(GPUS):
        assert reference_profile(name).gpu is None


@pytest.mark.parametrize("name", NAMES)
def test_json_gives_the_same_profile_back(name: str) -> None:
    profile = reference_profile(name)
    assert profile_from_json(json.loads(json.dumps(profile_to_json(profile)))) == profile


@pytest.mark.parametrize("written", [" RTX4090-24G ", "rtx4090_24g", "Rtx4090 24g"])
def test_names_are_forgiving(written: str) -> None:
    assert reference_profile(written).name == "rtx4090-24g"


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("rtx3060-12gb", "rtx3060-12g"),
        ("4090", "rtx4090-24g"),
        ("RTX 4060", "laptop-rtx4060-8g or rtx4060ti-16g"),
        ("ssdonly-16g", "ssd-only-16g"),
        ("../../etc/passwd", "there are: laptop-rtx4060-8g"),
        ("", "there are: "),
    ],
)
def test_the_hint_for_an_unknown_name_lists_similar_ones(written: str, hint: str) -> None:
    with pytest.raises(UsageError, match="no hardware profile") as caught:
        reference_profile(written)
    assert hint in (caught.value.hint or "")


def test_an_installed_package_reads_the_profiles_inside_it(tmp_path: Path) -> None:
    room = tmp_path / "moechat" / "hardware"
    room.mkdir(parents=True)
    shutil.copy(str(profile_file.__file__), room)
    (tmp_path / "moechat" / "profiles").mkdir()
    shutil.copy(SHIPPED / "ssd-only-16g.toml", tmp_path / "moechat" / "profiles")
    # In a clone this lies beside the package; inside one it is somebody else's.
    (tmp_path / "profiles").mkdir()
    shutil.copy(SHIPPED / "rtx4090-24g.toml", tmp_path / "profiles")
    spec = importlib.util.spec_from_file_location("installed_profile_file", room / "profile_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.reference_names() == ["ssd-only-16g"]
    assert module.reference_profile("ssd-only-16g") == reference_profile("ssd-only-16g")


def test_the_installed_distribution_has_profiles() -> None:
    files = importlib.metadata.files("moechat")
    assert files is not None
    assert any(str(file).endswith("moechat/profiles/README.md") for file in files)


SAMPLE = (SHIPPED / "rtx3060-12g.toml").read_text(encoding="utf-8")
NAMED = 'size_gib = { value = 32, origin = "datasheet", source ='


def written(tmp_path: Path, text: str, name: str = "sample.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


REFUSED = [
    ("title", 'title = "', 'titel = "', "title: is missing", "titel"),
    ("empty", 'model = "AMD Ryzen 5 5600"', 'model = " "', "cpu.model: is empty", None),
    ("date", 'created = "2026-11-21"', 'created = "21.11.2026"', "created: is '21.11.2026'", None),
    ("isa", 'isa = "avx2"', 'isa = "avx3"', "cpu.isa: is 'avx3'", "avx2"),
    ("cores", "cores = 6", "cores = 0", "cpu.cores: is 0", None),
    ("cores are whole", "cores = 6", "cores = 6.0", "cpu.cores: is 6.0", None),
    ("cores are counted", "cores = 6", "cores = true", "cpu.cores: is True", None),
    ("all cores", "cores = 6", "cores = 8", "cpu.expert_gb_per_s.2bit.8threads: is missing", None),
    ("too many threads", "cores = 6", "cores = 4", "6threads: is more than the 4 cores", None),
    (
        "bits",
        "expert_gb_per_s.8bit",
        "expert_gb_per_s.5bit",
        "cpu.expert_gb_per_s.5bit: is not known",
        "4bit",
    ),
    ("a zero before", "3threads =", "03threads =", "03threads: is not known", "6threads"),
    ("unit", "size_gib", "size_gb", "ram.size_gib: is missing", "size_gb"),
    ("unit of a link", "latency_us", "latency_ms", "link.file.latency_us: is missing", "latency_ms"),
    ("unit of a size", "256KiB", "256KB", "link.file.gb_per_s.256KB: is not known", "256KiB"),
    ("no value", "{ value = 12288, ", "{ ", "gpu.vram_mib.value: is missing", None),
    ("text value", "value = 12288", 'value = "12288"', "gpu.vram_mib.value: is '12288'", None),
    ("truth value", "value = 12288", "value = true", "gpu.vram_mib.value: is True", None),
    ("negative", "value = 12288", "value = -12288", "gpu.vram_mib.value: is -12288", None),
    ("nothing", "value = 12288", "value = 0", "gpu.vram_mib.value: is 0", None),
    ("no number", "value = 12288", "value = nan", "gpu.vram_mib.value: is nan", None),
    ("no end", "value = 12288", "value = inf", "gpu.vram_mib.value: is inf", None),
    ("too large", "value = 12288", "value = 1" + "0" * 400, "gpu.vram_mib.value: is 1000", None),
    ("larger than any", "value = 12288", "value = 1e290", "gpu.vram_mib.value: is 1e+290", None),
    ("smaller than any", "value = 5.88", "value = 5e-324", "256KiB.value: is 5e-324", None),
    ("bare number", NAMED, "size_gib = 32 #", "ram.size_gib: is 32, not a table", None),
    ("origin", 'origin = "datasheet"', 'origin = "guess"', "ram.size_gib.origin: is 'guess'", "estimate"),
    ("no origin", 'origin = "datasheet", ', "", "ram.size_gib.origin: is missing", None),
    (
        "no source",
        ', source = "nvidia-smi',
        ', sauce = "nvidia-smi',
        "gpu.vram_mib.source: is missing",
        "sauce",
    ),
    (
        "more in a figure",
        "{ value = 12288,",
        "{ value = 12288, peak = 1,",
        "gpu.vram_mib.peak: is not known",
        "",
    ),
    (
        "one end",
        "{ value = 12288,",
        "{ value = 12288, low = 12000,",
        "gpu.vram_mib.high: is missing",
        None,
    ),
    (
        "the other end",
        "{ value = 12288,",
        "{ value = 12288, high = 13000,",
        "gpu.vram_mib.low: is missing",
        None,
    ),
    (
        "above its range",
        "{ value = 12288,",
        "{ value = 12288, low = 1, high = 12000,",
        "gpu.vram_mib.value: 12288 is outside of its range, 1 to 12000",
        None,
    ),
    (
        "below its range",
        "{ value = 12288,",
        "{ value = 12288, low = 12300, high = 13000,",
        "gpu.vram_mib.value: 12288 is outside of its range, 12300 to 13000",
        None,
    ),
    (
        "end of a range",
        "{ value = 12288,",
        "{ value = 12288, low = -1, high = 13000,",
        "gpu.vram_mib.low: is -1",
        None,
    ),
    ("clock", "clock_ghz = { value = 3.95", "clock_ghz = { value = 0", "cpu.clock_ghz.value: is 0", None),
    ("unknown name", '"@ssd4"', '"@ssd5"', "[sources] has no 'ssd5'", "ssd4"),
    ("unused name", "[sources]", '[sources]\nidle = "nobody"', "sources.idle: is cited by no figure", None),
    ("source is a text", "[sources]", "[sources]\nidle = 3", "sources.idle: is 3, not a text", None),
    ("unknown table", "[ram]", "[rom]\n[ram]", "rom: is not known", "ram"),
    ("lanes", "pcie_lanes = 16", "pcie_lanes = 12", "gpu.pcie_lanes: is 12, not one of", None),
    ("generation", "pcie_generation = 4", "pcie_generation = 40", "gpu.pcie_generation: is 40", None),
    ("not TOML", "[ram]", "[ram", "is not TOML", None),
    (
        "link to nothing",
        SAMPLE[SAMPLE.index("[gpu]") :],
        "",
        "link.gpu: is here, but there is no [gpu]",
        None,
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "fact", "hint"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_a_malformed_file_is_refused_by_file_and_key(
    tmp_path: Path, old: str, new: str, fact: str, hint: str | None
) -> None:
    assert old in SAMPLE
    path = written(tmp_path, SAMPLE.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)
    assert fact in str(caught.value)
    if hint is not None:
        assert hint in (caught.value.hint or "")


def test_equal_sizes_are_refused(tmp_path: Path) -> None:
    line = next(line for line in SAMPLE.splitlines() if line.startswith("256MiB"))
    path = written(tmp_path, SAMPLE.replace(line, line + "\n" + line.replace("256MiB", "262144KiB")))
    with pytest.raises(UsageError, match="says the same as 256MiB"):
        read_profile(path)


def test_a_missing_link_is_refused(tmp_path: Path) -> None:
    start, end = SAMPLE.index("[link.gpu]"), SAMPLE.index("[gpu]")
    with pytest.raises(UsageError, match=r"link\.gpu: is missing"):
        read_profile(written(tmp_path, SAMPLE[:start] + SAMPLE[end:]))


@pytest.mark.parametrize(
    "name", ["Sample.toml", "my profile.toml", "sample.txt", "a--b.toml", "-a.toml", ".toml"]
)
def test_the_name_of_a_file_is_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a valid profile name"):
        read_profile(written(tmp_path, SAMPLE, name))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.toml cannot be read") as caught:
        read_profile(tmp_path / "nothing.toml")
    assert "--list-gpus" in (caught.value.hint or "")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(UsageError, match=r"folder\.toml cannot be read"):
        read_profile(tmp_path / "folder.toml")
    (tmp_path / "latin.toml").write_bytes('title = "\u00e9"'.encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.toml is not TOML"):
        read_profile(tmp_path / "latin.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(UsageError, match=r"huge\.toml has more than 1048576 bytes"):
        read_profile(tmp_path / "huge.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000, encoding="utf-8")
    with pytest.raises(UsageError, match=r"deep\.toml is not TOML"):
        read_profile(tmp_path / "deep.toml")


def test_units_become_bytes_and_seconds() -> None:
    profile = reference_profile("rtx3060-12g")
    assert profile.gpu is not None
    assert profile.gpu.vram.value == 12 << 30
    assert profile.ram.value == 32 << 30
    assert profile.gpu.launch.value == pytest.approx(5e-6)
    assert profile.links["file"].latency.value == pytest.approx(247e-6)
    assert profile.links["file"].bandwidth[16 << 20].value == pytest.approx(6.4e9)
    assert profile.clock is not None
    assert profile.clock.value == pytest.approx(3.95e9)
    assert profile.expert_rate[4][6].low == pytest.approx(0.6 * 40.96e9, rel=1e-3)


def test_a_named_source_is_replaced_by_its_text() -> None:
    profile = reference_profile("rtx3060-12g")
    assert (
        profile.links["file"].bandwidth[16 << 20].source.startswith("O_DIRECT reads of a PCIe 4.0 x4 drive")
    )
    assert profile.gpu is not None
    assert profile.gpu.bandwidth.source.startswith("0.914 × 360 GB/s of the data sheet (clpeak reads")


LINES = SAMPLE.splitlines()


@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(LINES) - 1),
            st.sampled_from(["drop", "double", "swap", "cut"]),
            st.integers(0, 60),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_an_edited_file_is_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, edits: Any
) -> None:
    lines = list(LINES)
    for at, kind, amount in edits:
        at = min(at, len(lines) - 1)
        if kind == "drop":
            del lines[at]
        elif kind == "double":
            lines.insert(at, lines[at])
        elif kind == "swap":
            lines[at], lines[0] = lines[0], lines[at]
        else:
            lines[at] = lines[at][:amount]
    path = written(tmp_path_factory.mktemp("edited"), "\n".join(lines))
    profile, refused = None, ""
    try:
        profile = read_profile(path)
    except UsageError as error:
        refused = str(error)
    if profile is None:
        assert str(path) in refused
        return
    for place, figure in figures(profile):
        assert figure.value > 0, place
        assert figure.source, place
    assert set(profile.links) == ({"file"} if profile.gpu is None else {"file", "gpu"})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))


WHOLE = profile_to_json(reference_profile("laptop-rtx4060-8g"))
DAMAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.just(10**400),
    st.just(float("inf")),
    st.just(float("nan")),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.just({}),
    st.just("missing"),
)


@given(place=st.sampled_from([path for path in places(WHOLE) if path]), damage=DAMAGE)
def test_damaged_json_is_read_or_refused(place: tuple[Any, ...], damage: Any) -> None:
    data = json.loads(json.dumps(WHOLE))
    table = data
    for key in place[:-1]:
        table = table[key]
    if damage == "missing":
        del table[place[-1]]
    else:
        table[place[-1]] = damage
    profile, refused = None, ""
    try:
        profile = profile_from_json(data)
    except UsageError as error:
        refused = str(error)
    if profile is None:
        assert "not readable" in refused
        return
    assert isinstance(profile, HardwareProfile)
    assert profile_from_json(profile_to_json(profile)) == profile
    for link in profile.links.values():
        assert link.rate(1 << 20) > 0


def test_json_with_fields_of_another_version_is_refused() -> None:
    with pytest.raises(UsageError, match="not readable"):
        profile_from_json({**WHOLE, "colour": "green"})
    with pytest.raises(UsageError, match="KeyError: 'links'"):
        profile_from_json({key: value for key, value in WHOLE.items() if key != "links"})
    links = {**WHOLE["links"], "file": {**WHOLE["links"]["file"], "kind": "gpu"}}
    with pytest.raises(UsageError, match="link file is of kind 'gpu'"):
        profile_from_json({**WHOLE, "links": links})
