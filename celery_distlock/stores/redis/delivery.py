"""Push parked executions to workers, in a store over Redis."""

import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.keys import slot_name
from celery_distlock.stores.channels import DeliveryChannel
from celery_distlock.stores.queue_parts import Channels
from celery_distlock.stores.values import PeerChannel, WokenTask

from . import scripts
from .answers import text
from .connections import Command, command, milliseconds, script_call
from .delivery_channel import PubSubChannel, woken_task_of
from .parts import Part
from .server_errors import is_transient
from .topology import PushTarget

# Seconds until the server pushes; a worker that begins to consume waits for this.
ATTEND_TIMEOUT = 1.0
MOST_PEERS = 10  # delivery channels of a broker's queue that are looked up
MOST_FREE = 10_000  # the most free slots that a channel may report


class RedisChannels(Part, Channels):
    """See the module."""

    _opened: PubSubChannel | None = None

    def open_channel(self, receive: Callable[[WokenTask], object]) -> DeliveryChannel:
        channel = f"{self._records.prefix}:channel:{uuid.uuid4().hex}"
        self._opened = delivery = PubSubChannel(channel, self._servers, receive)
        if self._servers.in_order:
            delivery.attend(self._place("", channel), ATTEND_TIMEOUT)
        return delivery

    def push_channel(self, name: str, address: str, patience: float = 0.0) -> str:
        """Return the channel to which pushes of *name* go, for the delivery channel *address*."""
        if not address or self._servers.in_order:
            return address
        place, delivery = self._place(name, address), self._opened
        if delivery is not None and delivery.address == address:
            delivery.attend(place, patience)
        return place.channel

    def register_channel(self, queues: Sequence[str], peer: PeerChannel, seconds: float) -> None:
        delivery, for_ms = self._opened, milliseconds(seconds) if seconds else 0
        if seconds and delivery is not None and delivery.address == peer.address:
            delivery.attend(self._place_of(peer.address, peer.address), ATTEND_TIMEOUT)
        note = peer.address, max(0, peer.free), for_ms
        notes = [self._of_queue(_REGISTER, queue, *note) for queue in queues]
        self._served(self._requests.attempt_once(notes))

    def find_channels(self, queues: Sequence[str], near: Sequence[str] = ()) -> list[PeerChannel]:
        words = MOST_PEERS, " ".join(filter(self._is_channel, near))
        looks = [self._of_queue(_CHANNELS, queue, *words) for queue in queues]
        return self._peers(self._served(self._requests.attempt_briefly(looks)))

    def _of_queue(self, script: scripts.Script, queue: str, *arguments: Any) -> Command:
        records = f"{self._records.prefix}:channels:{{{slot_name(queue)}}}:"
        return script_call(script, (records,), *arguments)

    def _served(self, answers: Sequence[Any]) -> list[Any]:
        """Return the answers without refusals, which are logged; raise if one is unreachable."""
        served = []
        for answer in answers:
            if not isinstance(answer, Exception):
                served.append(answer)
                continue
            if not isinstance(answer, ResponseError) or is_transient(answer):
                raise StoreUnavailableError(f"{self._servers.address} cannot serve: {answer}")
            said = self._requests.refusal(answer, "the delivery channels")
            self._complaints.report("channels", "%s: woken tasks may go by the broker", said)
        return served

    def _peers(self, answers: Sequence[Any]) -> list[PeerChannel]:
        """Return the channels in *answers*, each once, without foreign ones."""
        found: dict[str, PeerChannel] = {}
        for answer in answers:
            with self._requests.reading(_CHANNELS, answer):
                for address, free in zip(map(text, answer[::2]), answer[1::2], strict=True):
                    if self._is_channel(address):
                        peer = PeerChannel(address, min(MOST_FREE, _number(free)))
                        found.setdefault(address, peer)
        return list(found.values())

    def _is_channel(self, address: str) -> bool:
        stem, _, name = address.rpartition(":")
        return (
            stem == f"{self._records.prefix}:channel"
            and re.fullmatch("[0-9a-f]{32}", name) is not None
        )

    def push_all(self, pushes: Sequence[tuple[WokenTask, Iterable[str]]]) -> list[bool]:
        known = [(wake, list(filter(self._is_channel, where))) for wake, where in pushes]
        calls = [self._push(wake, addresses) for wake, addresses in known if addresses]
        answers = iter(self._requests.ask(calls, known[0][0].name).answers if calls else ())
        return [
            bool(addresses) and self._is_received(wake, addresses, next(answers))
            for wake, addresses in known
        ]

    def _push(self, wake: WokenTask, addresses: list[str]) -> Command:
        to = [self._payload(wake), " ".join(addresses)] if self._servers.in_order else []
        return self._records.call(_PUSH, wake.name, wake.run, *to)

    def _payload(self, wake: WokenTask) -> bytes:
        return woken_task_of(f"{self._records.stem(wake.name)}lock", wake)

    def _is_received(self, wake: WokenTask, addresses: list[str], became: Any) -> bool:
        if became == 1 and not self._servers.in_order:
            return any(self._publish(self._payload(wake), address) for address in addresses)
        return became in (0, 1)  # 0: it was already claimed, there is nothing to send

    def _publish(self, payload: bytes, address: str) -> bool:
        """Publish in a cluster; return whether a subscriber has received it."""
        place = self._place_of(address, address)  # where it receives what is parked at any key
        verb = "SPUBLISH" if place.sharded else "PUBLISH"
        # By the address: a channel without a slot is published at the node of the address' slot.
        publish = command(address.encode(), verb, place.channel, payload)
        (receivers,) = self._requests.attempt_briefly([publish])
        return isinstance(receivers, int) and receivers > 0

    def _place(self, name: str, channel: str) -> PushTarget:
        """Return where pushes about a key go, for a subscriber to *channel*."""
        return self._place_of(self._records.stem(name), channel)


def _number(value: bytes) -> int:
    try:
        return max(0, round(float(value)))
    except (ValueError, OverflowError):
        return 0


_CHANNELS, _PUSH, _REGISTER = map(scripts.load, ("channels", "push", "register"))
