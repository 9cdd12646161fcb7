"""Compares ways to run on real tokens, and chooses among them while answers are given."""

from moechat.trials.comparison import Comparison, Gap
from moechat.trials.watch import Switch, Watch

__all__ = ["Comparison", "Gap", "Switch", "Watch"]
