"""What every store promises, as tests: see `StoreContract`."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import pytest

from celery_distlock import Lock, clock
from celery_distlock.engine.lease import believed
from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import NotOursError, Store, UnsendableError
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.findings import Severity
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.values import (
    Ability,
    Completion,
    Ownership,
    ParkRequest,
    PeerChannel,
    Release,
    RenewOutcome,
    Reply,
    Route,
    Sending,
    Status,
    WokenTask,
)

__all__ = ["StoreContract"]

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., None])

GRANTED, BUSY, PARKED, DONE = Status.GRANTED, Status.BUSY, Status.PARKED, Status.DONE
RESERVED = Status.RESERVED
YES, AGAIN = Completion.YES, Completion.YES_AND_MAY_COME_AGAIN

PATIENCE = 30.0  # seconds until what is waited for must have happened, on a busy machine too
LONGEST_WAIT = 2.0  # seconds that a test without a `pass_time` of its own lets pass

HOSTILE_KEYS = {
    "braces": "{a}{b}}{",
    "percent": "%7B%25%",
    "blanks": " a\tb\r\nc ",
    "nul": "a\0b",
    "glob": "*?[a]\\",
    "slashes": "/a//../b/.",
    "unicode": "größe \U0001f512 \u2028",
    "surrogate": "a\ud800b",
    "long": "x" * 10_000,
    "quotes": "'\"; return 1 --",
}
ENVELOPES = [
    b"",
    b"\x00",
    bytes(range(256)),
    b'{"task": "t"}\r\n$5\r\n',
    b"\xff\xfe not utf-8",
    pytest.param(bytes(range(256)) * 4096, id="1MB"),
]
RUNS = ["a:b", "p:x", "b:x y", " ", "{}", "run\n2", "ü", "%"]

hostile_keys = pytest.mark.parametrize("key", HOSTILE_KEYS.values(), ids=list(HOSTILE_KEYS))
hostile_runs = pytest.mark.parametrize("run", RUNS)
any_envelope = pytest.mark.parametrize("envelope", ENVELOPES)


def needs(reason: str, met: Callable[["Given", Store], bool]) -> Callable[[Test], Test]:
    """Skip a test where the store is not *met*; in one place, so that a summary can count them."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(self: "Given", store: Store, **others: Any) -> None:
            if not met(self, store):
                pytest.skip(reason)
            test(self, store=store, **others)

        return cast("Test", run)

    return decorate


def needs_ability(ability: Ability) -> Callable[[Test], Test]:
    """Skip a test where the store lacks *ability*."""
    return needs(f"the store cannot {ability.value}", lambda _, store: ability in store.abilities)


waits = needs_ability(Ability.WAIT)
parks = needs_ability(Ability.PARK)
recognises = needs_ability(Ability.RECOGNISE)
shares = needs_ability(Ability.SHARE)
lists = needs_ability(Ability.LIST)
counts = needs_ability(Ability.COUNT)
fair = needs("the store serves whoever asks first (fair = False)", lambda given, _: given.fair)
loose = needs("an owner is one process's here (bound = True)", lambda given, _: not given.bound)
bound = needs("an owner is no process's here (bound = False)", lambda given, _: given.bound)


def wait_until(predicate: Callable[[], T], what: str) -> T:
    """Call *predicate* until it returns something true, and return that."""
    deadline = time.monotonic() + PATIENCE
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.005)
    return value


class Waiter(NamedTuple):
    """A blocked waiter in the queue of a key."""

    owner: str
    inbox: Inbox


def take(store: Store, key: str, owner: str, lease: float = 30.0, **more: Any) -> int:
    """Acquire a key that has to be granted; return the token."""
    reply = store.acquire(AcquireRequest(key, owner, lease, **more))
    assert reply.status is GRANTED
    return reply.token


def wait_for(store: Store, key: str, name: str, lease: float = 30.0, **more: Any) -> Waiter:
    """Join the queue of a taken key as a blocked waiter."""
    waiter = Waiter(name, store.inbox(key, name))
    assert (
        store.acquire(AcquireRequest(key, name, lease, queue=waiter.inbox, **more)).status is BUSY
    )
    return waiter


def park(store: Store, key: str, run: str, envelope: bytes | None = None, **more: Any) -> None:
    """Park a run at a taken key; it was delivered to an owner that is over by now."""
    park_request = ParkRequest(run.encode() if envelope is None else envelope, task="shop.reserve")
    owner = new_owner("delivery")
    assert (
        store.acquire(AcquireRequest(key, owner, 30.0, queue=park_request, run=run, **more)).status
        is PARKED
    )


def join_before_the_end(
    store: Store,
    lease: float,
    join: Callable[[], T],
    *,
    key: str = "k",
    owner: str = "a",
    run: str = "",
) -> T:
    """
    Take a key for *lease* seconds, and have somebody *join* its queue meanwhile; return what does.

    Anew and for longer, if it was free again before: a busy machine may take that long.
    """
    while True:
        take(store, key, owner, lease, run=run)
        try:
            return join()
        except AssertionError:
            newcomer = holder(store, key)
            if newcomer in {"", owner} or lease > PATIENCE:
                raise
            store.release(ReleaseRequest(key, newcomer))
            lease *= 4


def found_keys(store: Store, pattern: str = "*") -> list[str]:
    """Return all the keys that are found."""
    return [key for batch in store.find_keys(pattern) for key in batch]


def renew(store: Store, *holds: tuple[str, str, float]) -> list[RenewOutcome]:
    """Renew holds, each a key, an owner and a lease; return the outcomes."""
    return [outcome for outcome, _ in store.renew([Ownership(*hold) for hold in holds], 10.0)]


def holder(store: Store, key: str) -> str:
    """Return who holds a key."""
    return store.inspect(key).owner


def expire(store: Store, key: str, owner: str = "a") -> None:
    """Wait until the lease of *owner*, who does not renew it, has ended."""
    wait_until(lambda: store.inspect(key).owner != owner, "the end of the lease")


def swept(store: Store) -> list[WokenTask]:
    """Return what a sweep finds; nothing if another one was a moment ago."""
    return list(store.sweep(0.01))


def woken(store: Store, key: str, run: str, envelope: bytes = b"envelope") -> WokenTask:
    """Park a run at a key that is taken, and give that up."""
    take(store, key, "a")
    park(store, key, run, envelope)
    wake = store.release(ReleaseRequest(key, "a")).wake
    assert wake is not None
    return wake


def refuse(_wake: WokenTask) -> None:
    """As a publisher whose process is not to send it."""
    raise NotOursError


def spoilt(_wake: WokenTask) -> None:
    """As a publisher that has found an envelope which nobody can send."""
    raise UnsendableError("no JSON")


def take_all(store: Store, keys: str, owners: str) -> list[int] | None:
    """Acquire several keys at once; return the tokens."""
    replies = store.acquire_all(list(keys), list(owners), 30.0, run="run")
    return None if replies is None else [reply.token for reply in replies]


def take_all_or_skip(store: Store, keys: str, owners: str) -> list[int]:
    """Acquire several free keys at once; skip the test if the store takes one at a time."""
    tokens = take_all(store, keys, owners)
    if tokens is None:
        pytest.skip("the store takes one key at a time")
    return tokens


def stand(
    store: Store, keys: str, run: str = "run", *, arrival: int = 0, **more: Any
) -> list[Reply]:
    """Have a run begin to stand at its keys, as far as it comes; return what it is told there."""
    route = Route(tuple(keys), "shop.move")
    park_request: ParkRequest | None = ParkRequest(run.encode())
    replies = []
    for key in keys:
        replies.append(
            store.stand(key, run, route, arrival=arrival, park_request=park_request, **more)
        )
        park_request, arrival = None, replies[-1].arrival
        if replies[-1].status is not RESERVED:
            break
    return replies


def goes_on(store: Store, wake: WokenTask | None) -> list[WokenTask]:
    """Let a run that has one more key go on; return what is to be sent."""
    assert wake is not None
    return list(store.ready(wake))


def unsettled(store: Store) -> None:
    """Let a run end whose result is not stored yet."""
    take(store, "k", "a", run="run")
    assert store.release(
        ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED)
    ).released


def kept(store: Store, lease: float) -> WokenTask:
    """Let a run hold the key whose message nobody but the store has."""
    take(store, "k", "a")
    park(store, "k", "run", b"envelope")
    wake = store.release(ReleaseRequest("k", "a")).wake
    assert wake is not None
    take(store, "k", "b", lease, run="run", retain=True)
    return wake


def work(store: Store) -> None:
    """Let everything happen at the key "k" that can, to its end."""
    take(store, "k", "a", run="run-a")
    gone = wait_for(store, "k", "gone")
    waiter = wait_for(store, "k", "b")
    park(store, "k", "run-c")
    park(store, "k", "run-d")
    park(store, "k", "run-a", redelivered=True)
    store.release(ReleaseRequest("k", "gone", inbox=gone.inbox))
    store.release(ReleaseRequest("k", "a", run="run-a", completion=AGAIN))
    take(store, "k", "b", queue=waiter.inbox)
    wake = store.release(ReleaseRequest("k", "b")).wake
    assert wake is not None
    store.mark_published(wake)
    take(store, "k", "c", run="run-c", retain=True)
    store.release(ReleaseRequest("k", "c", run="run-c", keep_for=("run-c", 30.0)))
    take(store, "k", "c2", run="run-c")
    wake = store.release(ReleaseRequest("k", "c2", run="run-c", completion=YES)).wake
    assert wake is not None
    store.mark_returned(wake)
    store.drop(wake)
    assert not store.inspect("k").token


class Given:
    """What the tests are given; see `StoreContract`."""

    shortest_lease: ClassVar[float] = 0.3
    longest_lease: ClassVar[float] = 30 * 86400.0
    fair: ClassVar[bool] = True
    hands_over: ClassVar[bool] = False
    bound: ClassVar[bool] = False

    @pytest.fixture
    def open_store(self) -> Callable[[str], Store]:
        """Open a store; those of one name share their records. The author's to write."""
        raise NotImplementedError("a StoreContract needs a fixture open_store: see its docstring")

    @pytest.fixture
    def pass_time(self, store: Store) -> Callable[[float], None]:
        """Let seconds pass for what the store has recorded."""

        def wait(seconds: float) -> None:
            if seconds > LONGEST_WAIT:
                pytest.skip(f"{seconds:g} s have to pass, and there is no pass_time of its own")
            time.sleep(seconds)

        return wait

    @pytest.fixture
    def store(self, open_store: Callable[[str], Store]) -> Iterator[Store]:
        """The store that is tested."""
        with closing(open_store("here")) as opened:
            yield opened

    @pytest.fixture
    def another(self, open_store: Callable[[str], Store]) -> Iterator[Store]:
        """The same store as another process opens it."""
        with closing(open_store("here")) as opened:
            yield opened

    @pytest.fixture
    def elsewhere(self, open_store: Callable[[str], Store]) -> Iterator[Store]:
        """A store that has other records."""
        with closing(open_store("elsewhere")) as opened:
            yield opened


class Taking(Given):
    """A key is one owner's at a time."""

    def test_a_free_key_is_granted(self, store: Store) -> None:
        before = clock.monotonic()

        reply = store.acquire(AcquireRequest("k", "a", 30.0))

        assert reply.status is GRANTED
        assert reply.token > 0
        assert reply.wake is None
        assert before <= reply.asked_at <= clock.monotonic()

    def test_a_taken_key_is_busy_and_says_who_holds_it(self, store: Store) -> None:
        token = take(store, "k", "a", run="run-a")

        reply = store.acquire(AcquireRequest("k", "b", 30.0))

        assert (reply.status, reply.token, reply.holder, reply.holder_run) == (
            BUSY,
            token,
            "a",
            "run-a",
        )
        assert 0 < reply.remaining <= 30.0
        assert reply.place == 0
        assert store.inspect("k").waiting == 0

    def test_the_same_owner_asking_again_changes_nothing_but_the_end(self, store: Store) -> None:
        token = take(store, "k", "a", 15.0)

        assert take(store, "k", "a", 30.0) == token

        assert 15.0 < store.inspect("k").remaining <= 30.0
        assert store.release(ReleaseRequest("k", "a")).released
        assert not holder(store, "k")

    def test_keys_are_independent(self, store: Store) -> None:
        take(store, "k1", "a")
        take(store, "k2", "b")

        assert (holder(store, "k1"), holder(store, "k2")) == ("a", "b")

    def test_stores_with_other_prefixes_are_other_places(
        self, store: Store, elsewhere: Store
    ) -> None:
        take(store, "k", "a")

        take(elsewhere, "k", "b")
        assert elsewhere.identity != store.identity

    def test_one_of_many_threads_gets_the_key(self, store: Store) -> None:
        start = threading.Barrier(8)
        replies = []

        def ask(name: str) -> None:
            start.wait()
            replies.append(store.acquire(AcquireRequest("k", name, 30.0)))

        threads = [threading.Thread(target=ask, args=(f"t{n}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        statuses = [reply.status for reply in replies]
        assert (statuses.count(GRANTED), statuses.count(BUSY)) == (1, 7)

    def test_an_expired_key_is_free(self, store: Store) -> None:
        take(store, "k", "a", self.shortest_lease)
        expire(store, "k")

        take(store, "k", "b")

    def test_a_lease_lasts_for_as_long_as_its_holder_believes_in_it(self, store: Store) -> None:
        first = store.acquire(AcquireRequest("k", "a", self.shortest_lease))

        wait_until(
            lambda: store.acquire(AcquireRequest("k", "b", 30.0)).status is GRANTED, "the key"
        )

        assert clock.monotonic() >= first.asked_at + believed(self.shortest_lease)

    @pytest.mark.parametrize("lease", [0.001, 0.0001])
    def test_the_shortest_lease_is_granted_and_expires(self, store: Store, lease: float) -> None:
        take(store, "k", "a", lease)

        expire(store, "k")

    def test_the_longest_lease_is_granted(self, store: Store) -> None:
        take(store, "k", "a", self.longest_lease)

        left = store.inspect("k").remaining
        assert left == pytest.approx(self.longest_lease, rel=0.01, abs=5.0)


class Renewing(Given):
    """A holder pushes the end of its lease, and nobody else does."""

    def test_a_holder_renews(self, store: Store) -> None:
        take(store, "k", "a", 15.0)
        before = clock.monotonic()

        ((outcome, asked_at),) = store.renew([Ownership("k", "a", 30.0)], 10.0)

        assert outcome is RenewOutcome.RENEWED
        assert before <= asked_at <= clock.monotonic()
        assert store.inspect("k").remaining > 15.0

    def test_what_was_renewed_outlives_its_first_lease(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        wait_until(  # at once, but for a machine that is too busy to ask before the end
            lambda: (
                take(store, "k", "a", 1.0)
                and renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]
            ),
            "a renewal in time",
        )

        pass_time(1.5)

        assert store.acquire(AcquireRequest("k", "b", 30.0)).status is BUSY

    def test_renewing_keeps_the_token(self, store: Store) -> None:
        token = take(store, "k", "a")

        renew(store, ("k", "a", 30.0))

        assert store.inspect("k").token == token

    def test_what_somebody_else_holds_is_not_renewed(self, store: Store) -> None:
        take(store, "k", "b", 15.0)

        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.HELD]

        assert holder(store, "k") == "b"
        assert store.inspect("k").remaining <= 15.0

    @pytest.mark.parametrize("end", ["never", "released", "expired"])
    def test_renewing_never_makes_a_lock_anew(self, store: Store, end: str) -> None:
        if end == "released":
            take(store, "k", "a")
            store.release(ReleaseRequest("k", "a"))
        elif end == "expired":
            take(store, "k", "a", self.shortest_lease)
            expire(store, "k")

        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.LOST]

        assert not store.inspect("k").token

    def test_each_of_many_renewals_has_its_own_outcome(self, store: Store) -> None:
        take(store, "k1", "a")
        take(store, "k2", "b")
        holds = [("k1", "a", 30.0), ("k2", "a", 30.0), ("k3", "a", 30.0), ("k1", "a", 30.0)]

        assert renew(store, *holds) == [
            RenewOutcome.RENEWED,
            RenewOutcome.HELD,
            RenewOutcome.LOST,
            RenewOutcome.RENEWED,
        ]

    def test_nothing_to_renew_is_no_error(self, store: Store) -> None:
        assert store.renew([], 10.0) == []


class GivingBack(Given):
    """A holder gives its key up, and nobody else does."""

    def test_a_released_key_is_free(self, store: Store) -> None:
        take(store, "k", "a")

        released = store.release(ReleaseRequest("k", "a"))

        assert released == (True, None)
        take(store, "k", "b")

    def test_who_does_not_hold_the_key_cannot_release_it(self, store: Store) -> None:
        take(store, "k", "a")

        assert store.release(ReleaseRequest("k", "b")) == (False, None)

        assert holder(store, "k") == "a"

    def test_a_second_release_finds_nothing(self, store: Store) -> None:
        take(store, "k", "a")
        store.release(ReleaseRequest("k", "a"))

        assert not store.release(ReleaseRequest("k", "a")).released

    def test_a_key_nobody_has_taken_cannot_be_released(self, store: Store) -> None:
        assert store.release(ReleaseRequest("k", "a")) == (False, None)

    def test_a_late_release_does_not_free_the_next_holders_key(self, store: Store) -> None:
        take(store, "k", "a", self.shortest_lease)
        expire(store, "k")
        take(store, "k", "b")

        assert not store.release(ReleaseRequest("k", "a")).released

        assert holder(store, "k") == "b"

    @parks
    def test_a_late_release_wakes_nobody(self, store: Store) -> None:
        take(store, "k", "a", self.shortest_lease)
        expire(store, "k")
        take(store, "k", "b")
        park(store, "k", "run")

        assert store.release(ReleaseRequest("k", "a")) == (False, None)

        assert store.inspect("k").waiting == 1

    def test_a_key_can_stay_locked_for_a_run_that_comes_later(self, store: Store) -> None:
        token = take(store, "k", "a", run="run")

        released = store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", 30.0)))

        assert released == (True, None)
        assert store.acquire(AcquireRequest("k", "b", 30.0)).status is BUSY
        assert take(store, "k", "c", run="run") == token

    @parks
    def test_a_key_that_stays_locked_is_not_given_to_the_queue(self, store: Store) -> None:
        token = take(store, "k", "a", run="run")
        park(store, "k", "other")

        released = store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", 30.0)))

        assert released == (True, None)
        assert store.acquire(AcquireRequest("k", "b", 30.0)).status is BUSY
        assert take(store, "k", "c", run="run") == token

    def test_a_key_that_was_kept_in_vain_is_free(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", self.shortest_lease)))

        wait_until(lambda: not store.inspect("k").token, "the end of what the key was kept for")
        take(store, "k", "b")

    @parks
    def test_a_key_that_was_kept_in_vain_goes_to_the_next(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        park(store, "k", "other")
        store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", self.shortest_lease)))
        wait_until(lambda: not store.inspect("k").token, "the end of what the key was kept for")

        (wake,) = swept(store)

        assert wake.run == "other"

    def test_who_does_not_hold_the_key_cannot_keep_it(self, store: Store) -> None:
        take(store, "k", "a", run="run")

        assert not store.release(
            ReleaseRequest("k", "b", run="other", keep_for=("other", 30.0))
        ).released

        assert holder(store, "k") == "a"


class Tokens(Given):
    """Every grant has a higher token than those before."""

    def test_tokens_rise_with_every_grant(self, store: Store) -> None:
        tokens = []
        for n in range(20):
            tokens.append(take(store, "k", f"o{n}"))
            store.release(ReleaseRequest("k", f"o{n}"))

        assert tokens == sorted(set(tokens))

    def test_tokens_rise_over_expiry(self, store: Store) -> None:
        first = take(store, "k", "a", self.shortest_lease)
        expire(store, "k")

        assert take(store, "k", "b") > first

    @waits
    @fair
    def test_tokens_rise_from_waiter_to_waiter(self, store: Store) -> None:
        tokens = [take(store, "k", "a")]
        waiters = [wait_for(store, "k", f"w{n}") for n in range(3)]
        before = "a"
        for waiter in waiters:
            store.release(ReleaseRequest("k", before))
            before = waiter.owner
            tokens.append(take(store, "k", before, queue=waiter.inbox))

        assert tokens == sorted(set(tokens))

    @waits
    @parks
    def test_tokens_rise_over_hand_overs(self, store: Store) -> None:
        tokens = [take(store, "k", "a")]
        waiter = wait_for(store, "k", "b")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        tokens.append(take(store, "k", "b", queue=waiter.inbox))
        store.release(ReleaseRequest("k", "b"))
        tokens.append(take(store, "k", "c", run="run"))

        assert tokens == sorted(set(tokens))


class Waiting(Given):
    """A blocked waiter has the key when its turn comes."""

    @waits
    def test_a_waiter_has_the_key_after_its_release(self, store: Store) -> None:
        take(store, "k", "a")
        waiters = [wait_for(store, "k", f"w{n}") for n in range(3)]

        assert store.release(ReleaseRequest("k", "a")) == (True, None)

        assert len(self.granted(store, waiters)) == 1

    @waits
    def test_locks_over_the_store_let_one_thread_in_at_a_time(self, store: Store) -> None:
        inside, passed = [], []

        def work_under_the_lock() -> None:
            for _ in range(5):
                with Lock("k", store=store) as lease:
                    inside.append(lease.token)
                    time.sleep(0.001)  # others would come in now
                    passed.append((len(inside), lease.token))
                    inside.remove(lease.token)

        threads = [threading.Thread(target=work_under_the_lock) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert [count for count, _ in passed] == [1] * 15
        assert sorted(token for _, token in passed) == [token for _, token in passed]

    @waits
    @fair
    def test_waiters_are_served_in_the_order_of_arrival(self, store: Store) -> None:
        take(store, "k", "first")
        waiters = [wait_for(store, "k", f"w{n}") for n in range(5)]

        served: list[str] = []
        for before in ["first", *(waiter.owner for waiter in waiters[:-1])]:
            store.release(ReleaseRequest("k", before))
            served += self.granted(store, waiters[len(served) :])

        assert served == [waiter.owner for waiter in waiters]

    @waits
    @parks
    def test_a_queue_is_served_in_the_order_of_arrival(self, store: Store) -> None:
        take(store, "k", "first")
        arrivals, waiters = [], []
        for n in range(6):
            name = f"w{n}"
            if n % 2:
                park(store, "k", name)
            else:
                waiters.append(wait_for(store, "k", name))
            arrivals.append(name)
        assert store.inspect("k").waiting == 6

        served = []
        current, run = "first", ""
        for _ in arrivals:
            wake = store.release(ReleaseRequest("k", current, run=run, completion=YES)).wake
            if wake is not None:
                run = current = wake.run
                take(store, "k", current, run=run)
            else:
                run = ""
                (current,) = self.granted(store, waiters)
                del waiters[0]
            served.append(current)

        assert served == arrivals

    def granted(self, store: Store, waiters: list[Waiter]) -> list[str]:
        """Return which of the waiters has the key, though the last one asks first."""
        before = holder(store, "k")
        got = [
            waiter.owner
            for waiter in reversed(waiters)
            if store.acquire(AcquireRequest("k", waiter.owner, 30.0, queue=waiter.inbox)).status
            is GRANTED
        ]
        assert got == [before] or not self.hands_over
        return got

    @waits
    @fair
    def test_the_place_in_the_queue_counts_from_0(self, store: Store) -> None:
        take(store, "k", "a")

        places = []
        for n in range(3):
            inbox = store.inbox("k", f"w{n}")
            places.append(store.acquire(AcquireRequest("k", f"w{n}", 30.0, queue=inbox)).place)
            places.append(store.acquire(AcquireRequest("k", f"w{n}", 30.0, queue=inbox)).place)

        assert places == [0, 0, 1, 1, 2, 2]
        assert store.inspect("k").waiting == 3

    @waits
    @fair
    def test_one_who_does_not_queue_learns_how_many_wait_before_him(self, store: Store) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")
        wait_for(store, "k", "c")

        assert store.acquire(AcquireRequest("k", "d", 30.0)).place == 2

    @waits
    @parks
    def test_one_who_does_not_queue_learns_how_many_are_before_him(self, store: Store) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")
        park(store, "k", "run")

        assert store.acquire(AcquireRequest("k", "c", 30.0)).place == 2

    @waits
    def test_a_release_tells_the_waiter(self, store: Store) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        thread = threading.Thread(target=waiter.inbox.wait, args=(2 * PATIENCE,), daemon=True)
        thread.start()

        assert store.release(ReleaseRequest("k", "a")) == (True, None)

        assert holder(store, "k") == "b" or not self.hands_over
        thread.join(PATIENCE)
        assert not thread.is_alive(), "nothing came to the waiter's inbox"
        take(store, "k", "b", queue=waiter.inbox)
        assert store.inspect("k").waiting == 0

    @waits
    def test_what_came_before_the_wait_is_not_missed(self, store: Store) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        store.release(ReleaseRequest("k", "a"))

        started = time.monotonic()
        waiter.inbox.wait(2 * PATIENCE)

        assert time.monotonic() - started < PATIENCE

    @waits
    def test_waiting_ends_though_nothing_comes(self, store: Store) -> None:
        store.inbox("k", "a").wait(0.01)

    @waits
    def test_an_inbox_may_be_closed_twice(self, store: Store) -> None:
        inbox = store.inbox("k", "a")

        inbox.close()
        inbox.close()

    @waits
    @fair
    def test_a_handed_over_key_is_not_free_to_others(self, store: Store) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")
        store.release(ReleaseRequest("k", "a"))

        assert store.acquire(AcquireRequest("k", "c", 30.0)).status is BUSY

    @waits
    def test_a_waiter_that_does_not_confirm_loses_his_turn(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "stopped", 1.0)
        alive = wait_for(store, "k", "alive")
        store.release(ReleaseRequest("k", "a"))
        pass_time(2.0)

        wait_until(
            lambda: (
                store.acquire(AcquireRequest("k", "alive", 30.0, queue=alive.inbox)).status
                is GRANTED
            ),
            "the key to pass the one who does not answer",
        )

        assert holder(store, "k") == "alive"

    @waits
    def test_a_waiter_that_gives_up_leaves_no_trace(self, store: Store) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        waiter.inbox.close()

        released = store.release(ReleaseRequest("k", "b", inbox=waiter.inbox))

        assert not released.released
        assert store.inspect("k").waiting == 0
        assert store.release(ReleaseRequest("k", "a")) == (True, None)
        assert not holder(store, "k")

    @waits
    def test_a_waiter_that_gives_up_as_the_key_becomes_free_does_not_keep_it(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        first, second = wait_for(store, "k", "b"), wait_for(store, "k", "c")
        store.release(ReleaseRequest("k", "a"))

        released = store.release(ReleaseRequest("k", "b", inbox=first.inbox))

        assert released.released or not self.hands_over
        assert released.wake is None
        take(store, "k", "c", queue=second.inbox)

    @waits
    @parks
    def test_a_waiter_that_gives_up_just_as_he_is_served_passes_the_key_on(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))

        released = store.release(ReleaseRequest("k", "b", inbox=waiter.inbox))

        assert released.released or not self.hands_over
        assert released.wake is not None
        assert released.wake.run == "run"

    @waits
    @fair
    def test_a_newcomer_does_not_overtake_the_queue(self, store: Store) -> None:
        join_before_the_end(store, self.shortest_lease, lambda: wait_for(store, "k", "b"))
        expire(store, "k")

        reply = store.acquire(AcquireRequest("k", "newcomer", 30.0))

        assert reply.status is BUSY
        assert reply.holder == "b" or not self.hands_over

    @waits
    @fair
    def test_the_first_in_the_queue_gets_a_key_that_expired(self, store: Store) -> None:
        first = join_before_the_end(store, self.shortest_lease, lambda: wait_for(store, "k", "b"))
        second = wait_for(store, "k", "c")
        expire(store, "k")

        assert store.acquire(AcquireRequest("k", "c", 30.0, queue=second.inbox)).status is BUSY
        take(store, "k", "b", queue=first.inbox)

    @waits
    def test_a_blocked_run_that_finds_the_key_free_leaves_nothing_in_the_queue(
        self, store: Store
    ) -> None:
        waiter = join_before_the_end(
            store, self.shortest_lease, lambda: wait_for(store, "k", "b", run="run")
        )
        expire(store, "k")
        take(store, "k", "b", queue=waiter.inbox, run="run")

        store.release(ReleaseRequest("k", "b", run="run", completion=YES))

        assert not holder(store, "k")
        assert store.inspect("k").waiting == 0


class Parking(Given):
    """A parked run is kept until its turn comes, and then given to who can send it."""

    @parks
    @any_envelope
    def test_a_release_returns_the_next_runs_envelope_as_it_was_parked(
        self, store: Store, envelope: bytes
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run", envelope)

        wake = store.release(ReleaseRequest("k", "a")).wake

        assert wake == WokenTask(slot_name("k"), "run", envelope)

    @parks
    def test_a_parked_run_says_who_holds_the_key_and_its_place(self, store: Store) -> None:
        take(store, "k", "a", run="run-a")
        park(store, "k", "first")

        reply = store.acquire(AcquireRequest("k", "b", 30.0, queue=ParkRequest(b"e"), run="second"))

        assert (reply.status, reply.holder, reply.holder_run, reply.place) == (
            PARKED,
            "a",
            "run-a",
            1,
        )

    @parks
    def test_a_free_key_is_granted_and_not_parked_at(self, store: Store) -> None:
        reply = store.acquire(AcquireRequest("k", "a", 30.0, queue=ParkRequest(b"e"), run="run"))

        assert reply.status is GRANTED
        assert store.release(ReleaseRequest("k", "a", run="run", completion=YES)) == (True, None)

    @parks
    def test_a_newcomer_does_not_overtake_a_parked_run_and_is_given_it_to_send(
        self, store: Store
    ) -> None:
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "run", b"envelope")
        )
        expire(store, "k")

        reply = store.acquire(AcquireRequest("k", "newcomer", 30.0))

        assert (reply.status, reply.holder, reply.holder_run) == (BUSY, "parked:run", "run")
        assert reply.wake == WokenTask(slot_name("k"), "run", b"envelope")

    @parks
    def test_the_key_is_reserved_while_a_woken_run_is_on_its_way(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))

        reply = store.acquire(AcquireRequest("k", "b", 30.0))

        assert (reply.status, reply.holder, reply.wake) == (BUSY, "parked:run", None)
        assert reply.remaining > 0

    @parks
    def test_a_woken_run_claims_its_key_whoever_brings_it(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        token = store.inspect("k").token

        assert take(store, "k", "another-worker", run="run") == token

        assert holder(store, "k") == "another-worker"
        assert store.inspect("k").remaining > 10

    @parks
    def test_a_claimed_run_is_waiting_no_more(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        take(store, "k", "b", run="run")

        assert store.release(ReleaseRequest("k", "b", run="run", completion=YES)) == (True, None)
        assert swept(store) == []
        assert store.inspect("k").waiting == 0

    @parks
    def test_a_late_woken_run_is_still_served_before_the_queue(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        store.release(ReleaseRequest("k", "parked:run"))  # its reservation ends

        take(store, "k", new_owner("late"), run="run")

    @parks
    def test_a_run_is_parked_once_however_often_it_comes(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run", b"first")
        park(store, "k", "other")
        park(store, "k", "run", b"second")

        assert store.inspect("k").waiting == 2
        assert store.release(ReleaseRequest("k", "a")).wake == WokenTask(
            slot_name("k"), "run", b"second"
        )

    @parks
    @recognises
    def test_a_run_that_was_parked_and_claims_its_key_by_parking_again_is_recognised(
        self, store: Store
    ) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", 60.0)))
        again = AcquireRequest("k", "b", 60.0, queue=ParkRequest(b"envelope"), run="run")
        assert store.acquire(again).status is GRANTED
        store.release(ReleaseRequest("k", "b", run="run", completion=YES))

        assert store.acquire(again._replace(owner="c", redelivered=True)).status is DONE

    @parks
    def test_a_woken_run_that_finds_the_key_taken_keeps_its_turn(self, store: Store) -> None:
        self._pass_to_the_second(store)
        take(store, "k", "second", run="second", redelivered=True)

        park(store, "k", "first", redelivered=True)

        again = store.release(
            ReleaseRequest("k", "second", run="second", completion=Completion.YES)
        ).wake
        assert again is not None
        assert again.run == "first"

    @parks
    def test_a_woken_run_has_the_key_before_a_later_one_that_has_not_come(
        self, store: Store
    ) -> None:
        self._pass_to_the_second(store)

        take(store, "k", "first", run="first", redelivered=True)

        assert (
            store.acquire(
                AcquireRequest("k", "second", 30.0, run="second", redelivered=True)
            ).status
            is BUSY
        )

    @parks
    def test_a_run_that_was_overtaken_on_its_way_has_the_key_next_and_is_not_sent_again(
        self, store: Store
    ) -> None:
        self._pass_to_the_second(store)
        park(store, "k", "third", redelivered=True)
        take(store, "k", "first", run="first", redelivered=True)

        assert (
            store.release(ReleaseRequest("k", "first", run="first", completion=Completion.YES)).wake
            is None
        )

        assert holder(store, "k") == "parked:second"
        take(store, "k", "second", run="second", redelivered=True)
        wake = store.release(
            ReleaseRequest("k", "second", run="second", completion=Completion.YES)
        ).wake
        assert wake is not None
        assert wake.run == "third"

    @staticmethod
    def _pass_to_the_second(store: Store) -> None:
        """WokenTask two runs, one after the other: the first has not come in time."""
        take(store, "k", "a")
        park(store, "k", "first")
        park(store, "k", "second")
        for owner in ("a", "parked:first"):  # what ends a reservation in time, too
            wake = store.release(ReleaseRequest("k", owner)).wake
            assert wake is not None
            store.mark_published(wake)
        assert holder(store, "k") == "parked:second"

    @parks
    def test_a_waiter_that_comes_late_has_the_key_before_those_who_came_after_it(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        waiters = [Waiter(name, store.inbox("k", name)) for name in ("w1", "w2")]
        arrivals = [
            store.acquire(AcquireRequest("k", name, 30.0, queue=inbox)).arrival
            for name, inbox in waiters
        ]
        assert arrivals[0] < arrivals[1]
        store.release(ReleaseRequest("k", "a"))
        store.release(ReleaseRequest("k", "w1"))  # what ends its grant in time, too
        assert holder(store, "k") == "w2"

        take(store, "k", "w1", queue=waiters[0].inbox, arrival=arrivals[0])

        again = store.acquire(
            AcquireRequest("k", "w2", 30.0, queue=waiters[1].inbox, arrival=arrivals[1])
        )
        assert (again.status, again.arrival) == (BUSY, arrivals[1])
        store.release(ReleaseRequest("k", "w1"))
        assert holder(store, "k") == "w2"
        for waiter in waiters:
            waiter.inbox.close()

    @parks
    def test_nobody_overtakes_one_who_has_come(self, store: Store) -> None:
        take(store, "k", "a")
        first, second = wait_for(store, "k", "w1"), wait_for(store, "k", "w2")
        store.release(ReleaseRequest("k", "a"))
        take(store, "k", "w1", queue=first.inbox)

        early = store.acquire(AcquireRequest("k", "w2", 30.0, queue=second.inbox, arrival=1))

        assert early.status is BUSY
        for waiter in (first, second):
            waiter.inbox.close()

    def test_lining_up_never_takes_a_free_key(self, store: Store) -> None:
        status = store.park_if_held("k", "run", ParkRequest(b"e"), 10.0).status

        assert status in {Status.FREE, PARKED}
        look = store.inspect("k")
        assert (look.token, look.waiting) == (0, int(status is PARKED))

    @parks
    def test_who_came_before_those_in_line_takes_the_free_key(self, store: Store) -> None:
        first = store.time(10.0)
        for number in (1, 2):
            park_request = ParkRequest(b"%d" % number)
            reply = store.park_if_held("k", f"run{number}", park_request, 10.0, first + number)
            assert (reply.status, reply.holder, reply.wake) == (PARKED, "", None)

        late = store.acquire(AcquireRequest("k", "late", 30.0, run="late", arrival=first + 3))
        assert late.status is BUSY
        assert late.wake == WokenTask(slot_name("k"), "run1", b"1")

        early = store.acquire(AcquireRequest("k", "early", 30.0, run="early", arrival=first))
        assert early.status is GRANTED
        wake = store.release(ReleaseRequest("k", "early")).wake
        assert wake is None  # it is on its way
        take(store, "k", "b", run="run1")
        assert store.release(ReleaseRequest("k", "b", run="run1")).wake == WokenTask(
            slot_name("k"), "run2", b"2"
        )

    @parks
    def test_nobody_comes_later_than_now(self, store: Store) -> None:
        take(store, "k", "a")
        store.park_if_held("k", "ahead", ParkRequest(b"1"), 10.0, store.time(10.0) + 10**12)
        store.park_if_held("k", "next", ParkRequest(b"2"), 10.0)

        assert store.release(ReleaseRequest("k", "a")).wake == WokenTask(
            slot_name("k"), "ahead", b"1"
        )

    @parks
    def test_the_first_in_line_is_woken_if_the_key_is_free(self, store: Store) -> None:
        assert list(store.wake_next("k")) == []
        store.park_if_held("k", "run", ParkRequest(b"e"), 10.0)

        assert list(store.wake_next("k")) == [WokenTask(slot_name("k"), "run", b"e")]
        assert list(store.wake_next("k")) == []
        take(store, "k", "a", run="run")
        store.park_if_held("k", "other", ParkRequest(b"o"), 10.0)
        assert list(store.wake_next("k")) == []

    def test_lining_up_at_a_taken_key_parks_the_run_or_does_nothing(self, store: Store) -> None:
        take(store, "k", "a")

        status = store.park_if_held("k", "run", ParkRequest(b"e"), 10.0).status

        assert status in {Status.FREE, PARKED}
        assert holder(store, "k") == "a"
        wake = WokenTask(slot_name("k"), "run", b"e") if status is PARKED else None
        assert store.release(ReleaseRequest("k", "a")) == (True, wake)

    @parks
    def test_a_run_that_came_back_is_sent_by_the_next_sweep(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run", b"envelope")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None
        assert swept(store) == []

        store.mark_returned(wake)

        assert wait_until(lambda: swept(store), "a sweep") == [wake]

    @parks
    def test_a_dropped_run_gives_its_key_to_the_next(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        park(store, "k", "next")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None

        released = store.drop(wake)

        assert released.wake is not None
        assert released.wake.run == "next"
        assert holder(store, "k") == "parked:next"

    @parks
    def test_a_run_that_was_dropped_is_not_sent_again(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None
        store.drop(wake)

        store.mark_returned(wake)
        store.mark_published(wake)

        assert swept(store) == []
        assert not store.inspect("k").token

    @parks
    def test_dispatching_sends_and_notes_it(self, store: Store) -> None:
        sent: list[WokenTask] = []
        store.publishers = (sent.append,)
        take(store, "k", "a")
        park(store, "k", "run", b"envelope")

        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: sent, "its way")
        assert sent == [WokenTask(slot_name("k"), "run", b"envelope")]

    @parks
    def test_what_cannot_be_dispatched_is_left_to_the_sweep(
        self, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away(_: WokenTask) -> None:
            raise ConnectionRefusedError

        noted: list[WokenTask] = []
        store.publishers = (away,)
        monkeypatch.setattr(store, "mark_published", noted.append)
        take(store, "k", "a")
        park(store, "k", "run")

        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: "the next sweep sends it" in caplog.text, "the warning")
        assert noted == []

    @parks
    def test_what_nobody_can_send_counts_as_sent_and_is_told_once(
        self, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        noted: list[WokenTask] = []
        run = new_owner("run")  # of no other test
        store.publishers = (spoilt,)
        monkeypatch.setattr(store, "mark_published", noted.append)
        take(store, "k", "a")
        park(store, "k", run, b"{ no json")
        wake = store.release(ReleaseRequest("k", "a")).wake

        store.dispatch(wake)
        store.dispatch(wake)

        assert noted == [wake, wake]
        assert "Traceback" not in caplog.text
        (record,) = [each for each in caplog.records if "cannot be sent" in each.getMessage()]
        assert "celery locks drop" in record.getMessage()

    @parks
    def test_what_is_left_to_others_keeps_the_key_from_nobody(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "first")
        park(store, "k", "second")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None

        store.mark_left(wake)

        assert holder(store, "k") == "parked:second"

    @parks
    def test_what_is_left_to_others_is_swept_up_again_and_again(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        store.publishers = (refuse,)
        take(store, "k", "a")
        park(store, "k", "run", b"envelope")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None

        assert store.dispatch(wake) is not Sending.SENT

        for _ in range(2):
            assert wait_until(lambda: swept(store), "a sweep") == [wake]
            assert store.dispatch(wake) is not Sending.SENT
        assert caplog.text == ""

    def test_nothing_to_dispatch_is_no_error(self, store: Store) -> None:
        store.dispatch(None)

    @waits
    @parks
    @recognises
    def test_nobody_has_or_wants_a_key_when_all_has_come_to_its_end(self, store: Store) -> None:
        work(store)

        assert store.inspect("k").waiting == 0
        assert swept(store) == []


class Keeping(Given):
    """A run whose only copy is in the store is kept there until it has ended."""

    @parks
    def test_a_kept_run_is_sent_again_if_its_process_dies(self, store: Store) -> None:
        wake = kept(store, self.shortest_lease)

        (again,) = wait_until(lambda: swept(store), "the run to be swept up")

        assert again == wake

    @parks
    def test_a_kept_run_is_not_sent_again_while_it_runs(self, store: Store) -> None:
        lease = 2 * self.shortest_lease
        kept(store, lease)
        wait_until(  # at once, but for a machine that is too busy to ask before the end
            lambda: (
                take(store, "k", "b", lease, run="run", retain=True)
                and renew(store, ("k", "b", 30.0)) == [RenewOutcome.RENEWED]
            ),
            "a renewal in time",
        )
        until = clock.monotonic() + 2 * lease
        while clock.monotonic() < until:
            assert renew(store, ("k", "b", 30.0)) == [RenewOutcome.RENEWED]
            assert swept(store) == []

    @parks
    def test_a_kept_run_is_forgotten_when_it_has_ended(self, store: Store) -> None:
        kept(store, 30.0)

        store.release(ReleaseRequest("k", "b", run="run", completion=YES))

        assert swept(store) == []
        assert not holder(store, "k")

    @parks
    @recognises
    def test_a_kept_run_that_is_never_settled_runs_again(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        kept(store, self.shortest_lease)
        take(store, "k", "b", 30.0)
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.UNSETTLED))
        assert swept(store) == []

        pass_time(31.0)

        (wake,) = wait_until(lambda: swept(store), "the run to be swept up")
        assert wake.run == "run"

    @parks
    @recognises
    def test_a_kept_unsettled_run_whose_message_came_back_is_sent_at_once(
        self, store: Store
    ) -> None:
        kept(store, self.shortest_lease)
        take(store, "k", "b", 30.0)
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.UNSETTLED))

        store.mark_returned(WokenTask(slot_name("k"), "run", b""))

        (wake,) = wait_until(lambda: swept(store), "the run to be swept up")
        assert wake.run == "run"
        take(store, "k", "c", run="run", redelivered=True)


class Pushing(Given):
    """A run whose turn it is goes straight to the channel that it was parked from."""

    @parks
    @any_envelope
    def test_a_run_is_pushed_to_the_desk_it_was_parked_from(
        self, store: Store, envelope: bytes
    ) -> None:
        received: list[WokenTask] = []
        address, close = self.open_desk(store, received.append)
        take(store, "{k} 1", "a")
        park_request = ParkRequest(envelope, address)
        store.acquire(AcquireRequest("{k} 1", "b", 30.0, queue=park_request, run="run 7"))

        released = store.release(ReleaseRequest("{k} 1", "a"))

        assert released == (True, None)
        wake = WokenTask(slot_name("{k} 1"), "run 7", envelope)
        assert wait_until(lambda: received, "the push") == [wake]
        close()
        close()

    @parks
    def test_a_pushed_run_that_nobody_takes_is_swept_up(self, store: Store) -> None:
        address, close = self.open_desk(store, lambda _: None)
        take(store, "k", "a")
        store.acquire(AcquireRequest("k", "b", 30.0, queue=ParkRequest(b"e", address), run="run"))
        store.release(ReleaseRequest("k", "a"))

        assert wait_until(lambda: swept(store), "a sweep") == [
            WokenTask(slot_name("k"), "run", b"e")
        ]
        close()

    @parks
    def test_a_desk_is_found_by_the_queues_that_it_was_noted_for(self, store: Store) -> None:
        peer, close = self.open_noted(store, ["celery", "{} \n", "é" * 300], free=3)

        for queue in ("celery", "{} \n", "é" * 300):
            assert store.find_channels([queue]) == [peer]
        assert store.find_channels(["other"]) == store.find_channels([]) == []
        assert store.find_channels(["other", "celery", "{} \n"]) == [peer]
        close()

    @parks
    def test_a_desk_that_takes_no_more_of_a_queue_is_not_found_there(self, store: Store) -> None:
        peer, close = self.open_noted(store, ["celery", "other"])

        store.register_channel(["other"], peer, 0.0)

        assert store.find_channels(["other"]) == []
        assert store.find_channels(["celery"]) == [peer]
        close()

    @parks
    def test_a_desk_that_nothing_was_heard_of_is_not_found(self, store: Store) -> None:
        peer, close = self.open_noted(store, ["celery"], seconds=0.05)

        wait_until(lambda: not store.find_channels(["celery"], [peer.address]), "the end")

        close()

    @parks
    def test_who_notes_its_desk_is_told_of_the_others(self, store: Store) -> None:
        mine, close = self.open_noted(store, ["celery"], free=2)
        other, close_other = self.open_noted(store, ["celery"], free=5)

        assert store.register_channel(["celery"], mine, 30.0) == [other]
        assert store.register_channel(["celery"], other._replace(free=0), 30.0) == [mine]
        assert set(store.find_channels(["celery"])) == {mine, other._replace(free=0)}
        close()
        close_other()

    @parks
    def test_of_many_desks_the_near_one_and_those_with_most_room_are_found(
        self, store: Store
    ) -> None:
        near, close = self.open_noted(store, ["celery"], free=0)
        stem = near.address.removesuffix(near.address[-32:])
        for free in range(1, 51):
            store.register_channel(["celery"], PeerChannel(f"{stem}{free:032x}", free), 30.0)

        first, *others = store.find_channels(["celery"], [f"{stem}{0:032x}", near.address])

        assert first == near
        assert max(others, key=lambda peer: peer.free).free == 50
        assert len(others) < 50
        close()

    @parks
    @any_envelope
    def test_a_woken_run_is_pushed_to_a_desk_that_it_was_not_parked_from(
        self, store: Store, envelope: bytes
    ) -> None:
        received: list[WokenTask] = []
        peer, close = self.open_noted(store, ["celery"], receive=received.append)
        wake = woken(store, "{k} 1", "run 7", envelope)

        assert store.push(wake, [peer.address])

        assert wait_until(lambda: received, "the push") == [wake]
        take(store, "{k} 1", "b", run="run 7", redelivered=True)
        close()

    @parks
    def test_a_run_is_pushed_to_the_first_desk_that_is_attended(self, store: Store) -> None:
        received: dict[str, list[WokenTask]] = {"first": [], "second": []}
        gone, close = self.open_noted(store, ["celery"])
        close()
        first, close_first = self.open_noted(store, ["c"], receive=received["first"].append)
        second, close_second = self.open_noted(store, ["c"], receive=received["second"].append)
        wake = woken(store, "k", "run")

        def pushed() -> bool:  # a server may not have noticed yet that one was closed
            store.push(wake, [gone.address, first.address, second.address])
            return bool(received["first"])

        wait_until(pushed, "the push")
        assert not received["second"]
        close_first()
        close_second()

    @parks
    def test_a_run_that_no_desk_hears_is_for_the_broker(self, store: Store) -> None:
        peer, close = self.open_noted(store, ["celery"])
        close()
        wake = woken(store, "k", "run")

        wait_until(lambda: not store.push(wake, [peer.address]), "the channel to be closed")

        assert not store.push(wake, [])

    @parks
    def test_nothing_is_pushed_to_what_is_no_desk(self, store: Store) -> None:
        peer, close = self.open_noted(store, ["celery"])
        for address in ("", "x", "é \n", f"{peer.address}x", f"x{peer.address}", "{}"):
            wake = woken(store, f"k{address}", "run")
            assert not store.push(wake, [address])
        close()

    @parks
    def test_a_run_that_has_come_is_not_pushed_again(self, store: Store) -> None:
        received: list[WokenTask] = []
        peer, close = self.open_noted(store, ["celery"], receive=received.append)
        wake = woken(store, "k", "run")
        take(store, "k", "b", run="run", redelivered=True)

        assert store.push(wake, [peer.address])

        woken_later = woken(store, "l", "later")
        assert store.push(woken_later, [peer.address])
        assert wait_until(lambda: received, "the later one") == [woken_later]
        close()

    @parks
    def test_a_pushed_run_that_does_not_come_is_swept_up_and_at_last_for_the_broker(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        peer, close = self.open_noted(store, ["celery"])
        wake = woken(store, "k", "run", b"e")
        pushes = 0
        while store.push(wake, [peer.address]):
            pushes += 1
            assert pushes < 10
            pass_time(2.0)
            assert wait_until(lambda: swept(store), "a sweep") == [wake]
        assert pushes > 1

        store.mark_published(wake)
        pass_time(2.0)

        assert swept(store) == []
        close()

    @parks
    def test_runs_of_a_desk_that_takes_nothing_are_not_pushed_there_any_more(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        silent, close_silent = self.open_desk(store, lambda _: None)
        take(store, "k", "a")
        for number in range(3):
            park_request = ParkRequest(b"e", silent)
            store.acquire(
                AcquireRequest("k", f"p{number}", 30.0, queue=park_request, run=f"run {number}")
            )
        peer, close = self.open_noted(store, ["celery"])
        assert store.release(ReleaseRequest("k", "a")).wake is None
        pass_time(2.0)
        (first,) = wait_until(lambda: swept(store), "a sweep")

        assert store.push(first, [peer.address])

        take(store, "k", "b", run="run 0", redelivered=True)
        second = store.release(ReleaseRequest("k", "b", run="run 0", completion=YES)).wake
        assert second == WokenTask(slot_name("k"), "run 1", b"e")
        close()
        close_silent()

    @parks
    def test_a_run_that_is_tended_is_not_swept_up(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        peer, close = self.open_noted(store, ["celery"])
        wake = woken(store, "k", "run", b"e")
        store.push(wake, [peer.address])
        store.keep_reserved([wake], 60.0)
        pass_time(2.0)
        time.sleep(0.05)
        assert swept(store) == []

        store.keep_reserved([wake], 0.0)

        assert wait_until(lambda: swept(store), "a sweep") == [wake]
        close()

    @parks
    def test_a_run_whose_end_was_never_told_is_pushed_again(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        woken(store, "k", "run", b"e")
        take(store, "k", "b", 1.0, run="run", redelivered=True, retain=True)
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.UNSETTLED))
        pass_time(6.0)
        (wake,) = wait_until(lambda: swept(store), "a sweep")
        received: list[WokenTask] = []
        peer, close = self.open_noted(store, ["celery"], receive=received.append)

        assert store.push(wake, [peer.address])

        assert wait_until(lambda: received, "the push") == [wake]
        close()

    @parks
    def test_what_is_tended_too_late_stays_as_it_is(self, store: Store) -> None:
        _, close = self.open_noted(store, ["celery"])
        wake = woken(store, "k", "run")
        take(store, "k", "b", run="run", redelivered=True, retain=True)

        store.keep_reserved([wake, WokenTask("nobody", "run", b"")], 0.0)

        assert swept(store) == []
        assert holder(store, "k") == "b"
        close()

    def open_noted(
        self,
        store: Store,
        queues: list[str],
        *,
        free: int = 1,
        seconds: float = 30.0,
        receive: Callable[[WokenTask], object] = lambda _: None,
    ) -> tuple[PeerChannel, Callable[[], None]]:
        """Return a channel that takes from these broker queues, and what closes it."""
        address, close = self.open_desk(store, receive)
        peer = PeerChannel(address, free)
        store.register_channel(queues, peer, seconds)
        return peer, close

    def open_desk(
        self, store: Store, receive: Callable[[WokenTask], object]
    ) -> tuple[str, Callable[[], None]]:
        """Return the address of a channel, and what closes it."""
        channel = store.open_channel(receive)
        if channel is None:
            pytest.skip("the store cannot push")
        return channel.address, channel.close


class Sweeping(Given):
    """A sweep finds what a crash left."""

    def test_a_sweep_finds_nothing_where_nothing_is(self, store: Store) -> None:
        take(store, "k", "a")

        assert swept(store) == []

        assert holder(store, "k") == "a"

    @parks
    def test_an_unsent_run_is_sent_by_a_sweep_after_its_time(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run", b"envelope")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert swept(store) == []
        pass_time(2.0)

        assert wait_until(lambda: swept(store), "a sweep") == [wake]
        assert swept(store) == []

    @parks
    def test_a_run_that_was_sent_is_left_alone(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "sent")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None
        store.mark_published(wake)
        take(store, "k2", "a")
        park(store, "k2", "unsent")
        store.release(ReleaseRequest("k2", "a"))
        pass_time(2.0)

        (wake,) = wait_until(lambda: swept(store), "the other one to be swept up")

        assert wake.run == "unsent"

    @parks
    def test_a_sweep_frees_the_key_of_a_holder_that_died(self, store: Store) -> None:
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "run", b"envelope"), owner="dead"
        )
        expire(store, "k", "dead")

        assert swept(store) == [WokenTask(slot_name("k"), "run", b"envelope")]
        assert holder(store, "k") == "parked:run"

    @waits
    @parks
    def test_a_sweep_hands_a_free_key_to_a_blocked_waiter_before_parked_ones(
        self, store: Store
    ) -> None:
        waiter = join_before_the_end(
            store, self.shortest_lease, lambda: wait_for(store, "k", "b"), owner="dead"
        )
        park(store, "k", "run")
        expire(store, "k", "dead")

        assert swept(store) == []

        assert holder(store, "k") == "b" or not self.hands_over
        waiter.inbox.wait(PATIENCE)
        take(store, "k", "b", queue=waiter.inbox)

    @parks
    def test_a_sweep_leaves_held_keys_alone(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")

        assert swept(store) == []

        assert (holder(store, "k"), store.inspect("k").waiting) == ("a", 1)

    @parks
    def test_a_sweep_finds_every_key(self, store: Store) -> None:
        for n in range(250):
            take(store, f"k{n}", "dead", self.shortest_lease)
            store.acquire(
                AcquireRequest(f"k{n}", "b", 30.0, queue=ParkRequest(b"e"), run=f"run{n}")
            )
        # Some were granted at once: their holders had expired already.
        waiting = [n for n in range(250) if store.inspect(f"k{n}").waiting]
        for n in waiting:
            expire(store, f"k{n}", "dead")

        found = wait_until(lambda: swept(store), "a sweep")

        assert {wake.run for wake in found} == {f"run{n}" for n in waiting}

    @parks
    def test_of_all_who_sweep_in_an_interval_one_gets_to_look(self, store: Store) -> None:
        assert list(store.sweep(60.0)) == []
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "run"), owner="dead"
        )
        expire(store, "k", "dead")

        assert list(store.sweep(60.0)) == []


class SecondDeliveries(Given):
    """A run that has ended is not run again, and one that died is."""

    @recognises
    def test_a_second_delivery_of_a_finished_run_is_recognised(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )

    def test_a_first_delivery_is_never_taken_for_a_second(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        take(store, "k", "b", run="run", redelivered=False)

    def test_a_second_delivery_of_a_run_that_has_not_ended_runs(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=Completion.NO))

        take(store, "k", "b", run="run", redelivered=True)

    def test_a_second_delivery_of_another_run_runs(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        take(store, "k", "b", run="other", redelivered=True)

    def test_a_second_delivery_does_not_run_beside_the_first(self, store: Store) -> None:
        take(store, "k", "a", run="run")

        reply = store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True))

        assert (reply.status, reply.holder_run) == (BUSY, "run")

    @parks
    @recognises
    def test_a_parked_second_delivery_of_a_finished_run_is_dropped(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        park(store, "k", "run", redelivered=True)
        park(store, "k", "other")

        wake = store.release(ReleaseRequest("k", "a", run="run", completion=YES)).wake

        assert wake is not None
        assert wake.run == "other"
        assert store.inspect("k").waiting == 0
        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )

    @parks
    @recognises
    def test_a_parked_second_delivery_of_a_run_that_died_runs(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        park(store, "k", "run", b"again", redelivered=True)

        assert store.release(ReleaseRequest("k", "a", run="run")).wake == WokenTask(
            slot_name("k"), "run", b"again"
        )
        take(store, "k", "b", run="run", redelivered=True)

    @waits
    @fair
    @recognises
    @pytest.mark.parametrize("ended", [AGAIN, Completion.UNSETTLED])
    def test_a_second_delivery_that_blocks_does_not_run_when_the_first_has_ended(
        self, store: Store, ended: Completion
    ) -> None:
        take(store, "k", "a", run="run")
        waiter = wait_for(store, "k", "b", run="run", redelivered=True)
        other = wait_for(store, "k", "c")

        store.release(ReleaseRequest("k", "a", run="run", completion=ended))
        told = store.acquire(
            AcquireRequest("k", "b", 30.0, queue=waiter.inbox, run="run", redelivered=True)
        )

        assert told.status is (DONE if ended is AGAIN else BUSY)
        assert holder(store, "k") == "c" or not self.hands_over
        take(store, "k", "c", queue=other.inbox)
        store.release(ReleaseRequest("k", "c"))
        assert not holder(store, "k")

    @parks
    @recognises
    def test_a_second_delivery_whose_turn_has_come_does_not_run_when_the_first_has_ended(
        self, store: Store
    ) -> None:
        join_before_the_end(
            store,
            self.shortest_lease,
            lambda: park(store, "k", "run", redelivered=True),
            run="run",
        )
        park(store, "k", "other")
        expire(store, "k")
        (wake,) = wait_until(lambda: swept(store), "the free key to be handed over")
        assert wake.run == "run"
        store.release(
            ReleaseRequest("k", "a", run="run", completion=AGAIN)
        )  # it had lost its lease, and has ended

        told = store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True))

        assert told.status is DONE
        assert told.wake is not None
        assert told.wake.run == "other"

    def test_an_unsettled_run_leaves_its_key_free(self, store: Store) -> None:
        unsettled(store)

        take(store, "k", "b", run="other")

    @recognises
    def test_the_second_delivery_of_an_unsettled_run_does_not_run(self, store: Store) -> None:
        unsettled(store)

        reply = store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True))

        assert (reply.status, reply.holder_run) == (BUSY, "run")
        assert 25.0 < reply.remaining < 30.1
        assert not holder(store, "k")

    @parks
    @recognises
    def test_the_parked_second_delivery_of_an_unsettled_run_is_held_back(
        self, store: Store
    ) -> None:
        take(store, "k", "a", run="run")
        park(store, "k", "run", redelivered=True)
        park(store, "k", "other")

        wake = store.release(
            ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED)
        ).wake

        assert wake is not None
        assert wake.run == "other"
        assert swept(store) == []

    @recognises
    def test_the_second_delivery_of_a_run_that_is_settled_is_recognised(self, store: Store) -> None:
        unsettled(store)
        assert store.drop(WokenTask(slot_name("k"), "run", b"")).released

        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )

    @parks
    @recognises
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_the_second_delivery_of_a_run_that_is_settled_is_dropped(
        self, store: Store, when: str, pass_time: Callable[[float], None]
    ) -> None:
        unsettled(store)
        if when == "before":
            park(store, "k", "run", redelivered=True)
        assert store.drop(WokenTask(slot_name("k"), "run", b"")).released

        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )
        pass_time(120.0)
        assert swept(store) == []

    @parks
    @recognises
    @pytest.mark.parametrize("parked", ["before its end", "after its end"])
    def test_the_second_delivery_of_a_run_that_is_never_settled_runs(
        self, store: Store, parked: str, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", run="run")
        if parked == "before its end":
            park(store, "k", "run", b"again", redelivered=True)
        store.release(ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED))
        if parked == "after its end":
            park(store, "k", "run", b"again", redelivered=True)
        assert swept(store) == []

        pass_time(31.0)

        found = wait_until(lambda: swept(store), "the run to be swept up")
        assert found == [WokenTask(slot_name("k"), "run", b"again")]
        take(store, "k", "b", run="run", redelivered=True)

    @recognises
    def test_a_run_with_a_short_lease_has_five_seconds_to_be_settled(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 0.5, run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED))

        pass_time(2.5)  # not more: real time passes too
        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is BUSY
        )

        pass_time(2.6)
        take(store, "k", "b", run="run", redelivered=True)


class SeveralKeys(Given):
    """Several keys are taken all at once, or none is."""

    def test_free_keys_are_taken_in_one_step(self, store: Store) -> None:
        tokens = take_all_or_skip(store, "klm", "abc")

        for key, owner, token in zip("klm", "abc", tokens, strict=True):
            state = store.inspect(key)
            assert (state.owner, state.token, state.run) == (owner, token, "run")

    @pytest.mark.parametrize("taken", "klm")
    def test_if_one_of_several_is_taken_none_is(self, store: Store, taken: str) -> None:
        take(store, taken, "z")

        assert take_all(store, "klm", "abc") is None
        assert [holder(store, key) for key in "klm"] == ["z" * (key == taken) for key in "klm"]

    @waits
    @fair
    def test_who_wants_several_keys_does_not_overtake_a_waiter(self, store: Store) -> None:
        waiter = join_before_the_end(
            store, self.shortest_lease, lambda: wait_for(store, "k", "first"), owner="z"
        )
        expire(store, "k", "z")

        assert take_all(store, "kl", "ab") is None
        assert not holder(store, "l")
        take(store, "k", "first", queue=waiter.inbox)

    @parks
    def test_who_wants_several_keys_does_not_overtake(self, store: Store) -> None:
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "first"), owner="z"
        )
        expire(store, "k", "z")

        assert take_all(store, "kl", "ab") is None
        assert not holder(store, "l")

    def test_several_keys_are_given_up_one_by_one(self, store: Store) -> None:
        take_all_or_skip(store, "kl", "ab")

        assert store.release(ReleaseRequest("k", "a", run="run")).released
        assert store.release(ReleaseRequest("l", "b", run="run")).released

    def test_tokens_rise_however_a_key_was_taken(self, store: Store) -> None:
        first = take(store, "k", "z")
        store.release(ReleaseRequest("k", "z"))

        second, _ = take_all_or_skip(store, "kl", "ab")

        assert second > first


class StandingAtKeys(Given):
    """A run that needs several keys keeps what it has, and waits for the next."""

    @parks
    def test_it_is_sent_when_it_has_all_its_keys_and_not_before(self, store: Store) -> None:
        first, second = take(store, "k", "a"), take(store, "l", "b")

        assert [reply.status for reply in stand(store, "kl")] == [PARKED]
        assert goes_on(store, store.release(ReleaseRequest("k", "a")).wake) == []
        assert holder(store, "k") == "parked:run"
        (wake,) = goes_on(store, store.release(ReleaseRequest("l", "b")).wake)

        assert wake == WokenTask("k", "run", b"run")
        assert holder(store, "l") == "parked:run"
        assert take(store, "k", "c", run="run", redelivered=True) > first
        assert take(store, "l", "d", run="run", redelivered=True) > second
        for key, owner in (("k", "c"), ("l", "d")):
            assert store.release(
                ReleaseRequest(key, owner, run="run", completion=AGAIN)
            ) == Release(True, None)
            assert store.inspect(key)[-4:] == (0, 0.0, 0, "")

    @parks
    def test_the_order_of_the_keys_is_the_runs_own(self, store: Store) -> None:
        take(store, "k", "a")
        take(store, "m", "b")
        stand(store, "mkl")

        assert goes_on(store, store.release(ReleaseRequest("m", "b")).wake) == []
        assert goes_on(store, store.release(ReleaseRequest("k", "a")).wake) == [
            WokenTask("m", "run", b"run")
        ]
        assert holder(store, "l") == "parked:run"

    @parks
    def test_free_keys_are_all_kept_for_it(self, store: Store) -> None:
        replies = stand(store, "kl")

        assert [reply.status for reply in replies] == [RESERVED, RESERVED]
        assert len({reply.arrival for reply in replies}) == 1
        for key in "kl":
            assert holder(store, key) == "parked:run"
            assert store.acquire(AcquireRequest(key, "newcomer", 30.0)).status is BUSY
            take(store, key, f"{key}'s", run="run")

    @parks
    def test_it_is_dispatched_as_any_other(self, store: Store) -> None:
        sent: list[WokenTask] = []
        store.publishers = (sent.append,)
        take(store, "k", "a")
        take(store, "l", "b")
        stand(store, "kl")

        store.dispatch(store.release(ReleaseRequest("l", "b")).wake)
        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: sent, "its way")
        assert sent == [WokenTask("k", "run", b"run")]

    @parks
    def test_who_has_no_courier_lets_it_go_on_too(self, store: Store) -> None:
        take(store, "k", "a")
        take(store, "l", "b")
        stand(store, "kl")

        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: store.inspect("l").waiting, "the next key")
        assert holder(store, "k") == "parked:run"

    @parks
    def test_it_has_the_same_place_in_all_queues(self, store: Store) -> None:
        take(store, "k", "a")
        take(store, "l", "b")
        (reply,) = stand(store, "kl")
        park(store, "l", "later")
        goes_on(store, store.release(ReleaseRequest("k", "a")).wake)

        wake = store.release(ReleaseRequest("l", "b")).wake

        assert wake is not None
        assert wake.run == "run"
        assert stand(store, "kl")[-1].arrival == reply.arrival
        assert [waiter.run for waiter in store.waiters("l")] == ["run", "later"]

    @parks
    def test_what_is_kept_for_a_later_one_that_still_waits_goes_to_an_earlier_one(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        take(store, "m", "b")
        stand(store, "kl", "first")
        assert [reply.status for reply in stand(store, "lm", "second")] == [RESERVED, PARKED]

        assert goes_on(store, store.release(ReleaseRequest("k", "a")).wake) == [
            WokenTask("k", "first", b"first")
        ]

        assert holder(store, "l") == "parked:first"
        assert goes_on(store, store.release(ReleaseRequest("m", "b")).wake) == []
        take(store, "k", "c", run="first")
        take(store, "l", "d", run="first")
        wake = store.release(ReleaseRequest("l", "d", run="first", completion=AGAIN)).wake
        assert goes_on(store, wake) == [WokenTask("l", "second", b"second")]

    @parks
    def test_what_is_kept_for_a_later_one_that_has_all_stays_his(self, store: Store) -> None:
        take(store, "k", "a")
        stand(store, "kl", "first")
        take(store, "l", "b")
        stand(store, "lm", "second")
        assert goes_on(store, store.release(ReleaseRequest("l", "b")).wake) == [
            WokenTask("l", "second", b"second")
        ]

        assert goes_on(store, store.release(ReleaseRequest("k", "a")).wake) == []

        assert holder(store, "l") == "parked:second"
        assert [waiter.run for waiter in store.waiters("l") if not waiter.woken] == ["first"]

    @parks
    def test_a_key_that_was_taken_for_it_is_kept(self, store: Store) -> None:
        take(store, "l", "b")
        token = take(store, "k", "a", run="run")
        route = Route(("k", "l"))

        reply = store.stand("k", "run", route, park_request=ParkRequest(b"run"), owner="a")

        assert reply.status is RESERVED
        assert reply.token > token
        assert not store.release(ReleaseRequest("k", "a")).released
        assert store.stand("l", "run", route, arrival=reply.arrival).status is PARKED
        assert goes_on(store, store.release(ReleaseRequest("l", "b")).wake) == [
            WokenTask("k", "run", b"run")
        ]

    @parks
    def test_a_key_that_was_taken_for_it_goes_to_who_stands_before_it(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        stand(store, "kl", "first")

        (reply,) = stand(store, "kl", "run", owner="a")

        assert reply.status is PARKED
        assert goes_on(store, reply.wake) == [WokenTask("k", "first", b"first")]

    @parks
    def test_one_that_comes_again_has_its_old_place(self, store: Store) -> None:
        take(store, "k", "a")
        (before,) = stand(store, "kl")
        (wake,) = goes_on(store, store.release(ReleaseRequest("k", "a")).wake)
        stand(store, "kl", "later")
        take(store, "k", "b", run=wake.run, redelivered=True)

        replies = stand(store, "kl", owner="b")

        assert [reply.arrival for reply in replies] == [before.arrival] * 2
        assert [reply.status for reply in replies] == [RESERVED, RESERVED]

    @parks
    def test_repeating_changes_nothing(self, store: Store) -> None:
        take(store, "l", "b")

        told = [[reply[:1] + reply[2:5] for reply in stand(store, "kl")] for _ in range(2)]
        store.release(ReleaseRequest("l", "b"))
        departed = [store.depart(key, "run", first=key == "k") for key in "llkk"]

        assert told[0] == told[1]
        assert [each.released for each in departed] == [True] * 4
        assert [each.wake for each in departed[:2]] == [None, None]
        assert departed[2].wake == WokenTask("k", "run", b"run")
        assert (store.inspect("k").waiting, store.inspect("l").waiting) == (0, 0)

    @parks
    def test_one_that_is_on_its_way_is_left_alone(self, store: Store) -> None:
        take(store, "k", "a")
        take(store, "l", "b")
        stand(store, "kl")
        before = store.release(ReleaseRequest("k", "a")).wake
        assert goes_on(store, before) == []
        late = store.release(ReleaseRequest("l", "b")).wake
        assert goes_on(store, late) == [WokenTask("k", "run", b"run")]

        assert goes_on(store, before) == goes_on(store, late) == []

        assert (holder(store, "k"), holder(store, "l")) == ("parked:run", "parked:run")
        take(store, "k", "c", run="run", redelivered=True)
        assert goes_on(store, late) == []
        take(store, "l", "d", run="run", redelivered=True)

    @parks
    def test_it_does_not_depart_from_what_is_not_kept_for_it(self, store: Store) -> None:
        take(store, "k", "a")
        stand(store, "kl")

        assert not store.depart("k", "run", first=True).released
        assert not store.depart("l", "run", first=False).released
        assert [waiter.run for waiter in store.waiters("k")] == ["run"]

    @parks
    @recognises
    def test_one_that_has_ended_stands_nowhere(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        assert [reply.status for reply in stand(store, "kl")] == [DONE]
        assert not store.inspect("k").token

    @parks
    @lists
    def test_one_that_is_cancelled_at_its_first_key_is_soon_gone_everywhere(
        self, store: Store
    ) -> None:
        take(store, "l", "b")
        stand(store, "kl")
        park(store, "l", "next", b"next")

        assert store.cancel("k", "run").released

        assert not store.inspect("k").token
        assert goes_on(store, store.release(ReleaseRequest("l", "b")).wake) == [
            WokenTask("l", "next", b"next")
        ]
        assert [at for at, _ in store.find_parked("run")] == []

    @parks
    @lists
    def test_where_it_stands_is_known(self, store: Store) -> None:
        take(store, "l", "b")
        stand(store, "kl", "task:0:0:0")

        assert sorted(store.find_parked("task")) == [("k", "task:0:0:0"), ("l", "task:0:0:0")]
        here, there = store.parked("k", "task:0:0:0"), store.parked("l", "task:0:0:0")
        assert here is not None
        assert there is not None
        assert (here.envelope, there.envelope) == (b"task:0:0:0", b"")
        assert here.route == there.route == Route(("k", "l"), "shop.move")
        assert (here.task, there.task) == ("shop.move", "shop.move")
        assert store.inspect("k").task == "shop.move"

    @parks
    def test_what_lapses_while_it_waits_elsewhere_is_kept_for_it_again(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "l", "b", 60.0)
        stand(store, "kl")
        pass_time(6.0)
        expire(store, "k", "parked:run")

        (wake,) = wait_until(lambda: swept(store), "a sweep")

        assert goes_on(store, wake) == []
        assert holder(store, "k") == "parked:run"
        assert goes_on(store, store.release(ReleaseRequest("l", "b")).wake) == [
            WokenTask("k", "run", b"run")
        ]

    @parks
    def test_one_whose_waker_has_died_goes_on_soon(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        stand(store, "kl")
        store.release(ReleaseRequest("k", "a"))
        pass_time(2.5)
        expire(store, "k", "parked:run")

        (wake,) = wait_until(lambda: swept(store), "a sweep")

        assert goes_on(store, wake) == [WokenTask("k", "run", b"run")]

    @parks
    @waits
    def test_who_is_blocked_where_it_waits_for_him_goes_before_it_once(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "l", "b", 60.0)
        stand(store, "kl")
        waiter = wait_for(store, "k", "b2", 60.0)
        pass_time(6.0)
        expire(store, "k", "parked:run")

        assert swept(store) == []

        take(store, "k", "b2", 60.0, queue=waiter.inbox)
        store.release(ReleaseRequest("l", "b"))
        wake = store.release(ReleaseRequest("k", "b2")).wake
        assert goes_on(store, wake) == [WokenTask("k", "run", b"run")]


class AnyText(Given):
    """A key and a run may be any text."""

    @hostile_keys
    def test_a_key_may_hold_any_text(self, store: Store, key: str) -> None:
        token = take(store, key, "a")
        assert store.acquire(AcquireRequest(key, "b", 30.0)).status is BUSY
        assert renew(store, (key, "a", 30.0)) == [RenewOutcome.RENEWED]
        assert store.inspect(key).token == token

        assert store.release(ReleaseRequest(key, "a")) == (True, None)
        assert not store.inspect(key).token

    def test_keys_that_look_alike_are_different(self, store: Store) -> None:
        keys = ["a", "A", "a ", "a\0", "{a}", "%61", "a?b", "a\ud801b", "\ufffd", "x" * 9_999]
        keys += HOSTILE_KEYS.values()

        tokens = {key: take(store, key, f"o{n}") for n, key in enumerate(keys)}

        assert {key: store.inspect(key).token for key in keys} == tokens

    @parks
    @hostile_keys
    def test_a_run_can_be_parked_at_any_key(self, store: Store, key: str) -> None:
        take(store, key, "a")
        park(store, key, "run", b"envelope")

        wake = store.release(ReleaseRequest(key, "a")).wake
        assert wake is not None
        assert wake.envelope == b"envelope"
        store.mark_published(wake)
        store.mark_returned(wake)
        assert wait_until(lambda: swept(store), "a sweep") == [wake]
        store.drop(wake)
        assert not store.inspect(key).token

    @waits
    @hostile_keys
    def test_one_can_wait_for_any_key(self, store: Store, key: str) -> None:
        take(store, key, "a")
        waiter = wait_for(store, key, "b")

        store.release(ReleaseRequest(key, "a"))

        waiter.inbox.wait(PATIENCE)
        take(store, key, "b", queue=waiter.inbox)

    @hostile_runs
    def test_a_holders_run_may_have_any_name(self, store: Store, run: str) -> None:
        take(store, "k", "a", run=run)

        assert store.acquire(AcquireRequest("k", "b", 30.0)).holder_run == run
        assert store.inspect("k").run == run
        assert store.release(ReleaseRequest("k", "a", run=run)).released

    @parks
    @recognises
    @hostile_runs
    def test_a_run_may_have_any_name(self, store: Store, run: str) -> None:
        take(store, "k", "a")
        park(store, "k", run)

        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None
        assert wake.run == run
        take(store, "k", "b", run=run)
        store.release(ReleaseRequest("k", "b", run=run, completion=AGAIN))
        assert (
            store.acquire(AcquireRequest("k", "c", 30.0, run=run, redelivered=True)).status is DONE
        )


class Looking(Given):
    """A look says how it is, and changes nothing."""

    @pytest.mark.parametrize("timeout", [None, 10.0])
    def test_a_look_at_a_free_key(self, store: Store, timeout: float | None) -> None:
        state = store.inspect("k", timeout)

        assert (state.owner, state.token, state.run, state.waiting) == ("", 0, "", 0)
        assert state.remaining == 0.0

    @pytest.mark.parametrize("timeout", [None, 10.0])
    def test_a_look_at_a_held_key(self, store: Store, timeout: float | None) -> None:
        token = take(store, "k", "a", run="run")

        state = store.inspect("k", timeout)

        assert (state.owner, state.token, state.run, state.waiting) == ("a", token, "run", 0)
        assert abs(state.since - time.time()) < 60
        assert 0 < state.remaining <= 30.0

    @parks
    def test_a_look_at_a_held_key_where_somebody_waits(self, store: Store) -> None:
        token = take(store, "k", "a", run="run")
        park(store, "k", "b")

        state = store.inspect("k")

        assert (state.owner, state.token, state.run, state.waiting) == ("a", token, "run", 1)
        assert abs(state.since - time.time()) < 60
        assert 0 < state.remaining <= 30.0

    def test_looking_takes_nothing(self, store: Store) -> None:
        take(store, "k", "a", self.shortest_lease)
        expire(store, "k")

        assert store.inspect("k") == store.inspect("k")
        take(store, "k", "b")

    @parks
    def test_looking_changes_nothing(self, store: Store) -> None:
        join_before_the_end(store, self.shortest_lease, lambda: park(store, "k", "run"))
        expire(store, "k")

        assert store.inspect("k") == store.inspect("k")
        assert store.inspect("k").waiting == 1

    def test_a_working_store_passes_its_check(self, store: Store) -> None:
        assert all(finding.severity is not Severity.BAD for finding in store.check())

    def test_a_check_leaves_keys_alone(self, store: Store) -> None:
        token = take(store, "k", "a")

        store.check()

        assert store.inspect("k").token == token

    def test_a_store_may_be_used_after_it_was_closed(self, store: Store) -> None:
        take(store, "k", "a")
        store.close()
        store.close()

        take(store, "another key", "b")
        assert store.release(ReleaseRequest("another key", "b")).released


class Sharing(Given):
    """What one process does at a key is so for all."""

    @shares
    def test_it_is_one_store_wherever_it_is_opened(self, store: Store, another: Store) -> None:
        assert another.identity == store.identity

    @shares
    def test_what_one_process_holds_another_cannot_take(self, store: Store, another: Store) -> None:
        token = take(store, "k", "a", run="run-a")

        reply = another.acquire(AcquireRequest("k", "b", 30.0))

        assert (reply.status, reply.token, reply.holder, reply.holder_run) == (
            BUSY,
            token,
            "a",
            "run-a",
        )
        assert holder(another, "k") == "a"

    @shares
    @loose
    def test_an_owner_is_an_acquisition_and_not_a_process(
        self, store: Store, another: Store
    ) -> None:
        token = take(store, "k", "a", 15.0)

        assert take(another, "k", "a") == token
        assert renew(another, ("k", "a", 60.0)) == [RenewOutcome.RENEWED]
        assert store.inspect("k").remaining > 30.0
        assert another.release(ReleaseRequest("k", "a")).released
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.LOST]

    @shares
    @bound
    def test_another_process_can_release_a_hold_and_no_more(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a")

        assert another.acquire(AcquireRequest("k", "a", 30.0)).status is BUSY
        assert renew(another, ("k", "a", 30.0)) != [RenewOutcome.RENEWED]
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]
        assert another.release(ReleaseRequest("k", "a")).released
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.LOST]

    @shares
    def test_what_one_process_gives_up_another_can_take(self, store: Store, another: Store) -> None:
        first = take(store, "k", "a")
        store.release(ReleaseRequest("k", "a"))

        assert take(another, "k", "b") > first
        assert holder(store, "k") == "b"

    @shares
    def test_a_lease_ends_for_all(self, store: Store, another: Store) -> None:
        first = store.acquire(AcquireRequest("k", "a", self.shortest_lease))

        wait_until(
            lambda: another.acquire(AcquireRequest("k", "b", 30.0)).status is GRANTED, "the key"
        )

        assert clock.monotonic() >= first.asked_at + believed(self.shortest_lease)
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.HELD]

    @shares
    @waits
    def test_a_waiter_learns_of_a_release_in_another_process(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a")
        waiter = wait_for(another, "k", "b")

        store.release(ReleaseRequest("k", "a"))

        started = time.monotonic()
        waiter.inbox.wait(2 * PATIENCE)
        assert time.monotonic() - started < PATIENCE
        take(another, "k", "b", queue=waiter.inbox)

    @shares
    @waits
    @fair
    def test_a_queue_is_one_for_all_processes(self, store: Store, another: Store) -> None:
        take(store, "k", "a")
        here, there = wait_for(store, "k", "b"), wait_for(another, "k", "c")
        store.release(ReleaseRequest("k", "a"))

        assert another.acquire(AcquireRequest("k", "c", 30.0, queue=there.inbox)).status is BUSY
        take(store, "k", "b", queue=here.inbox)
        store.release(ReleaseRequest("k", "b"))
        take(another, "k", "c", queue=there.inbox)

    @shares
    @waits
    def test_a_waiter_whose_process_is_gone_is_passed_over(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a")
        wait_for(another, "k", "dead", 1.0)
        alive = wait_for(store, "k", "alive")
        another.close()

        store.release(ReleaseRequest("k", "a"))

        wait_until(
            lambda: (
                store.acquire(AcquireRequest("k", "alive", 30.0, queue=alive.inbox)).status
                is GRANTED
            ),
            "the key to pass the one who is gone",
        )

    @shares
    @parks
    def test_a_run_parked_by_one_process_is_woken_by_another(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a")
        park(another, "k", "run", b"envelope")

        assert store.release(ReleaseRequest("k", "a")).wake == WokenTask(
            slot_name("k"), "run", b"envelope"
        )
        take(another, "k", "b", run="run")

    @shares
    @parks
    def test_of_all_processes_one_gets_to_sweep(self, store: Store, another: Store) -> None:
        assert list(another.sweep(60.0)) == []
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "run"), owner="dead"
        )
        expire(store, "k", "dead")

        assert list(store.sweep(60.0)) == []

    @shares
    @recognises
    def test_a_run_that_ended_in_one_process_is_recognised_by_another(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        assert (
            another.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )


class StoreContract(
    Taking,
    Renewing,
    GivingBack,
    Tokens,
    Waiting,
    Parking,
    Keeping,
    Pushing,
    Sweeping,
    SecondDeliveries,
    SeveralKeys,
    StandingAtKeys,
    AnyText,
    Looking,
    Sharing,
):
    """
    Tests that hold a store to the contract of :class:`~celery_distlock.stores.Store`.

    A store that passes them keeps locks as this package's own stores do. Inherit them in a test
    module, and say how to open the store::

        import pytest
        from celery_distlock.testing import StoreContract

        from shop.locks import SQLiteStore


        class TestSQLiteStore(StoreContract):
            fair = False

            @pytest.fixture
            def open_store(self, tmp_path):
                return lambda name: SQLiteStore(f"sqlite://{tmp_path}/locks", prefix=name)

    What the store's `abilities` leave out is skipped, with the reason (``pytest -rs``). A test that
    does not fit the store can be overridden in the class; say there why.

    Fixtures:
        open_store: To be written. A callable that opens a store: those that get one name share
            their records, as two processes would, those that get different names do not. Each test
            starts with no records and closes what was opened.
        pass_time: To be written where it can be. A callable that lets seconds pass for what the
            store has recorded, by changing its records or its clock. Without it, tests wait up to
            2 seconds, and those that need more are skipped.

    Attributes:
        shortest_lease: Seconds. A lease that the tests see to its end; within it, some requests
            have to be answered. More for a store that is slow or whose leases are coarse.
        longest_lease: Seconds, 30 at least: the longest that the store grants, if that is less than
            a month.
        fair: Blocked waiters are served first come, first served. False: who happens to ask first
            has the key.
        hands_over: A release grants the key to the first blocked waiter at once. False: the waiter
            takes it when it looks.
        bound: A hold is neither taken over nor renewed by another process, as where it ends with
            the session of its own. False: by any that knows the owner.
    """

    # Listing

    @lists
    @hostile_keys
    def test_a_held_key_is_found(self, store: Store, key: str) -> None:
        take(store, key, "a")

        assert [slot_name(found) for found in found_keys(store)] == [slot_name(key)]

    @lists
    def test_keys_are_found_by_a_pattern(self, store: Store) -> None:
        for key in ("stock:1", "stock:2", "order:1", "stock"):
            take(store, key, "a")

        assert sorted(found_keys(store, "stock:*")) == ["stock:1", "stock:2"]
        assert sorted(found_keys(store, "*:1")) == ["order:1", "stock:1"]
        assert found_keys(store, "stock") == ["stock"]
        assert sorted(found_keys(store, "st[o]ck:[!2]")) == ["stock:1"]
        assert found_keys(store, "Stock*") == []

    @lists
    @hostile_keys
    def test_a_long_key_s_name_does_for_the_key(self, store: Store, key: str) -> None:
        token = take(store, key, "a")
        (found,) = found_keys(store)

        assert store.inspect(found).token == token
        assert store.release(ReleaseRequest(found, "a")).released
        assert store.inspect(key).token == 0

    @lists
    def test_a_key_that_is_free_is_not_found(self, store: Store) -> None:
        take(store, "k", "a")
        store.release(ReleaseRequest("k", "a"))

        assert found_keys(store) == []

    @lists
    def test_many_keys_are_found_once_each(self, store: Store) -> None:
        names = [f"k{number}" for number in range(1500)]
        lease = min(300.0, self.longest_lease)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: take(store, name, "a", lease), names))

        assert sorted(found_keys(store)) == sorted(names)

    @lists
    def test_several_keys_are_looked_at_as_one_by_one(self, store: Store) -> None:
        for number in range(250):
            take(store, f"k{number}", f"o{number}")
        keys = [f"k{number}" for number in range(260)]

        states = store.inspect_many(keys)

        assert [state.owner for state in states] == [f"o{n}" if n < 250 else "" for n in range(260)]
        assert [state.token for state in states] == [store.inspect(key).token for key in keys]

    @lists
    @parks
    @any_envelope
    def test_a_parked_run_is_among_those_who_wait(self, store: Store, envelope: bytes) -> None:
        take(store, "k", "a")
        park(store, "k", "run", envelope)

        (waiter,) = store.waiters("k")

        whole = store.parked("k", "run")
        assert whole is not None
        assert whole.envelope == envelope
        assert waiter == whole._replace(envelope=b"")  # which may be large
        assert store.parked("k", "another") is None
        assert (waiter.owner, waiter.run, waiter.task) == ("", "run", "shop.reserve")
        assert not waiter.woken
        assert waiter.since == pytest.approx(store.inspect("k").oldest, abs=0.01)

    @lists
    @parks
    def test_those_who_wait_are_told_in_order_and_by_pages(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run1")
        blocked = wait_for(store, "k", "b")
        park(store, "k", "run2")

        assert [(w.run or w.owner) for w in store.waiters("k")] == ["run1", "b", "run2"]
        assert [(w.run or w.owner) for w in store.waiters("k", first=1, limit=1)] == ["b"]
        assert store.waiters("k", first=3) == []
        blocked.inbox.close()

    @lists
    @parks
    def test_a_run_on_its_way_is_told_as_woken(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run1")
        park(store, "k", "run2")
        store.release(ReleaseRequest("k", "a"))

        woken, queued = store.waiters("k")

        assert (woken.run, woken.woken) == ("run1", True)
        assert (queued.run, queued.woken) == ("run2", False)
        assert store.parked("k", "run1") == woken._replace(envelope=b"run1")
        assert (store.inspect("k").woken, store.inspect("k").task) == (1, "shop.reserve")
        assert found_keys(store) == ["k"]

    @lists
    @parks
    def test_a_run_that_came_is_not_on_its_way(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))

        take(store, "k", "b", run="run", redelivered=True, retain=True)

        assert store.inspect("k").woken == 0

    @lists
    @parks
    def test_a_task_is_not_found_by_what_its_id_begins_with(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "import:42:0:0:0")

        assert list(store.find_parked("import")) == []
        assert list(store.find_parked("import:42")) == [("k", "import:42:0:0:0")]

    @lists
    @parks
    @hostile_runs
    def test_a_parked_task_is_found_by_its_id(self, store: Store, run: str) -> None:
        take(store, "k", "a")
        take(store, "l", "a")
        park(store, "k", f"{run}:0:0:0")
        park(store, "l", f"{run}:1:0:0")
        park(store, "l", f"{run}x:0:0:0")

        assert list(store.find_parked(run, "k")) == [("k", f"{run}:0:0:0")]
        assert list(store.find_parked(run, "m")) == []
        found = sorted(store.find_parked(run))

        assert found == [("k", f"{run}:0:0:0"), ("l", f"{run}:1:0:0")]

    @lists
    @parks
    def test_what_is_on_its_way_is_found_again_at_once(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None
        store.mark_published(wake)

        (again,) = store.wake_again("k")

        assert again == wake
        assert list(store.find_parked("nobody")) == []

    @lists
    @parks
    def test_nothing_is_roused_that_has_come_or_waits_for_a_holder(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")

        assert list(store.wake_again("k")) == []
        store.release(ReleaseRequest("k", "a"))
        take(store, "k", "b", run="run", redelivered=True, retain=True)
        assert list(store.wake_again("k")) == []

    @lists
    def test_a_waiter_that_blocks_is_told_or_not_known(self, store: Store) -> None:
        take(store, "k", "a")
        waiters = [wait_for(store, "k", name) for name in ("b", "c")]
        state = store.inspect("k")

        told = store.waiters("k")

        assert [waiter.owner for waiter in told] == ["b", "c"][: state.waiting]
        assert [waiter.owner for waiter in store.waiters("k", first=1, limit=1)] == (
            ["c"] if state.waiting else []
        )
        assert store.waiters("k", first=2) == []
        assert state.oldest == (pytest.approx(told[0].since, abs=0.01) if told else 0.0)
        assert not any(waiter.run or waiter.woken for waiter in told)
        for waiter in waiters:
            waiter.inbox.close()

    @lists
    def test_nobody_waits_for_a_key_that_was_never_taken(self, store: Store) -> None:
        assert store.waiters("k") == []
        assert list(store.find_parked("task")) == []
        assert store.parked("k", "run") is None
        assert list(store.wake_again("k")) == []
        assert not store.cancel("k", "run").released

    @counts
    def test_what_is_counted_adds_up(self, store: Store) -> None:
        assert store.counts() == {}

        store.count({"a|b c": 1.0, "ü": 0.25})
        store.count({"a|b c": 2.0})

        assert store.counts() == {"a|b c": 3.0, "ü": 0.25}

    @lists
    @parks
    @recognises
    def test_what_has_ended_is_not_roused_while_its_result_is_on_its_way(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        take(store, "k", "b", run="run", redelivered=True, retain=True)
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.UNSETTLED))

        assert list(store.wake_again("k")) == []
        assert (
            store.acquire(AcquireRequest("k", "c", 30.0, run="run", redelivered=True)).status
            is BUSY
        )

    # Cancelling

    @lists
    @parks
    @recognises
    def test_a_parked_run_that_is_cancelled_does_not_run(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run1")
        park(store, "k", "run2")

        assert store.cancel("k", "run1") == Release(True)

        assert [waiter.run for waiter in store.waiters("k")] == ["run2"]
        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run1", redelivered=True)).status
            is DONE
        )

    @lists
    @parks
    def test_a_run_on_its_way_that_is_cancelled_leaves_the_key_to_the_next(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run1")
        park(store, "k", "run2")
        store.release(ReleaseRequest("k", "a"))

        cancelled = store.cancel("k", "run1")

        assert cancelled == Release(True, WokenTask(slot_name("k"), "run2", b"run2"))
        assert [waiter.run for waiter in store.waiters("k")] == ["run2"]

    @lists
    @parks
    def test_a_run_that_has_come_is_not_cancelled(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        token = take(store, "k", "b", run="run", redelivered=True, retain=True)

        assert not store.cancel("k", "run").released
        assert store.inspect("k").token == token
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.UNSETTLED))
        assert not store.cancel("k", "run").released

    @lists
    @parks
    def test_nothing_is_cancelled_that_is_not_parked(self, store: Store) -> None:
        take(store, "k", "a", run="run")

        assert not store.cancel("k", "another").released
        assert not store.cancel("l", "run").released
        assert holder(store, "k") == "a"
