"""Checksums of ranges of a file that comes in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moechat.store.range_sums import RangeSums, checksum


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]], list[int]]:
    data = draw(st.binary(max_size=60))
    place = st.integers(0, len(data))
    ranges = [tuple(sorted(draw(st.tuples(place, place)))) for _ in range(draw(st.integers(0, 6)))]
    return data, ranges, sorted(draw(st.lists(place, max_size=6)))


@given(files())
def test_the_sums_are_those_of_the_bytes_however_they_are_cut(
    given_file: tuple[bytes, list[tuple[int, int]], list[int]],
) -> None:
    data, ranges, cuts = given_file
    sums = RangeSums(ranges)
    for _ in range(2):
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            sums.add(data[begin:end])
        wanted = {(begin, end): checksum(data[begin:end]) for begin, end in ranges if begin < end}
        assert {one: found for one, found in sums.found.items() if one[0] < one[1]} == wanted
        sums.restart()
