"""A server in this process that executes the oracle's scripts."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from celery_distlock.stores.memory.server import Server, _words
from celery_distlock.stores.redis.connections import script_call
from tests.oracle import scripts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from celery_distlock.stores.redis.connections import Command

__all__ = ["OracleServer"]


class OracleServer(Server):
    """See the module; called, and answering, as the present scripts are."""

    def _executed(self, call: Command) -> Any:
        if call.script is None:
            return super()._executed(call)
        name = call.script.name
        script = scripts.load(name)
        if script.keys != call.script.keys:  # its renewal takes one more key
            first = _words(call.head)[3].decode("utf-8", "surrogateescape")
            stem = first.removesuffix(call.script.keys[0])
            call = script_call(script, (stem,), *call.arguments)
        if name in _POSITIONS:
            call = call._replace(arguments=_POSITIONS[name](*call.arguments))
        answer = super()._executed(call._replace(script=script))
        return _NAMED[name](answer) if name in _NAMED and isinstance(answer, list) else answer


def _read(request: bytes) -> dict[str, Any]:
    """Return the optional fields of a request; what is not there is empty."""
    found = json.loads(request.decode("utf-8", "surrogateescape")) if request else {}
    return defaultdict(str, found)


def _to_acquire(
    owner: str,
    lease_ms: int,
    run: str,
    arrival: int,
    want: str = "",
    request: bytes = b"",
    envelope: bytes = b"",
) -> tuple[Any, ...]:
    told = _read(request)
    place = told["mode"] or "try", run, int(told["repeated"] or 0), arrival
    more = int(told["keep"] or 0), envelope or told["inbox"], told["channel"], told["task"]
    return (owner, lease_ms, *place, *more, *([want] if want else []))


def _to_send(
    run: str, envelope: bytes, task: str, sent_to: str, request: bytes = b""
) -> tuple[Any, ...]:
    told = _read(request)
    terms = told["want"], told["delay_ms"] or 0, int(told["repeated"] or 0)
    identity = told["identity"], told["until_when"], told["replaces"], told["most_ms"]
    more = int(told["paced"] or 0), told["expires_ms"], told["marks"], int(told["beside"] or 0)
    return (run, envelope, task, sent_to, *terms, *identity, *more)


def _to_release(
    owner: str,
    run: str,
    ended: str,
    channel: str = "",
    destination: str = "",
    request: bytes = b"",
) -> tuple[Any, ...]:
    told = _read(request)
    keep = told["inbox"], told["keep_run"], told["keep_ms"] or 0, int(told["unstarted"] or 0)
    return (owner, run, ended, channel, destination, *(keep if request else ()))


_POSITIONS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "acquire": _to_acquire,
    "send": _to_send,
    "release": _to_release,
}


def _woken(pairs: Sequence[Any], **fields: Any) -> list[bytes]:
    """Return an answer of named fields, with the runs of *pairs*: each one's, and its envelope."""
    return _sent([(run, envelope, {}) for run, envelope in _by(2, pairs)], **fields)


def _sent(woken: Sequence[tuple[bytes, Any, dict[str, Any]]], **fields: Any) -> list[bytes]:
    runs, envelopes, opens = [], [], []
    for run, envelope, more in woken:
        if not run:
            opens += [envelope] if envelope else []
            continue
        told, *letters = envelope if isinstance(envelope, list) else (envelope, b"")
        is_route = not letters
        marks = {"returned": b"r" in letters[0], "published": b"b" in letters[0]} if letters else {}
        runs.append({"run": _text(run), "route": _text(told) if is_route else "", **marks, **more})
        envelopes.append(b"" if is_route else told)
    fields |= {"woken": runs} if runs else {}
    fields |= {"opens_ms": min(opens)} if opens else {}
    written = {name: _text(each) for name, each in fields.items()}
    return [json.dumps(written).encode(), *envelopes]


def _by(size: int, words: Sequence[Any]) -> list[tuple[Any, ...]]:
    return list(zip(*[words[each::size] for each in range(size)], strict=True))


def _text(value: Any) -> Any:
    if value is None:
        return ""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _of_acquire(answer: list[Any]) -> list[Any]:
    status, *facts = answer
    if status == b"granted":
        token, slot, *woken = facts
        if not any(woken):
            return [status, token, slot]
        return _woken(woken, status=status, token=token, slot=slot)
    if not facts:
        return _woken([], status=status)
    token, holder, run, ttl_ms, place, woken, envelope, since, *others = facts
    told = {"token": token or "", "holder": holder, "run": run, "ttl_ms": ttl_ms}
    return _woken([woken, envelope, *others], status=status, place=place, since=since, **told)


def _of_stand(answer: list[Any]) -> list[Any]:
    status, *facts = answer
    if not facts:
        return _woken([], status=status)
    token, holder, run, ttl_ms, place, since, *woken = facts
    told = {"token": token, "holder": holder, "run": run, "ttl_ms": ttl_ms, "place": place}
    found = _by(3, woken)
    keys = [number for number, run, _ in found if not run]  # only the last has openings
    more = [(run, envelope, {"key": number}) for number, run, envelope in found]
    return _sent(more, status=status, since=since, at=max(keys, default=1), **told)


def _of_upgrade(answer: list[Any]) -> list[Any]:
    status, *ttl_ms = answer
    return _woken([], status=status, **({"ttl_ms": ttl_ms[0]} if ttl_ms else {}))


def _fields(**fields: Any) -> bytes:
    written = json.dumps(_all_text(fields), ensure_ascii=False)
    return written.encode("utf-8", "surrogateescape")


def _all_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _all_text(each) for name, each in value.items() if each is not None}
    return list(map(_all_text, value)) if isinstance(value, list) else _text(value)


def _rows(names: str, words: Sequence[Any]) -> list[dict[str, Any]]:
    words_each = names.split()
    return [dict(zip(words_each, row, strict=True)) for row in _by(len(words_each), words)]


_LOOK = "owner token run ttl_ms waiting oldest woken task limit used capacity rest_ms starts"
_LOOK += " later due_ms opens_ms identities"
_SHARE = re.compile(rb"\d+ (\d+) (-?\d+) \d+ (\d+) (.*)", re.DOTALL)


def _of_inspect(answer: list[Any]) -> bytes:
    count = len(_LOOK.split())
    (told,) = _rows(_LOOK, answer[:count])
    starts = [each.split(b",") for each in told["starts"].split()]
    told["starts"] = [dict(zip(("limit", "per", "begun"), each, strict=True)) for each in starts]
    told["opens_ms"] = None if told["opens_ms"] < 0 else told["opens_ms"]
    told["oldest"] = told["oldest"] or b""
    told["holders"] = _rows("owner entry left_ms task", answer[count:])
    for each in told["holders"]:
        found = _SHARE.fullmatch(each.pop("entry"))
        each |= dict(zip(("units", "slot", "since", "run"), found.groups(), strict=True))
    return _fields(**told)


def _of_waiters(answer: list[Any]) -> bytes:
    woken, *words = answer
    rows = _rows("member since task want", words)
    for each in rows:
        kind, _, name = each.pop("member").partition(b":")
        each["run" if kind == b"p" else "blocked"] = name
        each["since"] = each["since"] or b""
    return _fields(woken=rows[:woken], queue=rows[woken:])


def _of_identity(answer: list[Any]) -> bytes:
    names = ("run", "where", "expires_ms", "marks", "lasts_ms")
    told = dict(zip(names, answer, strict=False))
    return _fields(**{name: each for name, each in told.items() if each != b""})


def _of_tick(answer: list[Any]) -> bytes:
    leads, pause_ms, late_ms, claim, *names = answer
    pause = None if pause_ms < 0 else pause_ms
    return _fields(leads=leads == 1, pause_ms=pause, late_ms=late_ms, claim=claim, names=names)


_NAMED = {
    "inspect": _of_inspect,
    "waiters": _of_waiters,
    "identity": _of_identity,
    "tick": _of_tick,
    "delayed": lambda answer: _fields(runs=_rows("run in_ms task want", answer)),
    "identities": lambda answer: _fields(identities=_rows("identity run where", answer)),
    "dues": lambda answer: _fields(ticker=answer[0], many=answer[1], first_ms=answer[2]),
    "acquire": _of_acquire,
    "downgrade": _of_acquire,
    "upgrade": _of_upgrade,
    "try_key": _of_stand,
    "send": lambda answer: _woken(answer[1:], status=answer[0]),
    "sweep": lambda answer: _woken(answer[1:], waiting=answer[0]),
    **dict.fromkeys(("release", "drop", "cancel", "reserve_kept", "limit"), _woken),
}
