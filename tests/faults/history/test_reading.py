"""From what processes have written down to what they believed."""

from __future__ import annotations

import json

import pytest

from tests.faults.history import history

BEGUN = {"key": "k", "begin": 1.0, "token": 5, "pid": 7, "owner": "a", "until": 2.0}
RENEWED = {"owner": "a", "until": 3.0}


@pytest.mark.parametrize(
    ("notes", "death", "end"),
    [
        ([BEGUN, {"owner": "a", "end": 1.5}], 9.0, 1.5),
        ([BEGUN], 1.7, 1.7),
        ([BEGUN], 2.5, 2.0),
        ([BEGUN, RENEWED], 2.5, 2.5),
        ([BEGUN, RENEWED], 9.0, 3.0),
    ],
    ids=["ended", "killed", "killed after its lease", "killed, renewed", "killed after that lease"],
)
def test_a_belief_ends_with_its_process_or_its_lease(tmp_path, notes, death, end):
    file = tmp_path / "notes"
    file.write_text("\n".join(map(json.dumps, notes)))

    (belief,) = history.read(file, {7: death})

    assert (belief.begin, belief.end) == (1.0, end)
