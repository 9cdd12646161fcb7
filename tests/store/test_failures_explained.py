"""What libraries raise when the system refuses something."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from moechat.errors import DoesNotFitError, StoreDamagedError
from moechat.store.file_problems import failures_explained


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Cannot allocate memory (os error 12)", DoesNotFitError),
        ("Too many open files (os error 24)", DoesNotFitError),
        ("Input/output error (os error 5)", StoreDamagedError),
    ],
)
def test_a_refusal_that_a_library_in_rust_reports_is_one_of_the_system(text: str, kind: type) -> None:
    with pytest.raises(kind, match=text.partition(" (")[0]), failures_explained(Path("/models/m")):
        raise Exception(text)


def test_other_errors_of_such_libraries_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"\(os error 2\)") as found, failures_explained(tmp_path):
        Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert type(found.value) is Exception
    with pytest.raises(ValueError, match="no number"), failures_explained(tmp_path):
        raise ValueError("no number")
