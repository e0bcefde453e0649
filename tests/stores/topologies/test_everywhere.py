"""The same everywhere: the plain server by every way in, sentinels, replicas, a cluster."""

from __future__ import annotations

import pytest

from tests.stores.topologies import drill
from tests.topologies import url_of_user

PLACES = ["tls", "unix", "user", "sentinels", "replicas", "cluster"]
RULES = "~{0}* &{0}* +@all -@dangerous +info"  # the least that a user needs: see test_rights


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, prefix: str) -> str:
    """A URL of each."""
    match request.param:
        case "tls":
            url = request.getfixturevalue("shared_tls").url
        case "unix":
            url = request.getfixturevalue("shared_unix_url")
        case "user":
            server = request.getfixturevalue("redis_server")
            url = url_of_user(server, prefix, "s3cret/:@", RULES.format(prefix))
        case "sentinels":
            url = request.getfixturevalue("shared_sentinels").url()
        case "replicas":
            url = request.getfixturevalue("shared_replicated").url + "?replicas=1"
        case "cluster":
            url = request.getfixturevalue("shared_cluster").url
    return str(url)


def test_locks_waiters_and_parked_runs_work(opened, place, monkeypatch):
    monkeypatch.setattr("celery_distlock.stores.redis.sentinels.SENTINEL_TIMEOUT", 4.0)
    store = opened(place)

    assert [found for found in store.check() if found.subject != "persistence"] == []
    drill.run_all(store)


def test_no_password_is_in_its_name(opened, place):
    assert "s3cret" not in opened(place).identity
