"""What operators are shown of a key that several hold, limited or at rest: from a state alone."""

from __future__ import annotations

import click
import pytest

from celery_distlock.errors import DistlockError
from celery_distlock.ops.cli.display import (
    hold_cells,
    limit_label,
    lock_cells,
    lock_record,
    waiter_record,
    wants_label,
)
from celery_distlock.ops.cli.ranges import Duration
from celery_distlock.ops.cli.single import in_use, key_facts
from celery_distlock.ops.cli.top import View
from celery_distlock.ops.looks import holds_named, is_of_interest, lock_info, waiter_info
from celery_distlock.rate import Rate
from celery_distlock.stores.holders import Asked
from celery_distlock.stores.values import Holder, KeyState, Limit, Starts, Waiter, Want

NOW = 1_800_000_000.0
COLUMNS = ("key", "holder", "worker", "held", "age", "lease", "token", "waiting", "woken", "notes")


def holder(number, *, units=1, slot=-1, since=NOW - 10, remaining=20.0):
    return Holder(f"vm|{number}|shop.f[id-{number}]|n{number}", "", units, slot, since, remaining)


def shared(*holders, capacity=5, limit=None, rest=0.0, run="", task=""):
    used, first = sum(each.units for each in holders), holders[0]
    return KeyState(
        first.owner,
        7,
        run or first.run,
        first.since,
        first.remaining,
        0,
        task=task,
        holders=holders,
        used=used,
        capacity=capacity,
        limit=limit,
        rest=rest,
    )


FREE = KeyState("", 0, "", 0.0, 0.0, 0)


def row(state):
    return dict(zip(COLUMNS, lock_cells(lock_info("k", state), NOW), strict=True))


def test_a_key_at_rest_is_not_counted_as_held():
    view = View()
    for owner in ("parked:resting:x", "parked:x:0:0:0", holder(1).owner):
        view.count(lock_info("k", KeyState(owner, 7, "", NOW, 20.0, 0)))

    assert view.held == 1


def test_a_task_dispatched_to_a_shared_key_is_shown_by_its_name():
    own = Holder("parked:x:0:0:0", "x:0:0:0", 1, -1, NOW, 20.0, "shop.f")

    cells = hold_cells(lock_info("k", shared(holder(1), own)).holds[1], NOW)

    assert cells[:3] == ["shop.f", "x", "(in flight)"]


def test_several_are_shown_with_the_units_in_use_and_the_longest_holder():
    state = shared(holder(1, units=2), holder(2, since=NOW - 60, remaining=4.0))

    cells = row(state)

    assert cells["holder"] == "shop.f +1"
    assert cells["worker"] == "vm:2 +1"
    assert cells["held"] == "3/5"
    assert (cells["age"], cells["lease"]) == ("1m00s", "4.0s")


def test_an_exclusive_holder_is_shown_as_before_and_as_exclusive():
    cells = row(KeyState("vm|1|shop.f[id]|n", 7, "", NOW - 10, 20.0, 0))

    assert (cells["holder"], cells["worker"], cells["held"]) == ("shop.f", "vm:1", "exclusive")
    assert cells["notes"] == ""


def test_a_key_without_a_capacity_has_room_for_any_number():
    assert row(shared(holder(1), capacity=0))["held"] == "1/any"


def test_an_operator_s_limit_goes_before_the_capacity():
    cells = row(shared(holder(1), holder(2), holder(3), limit=Limit(2)))

    assert (cells["held"], cells["notes"]) == ("3/2", "limit 2")


def test_a_paused_key_and_one_at_rest_are_marked():
    assert row(shared(holder(1), limit=Limit(0), rest=12.0))["notes"] == "paused, rests 12.0s"
    assert row(FREE._replace(limit=Limit(0)))["notes"] == "paused"
    assert row(FREE._replace(limit=Limit(0)))["held"] == ""


@pytest.mark.parametrize("facts", [{"limit": Limit(0)}, {"rest": 1.0}, {"waiting": 1}])
def test_a_free_key_is_of_interest_if_it_is_not_as_others_are(facts):
    assert not is_of_interest(FREE)
    assert is_of_interest(FREE._replace(**facts))


def test_what_is_kept_for_a_task_in_flight_is_no_hold_of_a_process():
    waking = holder(1)._replace(owner="parked:id:0:0:0", run="id:0:0:0", since=NOW - 99)
    info = lock_info("k", shared(waking, holder(2)))

    assert (info.state, info.holder.pid) == ("held", 2)
    assert [hold.state for hold in info.holds] == ["held", "waking"]
    assert info.holds[1].who.task_id == "id"


def test_what_rests_has_no_holder():
    resting = holder(1)._replace(owner="parked:resting:x", run="resting:x")
    alone = KeyState("parked:resting:x", 7, "resting:x", NOW - 1, 9.0, 0)

    for state in (shared(resting), alone):
        info = lock_info("k", state)
        assert (info.state, str(info.holder)) == ("resting", "")
        assert row(state)["worker"] == "(rests)"


def test_a_task_whose_id_looks_like_a_rest_is_a_task():
    state = KeyState("vm|1|shop.f[resting:x]|n", 7, "resting:x:0:0:0", NOW, 9.0, 0)

    assert lock_info("k", state).state == "held"


def test_json_has_the_facts_of_each_holder():
    limit = Limit(2, NOW + 60, "ann@vm", NOW - 60)
    state = shared(holder(1, units=1, slot=0), holder(2, slot=1), limit=limit, rest=1.5)

    record = lock_record(lock_info("k", state), NOW)

    assert (record["mode"], record["units"], record["capacity"]) == ("shared", 2, 5)
    assert record["rest_seconds"] == 1.5
    assert record["limit"]["author"] == "ann@vm"
    assert record["limit"]["until_seconds"] == NOW + 60
    assert [
        (each["task_id"], each["pid"], each["units"], each["slot"]) for each in record["holders"]
    ] == [("id-1", 1, 1, 0), ("id-2", 2, 1, 1)]
    assert record["holders"][0]["remaining_seconds"] == 20.0


def test_json_says_null_for_what_there_is_not():
    free = lock_record(lock_info("k", FREE), NOW)
    readers = lock_record(lock_info("k", shared(holder(1), capacity=0)), NOW)

    assert (free["mode"], free["capacity"], free["limit"], free["holders"]) == (
        None,
        None,
        None,
        [],
    )
    assert readers["capacity"] is None
    assert readers["holders"][0]["slot"] is None


def test_holders_that_are_not_listed_are_counted():
    info = lock_info("k", shared(holder(1), capacity=0)._replace(used=250))

    assert in_use(info) == (
        "250 units are in use, without a limit; holders of 249 of them are not listed"
    )


def named(info, *words, **options):
    return [hold.who.pid for hold in holds_named(info, *words, **options)]


def test_one_of_several_is_named_by_its_process_its_task_or_its_owner():
    info = lock_info("k", shared(holder(1), holder(2)))

    for word in ("2", "vm:2", "id-2", "vm|2|shop.f[id-2]|n2"):
        assert named(info, word) == [2]


def test_the_only_holder_needs_no_name_and_its_token_is_one():
    info = lock_info("k", shared(holder(1)))

    assert named(info) == named(info, "7") == [1]
    assert named(lock_info("k", FREE)) == []


@pytest.mark.parametrize("word", ["", "7"], ids=["none", "their token"])
def test_several_are_named_in_the_refusal_to_choose_one_of_them(word):
    info = lock_info("k", shared(*(holder(number) for number in range(1, 8))))

    with pytest.raises(DistlockError, match="'k' has 7 holders") as refused:
        holds_named(info, word)

    assert "shop.f[id-1] on vm, process 1, " in str(refused.value)
    assert "and 2 more; " in str(refused.value)
    assert "--holder" in str(refused.value)
    assert len(holds_named(info, word, many=True)) == 7


def test_a_non_holder_is_not_found_among_the_holders():
    info = lock_info("k", shared(holder(1), holder(2)))

    with pytest.raises(DistlockError, match="'3' is none of the holders of 'k': "):
        holds_named(info, "3", many=True)


def test_a_holder_s_row_has_its_units_its_slot_and_its_lease():
    (hold,) = lock_info("k", shared(holder(1, units=1, slot=3))).holds

    cells = hold_cells(hold, NOW)

    assert cells[:5] == ["shop.f", "id-1", "vm:1", "1", "3"]
    assert cells[5].endswith("(10.0s ago)")
    assert cells[6] == "20.0s"


def test_when_a_holder_was_asked_to_leave_and_by_what_is_shown():
    asked = Asked(NOW - 4, "a newer call")
    alone = lock_info("k", KeyState("vm|1|shop.f[id]|n", 7, "", NOW - 9, 20.0, 0, asked=asked))
    one, other = lock_info("k", shared(holder(1)._replace(asked=asked), holder(2))).holds

    assert dict(key_facts(alone, NOW))["asked"].endswith("(4.0s ago) by a newer call")
    assert [hold_cells(each, NOW, brief=True)[7] for each in (one, other)] == [
        "4.0s ago by a newer call",
        "",
    ]
    (record,) = lock_record(alone, NOW)["holders"]
    assert (record["asked_seconds"], record["asked_by"]) == (NOW - 4, "a newer call")


def test_of_one_that_was_not_asked_there_is_nothing_to_show():
    alone = lock_info("k", KeyState("vm|1|shop.f[id]|n", 7, "", NOW - 9, 20.0, 0))

    assert "asked" not in dict(key_facts(alone, NOW))
    (record,) = lock_record(alone, NOW)["holders"]
    assert (record["asked"], record["asked_seconds"], record["asked_by"]) == (None, None, None)


def test_a_waiter_for_units_shows_that():
    part = waiter_info(0, "parked", Waiter("", "id:0:0:0", NOW, task="t", want=Want(2, 5)))
    whole = waiter_info(0, "parked", Waiter("", "id:0:0:0", NOW, task="t"))

    assert wants_label(part.want) == "2 of 5"
    assert wants_label(Want(1, 0)) == "1 of any"
    assert wants_label(whole.want) == ""
    assert (waiter_record(part)["units"], waiter_record(part)["capacity"]) == (2, 5)


def test_a_limit_has_author_start_and_end():
    words = limit_label(Limit(2, NOW + 3600, "ann@vm", NOW - 60), NOW)

    assert words.startswith("2 units, by ann@vm, since 20")
    assert "(1m00s ago), until 20" in words
    assert words.endswith("(in 1h00m)")
    assert limit_label(Limit(0), NOW) == "paused: no new grants"


def test_nothing_in_an_author_moves_the_cursor():
    assert limit_label(Limit(1, author="\x1b[2Jann"), NOW) == r"1 unit, by \x1b[2Jann"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("1.5h", 5400.0),
        ("15m", 900.0),
        ("1h30m", 5400.0),
        ("2d", 172_800.0),
        ("1H", 3600.0),
    ],
)
def test_times_are_read_as_people_write_them(text, seconds):
    assert Duration(1.0, 365 * 86400.0).convert(text, None, None) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h",
        "1x",
        "-1h",
        "1.h",
        "90",
        "8",
        "30m1h",
        "nan",
        "inf",
        "0",
        "0s",
        "366d",
        "٣h",
        "9" * 20,
    ],
)
def test_what_is_no_such_time_is_refused(text):
    with pytest.raises(click.BadParameter):
        Duration(1.0, 365 * 86400.0).convert(text, None, None)


def test_a_number_without_a_unit_says_how_to_write_it():
    with pytest.raises(click.BadParameter, match="'8' has no unit: use 8s, 8m, 8h or 8d"):
        Duration(1.0, 86400.0).convert("8", None, None)

    assert Duration(0.0, 86400.0).convert("0", None, None) == 0
    assert Duration(0.1, 86400.0).convert("0.2s", None, None) == 0.2


def test_calls_that_come_later_and_what_time_lets_in_are_notes():
    later = FREE._replace(later=3, due=3.2)
    rated = FREE._replace(waiting=1, opens=0.4)

    assert is_of_interest(later)
    assert row(later)["notes"] == "3 later, in 3.2s"
    assert row(rated)["notes"] == "next in 0.4s"
    assert row(rated._replace(rest=0.4))["notes"] == "rests 0.4s"
    assert row(FREE._replace(opens=0.0, later=1, waiting=1))["notes"] == (
        "next in 0.0s, 1 later, in 0.0s"
    )


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"limit": Limit(2, NOW + 3540)}, "next in 59m00s at the latest"),  # it is full
        ({"limit": Limit(4, NOW + 3540)}, "next in 59m00s at the latest"),  # too much is wanted
        ({"limit": Limit(0, NOW + 3540)}, "next in 59m00s"),
        ({"limit": Limit(4, rates=(Rate(1),))}, "next in 59m00s"),
        ({"starts": (Starts(5, 60.0, 5),)}, "next in 59m00s"),
        ({"limit": Limit(2), "starts": (Starts(5, 60.0, 5),)}, "next in 59m00s at the latest"),
    ],
)
def test_what_lets_in_sooner_if_a_holder_ends_is_said_to_be_the_latest(change, note):
    state = shared(holder(1, units=2))._replace(waiting=1, opens=3540.0, **change)

    assert row(state)["notes"].rpartition(", ")[2] == note


def test_the_record_shows_times_only_where_there_are_any():
    later = lock_record(lock_info("k", FREE._replace(later=3, due=3.2, opens=0.4)), NOW)
    free = lock_record(lock_info("k", FREE), NOW)

    names = ("later", "due_in_seconds", "opens_in_seconds", "identities")
    assert [later[name] for name in names] == [3, 3.2, 0.4, 0]
    assert [free[name] for name in names] == [0, None, None, 0]
    waiter = waiter_info(None, "later", Waiter("", "id:0:0:0", 0.0, task="shop.f", due=3.2))
    assert (waiter_record(waiter)["due_in_seconds"], waiter_record(waiter)["since"]) == (3.2, None)
