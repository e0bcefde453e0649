"""How each task is locked: its plan, made of what it declares and what its app sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_distlock.engine.hold import Terms
from celery_distlock.engine.wants import want_of
from celery_distlock.errors import ConfigurationError
from celery_distlock.keys import KeyRule, Receive, slot_name
from celery_distlock.policies import Fail, Policy, Requeue, Skip, Wait, resolve
from celery_distlock.settings import Layer, Settings
from celery_distlock.stores import Ability, Store
from celery_distlock.unique import CallRule, Throttle, rule_of

from .task_function import TaskFunction
from .task_options import UNSET, options_of

__all__ = ["CallIdentity", "Plan", "make_plan"]


class CallIdentity:
    """
    How the identity of one task's calls is made from their arguments.

    Args:
        rule: How the task's keys are made.
        by: The template of what is alike; None: equal arguments are, or all calls.
        all_are: All calls are alike.
    """

    def __init__(self, rule: KeyRule, by: KeyRule | None, *, all_are: bool) -> None:
        self._rule = rule
        self._by = by
        self._all_are = all_are

    def of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], receive: Receive | None = None
    ) -> str:
        """
        Return the identity of one call: no other task's is the same.

        The arguments are those of :meth:`KeyRule.keys <celery_distlock.keys.KeyRule.keys>`.

        Raises:
            LockKeyError: None can be made of these arguments.
        """
        parts = [self._rule.task.replace("%", "%25").replace(":", "%3A")]  # the first : ends it
        if self._by is not None:
            parts.append(self._by.keys(args, kwargs, receive)[0].template)
        elif not self._all_are:
            parts.append(self._rule.digest(args, kwargs, receive))
        return slot_name(":".join(parts))


@dataclass(frozen=True, slots=True)
class Plan:
    """How one task is locked; made when it is declared."""

    settings: Settings
    rule: KeyRule
    policy: Policy
    terms: Terms
    sends: bool = False  # its calls go through the store
    unique: CallRule | None = None
    identity: CallIdentity | None = None  # as `unique` says
    seems_pending: bool = False  # its function seems to return a coroutine
    by_default: bool = False  # `sends` is the app's wish, not the task's own

    def needs(self, store: Store) -> list[tuple[str, Ability]]:
        """Return what of it needs which abilities that *store* has not."""
        needed = [(repr(key), want_of(key).needs) for key in self.rule.declared]
        needed += [(repr(self.policy), each) for each in self.policy.needs]
        needed += [(self.sent_by, Ability.QUEUE)] if self.sends else []
        return [(what, each) for what, each in needed if each and each not in store.abilities]

    @property
    def sent_by(self) -> str:
        """What it is that sends its calls through the store, for messages."""
        return "lock_via='store'" if self.unique is None else "lock_unique"

    @property
    def why_not_sent(self) -> str:
        """Why calls cannot go through the store; empty: they can."""
        needed = _why_not_sent(self.rule, self.policy)
        return f"lock_via='store' needs {needed}" if needed else ""


def make_plan(
    task: type[Any], name: str, flags: Layer, configured: Layer, *, annotated: bool
) -> Plan:
    """
    Return the plan of *task*, which has this *name*; its class may have none.

    Args:
        flags: Of the worker.
        configured: The settings of the app.
        annotated: Celery may have set some of its options, by ``task_annotations``.

    Raises:
        ConfigurationError: An option is unknown or wrong; the message says which and where.
    """
    where = f"task {name}"
    options = options_of(task, where)
    layer = Layer(f"{where}: lock_*", options)
    settings = Settings.from_layers(layer, flags, configured)
    policy_name = f"{where}: lock_on_conflict"
    if "on_conflict" not in options:
        flag = "on_conflict" in flags.values
        policy_name = f"{'worker flag --' if flag else 'setting '}distlock_on_conflict"
    policy = resolve(policy_name, settings.on_conflict)
    unique = rule_of(f"{where}: lock_unique", options.get("unique"))
    if not annotated:
        _refuse_idle(where, _own(task, flags, configured), settings, policy, unique)
    function = TaskFunction(task, name)
    function.ensure_ends_with_its_call()
    rate = unique.rate if isinstance(unique, Throttle) else None
    rule = function.key_rule(settings.key, rate=rate)
    wanted_by = "lock_via='store'" if "via" in options else ""
    if unique is not None:
        settings = replace(settings, via="store")
        wanted_by = "lock_unique"
    return Plan(
        settings,
        rule,
        policy,
        Terms(
            settings.lease,
            watchdog=settings.watchdog,
            max_hold=settings.max_hold,
            warn_held=settings.warn_held,
        ),
        _sends(where, settings, rule, policy, wanted_by),
        unique,
        _call_identity(unique, rule, function),
        function.seems_pending,
        by_default=not wanted_by,
    )


def _own(task: type[Any], *layers: Layer) -> set[str]:
    """Return what stands in the declaration of *task*, or is a default for all tasks."""
    own = {name for name, value in vars(task).items() if value is not UNSET}
    if not any("lease" in layer.values for layer in layers):
        own.add("lock_lease")
    return own


def _refuse_idle(
    where: str, own: set[str], settings: Settings, policy: Policy, unique: CallRule | None
) -> None:
    """
    Raise for what would change nothing, or not what it says.

    Only where the declaration of *task*, which has *own*, says both: its bases, the app's settings
    and a worker's flags are for many tasks, and must not keep a worker from starting.
    """
    if {"lock_wait", "lock_on_conflict"} <= own:
        if isinstance(policy, Skip | Fail):
            raise ConfigurationError(
                f"{where}: lock_wait is never waited, for its policy is {policy!r}; to wait before"
                f" that, write lock_on_conflict = policies.Wait(then={policy!r})"
            )
        if isinstance(policy, Wait) and policy.timeout is not None:
            raise ConfigurationError(
                f"{where}: lock_wait is {settings.wait:g} s, and {policy!r} waits its own timeout"
            )
    if {"lock_max_hold", "lock_watchdog"} <= own and not settings.watchdog and settings.max_hold:
        raise ConfigurationError(
            f"{where}: lock_max_hold is {settings.max_hold:g} s, and with lock_watchdog=False no"
            " lease is renewed: a key is held until lock_lease is over"
        )
    longest = settings.max_hold if {"lock_max_hold", "lock_lease"} <= own else None
    if longest is not None and settings.watchdog and longest < settings.lease:
        raise ConfigurationError(
            f"{where}: lock_max_hold is {longest:g} s and lock_lease"
            f" {settings.lease:g} s, and no key is held for less than its lease: shorten the lease"
        )
    if {"lock_via", "lock_unique"} <= own and unique is not None and settings.via != "store":
        raise ConfigurationError(
            f"{where}: lock_via={settings.via!r} would change nothing, for calls with"
            " lock_unique go through the store; leave one of the two out"
        )


def _sends(where: str, settings: Settings, rule: KeyRule, policy: Policy, wanted_by: str) -> bool:
    """Whether calls go through the store; raise if an option of the task's own wants it in vain."""
    why_not = _why_not_sent(rule, policy) if settings.via == "store" else ""
    if why_not and wanted_by:
        raise ConfigurationError(f"{where}: {wanted_by} needs {why_not}")
    return settings.via == "store" and not why_not


def _why_not_sent(rule: KeyRule, policy: Policy) -> str:
    """Return what calls would need to go through the store; empty: they can."""
    if type(policy) is not Requeue:
        return f"lock_on_conflict='requeue': its calls wait in the store; not {policy!r}"
    if rule.most > 1:
        verb = "names" if rule.declared else "returns"
        return f"one key to wait at, and lock_key {verb} {rule.most}"
    return ""


def _call_identity(
    unique: CallRule | None, rule: KeyRule, function: TaskFunction
) -> CallIdentity | None:
    if unique is None:
        return None
    by = function.key_rule(unique.by, option="lock_unique: by") if unique.by else None
    if by is None and not unique.all_alike:
        function.ensure_calls_compare("lock_unique")
    return CallIdentity(rule, by, all_are=unique.all_alike)
