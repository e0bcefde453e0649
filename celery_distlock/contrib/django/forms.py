"""The actions of the admin's page on a key: a form for each, with a permission and a reason."""

from collections.abc import Sequence
from typing import ClassVar

import click
from django import forms

from celery_distlock.key import MAX_CAPACITY
from celery_distlock.naming import printable
from celery_distlock.ops.acts import MOST_TEXT
from celery_distlock.ops.admin import Admin
from celery_distlock.ops.cli.limits import LONGEST
from celery_distlock.ops.cli.ranges import Duration
from celery_distlock.ops.looks import WaiterInfo
from celery_distlock.stores.values import KeyState


class Action(forms.Form):
    """
    One action on a key.

    Attributes:
        permission: The permission that it needs, without ``_lock``.
        warning: What an operator must know before.
        outcome: What it has done, before the name of the key.
    """

    permission: ClassVar[str]
    warning: ClassVar[str] = ""
    outcome: ClassVar[str]

    reason = forms.CharField(max_length=MOST_TEXT, help_text="Recorded, with your name.")

    def fill(self, lock: KeyState, waiters: Sequence[WaiterInfo]) -> bool:
        """Fill the form for a key as it is; return whether there is something to do."""
        return True

    def act(self, admin: Admin, key: str, author: str) -> bool:
        """Perform the action; return whether anything was done."""
        raise NotImplementedError


class Release(Action):
    """Takes the key from one holder, if that holder still has it."""

    permission = "release"
    warning = (
        "The holder is not asked. It notices within a third of its lease, and until then two tasks"
        " may run. Release what is stuck, not what is slow."
    )
    outcome = "Taken from its holder"
    field_order = ("holder", "token", "reason")

    holder = forms.CharField(widget=forms.Select)
    token = forms.IntegerField(widget=forms.HiddenInput)

    def fill(self, lock: KeyState, waiters: Sequence[WaiterInfo]) -> bool:
        self.initial = {"token": lock.token}
        self.fields["holder"].widget.choices = [
            (hold.who.owner, printable(str(hold.who) or "no holder: it rests"))
            for hold in lock.holds
        ]
        return bool(lock.holds)

    def act(self, admin: Admin, key: str, author: str) -> bool:
        owners = (self.cleaned_data.pop("holder"),)
        return admin.release(key, owners=owners, author=author, **self.cleaned_data).done


class Recall(Release):
    """Asks one holder to leave, which keeps the key until it does."""

    warning = (
        "The holder keeps the key until it leaves. It learns of that within a third of its lease; a"
        " task is interrupted then by RecalledError, unless it declares otherwise."
    )
    outcome = "Asked to leave: the holder"

    def fill(self, lock: KeyState, waiters: Sequence[WaiterInfo]) -> bool:
        super().fill(lock, waiters)
        return any(hold.state != "resting" for hold in lock.holds)

    def act(self, admin: Admin, key: str, author: str) -> bool:
        owners = (self.cleaned_data.pop("holder"),)
        return bool(admin.recall(key, owners=owners, author=author, **self.cleaned_data).asked)


class Drop(Action):
    """Removes one waiting task."""

    permission = "drop"
    warning = "The task never runs; its state becomes REVOKED, and a chord that waits for it fails."
    outcome = "Dropped a task that waited for it"
    field_order = ("task_id", "reason")

    task_id = forms.CharField(widget=forms.Select, label="Task")

    def fill(self, lock: KeyState, waiters: Sequence[WaiterInfo]) -> bool:
        tasks = [
            (each.who.task_id, printable(str(each.who))) for each in waiters if each.who.task_id
        ]
        self.fields["task_id"].widget.choices = tasks
        return bool(tasks)

    def act(self, admin: Admin, key: str, author: str) -> bool:
        return bool(admin.drop(key=key, author=author, **self.cleaned_data))


class _Lasting(Action):
    seconds = forms.CharField(
        label="For", required=False, help_text="90s, 15m, 2h; empty: until it is removed."
    )

    def clean_seconds(self) -> float:
        """Return the time in seconds; 0: it has no end."""
        try:
            return Duration(0.0, LONGEST).convert(self.cleaned_data["seconds"] or "0", None, None)
        except click.BadParameter as error:
            raise forms.ValidationError(error.message) from error


class Limit(_Lasting):
    """Limits the units of the key in use, or the rate of its starts, or both."""

    permission = "limit"
    warning = "It replaces an earlier limit, and a pause. Current holders are not affected."
    outcome = "Limited"
    field_order = ("units", "rate", "seconds", "reason")

    units = forms.IntegerField(min_value=1, max_value=MAX_CAPACITY, required=False)
    rate = forms.CharField(required=False, help_text="10/s, or several: 10/s 100/m.")

    def clean(self) -> None:
        if not (self.errors or self.cleaned_data["units"] or self.cleaned_data["rate"]):
            raise forms.ValidationError("Give units, a rate, or both.")

    def act(self, admin: Admin, key: str, author: str) -> bool:
        units, rate = self.cleaned_data.pop("units"), self.cleaned_data.pop("rate").split()
        admin.limit(key, units, rate=rate or None, author=author, **self.cleaned_data)
        return True


class Pause(_Lasting):
    """Stops new grants."""

    permission = "pause"
    warning = "There are no new grants then. Current holders are not affected."
    outcome = "Paused"
    field_order = ("seconds", "reason")

    def act(self, admin: Admin, key: str, author: str) -> bool:
        admin.limit(key, 0, author=author, **self.cleaned_data)
        return True


class Resume(Action):
    """Removes a limit or a pause."""

    permission = "pause"
    warning = "It removes the limit or the pause; what fits is woken at once."
    outcome = "Without a limit now"

    def fill(self, lock: KeyState, waiters: Sequence[WaiterInfo]) -> bool:
        return lock.limit is not None

    def act(self, admin: Admin, key: str, author: str) -> bool:
        return admin.limit(key, None, author=author, **self.cleaned_data).before.limit is not None


ACTIONS = {each.__name__.lower(): each for each in (Recall, Release, Drop, Limit, Pause, Resume)}
