from __future__ import annotations

from datetime import date, timedelta

import pytest

from tests.shaky import FILE, Shaky, overdue, parse

TODAY = date(2026, 12, 24)


def since(days):
    return Shaky(TODAY - timedelta(days), "tests/test_it.py::test_it", "a race")


def test_an_entry_may_stay_for_less_than_two_weeks():
    assert overdue([since(0), since(13)], TODAY) == []
    assert overdue([since(13), since(14), since(60)], TODAY) == [since(14), since(60)]


def test_a_date_in_the_future_gains_no_time():
    assert overdue([since(-1)], TODAY) == [since(-1)]


def test_an_entry_has_a_date_a_test_and_a_cause():
    text = "# what it is\n\n2026-12-24 tests/test_it.py::test_it a race\n"

    assert parse(text) == [since(0)]


@pytest.mark.parametrize("line", ["2026-12-24 tests/test_it.py::test_it", "soon test_it a race"])
def test_an_entry_that_lacks_one_is_refused(line):
    with pytest.raises(ValueError, match=r"unpack|isoformat"):
        parse(line)


def test_every_entry_of_the_file_can_be_read():
    parse(FILE.read_text())
