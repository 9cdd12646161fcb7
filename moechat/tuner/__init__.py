"""Times a few plans at first use, chooses the fastest, and remembers it.

The computed plan rests on a model of the machine, which can be wrong, so real decoding is timed. A winner
must be significantly faster than the computed plan, and is never slower than the plain one. The tokens are
the same with every plan.
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
