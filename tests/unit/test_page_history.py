"""What the page's server remembers of keys, from nothing but its looks."""

from __future__ import annotations

from celery_distlock.ops.web import history as module
from celery_distlock.ops.web.history import History
from celery_distlock.stores.values import Holder, KeyState


def held(key="k", token=1, since=100.0, *, waiting=0, oldest=0.0, task="shop.reserve"):
    owner = f"vm|7|{task}[id-{token}]|owner-{token}"
    return KeyState(owner, token, "", since, 30.0, waiting, oldest, key=key)


def shared(*numbers, token=1, since=100.0):
    """A key that several hold, each since a second later than the one before."""
    holders = tuple(Holder(f"vm|{n}|t[id-{n}]|{n}", "", 1, n, since + n, 30.0) for n in numbers)
    first, facts = holders[0], {"holders": holders, "used": len(holders), "capacity": 5}
    return KeyState(first.owner, token, "", first.since, 30.0, 0, key="k", **facts)


def free(key="k"):
    return KeyState("", 0, "", 0.0, 0.0, 0, key=key)


def grants(history, key="k"):
    return [(each.token, each.since, each.seen, each.ended) for each in history.of(key).grants]


def test_a_holder_is_remembered_from_its_grant_to_the_last_look_at_it():
    history = History()
    for at in (101.0, 103.0):
        history.note_all([held()], at, whole=True)

    assert grants(history) == [(1, 100.0, 103.0, 0.0)]


def test_a_key_that_is_gone_has_ended_between_two_looks():
    history = History()
    history.note_all([held()], 101.0, whole=True)
    history.note_all([], 103.0, whole=True)
    history.note_all([], 105.0, whole=True)

    assert grants(history) == [(1, 100.0, 101.0, 103.0)]


def test_the_next_grant_shows_when_the_one_before_ended():
    history = History()
    history.note_all([held()], 101.0, whole=True)
    history.note_all([held(token=2, since=101.5)], 103.0, whole=True)

    assert grants(history) == [(2, 101.5, 103.0, 0.0), (1, 100.0, 101.0, 101.5)]


def test_a_look_that_stopped_early_ends_nothing():
    history = History()
    history.note_all([held()], 101.0, whole=True)
    history.note_all([held("other")], 103.0, whole=False)

    assert grants(history) == [(1, 100.0, 101.0, 0.0)]


def test_a_look_at_one_key_counts_too():
    history = History()
    history.note(held(), 101.0)
    history.note(free(), 102.0)

    assert grants(history) == [(1, 100.0, 101.0, 102.0)]


def test_the_longest_queue_and_wait_are_kept():
    history = History()
    history.note_all([held(waiting=3, oldest=101.0)], 104.0, whole=True)
    history.note_all([held(waiting=1, oldest=103.0)], 105.0, whole=True)

    known = history.of("k")
    assert (known.most_waiting, known.longest_wait) == (3, 3.0)


def test_nothing_is_remembered_of_a_key_that_is_free_and_was():
    history = History()
    history.note(free(), 101.0)

    assert history.of("k").grants == []
    assert history._keys == {}


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST_KEYS", 3)
    history = History()
    for token in range(1, 20):
        history.note_all([held(token=token, since=float(token))], 100.0 + token, whole=True)
    assert [token for token, *_ in grants(history)] == list(range(19, 19 - module.MOST_GRANTS, -1))

    history.note_all([held(f"other-{n}") for n in range(3)], 200.0, whole=False)

    assert grants(history) == []
    assert len(history._keys) == 3
    assert history._held <= history._keys.keys()


def test_a_look_that_ends_after_a_later_one_brings_no_grant_back():
    history = History()
    history.note_all([held(token=1, since=100.0)], 101.0, whole=True)
    history.note(held(token=2, since=102.0), 103.0)
    history.note_all([held(token=1, since=100.0)], 103.5, whole=True)
    history.note_all([held(token=2, since=102.0)], 104.0, whole=True)

    assert [token for token, *_ in grants(history)] == [2, 1]


def spans(history):
    return {each.holder.pid: (each.since, each.seen, each.ended) for each in history.of("k").grants}


def test_each_of_several_has_its_own_beginning_and_end():
    history = History()
    history.note_all([shared(1, 2)], 104.0, whole=True)
    history.note_all([shared(2, 3)], 106.0, whole=True)
    history.note_all([], 108.0, whole=True)

    assert spans(history) == {
        1: (101.0, 104.0, 106.0),
        2: (102.0, 106.0, 108.0),
        3: (103.0, 106.0, 108.0),
    }


def test_all_holders_of_a_key_are_remembered_however_many():
    history = History()
    for at in (130.0, 140.0):
        history.note_all([shared(*range(20))], at, whole=True)

    assert [each.holder.pid for each in history.of("k").grants] == list(range(19, -1, -1))
    history.note_all([shared(0)], 150.0, whole=True)
    assert len(history.of("k").grants) == module.MOST_GRANTS


def test_the_time_in_which_a_key_is_shared_ends_those_of_the_one_before():
    history = History()
    history.note_all([shared(1, 2)], 104.0, whole=True)
    history.note_all([held(token=9, since=105.0)], 106.0, whole=True)

    assert spans(history)[1] == (101.0, 104.0, 105.0)
    assert spans(history)[2] == (102.0, 104.0, 105.0)
