"""Derives the CPU's expert rates of the reference machines in ``profiles/`` from a few figures of each.

Nobody has run moechat on these machines. What is known of each is its memory bandwidth, cores, clock and
instruction set; what a core does with the kernels was measured on one machine (``scripts/bench/cpu_rates``).
From these::

    GB/s at one token      = min(threads × a core's rate, share × memory bandwidth)
    ... with a busy link   = the same, with the bandwidth that the link leaves, and never more than alone
    GFLOP/s, many tokens   = cores × a core's rate × clock / measured clock

Each figure has a range, whose ends follow from the same formulas:

============ =============================== =========================== ===================================
what         low                             value                       high
============ =============================== =========================== ===================================
a core,      computes as :data:`SLOWER_CORE` as measured, blocks from    computes at the boost clock,
one token    or with half vectors, at the    memory                      memory :data:`NEARER_MEMORY` times
             base clock                                                  as fast
share of the :data:`LEAST_SHARE`             :data:`SHARE`                :data:`MOST_SHARE`
memory
a core, many as :data:`SLOWER_CORE` or with  at the mean of base and     at the boost clock, with whole
tokens       half vectors, at the base clock boost clock                 vectors
============ =============================== =========================== ===================================

At one token a core takes, for each byte, the time to read it and the part of the time to compute it that
reading does not hide: what it takes from memory beyond plain loads. Only the latter changes with clock and
core. Half vectors: a core with AVX-512 that computes 512 bits in two halves does what the measured core does
with AVX2. Run as a program, it rewrites the figures of all profiles in place; with ``--check`` it only says
which differ. The figures of other keys, and their sources, are written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
BITS = (2, 3, 4, 8, 16)


@dataclass(frozen=True)
class Core:
    """What one core does with experts of some bits.

    Attributes:
        streamed: GB/s at one token, blocks from memory.
        cached: GB/s at one token, blocks in the second-level cache.
        many: GFLOP/s with 256 tokens.
    """

    streamed: float
    cached: float
    many: float

    @property
    def unhidden(self) -> float:
        """Nanoseconds of computing a byte that reading it does not hide."""
        return 1 / self.streamed - 1 / READ


# Medians of one to three rounds of scripts/bench/cpu_rates on one machine, November 2026. Rounds differed by
# up to 7 %, with 2 and 8 bits from memory by up to 25 %. Two threads did 1.8 to 2.0 times this where both
# cores were free.
MEASURED: Mapping[str, Mapping[int, Core]] = {
    "avx512-vnni": {
        2: Core(12.8, 20, 271),
        3: Core(12.9, 18.1, 284),
        4: Core(13.5, 29.8, 274),
        8: Core(14, 45.4, 270),
        16: Core(15.1, 44, 129),
    },
    "avx512": {
        2: Core(12.1, 14.9, 171),
        3: Core(11.8, 15.6, 170),
        4: Core(13.1, 24.9, 173),
        8: Core(11.5, 25.1, 170),
        16: Core(14.6, 42.4, 117),
    },
    "avx2-vnni": {
        2: Core(12.5, 16.8, 158),
        3: Core(10.9, 12.7, 155),
        4: Core(13.1, 26.3, 155),
        8: Core(12.1, 43.1, 148),
        16: Core(14.6, 40.5, 80),
    },
    "avx2": {
        2: Core(10.5, 15.1, 123),
        3: Core(10.2, 11.7, 129),
        4: Core(13.2, 22.5, 129),
        8: Core(11.9, 23.1, 125),
        16: Core(14.5, 34.7, 77),
    },
    "portable": {
        2: Core(1.22, 1.22, 28.5),
        3: Core(1.56, 1.55, 27.7),
        4: Core(2.19, 2.33, 27.8),
        8: Core(3.96, 4.55, 30.2),
        16: Core(12.1, 20.8, 22.7),
    },
}
# The clock then, in GHz, and GB/s that one of its cores reads with plain loads.
CLOCK, READ = 4.0, 16.5
MEASURED_ON = (
    "one core of a Sapphire Rapids server at 4 GHz that reads 16.5 GB/s with plain loads, hidden size 2048, "
    "16-bit activations, November 2026"
)
# How much more a core reads from the memory of a PC: a core has a fixed number of reads in flight, and a PC's
# memory answers in some 70 ns, a large server's in some 140.
NEARER_MEMORY = 2.0
# Cores that start four instructions a cycle (Coffee Lake and its kin) in place of the measured core's six.
SLOWER_CORE = 2 / 3
# Of the memory's streaming rate. The least is that of whole models (moechat help benchmarks: 0.60 to 0.79 by
# shape, with the short calls of small experts). The usual one is the mean over bits and instruction sets of
# what both cores of the measured machine reach together: 0.61 to 0.88. They do not saturate its memory, so
# what they lack is their own time to compute. Many cores beside a slower memory have less of it for each
# byte, so the most is near all of it.
LEAST_SHARE, SHARE, MOST_SHARE = 0.6, 0.77, 0.95
# The set whose measured rate stands for AVX-512 in two halves.
HALF_VECTORS = {"avx512-vnni": "avx2-vnni", "avx512": "avx2"}
# Zen 4 computes 512 bits in two halves (AMD's optimisation guide for family 19h).
IN_HALVES = ("laptop-rtx4060-8g", "rtx4060ti-16g", "rtx4070ti-super-16g", "rtx4090-24g")
# Performance cores, where the others are efficient ones, which count half.
FAST_CORES = {"rtx4070-12g": 6, "rtx5090-32g": 8}
# GB/s of the whole memory, where the cores' way to it is narrower: 0.8 of what the channels transfer.
WHOLE_MEMORY = {
    "rtx4060ti-16g": 66.56,
    "rtx4070ti-super-16g": 76.8,
    "rtx5070ti-16g": 71.68,
    "rtx5080-16g": 76.8,
    "strix-halo-128g": 204.8,
}


@dataclass(frozen=True)
class Range:
    """A derived figure with its rule, as in a profile."""

    low: float
    value: float
    high: float
    rule: str

    def text(self) -> str:
        low, value, high = map(_rounded, (self.low, self.value, self.high))
        return (
            f'{{ value = {value}, low = {low}, high = {high}, origin = "estimate", source = "{self.rule}" }}'
        )


def _rounded(number: float) -> str:
    return f"{number:.4g}" if number < 1000 else f"{number:.0f}"


class Machine:
    """Derives the figures of one machine.

    Args:
        name: Of its profile.
        values: Content of the profile.
    """

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        cpu, clock = values["cpu"], values["cpu"]["clock_ghz"]
        self.isa, self.cores = str(cpu["isa"]), int(cpu["cores"])
        self.base, self.clock, self.boost = (float(clock[end]) / CLOCK for end in ("low", "value", "high"))
        self.fast = FAST_CORES.get(name, self.cores)
        self.memory = float(values["ram"]["bandwidth_gb_per_s"]["value"])
        self.whole = WHOLE_MEMORY.get(name, self.memory)
        links = values["link"]
        self.link = float(links.get("gpu", links["file"])["together_gb_per_s"]["value"])
        # Instruction sets that stand for low, value and high.
        half = HALF_VECTORS.get(self.isa, self.isa)
        self.usual = half if name in IN_HALVES else self.isa
        self.slowest = 1.0 if half != self.isa else SLOWER_CORE
        self.half = half

    def counted(self, threads: int) -> float:
        """Cores that so many threads count for."""
        return min(threads, self.fast) + 0.5 * max(0, threads - self.fast)

    def core_ends(self, bits: int) -> tuple[float, float]:
        """GB/s of a core at one token: low and high."""
        slow, fast = MEASURED[self.half][bits], MEASURED[self.isa][bits]
        usual = MEASURED[self.usual][bits].streamed
        speed = self.slowest * self.base
        low = min(1 / (1 / READ + slow.unhidden / speed), slow.cached * speed)
        high = 1 / (1 / (NEARER_MEMORY * READ) + fast.unhidden / self.boost)
        return min(low, usual), max(high, usual)

    def alone(self, bits: int, threads: int) -> Range:
        """GB/s at one token."""
        core, count = MEASURED[self.usual][bits], self.counted(threads)
        low, high = self.core_ends(bits)
        computed, read = count * core.streamed, SHARE * self.memory
        if computed <= read:
            rule = f"@kernels {count:g} × {core.streamed:g} GB/s of a core"
        else:
            rule = f"@kernels {SHARE:g} × {_rounded(self.memory)} GB/s of the memory"
        return Range(
            min(count * low, LEAST_SHARE * self.memory),
            min(computed, read),
            min(count * high, MOST_SHARE * self.memory),
            rule,
        )

    def together(self, bits: int) -> Range:
        """GB/s at one token with all threads while the link into the near tier is busy."""
        alone = self.alone(bits, self.cores)
        left = self.whole - self.link
        if SHARE * left < alone.value:
            link = f"({_rounded(self.whole)} - {_rounded(self.link)})"
            rule = f"{SHARE:g} × {link} GB/s: what the link leaves of the memory"
        else:
            rule = f"{alone.rule.removeprefix('@kernels ')} as alone: the link leaves enough of it"
        return Range(
            min(alone.low, LEAST_SHARE * left),
            min(alone.value, SHARE * left),
            min(alone.high, MOST_SHARE * left),
            rule,
        )

    def many(self, bits: int) -> Range:
        """GFLOP/s with many tokens and all threads."""
        count, usual = self.counted(self.cores), MEASURED[self.usual][bits].many
        core = float(_rounded(usual * self.clock))
        low = MEASURED[self.half][bits].many * self.slowest * self.base
        return Range(
            min(count * low, count * core),
            count * core,
            max(count * MEASURED[self.isa][bits].many * self.boost, count * core),
            f"@kernels {count:g} × {core:g} GFLOP/s of a core, of which it does {usual:g} at {CLOCK:g} GHz",
        )

    def source(self) -> str:
        """The text of the source ``kernels``."""
        rates = MEASURED[self.usual]
        decode = ", ".join(f"{rates[bits].streamed:g} at {bits}" for bits in BITS)
        many = ", ".join(f"{rates[bits].many:g} at {bits}" for bits in BITS)
        halves = " (512 bits are computed in two halves)" if self.usual != self.isa else ""
        slowest = f"{SLOWER_CORE:.2g} of" if self.slowest < 1 else "half vectors of"
        return (
            f"moechat's kernels ({self.usual}){halves} on {MEASURED_ON}: GB/s of blocks from memory "
            f"{decode} bits; with 256 tokens GFLOP/s {many} bits. "
            f"Low: {slowest} a core at the base clock, {LEAST_SHARE:g} of the memory. High: a core "
            f"at the boost clock that reads {NEARER_MEMORY:g} times as fast, {MOST_SHARE:g} of the memory. "
            "Rules: scripts/bench/profile_rates.py"
        )

    def tables(self) -> str:
        """All derived tables."""
        lines = []
        for bits in BITS:
            lines.append(f"[cpu.expert_gb_per_s.{bits}bit]")
            for threads in sorted({1, max(1, self.cores // 2), self.cores}):
                name = f"{threads}thread{'s' if threads > 1 else ''}"
                lines.append(f"{name} = {self.alone(bits, threads).text()}")
            lines.append("")
        lines.append("[cpu.expert_together_gb_per_s]")
        lines += [f"{bits}bit = {self.together(bits).text()}" for bits in BITS]
        lines += ["", "[cpu.expert_gflop_per_s]"]
        lines += [f"{bits}bit = {self.many(bits).text()}" for bits in BITS]
        return "\n".join(lines) + "\n\n"


def rewritten(name: str, text: str) -> str:
    """The text of a profile with its CPU rates derived again.

    Raises:
        ValueError: It has not the order of the shipped profiles.
    """
    machine = Machine(name, tomllib.loads(text))
    source = f'kernels = "{machine.source()}"\n'
    text, sources = re.subn(r"^kernels = .*\n", lambda _: source, text, flags=re.MULTILINE)
    tables = r"^\[cpu\.expert_gb_per_s\.2bit\]\n.*?(?=^\[ram\]\n)"
    text, found = re.subn(tables, lambda _: machine.tables(), text, flags=re.MULTILINE | re.DOTALL)
    if (sources, found) != (1, 1):
        raise ValueError(f"{name} has no source kernels, or no rates between [cpu] and [ram]")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file differs")
    arguments = parser.parse_args()
    differing = 0
    for path in sorted((*PROFILES.glob("*.toml"), *PROFILES.glob("testbeds/*.toml"))):
        before = path.read_text(encoding="utf-8")
        after = rewritten(path.stem, before)
        if before == after:
            continue
        differing += 1
        print(path.name)
        if not arguments.check:
            path.write_text(after, encoding="utf-8")
    return 1 if arguments.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
