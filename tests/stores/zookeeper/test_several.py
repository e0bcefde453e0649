"""Several holders of a key: which is admitted, in what order, and which is woken."""

from __future__ import annotations

import signal
import threading

import pytest

from celery_distlock.errors import StoreError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import ALONE, Completion, Want, WokenTask
from celery_distlock.stores.zookeeper import acquisition
from tests.stores.zookeeper.znodes import (
    BUSY,
    DONE,
    GRANTED,
    HELD,
    LOST,
    RENEWED,
    nodes,
    renew,
    script,
    take,
    wait_for,
)
from tests.waiting import wait_until

SHARED, THREE = Want(1, 0), Want(1, 3)


def enter(store, owner, want, **more):
    reply = store.acquire(AcquireRequest("k", owner, 30.0, want=want, **more))
    assert reply.status is GRANTED
    return reply


def refused(store, owner, want, **more):
    reply = store.acquire(AcquireRequest("k", owner, 30.0, want=want, **more))
    assert reply.status is BUSY
    return reply


def leave(store, owner, **more):
    assert store.release(ReleaseRequest("k", owner, **more)).released


def counted(inbox):
    """Count how often the inbox is woken."""
    times, wake = [], inbox.wake

    def counting():
        times.append(1)
        wake()

    inbox.wake = counting
    return times


# Admission


def test_as_many_hold_a_key_as_its_capacity_is(store, open_store):
    others = [store, open_store(), open_store()]
    slots = [enter(other, f"o{n}", THREE).slot for n, other in enumerate(others)]

    refused(store, "late", THREE)
    refused(store, "alone", ALONE)

    assert slots == [0, 1, 2]
    assert len(nodes(store, "k")) == 3


def test_any_number_share_a_key_and_none_is_exclusive_with_them(store, open_store):
    other = open_store()
    for n in range(10):
        reply = enter(other if n % 2 else store, f"o{n}", SHARED)
        assert reply.slot == -1

    refused(other, "alone", ALONE)


def test_no_request_shares_an_exclusive_key(store, open_store):
    enter(store, "alone", ALONE)

    assert refused(open_store(), "b", SHARED).holder == "alone"
    assert refused(store, "c", THREE).holder == "alone"
    assert len(nodes(store, "k")) == 1


def test_each_is_judged_by_its_own_capacity_and_none_is_thrown_out(store):
    for n in range(3):
        enter(store, f"o{n}", THREE)

    refused(store, "lower", Want(1, 2))
    enter(store, "higher", Want(1, 4))
    leave(store, "o0")
    leave(store, "o1")
    refused(store, "lower", Want(1, 2))
    leave(store, "o2")

    assert enter(store, "lower", Want(1, 2)).slot == 0


def test_a_slot_that_was_given_back_is_the_next_ones(store, open_store):
    for n in range(3):
        enter(store, f"o{n}", THREE)
    leave(store, "o1")

    assert enter(open_store(), "next", THREE).slot == 1
    assert enter(store, "o2", THREE).slot == 2
    assert enter(store, "o0", THREE).slot == 0


@pytest.mark.parametrize(("capacity", "slot"), [(2, 0), (1024, 0), (1025, -1), (0, -1)])
def test_slots_are_reported_up_to_a_capacity(store, capacity, slot):
    assert enter(store, "a", Want(1, capacity)).slot == slot


def test_a_weight_is_refused_and_nothing_is_left(store):
    with pytest.raises(StoreError, match=r"zookeeper://.*'k' .*units=2, .*ask for one unit"):
        store.acquire(AcquireRequest("k", "a", 30.0, want=Want(2, 3)))

    assert nodes(store, "k") == []


def test_no_request_overtakes_a_waiter_whether_it_would_fit_or_not(store, open_store):
    other = open_store()
    enter(store, "a", SHARED)
    writer = wait_for(other, "k", "writer")

    refused(store, "b", SHARED)
    behind = store.inbox("k", "c")
    refused(store, "c", SHARED, queue=behind)
    leave(store, "a")
    writer.wait(30.0)
    enter(other, "writer", ALONE, queue=writer)
    refused(store, "c", SHARED, queue=behind)
    leave(other, "writer")
    behind.wait(30.0)
    enter(store, "c", SHARED, queue=behind)


def test_of_many_requests_at_once_as_many_enter_as_fit(open_store):
    """A request that does not wait is not refused because one before it was not granted yet."""
    stores = [open_store() for _ in range(3)]
    for round_ in range(10):
        start, replies = threading.Barrier(9), []

        def ask(n, start=start, replies=replies, key=f"k{round_}"):
            start.wait()
            request = AcquireRequest(key, f"t{n}", 30.0, want=Want(1, 9))
            replies.append(stores[n % 3].acquire(request))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert [reply.status for reply in replies] == [GRANTED] * 9
        assert sorted(reply.slot for reply in replies) == list(range(9))
        assert len({reply.token for reply in replies}) == 1


# Tokens


def test_all_holders_of_a_phase_have_one_token_and_phases_rise(store, open_store):
    other = open_store()
    tokens = [take(store, "k", "before")]
    leave(store, "before")
    shared = {enter(store, "a", SHARED).token, enter(other, "b", SHARED).token}
    leave(store, "a")
    shared |= {enter(store, "c", SHARED).token, enter(other, "b", SHARED).token}
    writer = wait_for(store, "k", "writer")
    leave(other, "b")
    leave(store, "c")
    assert len(shared) == 1
    tokens += [*shared, enter(store, "writer", ALONE, queue=writer).token]
    leave(store, "writer")
    tokens += [enter(store, "d", SHARED).token]

    assert tokens == sorted(set(tokens))


def test_one_that_is_admitted_while_the_first_leaves_has_its_own_token(store, open_store):
    """The first is gone before the note: then it is another phase, and said to be."""
    other = open_store()
    first = enter(store, "a", SHARED).token
    let_in = acquisition.Queue.let_in

    def late(queue, line, entries):
        if store.inspect("k").owner == "a":
            leave(store, "a")
        return let_in(queue, line, entries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acquisition.Queue, "let_in", late)
        second = enter(other, "b", SHARED).token

    assert second > first
    assert enter(store, "c", SHARED).token == second


# Wake-ups


def test_a_release_wakes_the_first_waiter_and_no_other(store, open_store):
    for n in range(3):
        enter(store, f"o{n}", THREE)
    others = [open_store() for _ in range(4)]
    inboxes = []
    for n, other in enumerate(others):
        inboxes.append(other.inbox("k", f"w{n}"))
        refused(other, f"w{n}", THREE, queue=inboxes[n])
    counts = [counted(inbox) for inbox in inboxes]

    leave(store, "o1")
    inboxes[0].wait(30.0)

    assert [len(count) for count in counts] == [1, 0, 0, 0]
    assert enter(others[0], "w0", THREE, queue=inboxes[0]).slot == 1
    inboxes[1].wait(30.0)  # it is the first of the waiters now
    assert [len(count) for count in counts[1:]] == [1, 0, 0]
    refused(others[1], "w1", THREE, queue=inboxes[1])


def test_those_that_fit_follow_one_by_one(store, open_store):
    enter(store, "alone", ALONE)
    others = [open_store() for _ in range(4)]
    inboxes = []
    for n, other in enumerate(others):
        inboxes.append(other.inbox("k", f"w{n}"))
        refused(other, f"w{n}", THREE, queue=inboxes[n])
    counts = [counted(inbox) for inbox in inboxes]

    leave(store, "alone")
    tokens = set()
    for n in range(3):
        inboxes[n].wait(30.0)
        reply = enter(others[n], f"w{n}", THREE, queue=inboxes[n])
        assert reply.slot == n
        tokens.add(reply.token)
        assert [len(count) for count in counts[n + 2 :]] == [0] * (2 - n)
    inboxes[3].wait(30.0)
    refused(others[3], "w3", THREE, queue=inboxes[3])

    assert len(tokens) == 1
    leave(others[1], "w1")
    inboxes[3].wait(30.0)
    enter(others[3], "w3", THREE, queue=inboxes[3])


def test_an_exclusive_waiter_watches_the_last_before_it_and_no_other(store):
    for n in range(3):
        enter(store, f"o{n}", SHARED)
    wait_for(store, "k", "writer")

    assert list(store._contact.session.client._data_watchers) == [nodes(store, "k")[2]]


def test_the_first_to_wait_for_a_unit_watches_as_many_as_there_are_units(store):
    for n in range(3):
        enter(store, f"o{n}", Want(1, 8))
    inbox = store.inbox("k", "w")

    refused(store, "w", Want(1, 2), queue=inbox)

    assert sorted(store._contact.session.client._data_watchers) == sorted(nodes(store, "k")[:2])
    leave(store, "o2")
    leave(store, "o1")  # one of them has to go before there is room
    inbox.wait(30.0)
    enter(store, "w", Want(1, 2), queue=inbox)


def test_a_request_admits_earlier_ones_that_fit(store, open_store):
    """A waiter in a slow process does not block others that fit with it."""
    enter(store, "alone", ALONE)
    inbox = store.inbox("k", "slow")
    refused(store, "slow", THREE, queue=inbox)
    second = store.inbox("k", "slow too")
    refused(store, "slow too", THREE, queue=second)
    leave(store, "alone")

    reply = enter(open_store(), "quick", THREE)

    assert reply.slot == 2
    assert [enter(store, owner, THREE).slot for owner in ("slow too", "slow")] == [1, 0]
    assert enter(store, "slow", THREE).token == reply.token


def test_a_waiter_that_was_woken_and_does_not_come_is_passed_over(store, monkeypatch):
    monkeypatch.setattr(acquisition, "GRANT", 0.1)
    enter(store, "a", ALONE)
    for owner in ("gone", "alive"):
        inbox = store.inbox("k", owner)
        refused(store, owner, THREE, queue=inbox)

    leave(store, "a")

    wait_until(
        lambda: (
            store.acquire(AcquireRequest("k", "alive", 30.0, queue=inbox, want=THREE)).status
            is GRANTED
            and len(nodes(store, "k")) == 1
        ),
        what="the key to pass the one that does not come",
    )


# Leases, sessions, processes


def test_each_lease_ends_for_itself(store, open_store):
    other = open_store()
    store.acquire(AcquireRequest("k", "brief", 0.3, want=Want(1, 2)))
    enter(store, "long", Want(1, 2))

    wait_until(
        lambda: other.acquire(AcquireRequest("k", "c", 30.0, want=Want(1, 2))).status is GRANTED,
        what="the unit",
    )

    assert renew(store, ("k", "brief", 30.0), ("k", "long", 30.0)) == [LOST, RENEWED]
    refused(other, "d", Want(1, 2))


def test_the_loser_of_a_unit_learns_whether_the_key_is_held_exclusively(store, open_store):
    other = open_store()
    enter(store, "a", SHARED)
    leave(other, "a")
    enter(other, "b", SHARED)
    assert renew(store, ("k", "a", 30.0)) == [LOST]
    leave(other, "b")
    enter(other, "c", ALONE)
    assert renew(store, ("k", "a", 30.0)) == [HELD]


HOLDER = """
want = Want(1, 2)
reply = store.acquire(AcquireRequest("k", "dead", 3.0, want=want))
report(slot=reply.slot, token=reply.token)
ask()
"""


def test_the_unit_of_a_killed_process_is_free_when_its_session_ends(shared_server, store, prefix):
    first = enter(store, "a", Want(1, 2))
    with script(HOLDER, f"{shared_server.url}/chroot?session=3", prefix) as process:
        assert process.received() == {"slot": 1, "token": first.token}
        inbox = store.inbox("k", "b")
        refused(store, "b", Want(1, 2), queue=inbox)
        process.signal(signal.SIGKILL)

        inbox.wait(30.0)

        assert enter(store, "b", Want(1, 2), queue=inbox)[2:3] == (first.token,)
        assert renew(store, ("k", "a", 30.0)) == [RENEWED]


TAKER = """
import time
for n in range(int(sys.argv[4])):
    owner, want = new_owner("taker"), Want(1, int(sys.argv[5])) if n % 5 else Want()
    inbox = store.inbox("k", owner)
    request = AcquireRequest("k", owner, 10.0, queue=inbox, want=want)
    while (reply := store.acquire(request)).status is not Status.GRANTED:
        inbox.wait(1.0)
    with open(sys.argv[6], "a") as file:
        file.write(f"in {want.capacity} {reply.token} {reply.slot}\\n")
    time.sleep(0.002)
    with open(sys.argv[6], "a") as file:
        file.write(f"out {want.capacity} {reply.token} {reply.slot}\\n")
    store.release(ReleaseRequest("k", owner))
report(done=True)
"""


def test_processes_never_hold_more_than_there_is(url, prefix, tmp_path):
    file = tmp_path / "log"
    takers = [script(TAKER, url, prefix, "40", "2", str(file)) for _ in range(4)]
    for taker in takers:
        with taker:
            taker.received()

    inside, most, last = [], 0, (0, 0)
    for line in file.read_text().splitlines():
        what, *hold = line.split()
        capacity, token, slot = map(int, hold)
        if what == "out":
            inside.remove((capacity, token, slot))
            continue
        inside.append((capacity, token, slot))
        most = max(most, len(inside))
        assert len(inside) <= capacity
        assert len({slot for _, _, slot in inside}) == len(inside)
        assert token > last[0] or (token, 2) == last == (token, capacity)
        last = (token, capacity)
    assert most == 2
    assert inside == []


# Runs


def test_a_second_delivery_is_not_granted_during_the_first_though_there_is_room(store, open_store):
    other = open_store()
    enter(store, "a", SHARED)
    enter(store, "b", THREE, run="run")

    for redelivered in (False, True):
        for queue in (None, other.inbox("k", "c")):
            reply = refused(other, "c", THREE, run="run", redelivered=redelivered, queue=queue)
            assert (reply.holder, reply.holder_run) == ("b", "run")

    assert len(nodes(store, "k")) == 2
    enter(other, "d", THREE)


def test_a_second_delivery_that_blocks_is_notified_when_the_first_leaves(store, open_store):
    other = open_store()
    enter(store, "a", SHARED)
    enter(store, "b", THREE, run="run")
    inbox = other.inbox("k", "c")
    refused(other, "c", THREE, run="run", redelivered=True, queue=inbox)

    leave(store, "b", run="run")
    inbox.wait(30.0)
    enter(other, "c", THREE, run="run", redelivered=True, queue=inbox)
    third = store.inbox("k", "d")
    refused(store, "d", THREE, run="run", redelivered=True, queue=third)
    leave(other, "c", run="run", completion=Completion.YES_AND_MAY_COME_AGAIN)
    third.wait(30.0)

    reply = store.acquire(
        AcquireRequest("k", "d", 30.0, run="run", redelivered=True, queue=third, want=THREE)
    )
    assert reply.status is DONE
    assert not store._contact.session._inboxes


def test_a_unit_is_kept_for_a_run_and_claimed_with_its_slot(store, open_store):
    other = open_store()
    token = enter(store, "a", THREE).token
    enter(store, "b", THREE, run="run")
    enter(store, "c", THREE)
    leave(store, "b", run="run", keep_for=("run", 30.0))
    leave(store, "a")

    assert enter(other, "d", THREE).slot == 0
    refused(other, "e", THREE)
    state = store.inspect("k")
    assert [(each.owner, each.slot) for each in state.holders] == [
        ("parked:run", 1),
        ("c", 2),
        ("d", 0),
    ]
    assert state.used == 3
    reply = enter(other, "f", THREE, run="run")
    assert (reply.slot, reply.token) == (1, token)


def test_a_run_that_comes_with_another_capacity_is_checked_again(store):
    enter(store, "a", THREE)
    enter(store, "b", THREE)
    enter(store, "c", THREE, run="run")
    leave(store, "c", run="run", keep_for=("run", 30.0))

    assert refused(store, "d", Want(1, 2), run="run").place == 0
    refused(store, "d", ALONE, run="run")
    assert store.inspect("k").used == 3
    leave(store, "a")
    assert enter(store, "d", Want(1, 2), run="run").slot == 0


def test_a_run_that_comes_to_be_alone_waits_for_the_others(store):
    enter(store, "a", THREE)
    enter(store, "c", THREE, run="run")
    leave(store, "c", run="run", keep_for=("run", 30.0))
    inbox = store.inbox("k", "d")

    refused(store, "d", ALONE, run="run", queue=inbox)
    leave(store, "a")
    inbox.wait(30.0)

    enter(store, "d", ALONE, run="run", queue=inbox)


def test_a_run_that_had_a_key_alone_shares_it(store):
    token = enter(store, "a", ALONE, run="run").token
    leave(store, "a", run="run", keep_for=("run", 30.0))

    reply = enter(store, "b", THREE, run="run")

    assert (reply.slot, reply.token) == (0, token)
    assert enter(store, "c", THREE).token == token
    assert enter(store, "d", THREE).slot == 2


def test_a_unit_that_was_kept_for_a_dropped_run_is_free(store):
    enter(store, "a", Want(1, 2))
    enter(store, "b", Want(1, 2), run="run")
    leave(store, "b", run="run", keep_for=("run", 30.0))
    refused(store, "c", Want(1, 2))

    assert store.drop(WokenTask("k", "run", b"")).released

    assert enter(store, "c", Want(1, 2)).slot == 1


# Looks


def test_a_look_shows_holders_of_units_and_requests_of_waiters(store, open_store):
    other = open_store()
    token = enter(store, "a", THREE, run="run a").token
    enter(other, "b", THREE)
    enter(store, "c", THREE)
    inbox = store.inbox("k", "d")
    refused(store, "d", Want(1, 2), queue=inbox)
    wait_for(store, "k", "e")

    (state, other_state) = store.inspect_many(["k", "other"])

    assert (state.owner, state.run, state.token) == ("a", "run a", token)
    assert [(each.owner, each.run, each.units, each.slot) for each in state.holders] == [
        ("a", "run a", 1, 0),
        ("b", "", 1, 1),
        ("c", "", 1, 2),
    ]
    assert all(0 < each.remaining <= 30 and each.since for each in state.holders)
    assert (state.used, state.capacity, state.waiting) == (3, 3, 2)
    waiters = store.waiters("k")
    assert [(each.owner, each.want) for each in waiters] == [("d", Want(1, 2)), ("e", ALONE)]
    assert state.oldest == waiters[0].since
    assert other_state == store.inspect("nothing")
    assert [each.owner for each in store.waiters("k", first=1)] == ["e"]


def test_an_exclusive_holder_is_no_sharer(store):
    enter(store, "a", ALONE)

    state = store.inspect("k")

    assert (state.holders, state.used, state.capacity) == ((), 0, 1)


def test_a_look_goes_over_more_holders_than_it_names(store, monkeypatch):
    monkeypatch.setattr("celery_distlock.stores.zookeeper.queues.MOST_HOLDERS", 2)
    for n in range(5):
        enter(store, f"o{n}", SHARED)
    wait_for(store, "k", "w")

    state = store.inspect("k")

    assert (state.used, len(state.holders), state.waiting) == (5, 2, 1)
    assert [each.owner for each in store.waiters("k")] == ["w"]


def test_a_full_life_leaves_nothing(store):
    enter(store, "a", THREE, run="run")
    enter(store, "b", THREE)
    inbox = store.inbox("k", "c")
    refused(store, "c", ALONE, queue=inbox)
    leave(store, "a", run="run", keep_for=("run", 30.0))
    enter(store, "d", THREE, run="run")
    leave(store, "b")
    leave(store, "d")
    inbox.wait(30.0)
    enter(store, "c", ALONE, queue=inbox)
    leave(store, "c")

    assert nodes(store, "k") == []
    assert store._registry._nodes == {}
    assert not store._contact.session._inboxes
