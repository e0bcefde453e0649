"""The names of the records of a prefix, and the commands on them."""

from collections.abc import Sequence
from typing import Any

from celery_distlock.keys import slot_name
from celery_distlock.stores.requests import ReleaseRequest
from celery_distlock.stores.values import ALONE, Want

from . import scripts
from .connections import Command, command, fields, milliseconds, script_call, trimmed

RELEASE = scripts.load("release")


class Records:
    """
    See the module.

    Args:
        prefix: What all names begin with.
        replicas: The number of replicas that must confirm what must not be lost.
    """

    def __init__(self, prefix: str, replicas: int = 0) -> None:
        self.prefix = prefix
        self._replicas = replicas

    @property
    def times(self) -> str:
        """The prefix of the records of the times when keys are due; all in one slot."""
        return f"{self.prefix}:{{ticker}}:"

    def stem(self, name: str) -> str:
        """Return the prefix of a key's record names; all of them are in one slot."""
        return f"{self.prefix}:{{{name}}}:"

    def call(
        self, script: scripts.Script, name: str, *arguments: Any, confirmed: bool = False
    ) -> Command:
        """Return a call of *script* on a key's records."""
        call = script_call(script, (self.stem(name),), *arguments)
        return call._replace(replicas=self._replicas) if confirmed and self._replicas else call

    def release(
        self, request: ReleaseRequest, channel: tuple[str, str] = ("", ""), **more: object
    ) -> Command:
        """Return the call of `RELEASE`; *more* are fields that one kind of store has."""
        keep_run, keep_s = request.keep_for or ("", 0.0)
        keep_ms = milliseconds(keep_s) if request.keep_for else 0
        optional = fields(keep_run=keep_run, keep_ms=keep_ms, **more)
        completion = request.completion.value
        arguments = trimmed(request.owner, request.run, completion, *channel, optional)
        return self.call(RELEASE, slot_name(request.key), *arguments)

    def call_at(self, script: scripts.Script, names: Sequence[str], *arguments: Any) -> Command:
        """Return a confirmed call of *script* on the records of several keys."""
        call = script_call(script, tuple(map(self.stem, names)), *arguments)
        return call._replace(replicas=self._replicas)

    def call_without_key(self, script: scripts.Script, *arguments: Any) -> Command:
        """Return a call of *script* on records that belong to no key."""
        return script_call(script, (f"{self.prefix}:",), *arguments)

    def command(self, record: str, *words: Any) -> Command:
        """Return a command on a *record* that belongs to no key; the word ``{}`` is its name."""
        name = f"{self.prefix}:{record}".encode()
        return command(name, *(name if word == "{}" else word for word in words))

    def index(self, action: str, name: str) -> Command:
        """Return a call on the index of names with parked tasks: ``add``, or ``strike``."""
        if action == "add":
            return self.command("parked", "ZADD", "{}", 0, name)._replace(replicas=self._replicas)
        return self.call_without_key(_INDEX, name)

    def index_is_whole(self, seconds: float, only: str) -> Command:
        """Return the command that marks the index as complete for *seconds*; *only*: NX or XX."""
        # At the index's node, and lost with it.
        whole = f"{self.prefix}:{{{self.prefix}:parked}}:whole"
        return command(whole.encode(), "SET", whole, 1, only, "PX", milliseconds(seconds))


def wanted(want: Want) -> str:
    """Return *want* as the scripts take it."""
    return "" if want == ALONE else want.written()


_INDEX = scripts.load("index")
