"""Which tests a run takes: all, those of continuous integration, or a quick selection."""

import sys
import textwrap

import pytest
from places import ROOT, TESTS
from selection import ALWAYS, SlowTest, slow_tests

pytest_plugins = ["pytester"]

SUITE = {
    "tests/room/test_slow.py": """
        import pytest

        @pytest.mark.parametrize("number", range(6))
        def test_of_six(number): ...

        def test_long(): ...
        """,
    "tests/room/test_fast.py": """
        import pytest

        @pytest.mark.parametrize("number", range(3))
        def test_of_three(number): ...

        @pytest.mark.slow
        def test_marked(): ...
        """,
}
LIST = """\
# comment
6 0.3 1.8 room/test_slow.py::test_of_six
1 4.0 4.0 room/test_slow.py::test_long
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name, text in SUITE.items():
        file = pytester.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    plugin = (TESTS / "support" / "selection.py").read_text()
    pytester.makepyfile(
        selection=plugin, places=f"from pathlib import Path\nTESTS = Path({str(pytester.path / 'tests')!r})\n"
    )
    (pytester.path / "tests" / "slow.txt").write_text(LIST)
    pytester.makeconftest("pytest_plugins = ['selection']")
    pytester.makeini(
        "[pytest]\ntestpaths = tests\nmarkers = slow: slow\npythonpath = .\naddopts = -p no:cacheprovider"
    )
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return pytester


def passed(suite: pytest.Pytester, *arguments: str) -> set[str]:
    done = suite.run(sys.executable, "-m", "pytest", "-v", *arguments)
    assert done.ret == 0, done.outlines
    return {
        word.split("::")[1]
        for line in done.outlines
        if "PASSED" in line
        for word in line.split()
        if "::" in word
    }


SIX = {f"test_of_six[{number}]" for number in range(6)}
THREE = {f"test_of_three[{number}]" for number in range(3)}
USUAL = {"test_of_six[0]", "test_of_six[1]", *THREE, "test_marked"}


@pytest.mark.parametrize("processes", [[], ["-n", "2"]])
def test_a_run_without_paths_takes_what_fits_into_continuous_integration(suite, processes) -> None:
    assert passed(suite, *processes) == USUAL


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        (["--all"], SIX | THREE | {"test_long", "test_marked"}),
        (["--all", "-n", "2"], SIX | THREE | {"test_long", "test_marked"}),
        (["tests/room/test_slow.py"], SIX | {"test_long"}),
        (["tests/room/test_slow.py", "-n", "2"], SIX | {"test_long"}),
        (["--quick"], {"test_of_six[0]", "test_of_three[0]"}),
    ],
)
def test_options_and_paths_decide_what_runs(suite, arguments, taken) -> None:
    assert passed(suite, *arguments) == taken


@pytest.mark.parametrize("processes", [[], ["-n", "2"]])
def test_recording_takes_all_tests_and_writes_those_that_take_long(suite, processes) -> None:
    file = suite.path / "tests" / "room" / "test_slow.py"
    file.write_text(file.read_text().replace("test_long(): ...", "test_long(): sum(range(60_000_000))"))
    passed(suite, "--record-slow", *processes)
    written = (suite.path / "tests" / "slow.txt").read_text().splitlines()
    assert [line.split()[-1] for line in written if not line.startswith("#")] == [
        "room/test_slow.py::test_long"
    ]


def test_a_test_that_is_long_from_the_first_case_on_is_left_out_and_others_run_once_at_least() -> None:
    assert SlowTest(cases=10, first=3.0, total=30.0).usual_cases == 0
    assert SlowTest(cases=10, first=1.9, total=19.0).usual_cases == 1
    assert SlowTest(cases=10, first=0.2, total=2.0).usual_cases == 3
    assert SlowTest(cases=3, first=0.6, total=0.6).usual_cases >= 3


def test_continuous_integration_leaves_out_few_tests() -> None:
    slow = slow_tests()
    left_out = [name for name, test in slow.items() if test.usual_cases == 0 and name not in ALWAYS]
    assert len(left_out) < 350, "so many tests run only with --all: make them faster"
    assert '\nexec "$root/scripts/test" "$@"' in (ROOT / ".ci" / "run").read_text()
