from __future__ import annotations

import numpy as np
from configurator_support import curves

from moechat.configurator.costs import Costs
from moechat.configurator.exposure import PaperModel
from moechat.configurator.polish import polished
from moechat.configurator.targets import evaluate_all, pages_of

# K = 1, no windows: T = 1 - m, to a billionth.
LAYERS = curves([[0.9, 1.0], [0.5, 1.0]])
MODEL = PaperModel(Costs(attention=0.0, moe=1e-9, head=0.0, load=1.0), 1)


def run(start, pages, *, free_split=True, work=1000):
    def totals(candidates):
        return np.array([found.total for found in evaluate_all(list(candidates), LAYERS, MODEL, 2)])

    targets = np.array(start, dtype=np.int32)
    total = float(totals(targets[None])[0])
    targets = polished(targets, total, totals, 2, 2, pages, free_split=free_split, work=work)
    return targets, float(totals(targets[None])[0])


def test_pages_change_layers_while_that_helps():
    # (0, 1 whole): 1 + 0.5. (1 whole, 0): 0.1 + 1.
    targets, found = run([[0, 2], [1, 2]], 2, free_split=False)
    assert targets.tolist() == [[1, 2], [0, 2]]
    assert abs(found - 1.1) < 1e-6


def test_remaining_pages_are_used():
    targets, found = run([[1, 2], [0, 1]], 6)
    assert targets.tolist() == [[1, 2], [2, 2]]
    assert abs(found - 0.1) < 1e-6
    assert pages_of(targets) == 6


def test_best_stays_and_work_is_limited():
    targets, _ = run([[1, 2], [0, 2]], 2)
    assert targets.tolist() == [[1, 2], [0, 2]]
    targets, _ = run([[0, 2], [1, 2]], 2, work=0)
    assert targets.tolist() == [[0, 2], [1, 2]]
