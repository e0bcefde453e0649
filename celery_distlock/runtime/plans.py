"""The lock options that tasks declare, and the plan that is made of them for each task."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from celery_distlock.engine.hold import Terms, want_of
from celery_distlock.errors import ConfigurationError
from celery_distlock.key import Key
from celery_distlock.keys import KeyRule, Receive, slot_name
from celery_distlock.policies import Fail, Policy, Requeue, Skip, Wait, bounds, resolve
from celery_distlock.settings import APP_ONLY, TASK_ONLY, TASK_OPTIONS, Layer, Settings, meant
from celery_distlock.stores import Ability, Store
from celery_distlock.unique import NOTHING, CallRule, Latest, Throttle, rule_of

from .current import Task
from .declaration import TaskFunction

__all__ = [
    "OPTIONS",
    "UNSET",
    "CallIdentity",
    "Plan",
    "ensure_one_queue",
    "ensure_recallable",
    "hint_for",
    "make_plan",
    "options_of",
    "take_call_options",
]

logger = logging.getLogger(__name__)

UNSET: Any = type("Unset", (), {"__repr__": lambda _: "<not set>"})()
OPTIONS = (*TASK_OPTIONS, *TASK_ONLY)
RECALL_IN = 1.0  # seconds in which a task learns that it is asked to leave

# Without `shared`, which is also Celery's: a spawned pool process sets it as an attribute.
_TERMS = {each.name for each in fields(Key)[1:]} - {"shared"}
# How to write what a name means that is not an option.
_WRITTEN = {
    **{name: f"lock_key=Key('a:{{sku}}', {name}=2.0)" for name in ("min_hold", "cooldown")},
    "capacity": "lock_key=Key('a:{sku}', capacity=5)",
    "weight": "lock_key=Key('a:{sku}', capacity=5, weight=2)",
    "shared": "lock_key=Key('a:{sku}', shared=True)",
    "rate": "lock_key=Key('a:{sku}', shared=True, rate='100/m')",
    "cost": "lock_key=Key('a:{sku}', shared=True, rate='100/m', cost=2)",
    "order": "lock_key=Key('a:{sku}', order=Order('{user}'))",
    **{name: f"lock_on_conflict={name!r}" for name in ("requeue", "retry", "skip", "fail")},
    "debounce": "lock_unique=Debounce(2.0)",
    "throttle": "lock_unique=Throttle(60.0)",
    "latest": "lock_unique=Latest()",
}


def options_of(task: type[Any], where: str) -> dict[str, Any]:
    """
    Return the lock options that *task*, its bases or annotations set.

    Raises:
        ConfigurationError: One of them is unknown, or was passed to the decorator without
            ``lock_``. *where* names the task.
    """
    _refuse_without_prefix(task, where)
    options = {}
    for attribute in dir(task):
        name = attribute.removeprefix("lock_")
        if name == attribute:
            continue
        if name not in OPTIONS:
            known = [f"lock_{option}" for option in OPTIONS]
            hint = hint_for(name) or meant(attribute, known)
            raise ConfigurationError(f"{where}: unknown option {attribute}; {hint}")
        value = inspect.getattr_static(task, attribute)
        if isinstance(value, staticmethod):
            value = value.__func__
        if value is not UNSET:
            options[name] = value
    return options


def _refuse_without_prefix(task: type[Any], where: str) -> None:
    """Raise for a lock option that was passed to the decorator of *task* without its prefix."""
    given = vars(task)
    if "_decorated" not in given:  # a class may have any attributes
        return
    if isinstance(given.get("on_failure"), str):
        raise ConfigurationError(
            f"{where}: on_failure is Celery's handler, a function; write lock_on_failure"
        )
    for attribute in given:
        name = attribute.removeprefix("distlock_")
        is_ours = name in OPTIONS or name in _TERMS or name != attribute
        if is_ours and not any(hasattr(base, attribute) for base in task.__bases__):
            raise ConfigurationError(
                f"{where}: {attribute} is no option of a task, and would change nothing;"
                f" {hint_for(name) or f'write lock_{name}'}. To have an attribute of that name,"
                " declare it in a base class"
            )


def hint_for(name: str) -> str:
    """Return what to write instead of *name*, which is not an option; empty: not known."""
    if name in APP_ONLY:
        return f"distlock_{name} is a setting of the app"
    return f"write {_WRITTEN[name]}" if name in _WRITTEN else ""


def take_call_options(task: Task, options: dict[str, Any], *, by_celery: bool) -> tuple[Any, Any]:
    """
    Remove the lock options from those of one call.

    Returns:
        ``lock_via`` and ``lock_unique``.

    Raises:
        ConfigurationError: A call does not take one of them. It is only logged if the call is made
            *by_celery*: Celery would treat an error as the failure of the task that has this one as
            a link, or is retried.
    """
    names = [name for name in options if name.startswith(("lock_", "distlock_"))]
    if not names:
        return UNSET, UNSET
    given = {name: options.pop(name) for name in names}
    via, unique = given.pop("lock_via", UNSET), given.pop("lock_unique", UNSET)
    words = ""
    if given:
        words = (
            f"a call does not take {', '.join(given)}; it takes lock_via='broker' or 'store', and"
            " lock_unique=None. All else is declared with the task"
        )
    elif unique is not UNSET and unique is not None:
        words = (
            f"in a call lock_unique can only be None, not {unique!r}; declare the rule with the"
            " task"
        )
        unique = UNSET
    if words and not by_celery:
        raise ConfigurationError(f"task {task.name}: {words}")
    if words:
        logger.error("task %s: %s", task.name, words)
    return via, unique


class CallIdentity:
    """
    Makes the identity of a task's calls from their arguments.

    Args:
        rule: Makes the task's keys.
        by: The template of the identity; None: it is made of all arguments, or of none.
        all_are: All calls have the same identity.
    """

    def __init__(self, rule: KeyRule, by: KeyRule | None, *, all_are: bool) -> None:
        self._rule = rule
        self._task = rule.task.replace("%", "%25").replace(":", "%3A")  # the first : ends it
        self._by = by
        self._all_are = all_are

    def of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], receive: Receive | None = None
    ) -> str:
        """
        Return the identity of one call; those of different tasks always differ.

        The arguments are those of :meth:`KeyRule.keys <celery_distlock.keys.KeyRule.keys>`.

        Raises:
            LockKeyError: No identity can be made of these arguments.
        """
        parts = [self._task]
        if self._by is None and not self._all_are:
            return slot_name(":".join([*parts, self._rule.digest(args, kwargs, receive)]))
        if self._by is not None:
            parts.append(self._by.keys(args, kwargs, receive)[0].template)
        if self._rule.may_order:  # a call must not replace one of another lane
            keys = self._rule.keys(args, kwargs, receive)
            parts += [key.order.lane for key in keys if key.order and key.order.lane is not None]
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
    identity: CallIdentity | None = None  # for `unique`
    seems_pending: bool = False  # its function seems to return a coroutine
    by_default: bool = False  # `sends` comes from the app's setting, not from the task

    def needs(self, store: Store) -> list[tuple[str, Ability]]:
        """Return the options that need an ability which *store* lacks, each with that ability."""
        needed = [(repr(key), want_of(key).needs) for key in self.rule.declared]
        needed += [(repr(self.policy), each) for each in self.policy.needs]
        needed += self.needs_of_calls if self.sends else []
        return [(what, each) for what, each in needed if each and each not in store.abilities]

    @property
    def sent_by(self) -> str:
        """The option by which its calls go through the store, for messages."""
        ordered = next((repr(key) for key in self.rule.declared if key.order), "lock_via='store'")
        return ordered if self.unique is None else "lock_unique"

    @property
    def needs_of_calls(self) -> list[tuple[str, Ability]]:
        """The options by which calls need an ability of the store, if they go through it."""
        recalls = [(f"lock_unique={self.unique!r}", Ability.RECALL)] if self.recalls else []
        return [(self.sent_by, Ability.QUEUE), *recalls]

    @property
    def recalls(self) -> bool:
        """Whether a newer call asks a running one to leave."""
        return isinstance(self.unique, Latest) and bool(self.unique.recalls)

    @property
    def recall_result(self) -> Any:
        """The result of a run that is recalled; if there is none, it is revoked."""
        return self.unique.result if isinstance(self.unique, Latest) else NOTHING

    @property
    def why_not_sent(self) -> str:
        """Why calls cannot go through the store; empty: they can."""
        needed = _why_not_sent(self.rule, self.policy)
        return f"lock_via='store' needs {needed}" if needed else ""


def make_plan(
    task: type[Any], name: str, flags: Layer, configured: Layer, *, annotated: bool
) -> Plan:
    """
    Return the plan of the class *task*, registered as *name*.

    Args:
        flags: The worker's flags.
        configured: The settings of the app.
        annotated: Celery may have set some of its options, by ``task_annotations``.

    Raises:
        ConfigurationError: An option is unknown or invalid; the message names it.
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
    ensure_one_queue(where, policy, rule.most, "names" if rule.declared else "returns")
    for key in rule.declared:
        ensure_recallable(where, unique, key)
    wanted_by = "lock_via='store'" if "via" in options else ""
    ordered = next((repr(key) for key in rule.declared if key.order), "")
    if ordered or unique is not None:
        if ordered and "via" in options and settings.via != "store":
            raise ConfigurationError(
                f"{where}: lock_via={settings.via!r} contradicts {ordered}: calls that wait in the"
                " broker cannot be put in order; leave lock_via out"
            )
        settings = replace(settings, via="store")
        wanted_by = ordered or "lock_unique"
    sends = _sends(where, settings, rule, policy, wanted_by)
    rule.takes_order = sends
    return Plan(
        settings,
        rule,
        policy,
        _terms(settings, unique),
        sends,
        unique,
        _call_identity(unique, rule, function),
        function.seems_pending,
        by_default=not wanted_by,
    )


def _terms(settings: Settings, unique: CallRule | None) -> Terms:
    latest = unique if isinstance(unique, Latest) else Latest()
    return Terms(
        settings.lease,
        watchdog=settings.watchdog,
        max_hold=settings.max_hold,
        warn_held=settings.warn_held,
        renew_every=RECALL_IN if latest.recalls else None,
        stops=latest.running != "tell",
    )


def ensure_recallable(where: str, unique: CallRule | None, key: Key) -> None:
    """Raise if a newer call asks the holder of *key* to leave, and the key may have several."""
    if isinstance(unique, Latest) and unique.recalls and not key.alone:
        raise ConfigurationError(
            f"{where}: lock_unique={unique!r} asks the task that runs to leave, and {key!r} may"
            " have several: declare a key that is held exclusively, or write running='finish'"
        )


def ensure_one_queue(where: str, policy: Policy, keys: int, verb: str) -> None:
    """Raise if *policy* bounds the queue, and a call of the task at *where* has several *keys*."""
    if keys > 1 and bounds(policy).max_waiting:
        raise ConfigurationError(
            f"{where}: {policy!r} bounds the queue of one key, and lock_key {verb} {keys}"
        )


def _own(task: type[Any], *layers: Layer) -> set[str]:
    """Return the options in the declaration of *task*, and ``lock_lease`` if it is the default."""
    own = {name for name, value in vars(task).items() if value is not UNSET}
    if not any("lease" in layer.values for layer in layers):
        own.add("lock_lease")
    return own


def _refuse_idle(
    where: str, own: set[str], settings: Settings, policy: Policy, unique: CallRule | None
) -> None:
    """
    Raise for combinations of options that have no effect, or another one than they seem to.

    Only if the task's own declaration, *own*, has both options: bases, the app's settings and a
    worker's flags apply to many tasks, and must not keep a worker from starting.
    """
    if {"lock_wait", "lock_on_conflict"} <= own:
        if isinstance(policy, Skip | Fail):
            raise ConfigurationError(
                f"{where}: lock_wait has no effect with the policy {policy!r}; to wait before"
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
    recalls = isinstance(unique, Latest) and unique.recalls
    if {"lock_unique", "lock_watchdog"} <= own and not settings.watchdog and recalls:
        raise ConfigurationError(
            f"{where}: with lock_watchdog=False no lease is renewed, and by a renewal a task learns"
            f" that it is asked to leave, as {unique!r} says; leave lock_watchdog out, or write"
            " running='finish'"
        )
    longest = settings.max_hold if {"lock_max_hold", "lock_lease"} <= own else None
    if longest is not None and settings.watchdog and longest < settings.lease:
        raise ConfigurationError(
            f"{where}: lock_max_hold is {longest:g} s and lock_lease"
            f" {settings.lease:g} s, and no key is held for less than its lease: shorten the lease"
        )
    if {"lock_via", "lock_unique"} <= own and unique is not None and settings.via != "store":
        raise ConfigurationError(
            f"{where}: lock_via={settings.via!r} has no effect, because calls with"
            " lock_unique go through the store; leave one of the two out"
        )


def _sends(where: str, settings: Settings, rule: KeyRule, policy: Policy, wanted_by: str) -> bool:
    """Whether calls go through the store; raise if the task itself asks for it and they cannot."""
    why_not = _why_not_sent(rule, policy) if settings.via == "store" else ""
    if why_not and wanted_by:
        raise ConfigurationError(f"{where}: {wanted_by} needs {why_not}")
    return settings.via == "store" and not why_not


def _why_not_sent(rule: KeyRule, policy: Policy) -> str:
    """Return what is missing for calls to go through the store; empty: nothing."""
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
