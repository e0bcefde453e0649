"""
What sentinels, replicas, a cluster and TLS can change of what a Redis store promises.

A script computes the same on every server, so its cases are left to `test_memory_and_redis.py`. A
topology changes the way to it: which server is asked, whether keys share a hash slot, whether
replicas confirm a write, which connections bring pushes, how one is opened. So each topology has:

- a test for each script (`SCRIPTS`), which fails if it does not run that script;
- the tests of what servers push: to workers' channels (`Pushing`), blocked waiters and the ticker;
- tests of several keys, in one request or in several, and of looks and sweeps over all keys;
- what it alone can break: messages larger than a TLS record.

What becomes of all that when a server fails is in `tests/stores/topologies`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.redis import connections
from celery_distlock.stores.redis.scripts import Script
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.testing import (
    CountContract,
    ListContract,
    OrderContract,
    RecogniseContract,
    StoreContract,
)
from celery_distlock.testing.contract.acquiring import Acquiring
from celery_distlock.testing.contract.actions import take
from celery_distlock.testing.contract.recalling import RecallContract
from celery_distlock.testing.contract.renewing import Renewing
from celery_distlock.testing.contract.sharing import Sharing
from tests import servers
from tests.contract.grace import lengthen
from tests.contract.parts.actions import park, swept
from tests.contract.parts.delayed import Delayed
from tests.contract.parts.delivery import Delivery, Pushing
from tests.contract.parts.identities import Identities
from tests.contract.parts.lanes import Lanes
from tests.contract.parts.leaving import Leaving
from tests.contract.parts.limits import Limits
from tests.contract.parts.parked_runs import ParkedRuns
from tests.contract.parts.parking import Parking
from tests.contract.parts.recording import Recording
from tests.contract.parts.resting import Resting
from tests.contract.parts.sending import Sending
from tests.contract.parts.several_keys import SeveralKeys
from tests.contract.parts.several_queues import WaitingAtSeveralKeys
from tests.contract.parts.sweeping import Sweeping
from tests.contract.parts.timing import Timing
from tests.contract.parts.upgrading import Upgrading

if TYPE_CHECKING:
    from collections.abc import Callable


class Topology(Pushing):
    hands_over = True
    shortest_lease = 0.5  # seconds; a request takes two or three hops here
    elsewhere = frozenset(
        {"try_key", "leave_key", "reserve_kept"}
    )  # scripts for keys in several slots

    @pytest.fixture(autouse=True)
    def grace(self, monkeypatch):
        lengthen(monkeypatch, GRANT=3.0)

    @pytest.fixture(autouse=True)
    def ensure_scripts_run(self, request, monkeypatch):
        """Fail a test that does not run the scripts for which it is here."""
        called, head = set(), connections._script_head

        def recording(script, keys):
            called.add(script.name)
            return head(script, keys)

        monkeypatch.setattr(connections, "_script_head", recording)
        yield
        expected = {
            name for name, test in SCRIPTS.items() if test.__name__ == request.node.originalname
        }
        assert expected - self.elsewhere <= called

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

    def test_a_key_where_no_run_waits_any_more_is_noted(self, store):
        take(store, "k", "a")
        park(store, "k", "run")
        store.parking.cancel("k", "run")
        store.release(ReleaseRequest("k", "a"))

        assert swept(store) == []

    def test_one_that_does_not_queue_learns_when_to_come_again(self, store):
        take(store, "k", "a")
        park(store, "k", "run")

        assert 1.0 <= store.retry_delay("k", 2.0, (1.0, 60.0), 10.0) <= 60.0


SCRIPTS: dict[str, Callable[..., None]] = {
    "acquire": Acquiring.test_keys_are_independent,
    "acquire_all": SeveralKeys.test_free_keys_are_taken_in_one_step,
    "act": Recording.test_a_holder_that_keeps_its_part_is_not_notified_of_others,
    "identities": Delayed.test_an_identity_is_listed_with_its_run_and_where_that_is,
    "cancel": ParkedRuns.test_a_run_in_flight_that_is_cancelled_leaves_the_key_to_the_next,
    "channels": Delivery.test_a_channel_is_found_by_the_queues_that_it_was_registered_for,
    "count": CountContract.test_what_is_counted_adds_up,
    "delayed": Delayed.test_delayed_runs_are_listed_by_their_time,
    "try_keys": WaitingAtSeveralKeys.test_it_is_sent_when_it_can_have_all_its_keys,
    "reserve_kept": WaitingAtSeveralKeys.test_it_is_sent_when_it_can_have_all_its_keys,
    "leave_key": WaitingAtSeveralKeys.test_one_that_was_turned_away_often_has_the_others_kept,
    "downgrade": Upgrading.test_waiting_sharers_enter_up_to_the_next_request_that_does_not,
    "drop": Parking.test_a_dropped_run_gives_its_key_to_the_next,
    "due": Timing.test_the_ticker_is_called_for_what_is_due_before_all_else,
    "dues": Timing.test_a_rest_is_noted_if_there_are_waiters,
    "index": Topology.test_a_key_where_no_run_waits_any_more_is_noted,
    "inherit": Identities.test_one_that_is_put_back_by_the_broker_passes_it_on,
    "inspect": ListContract.test_several_keys_are_looked_at_as_one_by_one,
    "list_lanes": Lanes.test_they_are_listed_in_the_order_of_their_turns,
    "limit": Limits.test_a_waiter_for_a_paused_key_is_woken_when_it_goes_on,
    "leaving": Leaving.test_it_is_sent_though_its_key_is_held,
    "identity": Identities.test_a_waiting_run_has_its_identity,
    "push": Pushing.test_a_run_is_pushed_to_the_first_channel_that_is_open,
    "register": Pushing.test_a_run_that_has_come_is_not_pushed_again,
    "release": OrderContract.test_waiters_are_served_in_the_order_of_arrival,
    "recall": RecallContract.test_each_later_renewal_reports_it_again,
    "renew": Renewing.test_each_of_many_renewals_has_its_own_outcome,
    "rest": Resting.test_a_waiter_for_a_resting_key_is_woken_when_it_has_rested,
    "return": Topology.test_one_that_does_not_queue_learns_when_to_come_again,
    "resend_all": ParkedRuns.test_what_is_in_flight_is_found_again_at_once,
    "send": Sending.test_a_run_whose_key_is_taken_waits_its_turn,
    "mark_sent": Parking.test_dispatching_sends_and_notes_it,
    "try_key": WaitingAtSeveralKeys.test_it_is_sent_when_it_can_have_all_its_keys,
    "due_keys": Sweeping.test_a_sweep_finds_every_key,
    "sweep": Sweeping.test_a_sweep_finds_every_key,
    "delay_resend": Delivery.test_a_run_that_is_kept_reserved_is_not_swept_up,
    "tick": Sending.test_a_run_that_is_due_goes_by_the_ticker,
    "sweep_lease": Sweeping.test_of_all_sweepers_in_an_interval_one_gets_to_look,
    "upgrade": Upgrading.test_it_goes_before_all_queued_requests,
    "queues": ParkedRuns.test_a_run_of_several_keys_is_counted_where_it_waits,
    "waiters": ParkedRuns.test_waiters_are_listed_in_order_and_by_pages,
}
OTHERS = (
    # Pushed to blocked waiters
    StoreContract.test_a_release_notifies_the_waiter,
    StoreContract.test_a_waiter_learns_of_a_release_in_another_process,
    StoreContract.test_locks_over_the_store_let_one_thread_in_at_a_time,
    # Several keys, and all of them
    SeveralKeys.test_keys_that_are_kept_for_a_run_are_taken_in_one_step,
    WaitingAtSeveralKeys.test_it_has_the_same_place_in_all_queues,
    WaitingAtSeveralKeys.test_one_whose_waker_has_died_goes_on_soon,
    ListContract.test_many_keys_are_found_once_each,
    # Confirmed by replicas: what must not be forgotten
    RecogniseContract.test_a_second_delivery_of_a_finished_run_is_recognised,
    Sharing.test_a_lease_ends_for_all,
)
for each in {*SCRIPTS.values(), *OTHERS}:
    setattr(Topology, each.__name__, each)


def test_each_script_has_a_test():
    modules = [
        sys.modules[name]
        for name in list(sys.modules)
        if name.startswith("celery_distlock.stores.redis.")
    ]
    loaded = {
        each.name
        for module in modules
        for each in vars(module).values()
        if isinstance(each, Script)
    }

    assert loaded - {"vote"} == SCRIPTS.keys()  # which is Redlock's


class TestSentinels(Topology):
    @pytest.fixture(autouse=True)
    def patience(self, monkeypatch):
        monkeypatch.setattr("celery_distlock.stores.redis.sentinels.SENTINEL_TIMEOUT", 4.0)

    @pytest.fixture
    def url(self, shared_sentinels):
        return shared_sentinels.url()

    @pytest.fixture
    def masters(self, shared_sentinels):
        return [shared_sentinels.master]


class TestReplicas(Topology):
    @pytest.fixture
    def url(self, shared_replicated):
        return f"{shared_replicated.url}?replicas=1"

    @pytest.fixture
    def masters(self, shared_replicated):
        return [shared_replicated.master]


class TestCluster(Topology):
    # These keys are in several hash slots; `tests/stores/topologies/test_cluster.py` takes others.
    elsewhere = frozenset({"try_keys"})
    test_free_keys_are_taken_in_one_step = None
    test_keys_that_are_kept_for_a_run_are_taken_in_one_step = None

    @pytest.fixture
    def url(self, shared_cluster):
        return shared_cluster.url

    @pytest.fixture
    def masters(self, shared_cluster):
        return shared_cluster.masters


class TestTls(Topology):
    shortest_lease = 1.0  # and there are handshakes

    test_a_run_is_pushed_to_the_channel_it_was_parked_from = (
        Delivery.test_a_run_is_pushed_to_the_channel_it_was_parked_from
    )

    @pytest.fixture
    def url(self, shared_tls, monkeypatch):
        # Else each connection reads the system's certificate authorities first, for 30 ms.
        monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
        return shared_tls.url

    @pytest.fixture
    def masters(self, redis_server):
        return [redis_server]
