"""The store contract in every place that a Redis store can be in."""

from __future__ import annotations

import os

import pytest

from celery_distlock.stores.redis.store import RedisStore
from tests import servers
from tests.contract.grace import lengthen
from tests.contract.parts import Everything


class Contract(Everything):
    any_text = False
    hands_over = True
    shortest_lease = 0.5  # seconds; a request takes two or three hops here

    @pytest.fixture(autouse=True)
    def grace(self, monkeypatch):
        lengthen(monkeypatch, GRANT=3.0)

    @pytest.fixture
    def prefix(self):
        """The servers are the tests' own, so nothing need be deleted."""
        return servers.new_prefix()

    @pytest.fixture
    def open_store(self, url, prefix):
        return lambda name: RedisStore(url, f"{prefix}-{name}")

    @pytest.fixture
    def pass_time(self, masters, prefix):
        def pass_by(seconds):
            for master in masters:
                servers.bring_nearer(master.url, prefix, seconds)

        return pass_by


class TestSentinels(Contract):
    @pytest.fixture(autouse=True)
    def patience(self, monkeypatch):
        monkeypatch.setattr("celery_distlock.stores.redis.sentinels.SENTINEL_TIMEOUT", 4.0)

    @pytest.fixture
    def url(self, shared_sentinels):
        return shared_sentinels.url()

    @pytest.fixture
    def masters(self, shared_sentinels):
        return [shared_sentinels.master]


class TestReplicas(Contract):
    @pytest.fixture
    def url(self, shared_replicated):
        return f"{shared_replicated.url}?replicas=1"

    @pytest.fixture
    def masters(self, shared_replicated):
        return [shared_replicated.master]


class TestCluster(Contract):
    @pytest.fixture
    def url(self, shared_cluster):
        return shared_cluster.url

    @pytest.fixture
    def masters(self, shared_cluster):
        return shared_cluster.masters


class TestTls(Contract):
    shortest_lease = 1.0  # and there are handshakes

    @pytest.fixture
    def url(self, shared_tls, monkeypatch):
        # Else each connection reads the system's certificate authorities first, for 30 ms.
        monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
        return shared_tls.url

    @pytest.fixture
    def masters(self, redis_server):
        return [redis_server]
