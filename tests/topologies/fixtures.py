"""Fixtures: one topology of each kind that a module's tests share, and private ones to break."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import pytest

from tests.topologies import (
    UNIX_SOCKET,
    Cluster,
    Masters,
    Node,
    Replicated,
    Sentinels,
    TlsFront,
    unix_socket,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from celery_distlock.testing import EmbeddedServer

T = TypeVar("T")


@pytest.fixture(scope="module")
def shared_replicated() -> Iterator[Replicated]:
    """
    A master and a replica that tests share, as they do all of these: never break one.

    No longer than a module's: idle sentinels, and the nodes of a cluster, are busy with each other.
    """
    with Replicated() as replicated:
        yield replicated


@pytest.fixture(scope="module")
def shared_sentinels() -> Iterator[Sentinels]:
    with Sentinels() as sentinels:
        yield sentinels


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared_masters() -> Iterator[Masters]:
    with Masters() as masters:
        yield masters


@pytest.fixture(scope="module")
def shared_tls(redis_server: EmbeddedServer) -> Iterator[TlsFront]:
    """TLS before the server of `redis_server`."""
    with TlsFront(redis_server) as front:
        yield front


@pytest.fixture(scope="module")
def shared_unix_url() -> Iterator[str]:
    """A server behind a Unix socket."""
    with Node(options=UNIX_SOCKET) as server:
        yield unix_socket(server)


@pytest.fixture
def private_topology() -> Iterator[Callable[[AbstractContextManager[T]], T]]:
    """Starts topologies that the test may break: ``cluster = private_topology(Cluster())``."""
    with ExitStack() as stack:
        yield stack.enter_context
