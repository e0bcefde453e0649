"""The page of `tests.apps.locked`, and keys for it to show."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import redis

from celery_distlock.keys import slot_name
from celery_distlock.ops.admin import Admin
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.values import Status, Want
from celery_distlock.testing import FakeClock, Locks
from tests import servers
from tests.integration.web.page_process import PageProcess, pages
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def locked(load_app):
    return load_app("tests.apps.locked")


@pytest.fixture
def admin(locked) -> Admin:
    return Admin(locked.app)


@pytest.fixture
def hold(locked) -> Iterator[Callable[[str], int]]:
    """Lets another owner hold a key until the end of the test; returns the token."""
    locks = Locks(locked.app, FakeClock)
    with ExitStack() as stack:
        yield lambda key: stack.enter_context(locks.hold(key)).token


@pytest.fixture
def share(admin) -> Iterator[Callable[..., str]]:
    """Lets a task hold a part of a key until the end of the test; returns the owner."""
    with ExitStack() as stack:

        def take(key: str, task: str, want: Want) -> str:
            owner = new_owner(f"shop.f[{task}]")
            reply = admin.store.acquire(AcquireRequest(key, owner, 60.0, want=want))
            assert reply.status is Status.GRANTED
            stack.callback(admin.store.release, ReleaseRequest(key, owner))
            return owner

        yield take


@pytest.fixture
def endless(celery_env, locked) -> Iterator[Callable[[str], SimpleNamespace]]:
    """Makes a lock as no acquire does: without an expiry, with a token that is no time."""
    fields = {"x": servers.grant("host|1|task[id]|1", 10**30), "token": "9" * 30}
    with redis.Redis.from_url(celery_env["DISTLOCK_TEST_BACKEND"]) as client:

        def make(key: str) -> SimpleNamespace:
            name = f"{locked.app.conf.distlock_prefix}:{{{slot_name(key)}}}:lock"
            client.hset(name, mapping=fields)
            return SimpleNamespace(token=fields["token"])

        yield make


@pytest.fixture
def start_page(celery_env, tmp_path) -> Iterator[Callable[..., PageProcess]]:
    """Starts pages; arguments are those of the command line."""
    with pages(tmp_path, celery_env) as start:
        yield start


@pytest.fixture
def page_process(shared_page) -> PageProcess:
    """A page that shows nothing yet; other tests had it before, and will have it."""
    wait_until(lambda: not shared_page.get("/api/locks")["total"], what="nothing to be listed")
    shared_page.forget_log()
    return shared_page


# To start a page takes seconds: a module's tests have one, and the prefix with it.
@pytest.fixture(scope="module")
def shared_page(start_shared) -> PageProcess:
    return start_shared()


@pytest.fixture(scope="module")
def start_shared(
    redis_url, shared_prefix, tmp_path_factory
) -> Iterator[Callable[..., PageProcess]]:
    env = servers.environment(redis_url, shared_prefix)
    with pages(tmp_path_factory.mktemp("pages"), env) as start:
        yield start


@pytest.fixture(scope="module")
def shared_prefix() -> str:
    return servers.new_prefix()


@pytest.fixture
def prefix(redis_url, shared_prefix) -> Iterator[str]:
    yield shared_prefix
    servers.delete_keys(redis_url, shared_prefix)
