"""The page's API: its queries and its changes."""

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from celery_distlock import clock
from celery_distlock.errors import (
    ConfigurationError,
    DistlockError,
    StoreError,
    StoreUnavailableError,
)
from celery_distlock.keys import key_of, slot_name
from celery_distlock.naming import shown
from celery_distlock.ops.acts import MOST_TEXT, this_user
from celery_distlock.ops.admin import Admin
from celery_distlock.ops.cli.ranges import DAY
from celery_distlock.ops.looks import WaiterInfo
from celery_distlock.settings import closest
from celery_distlock.stores.holders import Holder, HoldInfo
from celery_distlock.stores.values import UNREADABLE, Action, KeyState, Limit

from .guard import SESSION_TIME, Json, Sessions
from .history import Grant
from .snapshots import COLUMNS, Selection, SnapshotCache

logger = logging.getLogger(__name__)

T = TypeVar("T")

FILES = Path(__file__).parent / "files"
MOST_SHOWN = 1000  # keys in one response
QUEUE_PAGE = 50  # waiters in one response
MOST_CALLS = 20  # calls with an identity in one response
MOST_LANES = 20  # in one response
FURTHEST = 10**9  # place in a queue
LONGEST_BODY = 16_384  # bytes


class Views:
    """
    The handlers of the page's requests.

    They identify a key by its slot name, which is short plain text for any key.
    """

    def __init__(
        self,
        admin: Admin,
        snapshots: SnapshotCache,
        sessions: Sessions,
        *,
        title: str,
        read_only: bool,
        interval: float,
    ) -> None:
        self._admin = admin
        self._snapshots = snapshots
        self._sessions = sessions
        self._about = {"title": title, "readOnly": read_only, "interval": interval}
        self._about["where"] = admin.where

    def router(self) -> Starlette:
        """Return the ASGI application that routes to them."""
        changes = [
            *(self.log_in, self.log_out, self.recall, self.release, self.wake, self.drop),
            *(self.limit, self.pause, self.resume),
        ]
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/api/session", self.session),
                Route("/api/locks", self.locks),
                Route("/api/lock", self.lock),
                Route("/api/actions", self.actions),
                *(
                    Route(f"/api/{change.__name__.replace('_', '')}", change, methods=["POST"])
                    for change in changes
                ),
                Mount("/static", StaticFiles(directory=FILES)),
            ],
            exception_handlers={
                HTTPException: _refused,
                DistlockError: _not_done,
                StoreError: _store_failed,
            },
        )

    async def page(self, request: Request) -> Response:
        """Return the HTML of the page, without data."""
        _query(request)
        return FileResponse(FILES / "index.html")

    async def session(self, request: Request) -> Response:
        """Return whether a log-in is required, and the settings; needs no log-in."""
        _query(request)
        if not self._sessions.admits(request):
            return Json({"login": True, "csrf": self._sessions.csrf})
        leaves = self._sessions.cookie in request.cookies
        return Json({**self._about, "login": False, "leaves": leaves, "csrf": self._sessions.csrf})

    async def log_in(self, request: Request) -> Response:
        """Start a session for a request that has the token."""
        body = await _body(request, "token")
        name = self._sessions.log_in(_text(body, "token"))
        if name is None:
            logger.warning("%s gave a wrong token", _client(request))
            raise HTTPException(403, "the token is wrong")
        logger.info("%s has logged in", _client(request))
        response = Json({})
        response.set_cookie(
            self._sessions.cookie,
            name,
            max_age=int(SESSION_TIME),
            httponly=True,
            samesite="strict",
            secure=request.headers.get("Origin", "").startswith("https:"),
        )
        return response

    async def log_out(self, request: Request) -> Response:
        """End the session."""
        await _body(request)
        self._sessions.log_out(request)
        response = Json({})
        response.delete_cookie(self._sessions.cookie, httponly=True, samesite="strict")
        return response

    async def locks(self, request: Request) -> Response:
        """List the matching keys, sorted, up to the requested number."""
        asked = _query(request, "q", "sort", "desc", "limit")
        selection = Selection(
            asked.get("q", "").strip(),
            _choice("sort", asked.get("sort", "waiting"), COLUMNS),
            _choice("desc", asked.get("desc", "1"), ("0", "1")) == "1",
            _number("limit", asked.get("limit", "200"), 1, MOST_SHOWN),
        )
        snapshot = await self._snapshots.latest()
        shown, matching = await run_in_threadpool(selection.of, snapshot.locks)
        now = clock.wall()
        return Json(
            {
                "locks": [_lock(lock, now) for lock in shown],
                "matching": matching,
                "total": len(snapshot.locks),
                "whole": snapshot.whole,
                "age": max(0.0, now - snapshot.at),
                "late": self._snapshots.late,
            }
        )

    async def lock(self, request: Request) -> Response:
        """Show one key, its holders and its waiters."""
        asked = _query(request, "name", "first")
        key = _key(asked.get("name", ""))
        first = _number("first", asked.get("first", "0"), 0, FURTHEST)
        lock, more = await run_in_threadpool(self._look_at, key, first)
        now = clock.wall()
        return Json(
            {
                "lock": _lock(lock, now),
                "holds": [_hold(hold, now) for hold in lock.holds],
                "first": first,
                "page": QUEUE_PAGE,
                **more,
            }
        )

    async def actions(self, request: Request) -> Response:
        """List what operators have done to any key in the last day."""
        _query(request)
        found = await run_in_threadpool(self._admin.recent_actions, DAY)
        return Json({"actions": [{"key": key, **_action(action)} for key, action in found]})

    def _seen(self, lock: KeyState, now: float) -> dict[str, Any]:
        history = self._snapshots.history
        history.note(lock, now)
        known = history.of(lock.key)
        return {
            "since": history.since,
            "mostWaiting": known.most_waiting,
            "longestWait": known.longest_wait,
            "grants": [_grant(grant, lock) for grant in known.grants],
        }

    def _look_at(self, key: str, first: int) -> tuple[KeyState, dict[str, Any]]:
        lock, now = self._admin.show(key), clock.wall()
        queue = self._admin.queue(key, first=first, limit=QUEUE_PAGE)
        lanes = self._admin.lanes(key, limit=MOST_LANES) if lock.waiting else []
        calls = self._admin.calls(key, limit=MOST_CALLS) if lock.identities else []
        return lock, {
            "queue": [_waiter(waiter, now) for waiter in queue],
            "lanes": [{**lane._asdict(), "name": shown(lane.name)} for lane in lanes],
            "calls": [asdict(call) for call in calls],
            "actions": [_action(action) for action in self._admin.actions(key)],
            "seen": self._seen(lock, now),
        }

    async def recall(self, request: Request) -> Response:
        """Ask the holder that the confirmation named to leave; as `release` in all else."""
        key, terms = await _holder_in(request)
        done = await self._do(lambda: self._admin.recall(key, **terms))
        return _outcome(request, "recalled", done.before, done.asked)

    async def release(self, request: Request) -> Response:
        """
        Release a key, but only from the holder that the confirmation named.

        If the key has several holders, `holder` is the owner of that one.
        """
        key, terms = await _holder_in(request)
        done = await self._do(lambda: self._admin.release(key, **terms))
        return _outcome(request, "released", done.after, done.lost)

    async def wake(self, request: Request) -> Response:
        """Send the tasks at a key that should be in flight."""
        body = await _body(request, "name", "reason")
        key = _key(_text(body, "name"))
        author, reason = _operator(request, body)
        sent = await self._do(lambda: self._admin.wake(key, author=author, reason=reason))
        logger.warning("%s woke %d tasks at %r", _client(request), sent, key)
        return Json({"sent": sent})

    async def drop(self, request: Request) -> Response:
        """Remove a task from a key's queue."""
        body = await _body(request, "name", "task_id", "reason")
        key, task_id = _key(_text(body, "name")), _task_id(body)
        author, reason = _operator(request, body)
        dropped = await self._do(
            lambda: self._admin.drop(task_id, key, author=author, reason=reason)
        )
        if not dropped:
            logger.info("%s dropped nothing: %r is not waiting", _client(request), task_id)
            raise HTTPException(409, "nothing was dropped: the task is no longer waiting")
        for each in dropped:
            task = f"{each.task}[{each.task_id}]"
            logger.warning("%s dropped %r from the queue of %r", _client(request), task, key)
        return Json({"dropped": len(dropped)})

    async def limit(self, request: Request) -> Response:
        """Limit the units of a key in use, or the rate of its starts."""
        body = await _body(request, "name", "units", "rate", "seconds", "reason")
        if body.get("units") is None and not body.get("rate"):
            raise HTTPException(400, "units or rate is missing; resume removes a limit")
        return await self._limit(request, body, "limited")

    async def pause(self, request: Request) -> Response:
        """Stop new grants of a key."""
        body = await _body(request, "name", "seconds", "reason")
        return await self._limit(request, {**body, "units": 0}, "paused")

    async def resume(self, request: Request) -> Response:
        """Remove the limit of a key."""
        body = await _body(request, "name", "reason")
        return await self._limit(request, body, "removed the limit of")

    async def _limit(self, request: Request, body: dict[str, Any], did: str) -> Response:
        key, units = _key(_text(body, "name")), body.get("units")
        terms = {"rate": body.get("rate") or None, "seconds": body.get("seconds", 0)}
        author, reason = _operator(request, body)
        try:
            done = await self._do(
                lambda: self._admin.limit(key, units, **terms, author=author, reason=reason)
            )
        except (ValueError, ConfigurationError) as error:
            raise HTTPException(400, str(error)) from None
        logger.warning("%s %s %r", _client(request), did, key)
        return Json({"lock": _lock(done.after, clock.wall())})

    async def _do(self, change: Callable[[], T]) -> T:
        try:
            return await run_in_threadpool(change)
        finally:
            self._snapshots.changed()


async def _holder_in(request: Request) -> tuple[str, dict[str, Any]]:
    """Return the key that a request names, and the holder, the operator and the reason."""
    body = await _body(request, "name", "token", "holder", "reason")
    key, given = _key(_text(body, "name")), _text(body, "token")
    token = UNREADABLE if given == str(UNREADABLE) else _number("token", given, 1, 10**30)
    owners = (_text(body, "holder"),) if "holder" in body else ()
    author, reason = _operator(request, body)
    return key, {"token": token, "owners": owners, "author": author, "reason": reason}


def _outcome(request: Request, did: str, lock: KeyState, of: Sequence[HoldInfo]) -> Response:
    """Return the answer to a request that *did* something to the holder *of* a key, or nothing."""
    if not of:
        logger.info("%s %s nothing: %r has changed hands", _client(request), did, lock.key)
        raise HTTPException(409, f"nothing was {did}: the key has changed hands, or is free")
    logger.warning("%s %s %r, which %r held", _client(request), did, lock.key, str(of[0].who))
    return Json({"lock": _lock(lock, clock.wall())})


def _lock(lock: KeyState, now: float) -> dict[str, Any]:
    return {
        "name": slot_name(lock.key),
        "key": lock.key,
        "state": lock.state,
        "mode": lock.mode,
        "holder": _holder(lock.holder) if lock.holder else None,
        "holders": len(lock.holds),
        **_lasting(lock, now),
        "token": str(lock.token),  # exceeds the safe integers of JavaScript
        "units": lock.units,
        "most": lock.most,
        "limit": _limit(lock.limit) if lock.limit else None,
        "laneLimits": {shown(lane): _limit(limit) for lane, limit in lock.lane_limits},
        "rest": lock.rest,
        "waiting": lock.waiting,
        "woken": lock.woken,
        "waited": max(0.0, now - lock.oldest) if lock.oldest else 0.0,
        "opens": lock.opens,
        "sooner": lock.may_open_sooner,
        "later": lock.later,
        "due": lock.due,
        "identities": lock.identities,
    }


def _hold(hold: HoldInfo, now: float) -> dict[str, Any]:
    return {
        "who": _holder(hold.who),
        "owner": hold.who.owner,
        "state": hold.state,
        "units": hold.units,
        "slot": hold.slot if hold.slot >= 0 else None,
        **_lasting(hold, now),
        "asked": hold.asked._asdict() if hold.asked.at else None,
    }


def _lasting(hold: KeyState | HoldInfo, now: float) -> dict[str, Any]:
    return {
        "since": hold.since,
        "held": max(0.0, now - hold.since) if hold.since else 0.0,
        "lease": hold.remaining if math.isfinite(hold.remaining) else None,  # None: no end
    }


def _limit(limit: Limit) -> dict[str, Any]:
    return {
        "units": limit.capacity,
        "rates": list(map(str, limit.rates)),
        "author": limit.author,
        "since": limit.since,
        "until": limit.until,
    }


def _action(action: Action) -> dict[str, Any]:
    facts = action._asdict()
    return {name: facts[name] for name in ("name", "author", "reason", "about", "at")}


def _grant(grant: Grant, lock: KeyState) -> dict[str, Any]:
    """Return *grant*, with the least and the greatest duration that it may have had."""
    now = {hold.who.owner for hold in lock.holds if hold.state == "held"}
    return {
        "who": _holder(grant.holder),
        "token": str(grant.token),
        "since": grant.since,
        "has": grant.token == lock.token and grant.holder.owner in now,
        "least": max(0.0, grant.seen - grant.since),
        "most": max(0.0, grant.ended - grant.since) if grant.ended else None,
    }


def _holder(holder: Holder) -> dict[str, Any]:
    return {
        "task": holder.task,
        "name": holder.name,
        "thread": holder.is_thread,
        "id": holder.task_id,
        "host": holder.host,
        "pid": holder.pid,
    }


def _waiter(waiter: WaiterInfo, now: float) -> dict[str, Any]:
    return {
        "place": waiter.place,
        "kind": waiter.kind,
        "who": _holder(waiter.who),
        "units": waiter.want.units,
        "capacity": waiter.want.capacity,
        "since": waiter.since,
        "waited": max(0.0, now - waiter.since) if waiter.since else None,
        "due": waiter.due,
        "leaves": waiter.leaves,
        "lane": shown(waiter.want.lane or ""),
    }


def _client(request: Request) -> str:
    return f"{request.client.host}:{request.client.port}" if request.client else "unknown client"


def _operator(request: Request, body: dict[str, Any]) -> tuple[str, str]:
    """Return the author and the reason of a change, for the audit record."""
    reason = body.get("reason", "")
    if not isinstance(reason, str) or len(reason) > MOST_TEXT:
        raise HTTPException(400, f"reason must be a text of at most {MOST_TEXT} characters")
    host = request.client.host if request.client else "unknown"
    return f"{host} by the page of {this_user()}"[:MOST_TEXT], reason


def _query(request: Request, *known: str) -> dict[str, str]:
    """Return the query parameters; refuse unknown and repeated ones."""
    given = request.query_params.multi_items()
    _refuse_unknown((name for name, _ in given), known)
    if len(dict(given)) < len(given):
        raise HTTPException(400, "a parameter is given twice")
    return dict(given)


async def _body(request: Request, *known: str) -> dict[str, Any]:
    """Return the fields of the JSON body; refuse unknown ones."""
    _query(request)
    read = bytearray()
    async for chunk in request.stream():
        read += chunk
        if len(read) > LONGEST_BODY:
            raise HTTPException(413, "too long")
    with suppress(ValueError, RecursionError):
        body = json.loads(bytes(read))
        if isinstance(body, dict):
            _refuse_unknown(body, known)
            return body
    raise HTTPException(400, "not a JSON object")


def _refuse_unknown(given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            hint = closest(name, known) if known else "there is none"
            raise HTTPException(400, f"there is no parameter {name!r}: {hint}")


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise HTTPException(400, f"{name} is missing")
    return value


def _task_id(body: dict[str, Any]) -> str:
    text = _text(body, "task_id")
    try:
        text.encode("utf-8", "surrogateescape")  # the way undecodable bytes of records are read
    except UnicodeEncodeError:
        raise HTTPException(400, "task_id is not valid text") from None
    return text


def _key(name: str) -> str:
    if not name:
        raise HTTPException(400, "name is missing")
    return key_of(name)


def _number(name: str, text: str, least: int, most: int) -> int:
    whole = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not whole or not least <= int(text) <= most:
        raise HTTPException(400, f"{name} must be a whole number from {least} to {most}")
    return int(text)


def _choice(name: str, text: str, known: Iterable[str]) -> str:
    if text not in known:
        raise HTTPException(400, f"{name} must be one of {', '.join(known)}")
    return text


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Json({"error": error.detail}, error.status_code)


async def _not_done(_: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, 409)


async def _store_failed(_: Request, error: Exception) -> Response:
    silent = isinstance(error, StoreUnavailableError)
    return Json({"error": str(error), "store": "silent" if silent else "refuses"}, 503)
