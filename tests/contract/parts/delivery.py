"""Woken runs that are pushed to a worker."""

import time
from collections.abc import Callable

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores import (
    AcquireRequest,
    ReleaseRequest,
    SendRequest,
    StandRequest,
    queue_store,
)
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import (
    Completion,
    OwnChannel,
    ParkRequest,
    PeerChannel,
    Route,
    WokenTask,
)
from celery_distlock.testing.contract.actions import YES, holder, take, wait_until
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import any_envelope, goes_on, swept, woken

__all__ = ["Delivery", "Pushing"]


class Channels(Given):
    """Open channels to push to; no tests."""

    def open_registered(
        self,
        store: QueueStore,
        queues: list[str],
        *,
        free: int = 1,
        seconds: float = 30.0,
        receive: Callable[[WokenTask], object] = lambda _: None,
    ) -> tuple[PeerChannel, Callable[[], None]]:
        """Return a channel that takes from these broker queues, and what closes it."""
        address, close = self.open_channel(store, receive)
        peer = PeerChannel(address, free)
        store.channels.register_channel(queues, peer, seconds)
        return peer, close

    def open_channel(
        self, store: QueueStore, receive: Callable[[WokenTask], object]
    ) -> tuple[str, Callable[[], None]]:
        """Return the address of a channel, and what closes it."""
        channel = store.channels.open_channel(receive)
        assert channel is not None
        return channel.address, channel.close

    def open_at_taken_key(
        self, store: QueueStore, receive: Callable[[WokenTask], object]
    ) -> tuple[str, Callable[[], None]]:
        """As `open_channel`, and the key's server pushes to it; the run "before" has the key."""
        address, close = self.open_channel(store, receive)
        take(store, "k", "a", run="before")
        # Others wait for no subscription, which a cluster has for each of its servers.
        store.acquire(AcquireRequest("k", "b", 30.0, queue=ParkRequest(b"", address), run="other"))
        store.parking.cancel("k", "other")
        return address, close


class Pushing(Channels):
    """Push woken runs to the channel that they were parked from, or to another one."""

    def test_a_pushed_run_has_its_arrival_and_the_releaser_of_its_key(
        self, store: QueueStore
    ) -> None:
        received: list[WokenTask] = []
        address, close = self.open_at_taken_key(store, received.append)
        arrival = store.time(10.0) - 1
        store.parking.park_if_held("k", "run", ParkRequest(b"e", address), 10.0, arrival)

        store.release(ReleaseRequest("k", "a", run="before"))

        (wake,) = wait_until(lambda: received, "the push")
        assert (wake.arrival, wake.givers) == (arrival, ("before",))
        close()

    def test_a_pushed_run_of_several_keys_names_the_releaser_of_the_last_one(
        self, store: QueueStore
    ) -> None:
        received: list[WokenTask] = []
        address, close = self.open_channel(store, received.append)
        take(store, "k", "a", run="one")
        take(store, "l", "b", run="other")
        route = Route(("k", "l"))
        request = StandRequest("run", route, 0, ParkRequest(b"e", address))
        queue_store.reserve_or_queue(store, request)

        for key, owner, run in (("k", "a", "one"), ("l", "b", "other")):
            assert goes_on(store, store.release(ReleaseRequest(key, owner, run=run)).wake) == []

        (wake,) = wait_until(lambda: received, "the push")
        assert (wake.name, wake.run, wake.envelope) == ("k", "run", b"e")
        # Where the keys are in several places, the last one that is reserved names none.
        asked = store.parking.try_all(request._replace(park_request=None), counts=False)
        assert wake.givers == (("other",) if asked else ())
        close()

    def test_a_pushed_run_that_has_come_before_says_so(self, store: QueueStore) -> None:
        received: list[WokenTask] = []
        peer, close = self.open_registered(store, ["celery"], receive=received.append)
        wake = woken(store, "k", "run", b"e")._replace(returned=True)

        assert store.channels.push(wake, [peer.address])

        assert wait_until(lambda: received, "the push") == [wake]
        close()

    def test_a_run_is_pushed_to_the_first_channel_that_is_open(self, store: QueueStore) -> None:
        received: dict[str, list[WokenTask]] = {"first": [], "second": []}
        gone, close = self.open_registered(store, ["celery"])
        close()
        first, close_first = self.open_registered(store, ["c"], receive=received["first"].append)
        second, close_second = self.open_registered(store, ["c"], receive=received["second"].append)
        wake = woken(store, "k", "run")

        def pushed() -> bool:  # a server may not have noticed yet that one was closed
            store.channels.push(wake, [gone.address, first.address, second.address])
            return bool(received["first"])

        wait_until(pushed, "the push")
        assert not received["second"]
        close_first()
        close_second()

    def test_several_runs_are_pushed_at_once_and_each_has_its_answer(
        self, store: QueueStore
    ) -> None:
        received: list[WokenTask] = []
        gone, close_gone = self.open_registered(store, ["celery"])
        close_gone()
        peer, close = self.open_registered(store, ["celery"], receive=received.append)
        first, second, third = (woken(store, key, f"run {key}") for key in "klm")
        wait_until(lambda: not store.channels.push(third, [gone.address]), "it to be closed")

        pushes = [(first, [peer.address]), (second, []), (third, [gone.address, peer.address])]

        assert store.channels.push_all(pushes) == [True, False, True]
        wait_until(lambda: len(received) == 2, "the pushes")
        assert received == [first, third]
        assert store.channels.push_all([]) == []
        close()

    def test_a_run_that_no_channel_receives_is_for_the_broker(self, store: QueueStore) -> None:
        peer, close = self.open_registered(store, ["celery"])
        close()
        wake = woken(store, "k", "run")

        wait_until(
            lambda: not store.channels.push(wake, [peer.address]), "the channel to be closed"
        )

        assert not store.channels.push(wake, [])

    def test_nothing_is_pushed_to_what_is_no_channel(self, store: QueueStore) -> None:
        peer, close = self.open_registered(store, ["celery"])
        for address in ("", "x", "é \n", f"{peer.address}x", f"x{peer.address}", "{}"):
            wake = woken(store, f"k{address}", "run")
            assert not store.channels.push(wake, [address])
        close()

    def test_a_run_that_has_come_is_not_pushed_again(self, store: QueueStore) -> None:
        received: list[WokenTask] = []
        peer, close = self.open_registered(store, ["celery"], receive=received.append)
        wake = woken(store, "k", "run")
        take(store, "k", "b", run="run", redelivered=True)

        assert store.channels.push(wake, [peer.address])

        woken_later = woken(store, "l", "later")
        assert store.channels.push(woken_later, [peer.address])
        assert wait_until(lambda: received, "the later one") == [woken_later]
        close()


class Delivery(Channels):
    """Push any envelope, to channels that are registered, and again if the run does not come."""

    @any_envelope
    def test_a_run_is_pushed_to_the_channel_it_was_parked_from(
        self, store: QueueStore, envelope: bytes
    ) -> None:
        received: list[WokenTask] = []
        address, close = self.open_channel(store, received.append)
        take(store, "{k} 1", "a")
        park_request = ParkRequest(envelope, address)
        store.acquire(AcquireRequest("{k} 1", "b", 30.0, queue=park_request, run="run 7"))

        released = store.release(ReleaseRequest("{k} 1", "a"))

        assert released == (True, None)
        (wake,) = wait_until(lambda: received, "the push")
        assert wake._replace(arrival=0) == WokenTask(slot_name("{k} 1"), "run 7", envelope)
        close()
        close()

    @pytest.mark.parametrize("completion", [Completion.YES, Completion.YES_AND_MAY_COME_AGAIN])
    @pytest.mark.parametrize(
        ("sent_to", "taken", "pushed"),
        [("{} celery", "{} celery", True), ("{} celery", "{} other", False), ("", "", False)],
    )
    def test_what_was_sent_is_pushed_to_no_worker_but_one_that_takes_such(
        self,
        store: QueueStore,
        completion: Completion,
        sent_to: str,
        taken: str,
        pushed: bool,
    ) -> None:
        received: list[WokenTask] = []
        address, close = self.open_at_taken_key(store, received.append)
        for run in ("one", "two"):
            park_request = ParkRequest(run.encode(), task="shop.reserve", destination=sent_to)
            assert store.calls.send(SendRequest("k", run, park_request)).sent is Sent.QUEUED

        release = ReleaseRequest("k", "a", "before", completion)
        released = store.release(release._replace(own_channel=OwnChannel(address, taken)))

        wake = WokenTask("k", "one", b"one")
        assert released.released
        if not pushed or released.wake is not None:  # it may be left to the releaser
            assert released.wake == wake
        else:
            (push,) = wait_until(lambda: received, "the push")
            assert push._replace(arrival=0) == wake._replace(givers=("before",))
        assert holder(store, "k") == "parked:one"
        take(store, "k", "c", run="one", redelivered=True)
        gone = OwnChannel(f"{address}-gone", sent_to)
        released = store.release(ReleaseRequest("k", "c", "one", completion, own_channel=gone))
        assert released == (True, WokenTask("k", "two", b"two"))
        close()

    def test_a_pushed_run_that_no_worker_takes_is_swept_up(self, store: QueueStore) -> None:
        address, close = self.open_channel(store, lambda _: None)
        take(store, "k", "a")
        store.acquire(AcquireRequest("k", "b", 30.0, queue=ParkRequest(b"e", address), run="run"))
        store.release(ReleaseRequest("k", "a"))

        assert wait_until(lambda: swept(store), "a sweep") == [
            WokenTask(slot_name("k"), "run", b"e")
        ]
        close()

    def test_a_channel_is_found_by_the_queues_that_it_was_registered_for(
        self, store: QueueStore
    ) -> None:
        peer, close = self.open_registered(store, ["celery", "{} \n", "é" * 300], free=3)

        for queue in ("celery", "{} \n", "é" * 300):
            assert store.channels.find_channels([queue]) == [peer]
        assert store.channels.find_channels(["other"]) == store.channels.find_channels([]) == []
        assert store.channels.find_channels(["other", "celery", "{} \n"]) == [peer]
        close()

    def test_a_channel_that_takes_no_more_of_a_queue_is_not_found_there(
        self, store: QueueStore
    ) -> None:
        peer, close = self.open_registered(store, ["celery", "other"])

        store.channels.register_channel(["other"], peer, 0.0)

        assert store.channels.find_channels(["other"]) == []
        assert store.channels.find_channels(["celery"]) == [peer]
        close()

    def test_a_channel_whose_registration_has_ended_is_not_found(self, store: QueueStore) -> None:
        peer, close = self.open_registered(store, ["celery"], seconds=0.05)

        wait_until(lambda: not store.channels.find_channels(["celery"], [peer.address]), "the end")

        close()

    def test_of_many_channels_the_near_one_and_those_with_most_room_are_found(
        self, store: QueueStore
    ) -> None:
        near, close = self.open_registered(store, ["celery"], free=0)
        stem = near.address.removesuffix(near.address[-32:])
        for free in range(1, 51):
            store.channels.register_channel(
                ["celery"], PeerChannel(f"{stem}{free:032x}", free), 30.0
            )

        first, *others = store.channels.find_channels(["celery"], [f"{stem}{0:032x}", near.address])

        assert first == near
        assert max(others, key=lambda peer: peer.free).free == 50
        assert len(others) < 50
        close()

    @any_envelope
    def test_a_woken_run_is_pushed_to_a_channel_that_it_was_not_parked_from(
        self, store: QueueStore, envelope: bytes
    ) -> None:
        received: list[WokenTask] = []
        peer, close = self.open_registered(store, ["celery"], receive=received.append)
        wake = woken(store, "{k} 1", "run 7", envelope)

        assert store.channels.push(wake, [peer.address])

        assert wait_until(lambda: received, "the push") == [wake]
        take(store, "{k} 1", "b", run="run 7", redelivered=True)
        close()

    def test_a_pushed_run_that_does_not_come_is_swept_up_and_at_last_for_the_broker(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        peer, close = self.open_registered(store, ["celery"])
        wake = woken(store, "k", "run", b"e")
        pushes = 0
        while store.channels.push(wake, [peer.address]):
            pushes += 1
            assert pushes < 10
            pass_time(2.0)
            assert wait_until(lambda: swept(store), "a sweep") == [wake]
        assert pushes > 1

        store.parking.mark_published(wake)
        pass_time(2.0)

        assert swept(store) == []
        close()

    def test_runs_of_a_channel_that_takes_nothing_are_not_pushed_there_any_more(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        silent, close_silent = self.open_channel(store, lambda _: None)
        take(store, "k", "a")
        for number in range(3):
            park_request = ParkRequest(b"e", silent)
            store.acquire(
                AcquireRequest("k", f"p{number}", 30.0, queue=park_request, run=f"run {number}")
            )
        peer, close = self.open_registered(store, ["celery"])
        assert store.release(ReleaseRequest("k", "a")).wake is None
        pass_time(2.0)
        (first,) = wait_until(lambda: swept(store), "a sweep")

        assert store.channels.push(first, [peer.address])

        take(store, "k", "b", run="run 0", redelivered=True)
        second = store.release(ReleaseRequest("k", "b", run="run 0", completion=YES)).wake
        assert second == WokenTask(slot_name("k"), "run 1", b"e")
        close()
        close_silent()

    def test_a_run_that_is_kept_reserved_is_not_swept_up(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        peer, close = self.open_registered(store, ["celery"])
        wake = woken(store, "k", "run", b"e")
        store.channels.push(wake, [peer.address])
        store.parking.keep_reserved([wake], 60.0)
        pass_time(2.0)
        time.sleep(0.05)
        assert swept(store) == []

        store.parking.keep_reserved([wake], 0.0)

        assert wait_until(lambda: swept(store), "a sweep") == [wake]
        close()

    def test_a_run_that_was_never_settled_is_pushed_again(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        woken(store, "k", "run", b"e")
        take(store, "k", "b", 1.0, run="run", redelivered=True, retain=True)
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.UNSETTLED))
        pass_time(6.0)
        (wake,) = wait_until(lambda: swept(store), "a sweep")
        received: list[WokenTask] = []
        peer, close = self.open_registered(store, ["celery"], receive=received.append)

        assert store.channels.push(wake, [peer.address])

        assert wait_until(lambda: received, "the push") == [wake]
        close()

    def test_what_is_kept_reserved_too_late_stays_as_it_is(self, store: QueueStore) -> None:
        _, close = self.open_registered(store, ["celery"])
        wake = woken(store, "k", "run")
        take(store, "k", "b", run="run", redelivered=True, retain=True)

        store.parking.keep_reserved([wake, WokenTask("nobody", "run", b"")], 0.0)

        assert swept(store) == []
        assert holder(store, "k") == "b"
        close()
