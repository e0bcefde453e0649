"""What the page's server reports of a real store, and does to it."""

from __future__ import annotations

import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from celery_distlock import Lock, Rate
from celery_distlock.stores import AcquireRequest, ReleaseRequest, SendRequest
from celery_distlock.stores.values import ALONE, Ownership, ParkRequest, RenewOutcome, Want
from tests import servers
from tests.waiting import wait_until
from tests.worker.intruder import Intruder, envelope

HOSTILE = ["<script>alert(1)</script>", "a\nb\r\n{c}%0A", "lone \ud800 surrogate", "x" * 10_000]


@pytest.fixture
def queue(locked, worker, admin):
    """One task holds ``queued`` until its gate opens, and three are parked behind it."""
    worker("tests.apps.locked", concurrency=2)
    first = locked.work_requeue.delay("queued", 0, "open")
    locked.journal.wait("queued")
    parked = []
    for note in (1, 2, 3):
        parked.append(locked.work_requeue.delay("queued", note))
        # Its state says so a little before.
        wait_until(lambda note=note: admin.show("queued").waiting == note, timeout=60)
    yield first, parked
    locked.journal.open("open")
    first.get(timeout=60)


def test_a_held_key_is_listed_with_its_holder(page_process, hold):
    token = hold("stock:1")

    lock = page_process.find("stock:1")

    assert lock["state"] == "held"
    assert lock["token"] == str(token)
    assert lock["holder"]["task"] == "the-test"
    assert 0 < lock["lease"] <= 30
    assert 0 <= lock["held"] < 60


def test_a_key_that_several_hold_is_listed_once_and_shown_with_each_of_them(page_process, share):
    first, second = share("tenant:8", "one", Want(2, 5)), share("tenant:8", "two", Want(1, 5))

    lock = page_process.find("tenant:8")
    answer = page_process.get("/api/lock", name=lock["name"])

    assert (lock["mode"], lock["units"], lock["most"], lock["holders"]) == ("shared", 3, 5, 2)
    assert [
        (hold["owner"], hold["units"], hold["slot"], hold["who"]["id"]) for hold in answer["holds"]
    ] == [(first, 2, None, "one"), (second, 1, 0, "two")]
    assert [grant["who"]["id"] for grant in answer["seen"]["grants"]] == ["two", "one"]
    assert all(grant["has"] for grant in answer["seen"]["grants"])
    assert page_process.keys(q="two") == ["tenant:8"]


def test_a_task_id_that_no_task_can_have_is_refused(page_process):
    headers = {**page_process.headers(), "Content-Type": "application/json"}
    body = b'{"name": "k", "task_id": "\\ud800"}'

    answer = page_process.client.post("/api/drop", content=body, headers=headers)

    assert (answer.status_code, answer.json()) == (400, {"error": "task_id is not valid text"})


def test_a_limit_and_a_rest_are_shown_with_the_author_and_the_times(page_process, share, admin):
    owner, began = share("tenant:7", "one", Want(1, 5)), time.time()
    admin.store.units.rest("tenant:7", owner, 60.0)
    admin.limit("tenant:7", 0, seconds=600.0, author="ann@vm")

    lock = page_process.find("tenant:7")

    limit = lock["limit"]
    assert (limit["units"], limit["author"], lock["most"]) == (0, "ann@vm", 0)
    assert limit["since"] == pytest.approx(began, abs=30)
    assert limit["until"] == pytest.approx(began + 600, abs=30)
    assert 0 < lock["rest"] <= 60
    admin.limit("tenant:7", None, rate=["10/s", "100/m"])
    wait_until(
        lambda: page_process.find("tenant:7")["limit"]["rates"] == ["10/s", "100/m"],
        what="the page to look again",
    )
    assert page_process.find("tenant:7")["limit"]["units"] is None
    admin.limit("tenant:7", None)


def test_a_paused_key_without_a_holder_is_listed(page_process, admin):
    admin.limit("paused", 0)

    lock = page_process.find("paused")

    assert (lock["state"], lock["mode"], lock["limit"]["units"]) == ("free", "", 0)
    admin.limit("paused", None)


def test_calls_that_come_later_are_shown_with_when(page_process, locked):
    task, once = locked.work_requeue, locked.work_once["seconds"]
    result = task.apply_async(("delayed",), lock_via="store", countdown=600)
    known = once.delay("known")

    lock = page_process.find("delayed")
    answer = page_process.get("/api/lock", name=lock["name"])
    calls = page_process.get("/api/lock", name=page_process.find("known")["name"])["calls"]

    assert (lock["state"], lock["waiting"], lock["later"]) == ("free", 0, 1)
    assert 480 < lock["due"] <= 600
    (waiter,) = answer["queue"]
    assert (waiter["kind"], waiter["place"], waiter["who"]["id"]) == ("later", None, result.id)
    assert 480 < waiter["due"] <= 600
    assert [call["task_id"] for call in calls] == [known.id]
    dropped = page_process.post("/api/drop", {"name": lock["name"], "task_id": result.id})
    assert (dropped.status_code, page_process.keys(q="delayed")) == (200, [])


def test_when_a_rate_lets_the_next_in_is_shown(page_process, admin):
    want = Want(1, 0, (Rate(1, 600.0),))
    for owner, run in (("first", ""), ("second", "task:0:0:0")):
        park_request = ParkRequest(b"", task="shop.call") if run else None
        admin.store.acquire(
            AcquireRequest("rated", owner, 60.0, queue=park_request, run=run, want=want)
        )
        admin.store.release(ReleaseRequest("rated", owner, started=True))

    # A start counts for up to 5 ms more.
    assert 480 < page_process.find("rated")["opens"] <= 600.005
    admin.store.parking.cancel("rated", "task:0:0:0")


def test_one_of_several_is_released_and_no_other(page_process, share, admin):
    first, second = share("tenant:7", "one", Want(1, 5)), share("tenant:7", "two", Want(1, 5))
    lock = page_process.find("tenant:7")

    refused = page_process.release(lock)
    assert (refused.status_code, "has 2 holders" in refused.json()["error"]) == (409, True)
    released = page_process.release(lock, holder=first)

    assert (released.status_code, released.json()["lock"]["units"]) == (200, 1)
    assert [hold.who.owner for hold in admin.show("tenant:7").holds] == [second]
    assert "released 'tenant:7', which 'shop.f[one] on" in page_process.log()
    assert page_process.release(lock, holder=first).status_code == 409


def test_one_of_several_is_asked_to_leave_and_no_other(page_process, share, admin):
    first, second = share("tenant:11", "one", Want(1, 5)), share("tenant:11", "two", Want(1, 5))
    lock = page_process.find("tenant:11")
    asked = {"name": lock["name"], "token": lock["token"], "reason": "INC-8"}

    refused = page_process.post("/api/recall", asked)
    assert (refused.status_code, "has 2 holders" in refused.json()["error"]) == (409, True)
    done = page_process.post("/api/recall", {**asked, "holder": first})

    assert (done.status_code, done.json()["lock"]["units"]) == (200, 2)
    holds = [Ownership("tenant:11", owner, 60.0) for owner in (first, second)]
    outcomes = [outcome for outcome, _ in admin.store.renew(holds, 5.0)]
    assert outcomes == [RenewOutcome.RECALLED, RenewOutcome.RENEWED]
    assert "recalled 'tenant:11', which 'shop.f[one] on" in page_process.log()
    one, two = page_process.get("/api/lock", name=lock["name"])["holds"]
    assert (one["asked"]["by"], two["asked"]) == ("an operator", None)
    assert abs(one["asked"]["at"] - time.time()) < 60
    (action,) = admin.actions("tenant:11")
    assert (action.name, action.reason, action.owners) == ("recall", "INC-8", (first,))
    stale = page_process.post("/api/recall", {**asked, "token": "7", "holder": first})
    assert stale.status_code == 409


def test_nothing_is_listed_of_an_empty_store(page_process):
    answer = page_process.get("/api/locks")

    assert (answer["locks"], answer["total"], answer["matching"]) == ([], 0, 0)


def test_a_look_is_at_most_as_old_as_an_interval_or_so(page_process, hold):
    page_process.get("/api/locks")
    hold("later")

    page_process.find("later")


def test_text_is_found_in_any_case_and_in_the_task(page_process, hold):
    for key in ("Stock:1", "stock:2", "order:1"):
        hold(key)
        page_process.find(key)

    assert sorted(page_process.keys(q="STOCK")) == ["Stock:1", "stock:2"]
    assert len(page_process.keys(q="the-test")) == 3
    assert page_process.keys(q="nothing like it") == []


def test_a_pattern_is_of_the_key(page_process, hold):
    for key in ("stock:1", "stock:22", "order:1"):
        hold(key)
        page_process.find(key)

    assert page_process.keys(q="s*:?") == ["stock:1"]


def test_what_is_cut_off_is_counted(page_process, hold):
    for number in range(5):
        hold(f"stock:{number}")
        page_process.find(f"stock:{number}")

    answer = page_process.get("/api/locks", q="stock", limit=2, sort="key", desc=0)

    assert [lock["key"] for lock in answer["locks"]] == ["stock:0", "stock:1"]
    assert (answer["matching"], answer["total"], answer["whole"]) == (5, 5, True)


@pytest.mark.parametrize("sort", ["key", "held", "token"])
def test_keys_are_sorted_both_ways(page_process, hold, sort):
    for key in ("a", "b", "c"):
        hold(key)
        page_process.find(key)
    rising = ["c", "b", "a"] if sort == "held" else ["a", "b", "c"]

    assert page_process.keys(sort=sort, desc=0) == rising
    assert page_process.keys(sort=sort, desc=1) == rising[::-1]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/locks?sort=__class__", "sort must be one of key, task, host,"),
        ("/api/locks?desc=yes", "desc must be one of 0, 1"),
        ("/api/locks?limit=1001", "limit must be a whole number from 1 to 1000"),
        ("/api/locks?limit=0", "limit must be"),
        ("/api/locks?limit=nan", "limit must be"),
        ("/api/locks?limit=", "limit must be"),
        ("/api/locks?pattern=a", "no parameter 'pattern': there are desc, limit, q, sort"),
        ("/api/locks?q=a&q=b", "given twice"),
        ("/api/lock?name=a&frist=1", "no parameter 'frist': did you mean 'first'?"),
        ("/api/lock?name=a&first=-1", "first must be a whole number from 0"),
        ("/api/lock?name=a&first=1000000001", "first must be a whole number from 0"),
        ("/api/session?a=b", "no parameter 'a'"),
        ("/?q=stock", "no parameter 'q'"),
    ],
)
def test_what_would_not_be_obeyed_is_refused(page_process, path, words):
    answer = page_process.client.get(path)

    assert (answer.status_code, words in answer.text) == (400, True), answer.text


@pytest.mark.parametrize("path", ["/api/release", "/api/wake", "/api/drop", "/api/logout"])
def test_a_change_with_more_than_it_takes_is_refused(page_process, path):
    body = {"name": "a", "token": "1", "task_id": "b"}

    answer = page_process.post(path, {**body, "force": True})
    assert (answer.status_code, "no parameter" in answer.text) == (400, True)
    answer = page_process.post(f"{path}?name=a", {})
    assert (answer.status_code, "no parameter 'name'" in answer.text) == (400, True)


def test_a_lock_without_an_end_and_a_time_is_shown_and_released(page_process, endless, admin):
    endless("for ever")

    listed = page_process.find("for ever")
    shown = page_process.get("/api/lock", name=listed["name"])["lock"]

    for lock in (listed, shown):
        assert (lock["lease"], lock["since"], lock["token"]) == (None, 0.0, "-1")
    assert page_process.release(listed).status_code == 200
    assert admin.show("for ever").state == "free"


def test_the_queue_is_shown_in_its_order(page_process, queue):
    _, parked = queue

    answer = page_process.get("/api/lock", name=page_process.find("queued")["name"])

    assert [waiter["who"]["id"] for waiter in answer["queue"]] == [task.id for task in parked]
    assert [waiter["place"] for waiter in answer["queue"]] == [0, 1, 2]
    assert {waiter["kind"] for waiter in answer["queue"]} == {"parked"}
    assert {waiter["who"]["task"] for waiter in answer["queue"]} == {"work_requeue"}
    assert answer["lock"]["waiting"] == 3


def test_lanes_are_shown_and_when_a_waiter_leaves(page_process, hold, admin):
    hold("lanes")
    for number, lane in enumerate(["acme", "acme", None]):
        want = ALONE if lane is None else Want(1, 1, (), 1, lane, 3000)
        leaves = None if number else 3600.0
        park_request = ParkRequest(b"{}", task="shop.call", leaves=leaves)
        admin.store.calls.send(SendRequest("lanes", f"{number}:0:0:0", park_request, want=want))

    admin.limit("lanes", 0, lane="acme", author="ann")

    answer = page_process.get("/api/lock", name=page_process.find("lanes")["name"])

    limit = answer["lock"]["laneLimits"]["acme"]
    assert (limit["units"], limit["author"]) == (0, "ann")
    admin.limit("lanes", None, lane="acme")
    lanes = {lane["name"]: (lane["waiting"], lane["share"]) for lane in answer["lanes"]}
    assert lanes == {"": (1, 1.0), "acme": (2, 3.0)}
    assert [waiter["lane"] for waiter in answer["queue"]] == ["acme", "acme", ""]
    first, *others = [waiter["leaves"] for waiter in answer["queue"]]
    assert 3400 < first <= 3600
    assert others == [None, None]
    for number in range(3):
        admin.store.parking.cancel("lanes", f"{number}:0:0:0")


def test_a_dropped_task_runs_no_more(page_process, queue, locked):
    first, (one, two, three) = queue
    name = page_process.find("queued")["name"]

    answer = page_process.post("/api/drop", {"name": name, "task_id": two.id})

    assert answer.json() == {"dropped": 1}
    assert two.state == "REVOKED"
    locked.journal.open("open")
    assert [task.get(timeout=60) for task in (first, one, three)] == [0, 0, 0]
    assert locked.journal.read("queued") == [0, 1, 3]
    assert "dropped 'work_requeue[" in page_process.log()


def test_a_task_that_the_app_does_not_have_is_not_dropped(page_process, locked, admin):
    with closing(Intruder(SimpleNamespace(app=locked.app))) as store:
        store.park("left", envelope("gone", "left"), "one:0:0:0")
    lock = page_process.find("left")

    answer = page_process.post("/api/drop", {"name": lock["name"], "task_id": "one"})

    assert (answer.status_code, "'gone'" in answer.json()["error"]) == (409, True)
    assert admin.show("left").waiting == 1


def test_a_task_that_does_not_wait_is_not_dropped(page_process):
    answer = page_process.post("/api/drop", {"name": "a", "task_id": "nobody"})

    assert answer.status_code == 409


def test_waking_says_how_many_were_sent(page_process):
    assert page_process.post("/api/wake", {"name": "a"}).json() == {"sent": 0}


def test_a_key_is_released_and_its_holder_named_in_the_log(page_process, hold, admin):
    hold("stuck")

    answer = page_process.release(page_process.find("stuck"))

    assert answer.json()["lock"]["state"] == "free"
    assert admin.show("stuck").state == "free"
    assert "127.0.0.1:" in page_process.log()
    assert "released 'stuck', which 'thread the-test on" in page_process.log()


def test_only_the_grant_that_was_confirmed_is_released(page_process, admin, locked):
    lock = Lock("passed on", store=admin.store)
    with lock:
        seen = page_process.find("passed on")
    with lock as later:
        answer = page_process.release(seen)

        assert answer.status_code == 409
        assert later.held
        assert lock.locked()


@pytest.mark.parametrize("key", HOSTILE, ids=["html", "newline", "surrogate", "long"])
def test_a_hostile_key_comes_as_text_and_goes_by_its_name(page_process, hold, admin, key):
    hold(key)

    (lock,) = wait_until(lambda: page_process.get("/api/locks")["locks"], timeout=60)

    assert lock["key"] == key or (len(key) > 160 and lock["key"].startswith("x" * 80 + "%#"))
    assert page_process.get("/api/lock", name=lock["name"])["lock"]["token"] == lock["token"]
    assert page_process.release(lock).status_code == 200
    assert admin.show(key).state == "free"


def test_a_store_that_is_unreachable_is_said_and_comes_back(start_page, private_server):
    server = private_server()
    page = start_page(DISTLOCK_TEST_STORE=server.url)
    page.get("/api/locks")
    server.stop()

    def refused():
        answer = page.client.get("/api/locks")
        return answer if answer.status_code == 503 else None

    answer = wait_until(refused, timeout=60.0)
    assert answer.json()["store"] == "silent"
    server.start()
    wait_until(lambda: page.client.get("/api/locks").status_code == 200, timeout=60.0)


def test_a_body_that_makes_no_sense_is_refused(page_process):
    headers = {**page_process.headers(), "Content-Type": "application/json"}

    for body in (b"", b"[]", b"{", b'"name"', b"{}", b'{"name": 1}', b"[" * 9999, b"\xff"):
        answer = page_process.client.post("/api/wake", content=body, headers=headers)
        assert answer.status_code == 400, body


def test_a_body_without_end_is_refused(page_process):
    headers = {**page_process.headers(), "Content-Type": "application/json"}

    answer = page_process.client.post("/api/wake", content=b" " * 100_000, headers=headers)

    assert answer.status_code == 413


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_hundred_thousand_keys_are_searched_at_once(start_page, locked, redis_url, admin):
    prefix = locked.app.conf.distlock_prefix
    now = int(time.time() * 1e6)
    with servers.redis.Redis.from_url(redis_url) as client:
        admin.store.acquire(AcquireRequest("pattern", "vm|1|task[id]|00", 600.0))
        (record,) = [key for key in servers.keys(redis_url, prefix) if key.endswith(b":lock")]
        fields = client.hgetall(record)
        for first in range(0, 100_000, 5_000):
            pipeline = client.pipeline(transaction=False)
            for number in range(first, first + 5_000):
                name = record.replace(b"{pattern}", b"{stock:%d}" % number)
                pipeline.hset(name, mapping={**fields, b"token": now + number})
                pipeline.pexpire(name, 600_000)
            pipeline.execute()
    page = start_page()

    answer = page.get("/api/locks", q="stock:9999*", sort="key", desc=0, limit=5)

    assert (answer["total"], answer["matching"]) == (100_001, 11)
    began = time.monotonic()
    page.get("/api/locks", sort="key")
    assert time.monotonic() - began < 30, "it is not usable"
    admin.store.release(ReleaseRequest("pattern", "vm|1|task[id]|00"))


def test_a_key_is_limited_paused_and_resumed_with_author_and_reason(page_process, share, admin):
    share("tenant:7", "one", Want(2, 5))
    body = {"name": page_process.find("tenant:7")["name"], "reason": "INC-2"}
    terms = {"units": 3, "rate": "100/m", "seconds": 600}

    limited = page_process.post("/api/limit", {**body, **terms}).json()["lock"]["limit"]
    paused = page_process.post("/api/pause", {**body, "seconds": 60.0}).json()["lock"]["limit"]
    resumed = page_process.post("/api/resume", body).json()["lock"]["limit"]

    assert (limited["units"], limited["rates"], paused["units"], resumed) == (3, ["100/m"], 0, None)
    assert 480 < limited["until"] - limited["since"] <= 601
    assert 48 < paused["until"] - paused["since"] <= 61
    actions = page_process.get("/api/actions")["actions"]
    assert [(act["key"], act["name"], act["reason"]) for act in actions] == [
        ("tenant:7", name, "INC-2") for name in ("resume", "pause", "limit")
    ]
    assert actions[0]["author"].startswith("127.0.0.1 by the page of ")
    assert "paused 'tenant:7'" in page_process.log()


def test_actions_on_a_key_that_is_free_again_are_listed_and_old_ones_are_not(page_process, admin):
    admin.limit("gone", 0, reason="INC-3")
    admin.limit("gone", None)

    assert [act["key"] for act in page_process.get("/api/actions")["actions"]] == ["gone", "gone"]
    assert admin.recent_actions(0.0) == []


@pytest.mark.parametrize(
    ("path", "terms", "words"),
    [
        ("limit", {}, "units or rate is missing"),
        ("limit", {"units": None, "rate": ""}, "units or rate is missing"),
        ("limit", {"units": "three"}, "must be a whole number from 0"),
        ("limit", {"units": -1}, "must be a whole number from 0"),
        ("limit", {"units": True}, "must be a whole number from 0"),
        ("limit", {"rate": "ten/s"}, "is not a number of starts"),
        ("limit", {"rate": {"10/s": 1}}, "rate is '100/m'"),
        ("limit", {"units": 1, "seconds": "soon"}, "finite number of seconds"),
        ("pause", {"seconds": -1}, "finite number of seconds"),
        ("pause", {"units": 3}, "no parameter 'units'"),
        ("resume", {"seconds": 3}, "no parameter 'seconds'"),
        ("resume", {"reason": "x" * 201}, "200 characters"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(page_process, admin, path, terms, words):
    answer = page_process.post(f"/api/{path}", {"name": "tenant:7", **terms})

    assert (answer.status_code, words in answer.json()["error"]) == (400, True), answer.text
    assert admin.show("tenant:7").limit is None


def test_releases_and_drops_on_the_page_are_recorded_with_author_and_reason(
    page_process, share, admin
):
    share("tenant:7", "one", Want(2, 5))
    lock = page_process.find("tenant:7")
    body = {"name": lock["name"], "token": lock["token"], "reason": "INC-1"}
    owner = page_process.get("/api/lock", name=lock["name"])["holds"][0]["owner"]

    assert page_process.post("/api/release", {**body, "holder": owner}).status_code == 200
    refused = page_process.post("/api/release", {**body, "reason": "x" * 201})

    (action,) = page_process.get("/api/lock", name=lock["name"])["actions"]
    assert action["author"].startswith("127.0.0.1 by the page of ")
    assert (action["name"], action["reason"]) == ("release", "INC-1")
    assert admin.actions("tenant:7")[0].author == action["author"]
    assert (refused.status_code, "200 characters" in refused.json()["error"]) == (400, True)
