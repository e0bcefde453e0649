"""No state of the small models breaks a guarantee; those that do are marked."""

from __future__ import annotations

import pytest

from .configurations import ALONE, PACED, SMALL
from .explorer import explore
from .models import Model


@pytest.mark.parametrize("name", SMALL)
def test_all_that_may_happen(name):
    assert explore(SMALL[name]).is_whole


def test_a_claim_holds_a_pause():
    explore(Model((ALONE,) * 2, acts=frozenset(["pause"]), claims_ask=True))


def test_a_start_is_counted_though_its_script_ended():
    explore(Model((PACED,) * 2, faults=1, ticks=True, memory=3.0), 5_000)
