"""The guard of `tests/unit`."""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress

import pytest

from tests.unit.conftest import no_sockets as guard


@pytest.fixture
def ended(monkeypatch):
    """Runs what a unit test does, and ends it."""

    def run(test):
        with pytest.MonkeyPatch.context() as patches:
            steps = guard.__wrapped__(patches)
            next(steps)
            test()
            next(steps, None)

    return run


def opens():
    with suppress(OSError), closing(socket.socket()):
        pass


def test_a_unit_test_that_opens_a_socket_fails_though_the_code_bears_it(ended):
    with pytest.raises(AssertionError, match="opened a socket"):
        ended(opens)


def test_a_unit_test_is_not_blamed_for_another_thread(ended):
    def leave_it_to_a_thread():
        thread = threading.Thread(target=opens)
        thread.start()
        thread.join(60)

    ended(leave_it_to_a_thread)


def test_a_pair_of_sockets_leads_nowhere_and_may_be_opened(ended):
    def pair():
        for each in socket.socketpair():
            each.close()

    ended(pair)
