"""What the commands show of keys that several hold, and how operators limit and pause them."""

from __future__ import annotations

import getpass
import json
import socket
import time
import uuid
from contextlib import ExitStack, contextmanager

import pytest
import redis

from celery_distlock.rate import Rate
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import AcquireRequest, ParkRequest, ReleaseRequest, SendRequest
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.values import ALONE, Status, Want
from tests.integration.cli.test_acting import run_here, wait_parked
from tests.waiting import wait_until

WORKERS = [{"concurrency": 2}]
SHARED = True
ME = f"{getpass.getuser()}@{socket.gethostname()}"
FIVE = Want(1, 5)


@contextmanager
def taken(site, key, task, want=FIVE, lease=60.0):
    """Have a task of this id and name take *want* of *key* in this process; yields its owner."""
    owner = new_owner(f"shop.f[{task}]")
    reply = site.store.acquire(AcquireRequest(key, owner, lease, want=want))
    assert reply.status is Status.GRANTED
    try:
        yield owner
    finally:
        site.store.release(ReleaseRequest(key, owner))


@pytest.fixture
def three(bare_site, key):
    """Three tasks that hold four of the five units of *key*: their owners, by id."""
    wants = {"one": Want(2, 5), "two": FIVE, "three": FIVE}
    with ExitStack() as stack:
        yield {
            task: stack.enter_context(taken(bare_site, key, task, want))
            for task, want in wants.items()
        }


def rows(text):
    head, *lines = [line.split("\t") for line in text.splitlines()]
    return [dict(zip(head, line, strict=True)) for line in lines]


def shown(invoke, key):
    return json.loads(invoke("show", key, "--json").stdout)


@pytest.fixture(autouse=True)
def _cleared(bare_site, key):
    yield
    bare_site.store.units.set_limit(key, None)


# What is seen


@pytest.mark.parametrize("words", [["list"], ["top"]], ids=" ".join)
def test_a_key_that_several_hold_is_one_row_with_its_units(invoke, key, three, words):
    text = invoke(*words).stdout
    text = text if words == ["list"] else text.partition("\n")[2]

    (row,) = [row for row in rows(text) if row["KEY"] == key]
    assert (row["HOLDER"], row["HELD"]) == ("shop.f +2", "4/5")
    assert row["NOTES"] == "-"


def test_each_holder_is_shown_with_its_units_slot_and_lease(invoke, key, three):
    facts, _, table = invoke("show", key).stdout.partition("HOLDER\t")

    assert "mode\tshared, 4 of 5 units are in use\n" in facts
    listed = {row["ID"]: row for row in rows("HOLDER\t" + table)}
    assert {task: (row["UNITS"], row["SLOT"]) for task, row in listed.items()} == {
        "one": ("2", "-"),
        "two": ("1", "0"),
        "three": ("1", "1"),
    }
    assert all(row["LEASE"].endswith("s") for row in listed.values())


def test_json_shows_the_same_of_the_list_and_of_one_key(bare_site, invoke, key, three):
    listed = json.loads(invoke("list", key, "--json").stdout)
    record = shown(invoke, key)

    for each in (listed, record):
        assert (each["mode"], each["units"], each["capacity"]) == ("shared", 4, 5)
        assert {hold["owner"] for hold in each["holders"]} == set(three.values())
        assert each["token"] == bare_site.look(key).token


def test_readers_have_no_number_to_be_part_of(bare_site, invoke, key):
    with taken(bare_site, key, "one", Want(1, 0)), taken(bare_site, key, "two", Want(1, 0)):
        (row,) = rows(invoke("list", key).stdout)
        assert row["HELD"] == "2/any"
        assert shown(invoke, key)["capacity"] is None


def test_a_rest_is_shown(bare_site, invoke, key, three):
    assert bare_site.store.units.rest(key, three["one"], 50.0)

    (row,) = rows(invoke("list", key).stdout)
    assert row["NOTES"].startswith("rests ")
    assert 40 < shown(invoke, key)["rest_seconds"] <= 50
    assert "rests\t" in invoke("show", key).stdout


@pytest.mark.parametrize("want", [ALONE, FIVE], ids=["alone", "shared"])
def test_a_key_that_stays_taken_without_a_holder_is_shown_as_such(bare_site, invoke, key, want):
    owner = new_owner("shop.f[x]")
    bare_site.store.acquire(AcquireRequest(key, owner, 60.0, want=want))
    bare_site.store.release(ReleaseRequest(key, owner, keep_for=("resting:x", 60.0)))

    (row,) = rows(invoke("list", key).stdout)
    assert (row["HOLDER"], row["WORKER"]) == ("-", "(rests)")
    assert shown(invoke, key)["state"] == "resting"
    output = invoke("show", key)
    assert output.exit_code == 0
    assert "state\tresting: it has no holder" in output.stdout
    assert ("rests\t" in output.stdout) == (want == ALONE)
    assert "unless it is renewed" not in output.stdout
    done = invoke("release", key, "--force")
    assert done.stdout == f"{key} was taken from no holder: it rested. It is free now.\n"


def test_a_task_of_several_is_found_by_its_name(bare_site, invoke, key, three):
    owner = new_owner("shop.other[x]")
    bare_site.store.acquire(AcquireRequest(key, owner, 60.0, want=FIVE))

    assert len(rows(invoke("list", key, "--task", "shop.other").stdout)) == 1
    assert invoke("list", key, "--task", "shop.g").stdout == ""
    bare_site.store.release(ReleaseRequest(key, owner))


# Limits


@pytest.fixture
def waiting(bare_site, key):
    """Two runs of the lane acme and one of bolt, which wait for *key*."""
    with bare_site.held(key):
        for number, lane in enumerate(["acme", "acme", "bolt"]):
            request = SendRequest(key, f"{number}:0:0:0", ParkRequest(b"{}"), Want(lane=lane))
            bare_site.store.calls.send(request)
        yield
        for number in range(3):
            bare_site.store.parking.cancel(key, f"{number}:0:0:0")
    for lane in ("acme", "x"):
        bare_site.store.units.set_limit(key, None, lane)


def test_a_lane_is_limited_paused_and_resumed(invoke, key, waiting):
    name = f"{key}, lane acme,"
    limited = invoke("limit", key, "--lane", "acme", "2", "--for", "1h", "--reason", "INC-1")
    paused = invoke("pause", key, "--lane", "acme")

    assert limited.stdout == f"At most 2 of {name} may be in use for 1h00m.\n"
    assert paused.stdout == f"{name} is paused.\n"
    assert (limited.exit_code, paused.exit_code) == (0, 0)
    record = shown(invoke, key)
    limit, (second, first) = record["lane_limits"]["acme"], record["actions"]
    assert (record["limit"], limit["capacity"], limit["author"]) == (None, 0, ME)
    assert (second["action"], second["about"]) == ("pause", "lane acme")
    assert first["about"].startswith("lane acme, 2 units, until 20")
    resumed, again = (invoke("resume", key, "--lane", "acme") for _ in range(2))
    assert resumed.stdout.startswith(f"{name} no longer has a limit (it was: paused: no new")
    assert (again.exit_code, again.stdout) == (1, f"{name} had no limit.\n")
    assert shown(invoke, key)["lane_limits"] == {}


def test_a_limit_of_a_lane_is_shown_with_the_lane(invoke, key, waiting):
    invoke("pause", key, "--lane", "acme")

    text = invoke("show", key).stdout
    assert f"limit\tlane acme: paused: no new grants, by {ME}, since 20" in text
    assert "LANE\tWAITING\tIN USE\tSHARE\n" in text
    assert "\nacme\t2\t0, paused\t1\n" in text
    (row,) = rows(invoke("list", key, "--limited").stdout)
    assert row["NOTES"] == "lane acme paused"
    queue = invoke("queue", key, "--lane", "acme")
    assert queue.stdout.startswith(f"limit\tpaused: no new grants, by {ME}, since 20")
    record = json.loads(invoke("queue", key, "--lane", "acme", "--json").stdout)
    assert record["limit"]["capacity"] == 0


def test_a_lane_that_nothing_waits_in_may_be_a_typo(bare_site, invoke, key, waiting):
    typo = invoke("pause", key, "--lane", "x")
    meant = invoke("pause", key, "--lane", "x")

    assert (typo.exit_code, typo.stdout) == (3, f"{key}, lane x, is paused.\n")
    assert f"{key}, lane x, had no waiter or limit. If you meant another lane" in typo.stderr
    assert meant.exit_code == 0
    assert invoke("limit", key, "1", "--lane", "x", "--clear").exit_code == 2
    assert invoke("limit", key, "--lane", "x", "--clear").exit_code == 0
    assert invoke("pause", key, "--lane", "x", "--idle").exit_code == 0


def test_a_key_without_lanes_is_named(bare_site, invoke, key):
    with bare_site.held(key):
        bare_site.store.calls.send(SendRequest(key, "run:0:0:0", ParkRequest(b"{}")))
        done = invoke("pause", key, "--lane", "acme")
        bare_site.store.parking.cancel(key, "run:0:0:0")

    assert done.exit_code == 2
    assert (
        f"'{key}' has no lanes: what waits there has asked for none"
        in str(done.exception) + done.stderr
    )
    assert bare_site.look(key).lane_limits == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1", "--lane", ""], "lane must not be empty"),
        (["--rate", "1/s", "--lane", "x"], "--lane takes N"),
    ],
)
def test_a_limit_of_a_lane_that_is_none_is_refused(invoke, key, words, said):
    done = invoke("limit", key, *words)

    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_a_limit_has_author_start_and_end(invoke, key, three):
    began = time.time()
    done = invoke("limit", key, "2", "--for", "1h")

    assert done.exit_code == 0
    assert done.stdout == (
        f"At most 2 of {key} may be in use for 1h00m. 4 of 2 units are in use.\n"
    )
    limit = shown(invoke, key)["limit"]
    assert (limit["capacity"], limit["author"]) == (2, ME)
    assert limit["since_seconds"] == pytest.approx(began, abs=30)
    assert limit["until_seconds"] == pytest.approx(began + 3600, abs=30)
    assert f"limit\t2 units, by {ME}, since 20" in invoke("show", key).stdout
    (row,) = rows(invoke("list", key, "--limited").stdout)
    assert (row["HELD"], row["NOTES"]) == ("4/2", "limit 2")


def test_no_request_enters_above_a_limit_and_no_holder_is_thrown_out(bare_site, invoke, key, three):
    invoke("limit", key, "4")

    refused = bare_site.store.acquire(AcquireRequest(key, new_owner("t[x]"), 60.0, want=FIVE))

    assert refused.status is Status.BUSY
    assert shown(invoke, key)["units"] == 4


def test_a_key_is_taken_only_so_often_while_an_operator_says_so(bare_site, invoke, key):
    done = invoke("limit", key, "--rate", "2/h", "--rate", "1/10m", "--for", "1d", "--idle")

    assert done.stdout == f"{key} is limited to 1/10m and 2/h for 1d00h.\n"
    with taken(bare_site, key, "one", ALONE):
        pass
    late = bare_site.store.acquire(AcquireRequest(key, new_owner("t[x]"), 60.0))
    assert late.status is Status.BUSY
    assert 1700 < late.due <= 1801  # at equal distances
    limit = shown(invoke, key)["limit"]
    assert (limit["capacity"], limit["rates"]) == (
        None,
        [{"limit": 1, "per": 600.0, "burst": 1}, {"limit": 2, "per": 3600.0, "burst": 1}],
    )
    assert f"limit\t1/10m, 2/h, by {ME}, since 20" in invoke("show", key).stdout
    (row,) = rows(invoke("list", key, "--limited").stdout)
    assert row["NOTES"].startswith("limit 1/10m 2/h")
    assert invoke("resume", key).stdout.startswith(
        f"{key} no longer has a limit (it was: 1/10m, 2/h"
    )
    with taken(bare_site, key, "two", ALONE):
        pass


def test_units_and_rates_are_limited_by_one_command(bare_site, invoke, key, three):
    done = invoke("limit", key, "3", "--rate", "100/m")

    assert done.stdout.startswith(
        f"At most 3 of {key} may be in use, and it is limited to 100/m. 4 of 3 units"
    )
    (row,) = rows(invoke("list", key).stdout)
    assert row["NOTES"] == "limit 3 100/m"
    invoke("limit", key, "4")
    assert shown(invoke, key)["limit"]["rates"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "often"], "is not a number of starts, a slash and a time"),
        (["--rate", "0/s"], "limit is a whole number from 1"),
        (["--rate", "1/s", "--rate", "2/s"], "two limits for one time"),
        (["--rate", "1/s", "--clear"], "takes no N, --rate or --for"),
        ([], "give N, --rate or --clear"),
    ],
)
def test_a_limit_that_is_none_is_refused(invoke, key, words, said):
    done = invoke("limit", key, *words)

    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert invoke("list", key).stdout == ""


def test_tasks_start_as_often_as_an_operator_says(site, locks, key):
    assert locks("limit", key, "--rate", "1/2s", "--idle").returncode == 0
    results = [site.tasks.work_requeue.delay(key, number) for number in range(3)]
    begun = time.monotonic()
    results[0].get(timeout=60)

    for result in results:
        result.get(timeout=60)

    assert time.monotonic() - begun > 3.0
    assert site.journal.read(key) == [0, 1, 2]


def test_a_limit_ends_by_itself(bare_site, invoke, key, three):
    assert invoke("pause", key, "--for", "1s").exit_code == 0

    wait_until(lambda: shown(invoke, key)["limit"] is None, what="the end of the pause", timeout=30)

    with taken(bare_site, key, "four"):
        assert shown(invoke, key)["units"] == 5


def test_a_paused_key_without_a_holder_is_listed_until_it_is_resumed(invoke, key):
    assert invoke("pause", key, "--idle").stdout == f"{key} is paused.\n"

    (row,) = rows(invoke("list", key).stdout)
    assert (row["HOLDER"], row["HELD"], row["NOTES"]) == ("-", "-", "paused")
    assert "limit\tpaused: no new grants, by " in invoke("show", key).stdout
    done = invoke("resume", key)
    assert (done.exit_code, done.stdout.startswith(f"{key} no longer has a limit (it was:")) == (
        0,
        True,
    )
    assert invoke("list", key).stdout == ""


@pytest.mark.parametrize("words", [["resume"], ["limit", "--clear"]], ids=" ".join)
def test_to_take_back_what_was_not_set_has_status_1(invoke, key, words):
    done = invoke(*words, key)

    assert (done.exit_code, done.stdout) == (1, f"{key} had no limit.\n")


def test_scripts_report_the_key_before_and_after(invoke, key, three):
    document = json.loads(invoke("limit", key, "3", "--json").stdout)

    assert document["before"]["limit"] is None
    assert document["after"]["limit"]["capacity"] == 3
    assert document["after"]["units"] == 4


def test_a_request_that_fits_into_a_higher_limit_is_granted_at_once(bare_site, invoke, key, three):
    invoke("limit", key, "4")
    owner = new_owner("t[x]")
    inbox = bare_site.store.inbox(key, owner)
    ask = AcquireRequest(key, owner, 60.0, inbox, want=FIVE)
    assert bare_site.store.acquire(ask).status is Status.BUSY

    invoke("limit", key, "5")

    wait_until(lambda: bare_site.look(key).used == 5, what="the waiter to be let in", timeout=1.5)
    bare_site.store.release(ReleaseRequest(key, owner, inbox=inbox))


@pytest.mark.parametrize("words", [["resume"], ["limit", "--clear"]], ids=" ".join)
def test_tasks_of_a_paused_key_wait_and_run_when_it_is_resumed(site, locks, key, words):
    assert locks("pause", key, "--idle").returncode == 0
    parked = site.tasks.work_requeue.delay(key)
    wait_parked(site, key, parked.id)
    (row,) = rows(locks("list", key).stdout)
    assert (row["WAITING"], row["NOTES"]) == ("1", "paused")

    done = locks(*words, key)

    assert (done.returncode, "no longer has a limit (it was: paused" in done.stdout) == (0, True)
    assert parked.get(timeout=60) == 0


def test_a_task_is_woken_by_what_resumes_its_key_and_not_by_a_sweep(site, invoke, key):
    invoke("pause", key)
    parked = site.tasks.work_requeue.delay(key)
    wait_parked(site, key, parked.id)

    record = json.loads(invoke("resume", key, "--json").stdout)["after"]

    assert (record["waiting"], record["limit"]) == (0, None)
    assert parked.get(timeout=60) == 0


def test_a_task_of_a_key_whose_pause_has_ended_runs(site, invoke, key):
    invoke("pause", key, "--for", "1s")
    parked = site.tasks.work_requeue.delay(key)

    assert parked.get(timeout=60) == 0


def test_whose_task_runs_goes_on_while_the_key_is_paused(site, locks, key):
    running = site.tasks.work_requeue.delay(key, 0, key)
    site.wait_held(key)

    done = locks("pause", key)

    assert "holds it exclusively and keeps it." in done.stdout
    site.journal.open(key)
    assert running.get(timeout=60) == 0


# One of several


def test_one_of_several_is_released_and_the_others_keep_theirs(bare_site, invoke, key, three):
    done = invoke("release", key, "--holder", "two", "--force")

    assert done.exit_code == 0
    assert f"{key} was taken from shop.f[two] on " in done.stdout
    assert "3 of 5 units are in use now." in done.stdout
    left = {hold.owner for hold in bare_site.look(key).holders}
    assert left == {three["one"], three["three"]}


def test_without_a_name_several_are_released_by_force_only(bare_site, invoke, key, three):
    refused = invoke("release", key)
    assert refused.exit_code == 2
    assert f"'{key}' has 3 holders: shop.f[one] on " in refused.stderr
    assert len(bare_site.look(key).holders) == 3

    done = invoke("release", key, "--force")

    assert (done.exit_code, done.stdout) == (
        0,
        f"{key} was taken from 3 holders. It is free now.\n",
    )


def test_one_that_is_admitted_instead_keeps_what_it_gets(bare_site, invoke, key, three):
    owner = new_owner("t[next]")
    inbox = bare_site.store.inbox(key, owner)
    ask = AcquireRequest(key, owner, 60.0, inbox, want=Want(5, 5))
    assert bare_site.store.acquire(ask).status is Status.BUSY

    document = json.loads(invoke("release", key, "--force", "--json").stdout)

    assert set(document["lost"]) == set(three.values())
    assert [hold["owner"] for hold in document["after"]["holders"]] == [owner]
    bare_site.store.release(ReleaseRequest(key, owner, inbox=inbox))


def test_a_name_that_matches_no_holder_releases_nothing(bare_site, invoke, key, three):
    done = invoke("release", key, "--holder", "nobody", "--force")

    assert done.exit_code == 2
    assert "'nobody' is none of the holders" in done.stderr
    assert len(bare_site.look(key).holders) == 3


def test_a_holder_is_asked_for_by_name_in_a_terminal(bare_site, terminal, key, three):
    screen = terminal("release", key, "--holder", "two")
    screen.wait("Take it away? [y/N]:")
    text = " ".join(screen.text.split())
    assert f"{key} is held by shop.f[two] on " in text
    assert "The 2 others keep what they have." in text

    screen.type("y\n")

    assert screen.status() == 0
    assert len(bare_site.look(key).holders) == 2


def test_a_holder_that_has_left_since_the_question_is_no_other_holder(
    bare_site, terminal, key, three
):
    screen = terminal("release", key, "--holder", "two")
    screen.wait("[y/N]:")
    bare_site.store.release(ReleaseRequest(key, three["two"]))

    screen.type("y\n")

    assert screen.status() == 1
    assert "has changed hands" in screen.text
    assert len(bare_site.look(key).holders) == 2


def test_a_holder_named_of_a_key_held_alone_is_the_only_one_released(bare_site, invoke, key):
    with taken(bare_site, key, "only", ALONE):
        assert invoke("release", key, "--holder", "1", "--force").exit_code == 2
        token = str(bare_site.look(key).token)
        assert invoke("release", key, "--holder", token, "--force").exit_code == 0


def test_a_waiter_for_units_shows_how_many(bare_site, invoke, key, three):
    owner = new_owner("t[next]")
    inbox = bare_site.store.inbox(key, owner)
    bare_site.store.acquire(AcquireRequest(key, owner, 60.0, inbox, want=Want(3, 5)))

    (row,) = rows(invoke("queue", key).stdout)
    (waiter,) = json.loads(invoke("queue", key, "--json").stdout)["waiters"]

    assert row["WANTS"] == "3 of 5"
    assert (waiter["units"], waiter["capacity"]) == (3, 5)
    bare_site.store.release(ReleaseRequest(key, owner, inbox=inbox))


@pytest.fixture
def unattended(load_app, worker):
    """An app without a worker, and a task of it that is parked at a paused key."""
    module = load_app("tests.apps.locked")
    key = f"key-{uuid.uuid4().hex[:8]}"
    process = worker("tests.apps.locked")
    assert run_here(module.app, "pause", key, "--idle").exit_code == 0
    result = module.work_requeue.delay(key)
    store = Runtime.of(module.app).store
    wait_until(
        lambda: list(store.parking.find_parked(result.id)), timeout=60, what="it to be parked"
    )
    process.stop()
    return module, key, result


def test_what_a_resume_wakes_is_sent_by_the_command_itself(unattended, worker):
    module, key, result = unattended

    assert run_here(module.app, "resume", key).exit_code == 0

    transport = module.app.conf.broker_transport_options
    with redis.Redis.from_url(module.app.conf.broker_url) as broker:
        assert broker.llen(f"{transport['global_keyprefix']}celery") == 1
    worker("tests.apps.locked")
    assert result.get(timeout=60) == 0


def test_show_says_how_often_a_key_was_taken(bare_site, key, invoke):
    want = Want(1, 0, (Rate(5, per=1.0, burst=5), Rate(100, burst=100)))
    for task in ("one", "two", "three"):
        with taken(bare_site, key, task, want):
            pass
    with taken(bare_site, key, "four", want):
        record = shown(invoke, key)

        output = invoke("show", key).stdout

    assert [(each["limit"], each["per"]) for each in record["starts"]] == [(5, 1.0), (100, 60.0)]
    assert record["starts"][1]["begun"] == 4
    assert "4 of 100 starts in the last 1m00s" in output


# Keys that are not in use


@pytest.mark.parametrize(
    ("words", "said"),
    [(["pause"], "is paused.\n"), (["limit", "2"], "may be in use.\n")],
    ids=["pause", "limit"],
)
@pytest.mark.parametrize("idle", [False, True])
def test_a_limit_of_a_key_that_is_not_in_use_is_set_and_questioned(
    bare_site, invoke, key, words, said, idle
):
    command, *rest = words
    name = key.upper()
    with bare_site.held(key):
        done = invoke(command, name, *rest, *(["--idle"] if idle else []))

    assert bare_site.look(name).limit is not None
    assert (done.exit_code, said in done.stdout) == (0 if idle else 3, True)
    assert (f"Similar keys: {key}" in done.stderr) is not idle  # other tests may have similar ones
    assert (f"{name} had no holder, waiter or limit." in done.stderr) is not idle
    assert invoke("resume", name).exit_code == 0


def test_a_key_in_use_is_not_questioned(bare_site, invoke, key):
    with bare_site.held(key):
        assert (invoke("pause", key).exit_code, invoke("pause", key).stderr) == (0, "")
    assert (invoke("limit", key, "1").exit_code, invoke("resume", key).exit_code) == (0, 0)


@pytest.mark.parametrize(
    "words",
    [
        ["show", "{}"],
        ["queue", "{}"],
        ["release", "{}", "--force"],
        ["wake", "{}"],
        ["drop", "--all", "--key", "{}", "--force"],
        ["drop", "some-id", "--key", "{}", "--force"],
        ["resume", "{}"],
        ["limit", "{}", "--clear"],
    ],
    ids=" ".join,
)
def test_what_finds_nothing_at_a_key_names_similar_ones(bare_site, invoke, key, words):
    slip = key[:-1] + ("x" if key[-1] != "x" else "y")
    with bare_site.held(key), bare_site.held(f"{uuid.uuid4()}"):
        done = invoke(*(word.format(slip) for word in words))

    assert done.exit_code == 1
    # Other tests may have similar ones, too.
    assert done.stderr.startswith("Similar keys: ")
    assert key in done.stderr
