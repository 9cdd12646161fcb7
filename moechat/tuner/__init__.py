"""Races a few plans at first use, chooses the fastest, and remembers what was timed.

The computed plan rests on a model of the machine, which can be wrong, so real decoding is timed. The winner
is never slower than the plain plan, and a choice that is not sure yet is continued at the next start. The
tokens are the same with every plan.
"""

from moechat.tuner.candidates import DEFAULT, MAPPED, PLAIN, Candidate, candidates
from moechat.tuner.choice import Choice, Timing, choose
from moechat.tuner.passes import Sequences
from moechat.tuner.racing import Passes, Raced, race
from moechat.tuner.remembered import Remembered, TuningKey, recall, remember
from moechat.tuner.tuning import Tuner, Tuning, skipped

__all__ = [
    "DEFAULT",
    "MAPPED",
    "PLAIN",
    "Candidate",
    "Choice",
    "Passes",
    "Raced",
    "Remembered",
    "Sequences",
    "Timing",
    "Tuner",
    "Tuning",
    "TuningKey",
    "candidates",
    "choose",
    "race",
    "recall",
    "remember",
    "skipped",
]
