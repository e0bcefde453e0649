"""Unit tests have the code alone: one that opens a socket fails, and says where."""

from __future__ import annotations

import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery

from celery_distlock import LockedTask
from celery_distlock.engine import watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Judge by the thread: what another test has left running is not this one's fault."""
    opened: list[str] = []
    tested, begin = threading.get_ident(), socket.socket.__init__

    def refuse(self: socket.socket, *arguments: Any, **options: Any) -> None:
        # One that is made of a file descriptor is one of a pair, or inherited.
        has_descriptor = len(arguments) > 3 or "fileno" in options
        if not has_descriptor and threading.get_ident() == tested:
            if not is_renewing():
                opened.append("a socket")
            raise PermissionError("a unit test opens no socket; others are in tests/integration")
        begin(self, *arguments, **options)

    monkeypatch.setattr(socket.socket, "__init__", refuse)
    yield
    # Also where the code under test took the refusal for an outage.
    assert not opened, f"a unit test opened {opened[0]}"


@pytest.fixture
def app() -> Iterator[Celery[Any]]:
    """An app with one locked task."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.distlock_url = "memory://"

    @app.task(base=LockedTask, name="reserve", lock_key="{sku}", shared=False)
    def reserve(sku): ...

    app.finalize()
    yield app
    app.close()


def is_renewing() -> bool:
    """Whether this renews a lease: a `FakeClock` renews here all that other tests have left."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != watchdog.__file__:
        frame = frame.f_back
    return frame is not None
