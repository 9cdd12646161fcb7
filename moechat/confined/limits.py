"""The limits under which a model's chat template and the rules of its tokenizer run."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20

TEMPLATE_CHARACTERS = _MIB  # of a template's own text; those of real models have up to 100,000


@dataclass(frozen=True)
class Limits:
    """What one request may take. All grow with the input, so that they do not limit long conversations.

    Attributes:
        output: Characters of the result.
        steps: Turns of loops and calls of macros, all together; a call counts four.
        memory: Bytes of address space beyond what the process has before.
        cpu_s: Seconds of processor time.
        wall_s: Seconds until the process is ended from outside, whatever it does.
    """

    output: int
    steps: int
    memory: int
    cpu_s: float
    wall_s: float

    @classmethod
    def of_template(cls, characters: int) -> Limits:
        """Those of a chat template.

        Args:
            characters: Of everything that it is given.
        """
        return cls(
            output=8 * _MIB + 2 * characters,
            steps=2_000_000 + 16 * characters,
            memory=256 * _MIB + 32 * characters,
            cpu_s=5 + 8 * characters / _MIB,
            wall_s=20 + 24 * characters / _MIB,
        )

    @classmethod
    def of_splitting(cls, size: int) -> Limits:
        """Those of normalising and splitting a text.

        Args:
            size: Bytes of the text in UTF-8. Those of common models took 220 bytes of memory and, on a busy
                machine, 0.9 µs for each.
        """
        return cls(
            output=0,
            steps=0,
            memory=256 * _MIB + 512 * size,
            cpu_s=5 + 4 * size / _MIB,
            wall_s=20 + 16 * size / _MIB,
        )
