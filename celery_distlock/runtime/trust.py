"""
Checks that a parked message may come from this app, before it is sent or run.

Other programs may write to the lock store. A worker has rights that they lack: it sends to the
broker with its own credentials, and runs what it receives. So a process sends or receives a parked
message only if all of this is true:

- it is for a locked task that this process knows;
- it goes to a queue of the app, see :meth:`Trust.knows_route`;
- its content type is one that the app accepts;
- with `distlock_secret`, it is signed. The signature is the last member of the envelope, a JSON
  object. It covers the bytes before it, the key, and the execution id, so an envelope that is
  copied to another key or execution is refused.

All other messages stay in the store: another process may know them. A worker parks no message that
it would not send itself, so no task of an app stays there for ever.
"""

import enum
import functools
import hashlib
import hmac
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from celery import Celery
from celery.app.routes import MapRoute
from kombu import Queue
from kombu.compression import get_decoder
from kombu.exceptions import SerializerNotInstalled
from kombu.serialization import TRUSTED_CONTENT  # type: ignore[attr-defined]
from kombu.utils.json import loads

from celery_distlock.keys import key_of
from celery_distlock.stores.values import WokenTask

from .message_facts import LockHeader
from .messages import accepted_content
from .routing import queues_at

__all__ = ["Reason", "RefusedError", "Trust", "is_signed", "is_signed_with", "sign"]

logger = logging.getLogger(__name__)

MOST_LOGGED = 1000  # different refusals that are logged; a hostile store can invent any number
MOST_SHOWN = 100  # characters of an untrusted name
LONGEST_ROUTING_KEY = 255  # AMQP's limit


class Reason(enum.Enum):
    """Why a parked message is not sent."""

    SIGNATURE = "it is not signed with distlock_secret"
    MALFORMED = "it is not a message"
    TASK = "its task is no locked task of this app"
    CONTENT = "accept_content does not have its content type"
    ROUTE = "this process knows no such queue"


class RefusedError(Exception):
    """This process may not send or run a parked message, for *reason*."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


class Trust:
    """Checks and signs the parked messages of one app."""

    def __init__(
        self,
        app: Celery,
        plans: Mapping[str, object],
        secrets: Callable[[], Sequence[Any]],
    ) -> None:
        self._app = app
        self._plans = plans  # of the app's locked tasks, by name
        self._secrets = secrets
        self._logged: set[str] = set()
        self._mutex = threading.Lock()

    def sign(self, name: str, run: str, envelope: bytes) -> bytes:
        """Return *envelope*, to be parked at slot name *name*, signed if there is a secret."""
        secrets = self._secrets()
        return sign(secrets[0], name, run, envelope) if secrets else envelope

    def check(self, woken: WokenTask, *, anywhere: bool = False) -> dict[str, Any]:
        """
        Return the envelope of a parked task, decoded, if this process may send and run it.

        Args:
            woken: The parked task.
            anywhere: Do not check the destination, because the message is only read.

        Raises:
            RefusedError: This process may not send it.
        """
        signed = self._check_signature(woken)
        try:
            message = loads(woken.envelope)
            headers = message["headers"]
            task, content_type = headers["task"], message["content_type"]
            exchange, routing_key = message["exchange"], message["routing_key"]
            texts = [task, content_type, exchange, routing_key]
            texts += [message["body"], message["content_encoding"]]
            sound = all(isinstance(each, str) for each in texts)
            sound &= isinstance(headers, dict) and isinstance(message["properties"], dict)
            sound &= isinstance(message["text"], bool)
            if compression := headers.get("compression"):
                get_decoder(compression)
        except Exception:  # noqa: BLE001  # malformed in any way: not ours
            sound = False
        if not sound:
            raise RefusedError(
                Reason.MALFORMED, f"the message parked at {_shown(key_of(woken.name))}"
            )
        if not self._knows(task):
            raise RefusedError(Reason.TASK, _shown(task))
        if not self._accepts(content_type):
            raise RefusedError(Reason.CONTENT, _shown(content_type))
        if not anywhere and not self.knows_route(task, exchange, routing_key, signed=signed):
            where = f"exchange {_shown(exchange)}, " if exchange else ""
            raise RefusedError(Reason.ROUTE, f"{where}{_shown(routing_key)}")
        header = LockHeader.of(headers)
        if not header.woken or (header.run, header.parked_at) != (woken.run, woken.name):
            where = f"the message parked at {_shown(key_of(woken.name))} says that it is elsewhere"
            raise RefusedError(Reason.MALFORMED, where)
        checked: dict[str, Any] = message
        return checked

    def knows_route(
        self,
        task: str,
        exchange: str,
        routing_key: str,
        *,
        signed: bool = False,
        declared: Iterable[Any] = (),
    ) -> bool:
        """
        Whether a message with *routing_key* to *exchange* reaches a queue of this app.

        A queue of this app is one of ``app.amqp.queues`` (``task_queues``, the default, those of
        ``-Q``, those that this process has sent a task to), or one of *task*'s own route. An
        exchange other than the broker's default must be bound to such a queue by that routing key.
        If the message is *signed*, any queue is accepted: the process that parked it knew the
        queue. So is a queue that is *declared* with the call: a worker that consumes it knows it by
        its name, though not by its bindings.
        """
        if len(routing_key) > LONGEST_ROUTING_KEY or self._is_reserved(exchange or routing_key):
            return False
        if not exchange and not routing_key:
            return False
        if queues_at(self._app, exchange, routing_key):
            return True
        if exchange:
            return False
        if signed or routing_key in self._routes(task):
            return True
        return any(isinstance(each, Queue) and each.name == routing_key for each in declared)

    def refuse(self, woken: WokenTask, refusal: RefusedError) -> None:
        """Log *refusal*, only the first time that it occurs."""
        with self._mutex:
            if str(refusal) in self._logged or len(self._logged) > MOST_LOGGED:
                return
            self._logged.add(str(refusal))
            last = len(self._logged) > MOST_LOGGED
        if last:
            logger.warning(
                "more parked messages are refused, and no longer logged: see `celery locks doctor`"
            )
            return
        logger.warning(
            "this process does not send the task parked at %s as %s, another process may: %s",
            _shown(key_of(woken.name)),
            _shown(woken.run),
            refusal,
        )

    def _check_signature(self, woken: WokenTask) -> bool:
        """Return whether *woken* is signed with a known secret; raise if it must be and is not."""
        secrets = self._secrets()
        if not secrets:
            return False
        known = [secret for secret in secrets if secret is not None]
        if is_signed_with(known, woken.name, woken.run, woken.envelope):
            return True
        if None in secrets and not is_signed(woken.envelope):
            return False
        raise RefusedError(Reason.SIGNATURE, f"the message parked at {_shown(key_of(woken.name))}")

    def _knows(self, task: str) -> bool:
        if self._plans.get(task) is None:
            self._app.finalize(auto=True)  # creates shared and lazy tasks
        return self._plans.get(task) is not None

    def _accepts(self, content_type: str) -> bool:
        if content_type in TRUSTED_CONTENT:
            return True
        try:
            return content_type in accepted_content(self._app)
        except SerializerNotInstalled:
            return False

    def _is_reserved(self, name: str) -> bool:
        """Whether *name* is reserved for the workers' remote control or events."""
        return name.endswith(".pidbox") or name.partition(".")[0] in self._events

    @functools.cached_property
    def _events(self) -> tuple[str, str]:
        conf = self._app.conf
        return conf.event_exchange, conf.event_queue_prefix

    def _routes(self, task: str) -> Iterator[str]:
        """Yield the queues that *task* is sent to by default."""
        own = getattr(self._app.tasks.get(task), "queue", None)
        yield _name_of(own)
        for router in self._app.amqp.routes:
            if isinstance(router, MapRoute):  # others are code that wants arguments
                yield _name_of((router(task) or {}).get("queue"))


def _name_of(queue: Any) -> str:
    return str(getattr(queue, "name", queue) or "")


def _shown(text: str) -> str:
    """Return untrusted *text*, quoted and cut to a length that fits a log line."""
    return repr(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…")


_OPENING, _CLOSING = b', "signature": "', b'"}'
_LENGTH = len(_OPENING) + 2 * hashlib.sha256().digest_size + len(_CLOSING)


def sign(secret: str, name: str, run: str, envelope: bytes) -> bytes:
    """Return *envelope* signed for *run* at the key with slot name *name*."""
    digest = _digest(secret, name, run, envelope).encode()
    return envelope[:-1] + _OPENING + digest + _CLOSING


def is_signed(envelope: bytes) -> bool:
    """Whether *envelope* has a signature, valid or not."""
    return envelope[-_LENGTH:].startswith(_OPENING) and envelope.endswith(_CLOSING)


def is_signed_with(secrets: Iterable[str], name: str, run: str, envelope: bytes) -> bool:
    """Whether *envelope* was signed with one of *secrets* for this run at this key."""
    if not is_signed(envelope):
        return False
    unsigned = envelope[:-_LENGTH] + b"}"
    given = envelope[-_LENGTH + len(_OPENING) : -len(_CLOSING)]
    return any(
        hmac.compare_digest(_digest(secret, name, run, unsigned).encode(), given)
        for secret in secrets
    )


def _digest(secret: str, name: str, run: str, envelope: bytes) -> str:
    at, what = name.encode(errors="surrogatepass"), run.encode(errors="surrogatepass")
    lengths = b"%d %d " % (len(at), len(what))  # so that the parts cannot be shifted
    return hmac.new(secret.encode(), lengths + at + what + envelope, hashlib.sha256).hexdigest()
