"""Which plan is really the fastest: a few are timed at first use, and the winner is remembered.

A model of the machine can be wrong (DESIGN, section 7). What is timed is real decoding; what wins must be
surely faster than the computed plan, and never slower than the plain way. The tokens are the same for all.
"""

from moechat.tuner.candidates import DEFAULT, MAPPED, PLAIN, Candidate, candidates
from moechat.tuner.choice import Choice, Timing, choose
from moechat.tuner.passes import Sequences
from moechat.tuner.remembered import Remembered, TuningKey, recall, remember
from moechat.tuner.timing import Passes, Timed, time_candidates
from moechat.tuner.tuning import Tuner, Tuning, skipped

__all__ = [
    "DEFAULT",
    "MAPPED",
    "PLAIN",
    "Candidate",
    "Choice",
    "Passes",
    "Remembered",
    "Sequences",
    "Timed",
    "Timing",
    "Tuner",
    "Tuning",
    "TuningKey",
    "candidates",
    "choose",
    "recall",
    "remember",
    "skipped",
    "time_candidates",
]
