"""A majority of the nodes decides, whatever the others do."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import threading
import time

import pytest

from celery_distlock import Lock, clock
from celery_distlock.errors import ConfigurationError, LockLostError, QuorumError, StoreError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.redis import quorum, redlock
from celery_distlock.stores.redis.quorum import ANSWER, CONNECTION, Answers
from celery_distlock.stores.redis.redlock import RedlockStore
from celery_distlock.stores.values import (
    Completion,
    Ownership,
    ParkRequest,
    RenewOutcome,
    Status,
    WokenTask,
)
from tests import servers
from tests.handlers import hangs_of
from tests.losses import Losses
from tests.stores.redlock.records import owners, record, renewed, take, tokens, vote
from tests.waiting import wait_until

NONE = ["", "", "", "", ""]


def kill(node):
    node.kill()


def hang(node):
    node.pause()


def empty(node):
    node.restart()


breaking = pytest.mark.parametrize("broken", [kill, hang, empty])


REFUSAL = StoreError("no")


@pytest.mark.parametrize(
    ("answers", "decided"),
    [
        ([None, None, None], False),
        ([[1, 1], None, None], False),
        ([[1, 1], [1, 1], None], True),
        ([[1, 1], [REFUSAL, 1], None], False),  # the awaited one decides on the first call
        ([[REFUSAL, 1], [REFUSAL, 1], None], True),  # the first has no majority whatever comes
        ([[1, 1], [REFUSAL, 1], [1, 1]], True),
    ],
)
def test_each_call_is_decided_by_itself(answers, decided):
    nothing = [0] * len(answers)
    assert Answers(2, 0.0, answers, nothing, nothing, nothing).are_decided() is decided


# Where it is


@pytest.mark.parametrize("hosts", ["a", "a,b", "a:1,b:1"])
def test_less_than_three_nodes_are_refused_with_the_reason(hosts):
    with pytest.raises(ConfigurationError, match=r"at least 3 .*redis://.*sentinel://"):
        RedlockStore(f"redlock://{hosts}/0", "p")


def test_a_node_that_is_named_twice_is_refused():
    with pytest.raises(ConfigurationError, match="two votes"):
        RedlockStore("redlock://a,b,c,a:6379/0", "p")


@pytest.mark.parametrize("rest", ["a,b:port,c/0", "a,b,c/0?nonsense=1"])
def test_a_url_that_does_not_parse_is_refused_without_its_password(rest):
    with pytest.raises(ConfigurationError) as caught:
        RedlockStore(f"redlock://user:secret@{rest}", "p")

    assert "secret" not in str(caught.value)
    assert "redlock://" in str(caught.value)


def test_a_store_is_the_same_with_its_nodes_in_another_order():
    one, other = RedlockStore("redlock://a,b,c/2", "p"), RedlockStore("redlock://c,a,b:6379/2", "p")

    assert one.identity == other.identity
    assert one.identity != RedlockStore("redlock://a,b,c/3", "p").identity
    assert one.identity != RedlockStore("redlock://a,b,d/2", "p").identity


def test_an_identity_has_no_password():
    assert "secret" not in RedlockStore("redlocks://u:secret@a,b,c/0", "p").identity


def test_nothing_can_be_parked(shared_store):
    with pytest.raises(StoreError, match="no task can be parked"):
        shared_store.acquire(AcquireRequest("k", "a", 30.0, queue=ParkRequest(b"e"), run="run"))


# Two of five nodes are unreachable


@breaking
def test_a_lock_is_taken_renewed_and_released_without_two_of_five_nodes(masters, store, broken):
    for node in masters.servers[:2]:
        broken(node)

    take(store, "a")
    assert renewed(store, "a") is RenewOutcome.RENEWED
    assert store.acquire(AcquireRequest("k", "b", 30.0)).holder == "a"
    assert store.inspect("k").owner == "a"
    assert store.release(ReleaseRequest("k", "a")).released
    take(store, "b")


@breaking
def test_a_lock_is_kept_when_two_of_five_nodes_go(masters, store, broken):
    take(store, "a")
    for node in masters.servers[:2]:
        broken(node)

    assert renewed(store, "a") is RenewOutcome.RENEWED
    assert store.acquire(AcquireRequest("k", "b", 30.0)).status is Status.BUSY
    assert store.release(ReleaseRequest("k", "a")).released
    take(store, "b")


def test_nodes_that_hang_cost_their_time_once(masters, store):
    take(store, "warm", "warm")
    for node in masters.servers[:2]:
        node.pause()
    take(store, "first")
    wait_until(lambda: len(store._nodes.failures()) == 2, what="the nodes to be known as silent")

    started = time.monotonic()
    for n in range(40):
        take(store, "a", f"k{n}")
        assert store.release(ReleaseRequest(f"k{n}", "a")).released

    assert time.monotonic() - started < 40 * ANSWER / 2


def test_nodes_that_hang_are_connected_to_side_by_side(masters, store):
    for node in masters.servers[:2]:
        node.pause()

    started = time.monotonic()
    take(store, "a")

    assert time.monotonic() - started < 2 * CONNECTION


@breaking
def test_a_node_that_is_back_votes_again(masters, store, broken):
    broken(masters.servers[0])
    take(store, "a")
    wait_until(lambda: broken is empty or store._nodes.failures(), what="it to be known as silent")
    masters.servers[0].resume()
    masters.servers[0].start()
    wait_until(lambda: not store._nodes.failures(), what="the node to answer")

    take(store, "b", "another key")

    wait_until(lambda: owners(masters, "another key") == ["b"] * 5, what="all votes")


def test_nodes_that_are_back_vote_at_once_where_another_begins_to_hang(masters, store, monkeypatch):
    monkeypatch.setattr(quorum, "PROBES", (60.0, 60.0))  # it is this request that has to find out
    for node in masters.servers[:2]:
        kill(node)
    take(store, "a")
    wait_until(lambda: len(store._nodes.failures()) == 2, what="the nodes to be known as silent")
    for node in masters.servers[:2]:
        node.start()
    hang(masters.servers[2])

    take(store, "b", "another key")


# Too many are unreachable


@pytest.mark.parametrize("broken", [kill, hang])
def test_too_few_nodes_are_a_quorum_error_that_says_how_many(masters, store, broken):
    for node in masters.servers[:3]:
        broken(node)

    with pytest.raises(QuorumError, match="2 of 5 nodes have answered, and 3 are needed") as caught:
        store.acquire(AcquireRequest("k", "a", 30.0))

    assert (caught.value.votes, caught.value.nodes) == (2, 5)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(QuorumError):
        store.release(ReleaseRequest("k", "a"))
    with pytest.raises(QuorumError):
        store.inspect("k")
    with pytest.raises(QuorumError):
        store.drop(WokenTask("k", "run", b""))
    with pytest.raises(QuorumError):
        store.check()


@pytest.mark.parametrize("broken", [kill, hang])
def test_what_a_minority_granted_is_undone(masters, store, broken):
    for node in masters.servers[:3]:
        broken(node)

    with pytest.raises(QuorumError):
        store.acquire(AcquireRequest("k", "a", 300.0))

    wait_until(lambda: owners(masters) == [None, None, None, "", ""], what="the votes to be undone")


def test_what_a_node_grants_that_hung_is_undone_when_it_is_back(masters, store):
    take(store, "warm", "warm")
    for node in masters.servers[:3]:
        node.pause()
    with pytest.raises(QuorumError):
        store.acquire(AcquireRequest("k", "a", 300.0))

    for node in masters.servers[:3]:
        node.resume()

    wait_until(lambda: owners(masters) == NONE, what="the votes to be undone")
    wait_until(lambda: not store._nodes.failures(), what="the nodes to answer")
    assert owners(masters) == NONE
    take(store, "b")
    wait_until(lambda: owners(masters) == ["b"] * 5, what="all votes")


def test_unawaited_requests_are_not_sent(masters, store):
    take(store, "warm", "warm")
    masters.servers[0].pause()
    worker = store._nodes._workers[0]
    take(store, "a", "sent")
    wait_until(lambda: worker._asked_at < math.inf, what="it to be sent")
    take(store, "a", "waits behind it")
    until = clock.monotonic() + 2 * ANSWER
    wait_until(lambda: clock.monotonic() > until, what="all to have given up")

    masters.servers[0].resume()

    wait_until(lambda: not store._nodes.failures(), what="the node to answer")
    wait_until(lambda: owners(masters, "sent") == ["a"] * 5, what="the late vote")
    assert owners(masters, "waits behind it")[0] == ""


def test_a_node_that_was_not_asked_gets_no_request_to_forget(masters, store):
    take(store, "warm", "warm")
    masters.servers[0].kill()
    take(store, "a")
    wait_until(store._nodes.failures, what="the node to be known as silent")

    for n in range(20):
        assert store.acquire(AcquireRequest("k", f"o{n}", 30.0)).status is Status.BUSY

    assert not store._nodes._workers[0]._owed


def test_a_release_reaches_a_node_that_hung(masters, store):
    take(store, "a", lease=300.0)
    masters.servers[0].pause()
    assert store.release(ReleaseRequest("k", "a")).released
    wait_until(store._nodes.failures, what="the node to be known as silent")

    masters.servers[0].resume()

    wait_until(lambda: owners(masters) == NONE, what="the late release")


def test_a_release_reaches_a_node_that_was_cut_off_for_long(masters, store):
    take(store, "a", lease=300.0)
    worker = store._nodes._workers[0]
    masters.servers[0].pause()
    store.inspect("k")
    wait_until(lambda: worker.failure is not None, what="the connection to be given up")
    assert store.release(ReleaseRequest("k", "a")).released

    masters.servers[0].resume()

    wait_until(lambda: owners(masters) == NONE, what="the late release")


# The holder


def test_a_minority_of_votes_is_no_lock(masters, store):
    vote(masters.servers[0], "k", "x")
    vote(masters.servers[1], "k", "x")

    assert not store.inspect("k").token
    take(store, "a")
    assert owners(masters) == ["x", "x", "a", "a", "a"]
    assert store.inspect("k").owner == "a"


def test_a_request_for_a_taken_key_leaves_no_vote_behind(masters, store):
    for node in masters.servers[:3]:
        vote(node, "k", "x")

    reply = store.acquire(AcquireRequest("k", "a", 30.0))

    assert (reply.status, reply.holder) == (Status.BUSY, "x")
    assert 0 < reply.remaining <= 30.0
    wait_until(lambda: owners(masters) == ["x", "x", "x", "", ""], what="the votes to be undone")


def test_split_votes_are_tried_for_again(masters, store, monkeypatch):
    monkeypatch.setattr(redlock, "SPLITS", (0.0,) + (0.05,) * 100)
    for node, owner in zip(masters.servers, ["x", "x", "y", "y"], strict=False):
        vote(node, "k", owner, 0.1)

    take(store, "a")


def test_votes_that_stay_split_leave_the_key_busy(masters, store):
    for node, owner in zip(masters.servers, ["x", "x", "y", "y"], strict=False):
        vote(node, "k", owner)

    reply = store.acquire(AcquireRequest("k", "a", 30.0))

    assert reply.status is Status.BUSY
    assert reply.holder in ("x", "y")
    wait_until(lambda: owners(masters)[4] == "", what="the vote to be undone")


def test_a_request_that_is_repeated_keeps_its_token_and_tops_up_its_votes(masters, store):
    masters.servers[0].kill()
    token = take(store, "a")
    wait_until(lambda: tokens(masters.servers[1:]) == [token] * 4, what="the slowest of them")
    masters.servers[0].start()
    wait_until(lambda: not store._nodes.failures(), what="the node to answer")

    assert take(store, "a") == token

    wait_until(lambda: owners(masters) == ["a"] * 5, what="all votes")


# Renewing


def test_a_renewal_that_a_majority_confirms_counts(masters, store):
    take(store, "a", lease=20.0)
    wait_until(lambda: owners(masters) == ["a"] * 5, what="the slowest vote")
    masters.servers[0].kill()
    masters.servers[1].restart()

    assert renewed(store, "a") is RenewOutcome.RENEWED

    assert store.inspect("k").remaining > 20.0


def test_a_renewal_creates_no_vote_at_a_node_that_lost_it(masters, store):
    take(store, "a")
    wait_until(lambda: owners(masters) == ["a"] * 5, what="the slowest vote")
    masters.servers[0].restart()

    assert renewed(store, "a") is RenewOutcome.RENEWED

    assert owners(masters) == ["", "a", "a", "a", "a"]


def test_a_lock_that_a_majority_has_forgotten_is_lost(masters, store):
    take(store, "a")
    wait_until(lambda: owners(masters) == ["a"] * 5, what="the slowest vote")
    for node in masters.servers[:3]:
        node.restart()

    assert renewed(store, "a") is RenewOutcome.LOST

    assert owners(masters) == ["", "", "", "a", "a"]
    assert not store.release(ReleaseRequest("k", "a")).released


def test_a_lock_that_another_holds_by_majority_is_held(masters, store):
    take(store, "a")
    wait_until(lambda: owners(masters) == ["a"] * 5, what="the slowest vote")
    for node in masters.servers[:3]:
        node.restart()
        vote(node, "k", "x")

    assert renewed(store, "a") is RenewOutcome.HELD


def test_a_renewal_that_too_few_have_answered_is_unknown(masters, store):
    take(store, "a")
    for node in masters.servers[:3]:
        node.kill()

    assert renewed(store, "a") is RenewOutcome.UNKNOWN


def test_a_renewal_without_a_majority_is_unknown_while_a_silent_node_may_have_it(masters, store):
    take(store, "a")
    wait_until(lambda: owners(masters) == ["a"] * 5, what="the slowest vote")
    masters.servers[0].restart()
    masters.servers[1].restart()
    masters.servers[2].kill()

    assert renewed(store, "a") is RenewOutcome.UNKNOWN

    masters.servers[2].start()
    wait_until(lambda: not store._nodes.failures(), what="the node to answer")
    assert renewed(store, "a") is RenewOutcome.LOST


def test_many_renewals_share_a_round_trip(masters, store, monkeypatch):
    holds = [Ownership(f"k{n}", "a", 30.0) for n in range(50)]
    for hold in holds:
        take(store, "a", hold.key)
    wait_until(lambda: owners(masters, "k49") == ["a"] * 5, what="all nodes to have voted")
    losses = Losses(monkeypatch)

    outcomes = store.renew(holds, 5.0)

    assert {outcome for outcome, _ in outcomes} == {RenewOutcome.RENEWED}
    wait_until(lambda: len(losses.sent) == 5, what="all nodes to be asked")
    assert [len(calls) for calls in losses.sent] == [50] * 5


# Marks of runs that have ended


def test_a_mark_is_found_by_another_majority_than_that_it_was_written_to(masters, store):
    first, second, _, fourth, fifth = masters.servers
    take(store, "a", run="run")
    fourth.pause()
    fifth.pause()
    store.release(ReleaseRequest("k", "a", run="run", completion=Completion.YES_AND_MAY_COME_AGAIN))
    fourth.kill()  # what it was sent without effect is lost with it
    fifth.kill()
    fourth.start()
    fifth.start()
    first.kill()
    second.kill()
    silent = {node.address for node in (first, second)}
    wait_until(
        lambda: _answers(store, but=silent),
        what="the others to answer",
    )

    assert (
        store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
        is Status.DONE
    )
    wait_until(lambda: owners(masters) == [None, None, "", "", ""], what="the votes to be undone")


def _answers(store, but):
    store._nodes.ask([], timeout=0.0)
    return {address for address, _ in store._nodes.failures()} <= but


def test_a_run_is_settled_though_a_node_has_missed_it(masters, store):
    take(store, "a", run="run")
    store.release(ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED))
    masters.servers[0].pause()
    assert store.drop(WokenTask("k", "run", b"")).released
    masters.servers[0].resume()

    assert (
        store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
        is Status.DONE
    )


def test_a_key_kept_for_a_run_is_kept_by_a_majority(masters, store):
    masters.servers[0].kill()
    token = take(store, "a", run="run")
    assert store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", 30.0))).released
    masters.servers[1].kill()

    assert store.acquire(AcquireRequest("k", "b", 30.0)).status is Status.BUSY
    assert take(store, "c", run="run") == token


# What a check says


def test_a_check_names_what_is_wrong_with_the_nodes(masters, open_redlock):
    masters.servers[0].kill()
    masters.servers[1].ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")

    doubts = "\n".join(found.message for found in open_redlock(masters.url).check())

    assert f"{masters.servers[0].address} does not answer: " in doubts
    assert f"{masters.servers[1].address}: maxmemory-policy is allkeys-lru" in doubts
    assert "without appendonly" in doubts


def test_a_check_names_an_even_number_and_a_server_that_is_two_nodes(masters, open_redlock):
    first = masters.servers[0]
    hosts = [node.address for node in masters.servers[:3]] + [f"localhost:{first.port}"]
    store = open_redlock(f"redlock://{','.join(hosts)}/0")
    doubts = "\n".join(found.message for found in store.check())

    assert "4 nodes tolerate as many failures as 3" in doubts
    assert f"localhost:{first.port} and {first.address} are one server" in doubts


def test_a_check_names_clocks_that_are_apart(shared_store, monkeypatch):
    to = shared_store._nodes.ask

    def ask(calls, **more):
        answers = to(calls, **more)
        if len(calls) == 2 and answers.of[0] is not None:
            answers.of[0][1] = [int(answers.of[0][1][0]) + 90, 0]
        return answers

    monkeypatch.setattr(shared_store._nodes, "ask", ask)

    (spread,) = [found.figures["spread"] for found in shared_store.check() if found.figures]

    assert spread == pytest.approx(90.0, abs=1.0)


def test_refusals_do_not_leak_and_have_no_password(masters, open_redlock):
    store = open_redlock(masters.url.replace("redlock://", "redlock://user:secret@"))

    with pytest.raises(QuorumError) as caught:
        store.acquire(AcquireRequest("k", "a", 30.0))

    assert "secret" not in str(caught.value)


def test_records_of_another_type_are_named(masters, store):
    for node in masters.servers[:3]:
        node.ask("SET", record("k", "lock"), "something")

    with pytest.raises(StoreError, match="of another type"):
        store.acquire(AcquireRequest("k", "a", 30.0))


# Processes


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own(shared_store):
    token = take(shared_store, "a")
    pid = os.fork()
    if not pid:
        try:
            reply = shared_store.acquire(AcquireRequest("k", "b", 30.0))
            good = reply.status is Status.BUSY and reply.token == token
            good = (
                good
                and shared_store.acquire(AcquireRequest("child", "c", 30.0)).status
                is Status.GRANTED
            )
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    for n in range(50):
        take(shared_store, "a", f"k{n}")

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert shared_store.inspect("child").owner == "c"
    assert shared_store.release(ReleaseRequest("k", "a")).released


def test_the_belief_begins_before_the_first_request(shared_store):
    before = clock.monotonic()

    reply = shared_store.acquire(AcquireRequest("k", "a", 30.0))

    assert before <= reply.asked_at <= clock.monotonic()


# Threads


def test_a_signal_s_handler_may_take_a_lock_while_its_thread_asks_the_nodes(
    shared_masters, open_redlock
):
    store = open_redlock(shared_masters.url, servers.new_prefix())

    def take(key: str) -> None:
        # On a busy machine not all answer in time, or not before the lease ends.
        with contextlib.suppress(StoreError, LockLostError), Lock(key, store=store, timeout=10.0):
            pass

    def disconnect() -> None:
        store.close()
        store.forget_connections()

    hangs = hangs_of(
        lambda: take("a"),
        lambda: take("b"),
        {"ask", "put", "_begin"},
        before=disconnect,
    )

    assert hangs == []


def test_a_node_is_asked_again_for_which_there_could_be_no_thread(
    shared_masters, open_redlock, monkeypatch
):
    store = open_redlock(shared_masters.url, servers.new_prefix())

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in store._nodes.addresses:
            with pytest.raises(RuntimeError):
                take(store, "first")

    assert take(store, "second", "another") > 0


def test_a_node_is_asked_again_after_a_defect_that_the_log_does_not_take(
    shared_masters, open_redlock, monkeypatch
):
    store = open_redlock(shared_masters.url, servers.new_prefix())

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a defect, or the log's server is unreachable")

    def is_taken() -> bool:
        with contextlib.suppress(QuorumError):
            return take(store, "second", "another") > 0
        return False

    with monkeypatch.context() as patch:
        patch.setattr(quorum._NodeWorker, "_serve", fail)
        patch.setattr(quorum.logger, "log", fail)
        patch.setattr(quorum.logger, "exception", fail)
        with pytest.raises(StoreError):
            take(store, "first")

    wait_until(is_taken, what="that the nodes are asked again")
