"""How a store over Redis accepts calls; see :class:`~celery_distlock.stores.queue_parts.Calls`."""

import math
from typing import Any

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.keys import slot_name
from celery_distlock.stores.queue_parts import Bearer, Calls, SendReply, Sent, Where
from celery_distlock.stores.requests import Identity, SendRequest
from celery_distlock.stores.values import Waiter

from . import scripts
from .answers import Answer, Fields, text, want_of
from .connections import TIMEOUT, Command, fields, milliseconds, time_left
from .parking import RedisParking
from .parts import Part, Reach
from .records import Replies, wanted
from .silence import Silence


class RedisCalls(Part, Calls):
    """See the module."""

    def __init__(self, reach: Reach, replies: Replies, parking: RedisParking) -> None:
        super().__init__(reach)
        self._replies = replies
        self._parking = parking
        self._silence = Silence()

    def send(self, request: SendRequest) -> SendReply:
        name = slot_name(request.key)
        with self._silence.patience() as patience:
            try:
                answer = self._ask_to_send(name, request, patience, repeated=False)
            except StoreUnavailableError:  # perhaps only the answer is missing
                if patience < TIMEOUT:
                    raise
                answer = self._ask_to_send(name, request, repeated=True)
        with self._requests.reading(_SEND, answer):
            data = Answer(answer) if isinstance(answer, list) else None
            sent = Sent(data.text("status") if data else text(answer))
            if request.delay > 0 and sent is Sent.UPDATED:
                self._replies.note_opens({name: request.delay})
            if data is None:
                return SendReply(sent)
            remaining = time_left(data.number("ttl_ms"))
            return SendReply(sent, self._replies.wakes(name, data), data.text("holder"), remaining)

    def peek(self, key: str, identity: str) -> Bearer | None:
        look = self._records.call(_IDENTITY, slot_name(key), identity)
        with self._silence.patience() as patience:
            found = self._requests.ask([look], key, patience).answers[0]
        if found is None:
            return None
        with self._requests.reading(_IDENTITY, found):
            run, where, marks, lasts_ms, *left_ms = found
            return Bearer(
                text(run),
                Where(text(where)),
                expires=left_ms[0] / 1000 if left_ms else math.inf,
                silent=b"~" in marks,
                fixed=b"=" in marks,
                lasts=lasts_ms / 1000,
            )

    def inherit(self, key: str, identity: Identity, run: str) -> None:
        lasts = _lasts(identity)
        terms = [identity.name, run, lasts, _expires(identity), _marks(identity)]
        call = self._records.call(_INHERIT, slot_name(key), *terms, confirmed=True)
        self._requests.ask([call], key)

    def delayed(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        look = self._records.call(_DELAYED, slot_name(key), first, first + limit - 1)
        with self._requests.reading(_DELAYED, self._requests.ask([look], key).answers[0]) as found:
            return [
                Waiter(
                    "",
                    each.text("run"),
                    0.0,
                    task=each.text("task"),
                    want=want_of(each.raw("want")),
                    due=each.number("in_ms") / 1000,
                )
                for each in Fields.read(found).each("runs")
            ]

    def bearers(self, key: str, limit: int = 100) -> dict[str, Bearer]:
        look = self._records.call(_IDENTITIES, slot_name(key), limit)
        with self._requests.reading(
            _IDENTITIES, self._requests.ask([look], key).answers[0]
        ) as found:
            bearers = Fields.read(found).each("identities")
            return {
                each.text("identity"): Bearer(each.text("run"), Where(each.text("where")))
                for each in bearers
            }

    def _ask_to_send(
        self, name: str, request: SendRequest, patience: float | None = None, *, repeated: bool
    ) -> Any:
        park_request = request.park_request
        optional = fields(
            want=wanted(request.want),
            delay_ms=milliseconds(request.delay) if request.delay > 0 else 0,
            repeated=repeated,
            paced=request.paced,
            most=park_request.max_waiting,
            **_identity_fields(request.identity),
        )
        message = park_request.envelope, park_request.task, park_request.destination
        given = [optional] if optional else []
        send = self._records.call(_SEND, name, request.run, *message, *given, confirmed=True)
        additional: list[Command] = []
        if self._servers.in_order:
            additional = self._parking.published(request.published)
        elif not repeated:
            self._parking.mark_all_published(request.published)
        # Before the call, so that no call is missing from the index.
        before = self._parking.before(name, request.run, park_request)
        for calls in self._servers.requests(before, send):
            # The additional commands come last: if a server does not know a script, all commands
            # after it are repeated.
            every = [*calls, *additional] if send in calls else calls
            asked = self._requests.ask(every, request.key, patience)
        return asked.answers[calls.index(send)]


def _identity_fields(identity: Identity | None) -> dict[str, Any]:
    if identity is None:
        return {}
    return {
        "identity": identity.name,
        "until_when": _lasts(identity),
        "replaces": identity.replaces,
        "most_ms": None if identity.most is None else milliseconds(identity.most),
        "expires_ms": _expires(identity) or None,
        "marks": _marks(identity),
        "beside": identity.beside,
        "recalls": identity.recalls or None,
    }


def _lasts(identity: Identity) -> str | int:
    until = identity.until
    return until if isinstance(until, str) else milliseconds(until)


def _expires(identity: Identity) -> str | int:
    return "" if identity.expires == math.inf else milliseconds(identity.expires)


def _marks(identity: Identity) -> str:
    return "~" * identity.silent + "=" * identity.fixed + "*" * bool(identity.recalls)


_SEND, _IDENTITY, _DELAYED, _IDENTITIES, _INHERIT = map(
    scripts.load, ("send", "identity", "delayed", "identities", "inherit")
)
