"""Reads the lists of a launch, as the native runner writes them (``native/src/offload/device_lists.h``)."""

from dataclasses import dataclass

import numpy as np


def rounded(count):
    return -(-count // 4) * 4


@dataclass
class Launched:
    page: np.ndarray
    row: np.ndarray
    slot: np.ndarray
    row_entry: np.ndarray
    row_block: np.ndarray


def read_launch(lists, begin, end, entries, rows):
    found = []
    for count in (entries, entries, entries, rows + 1, rows):
        found.append(lists[begin : begin + count].copy())
        begin += rounded(count)
    assert begin == end
    return Launched(*found)


def read_items(lists, written, tokens):
    end, rows, items, picks, most = written
    found, begin = [], 0
    for count in (rows + 1, items, items, tokens * picks):
        found.append(lists[begin : begin + count].copy())
        begin += rounded(count)
    assert begin == end
    row_item, token, weight, table = found
    assert most == np.diff(row_item).max(initial=0)
    return row_item, token, weight.view(np.float32), table.reshape(tokens, picks)
