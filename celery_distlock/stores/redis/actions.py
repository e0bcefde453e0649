"""The record of operators' actions on a key, in a store over Redis."""

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from redis.exceptions import RedisError

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.keys import slot_name
from celery_distlock.naming import printable, shown
from celery_distlock.stores.queue_parts import Audit
from celery_distlock.stores.values import Action, Ownership, RenewOutcome

from . import scripts
from .answers import text
from .connections import Command, command
from .parts import Part, Reach
from .scanning import KeysWith, keys_of, names_at

MOST_REMEMBERED = 1000  # known causes of losses that no caller has asked for yet
PATIENCE = 0.5  # seconds to look up why renewals were refused
_ENTRY = re.compile(r"(\d{1,16}) (\{.*\})", re.DOTALL)  # as in act.lua


class RedisAudit(Part, Audit):
    """See the module."""

    def __init__(self, reach: Reach) -> None:
        super().__init__(reach)
        self._causes: dict[str, str] = {}  # of losses, by owner

    def record_action(self, key: str, action: Action) -> bool:
        name, author, reason, about, owners, _ = action
        facts = {"name": name, "author": author, "reason": reason, "about": about}
        entry = json.dumps({**facts, "owners": owners, "id": secrets.token_hex(8)})
        call = self._records.call(_ACT, slot_name(key), entry, " ".join(owners))
        return bool(self._requests.ask([call], key).answers[0])

    def actions(self, key: str) -> list[Action]:
        return self._actions(self._requests.ask([self._look(key)], key).answers)

    def keys_acted_on(self) -> Iterator[list[str]]:
        def ask(scan: Command) -> Any:
            return self._requests.ask([scan], "the list of actions").answers[0]

        acted_on = KeysWith(self._records.stem, record="actions")
        yield from keys_of(names_at(self._servers, acted_on, ask, self._requests.reading), "*")

    def why_lost(self, key: str, owner: str, patience: float = 0.0) -> str:
        known = self._causes.pop(owner, "")
        if known or not patience:
            return known
        try:
            answers = self._requests.ask_once([self._look(key)], patience)
            return _cause(owner, self._actions(answers))
        except StoreError:
            return ""

    def _actions(self, answers: Sequence[Any]) -> list[Action]:
        with self._requests.reading("ZRANGE", answers[0]) as entries:
            return _read(entries)[::-1]

    def _look(self, key: str) -> Command:
        name = f"{self._records.stem(slot_name(key))}actions"
        return command(name.encode("utf-8", "surrogateescape"), "ZRANGE", name, 0, -1)

    def note_causes(self, found: Sequence[tuple[Ownership, RenewOutcome]], deadline: float) -> None:
        """
        Look up the causes of these outcomes, for `why_lost`; raises nothing, and is brief.

        This is a separate request: while a slot is moved, a request on two records is refused.
        """
        patience = min(PATIENCE, deadline - clock.monotonic())
        if not found or patience <= 0:
            return
        try:
            answers = self._requests.exchange([self._look(hold.key) for hold, _ in found], patience)
        except RedisError:
            return
        for (hold, outcome), answer in zip(found, answers, strict=True):
            actions = _read(answer)[::-1] if isinstance(answer, list) else []
            if cause := _cause(hold.owner, actions, recalled=outcome is RenewOutcome.RECALLED):
                if len(self._causes) >= MOST_REMEMBERED:
                    self._causes.clear()
                self._causes[hold.owner] = cause


def _cause(owner: str, actions: Sequence[Action], *, recalled: bool = False) -> str:
    return next(
        (
            action.loss
            for action in actions
            if owner in action.owners and (action.name == "recall") == recalled
        ),
        "",
    )


def _read(entries: Sequence[bytes]) -> list[Action]:
    """Return the actions of *entries*, without foreign ones."""
    found = (_ENTRY.fullmatch(text(entry)) for entry in entries)
    return [action for each in found if each and (action := _action(int(each[1]), each[2]))]


def _action(micros: int, written: str) -> Action | None:
    try:
        facts = json.loads(written)
        words = (facts["name"], facts["author"], facts["reason"], facts["about"])
        owners = tuple(map(str, facts["owners"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    name, author, reason, about = (shown(printable(str(word))) for word in words)
    return Action(name, author, reason, about, owners, micros / 1e6)


_ACT = scripts.load("act")
