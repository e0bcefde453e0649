"""The pages of locks in Django's admin."""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse

from celery_distlock.errors import DistlockError
from celery_distlock.keys import key_of, slot_name
from celery_distlock.ops.acts import MOST_TEXT
from celery_distlock.ops.admin import Admin
from celery_distlock.ops.cli.display import (
    ACTION_COLUMNS,
    HOLD_COLUMNS,
    LANE_COLUMNS,
    LOCK_COLUMNS,
    WAITER_COLUMNS,
    action_cells,
    hold_cells,
    lane_cells,
    lock_cells,
    waiter_cells,
)
from celery_distlock.ops.cli.single import key_facts
from celery_distlock.stores import Ability

from . import celery_app
from .forms import ACTIONS, Action
from .models import Lock

MOST_SHOWN = 500  # keys
QUEUE_PAGE = 100  # waiters


@admin.register(Lock)
class LockAdmin(admin.ModelAdmin):
    """Lists the keys, shows one, and acts on it."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: locks are not made here."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: each action has its own permission."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: see `has_change_permission`."""
        return False

    def get_urls(self) -> list[Any]:
        """Add the address of the actions."""
        act = self.admin_site.admin_view(self.act_view)
        address = path("<path:object_id>/act/<slug:action>/", act, name="celery_distlock_lock_act")
        return [address, *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """List the keys that match the pattern, or contain the text, ``q``."""
        text = request.GET.get("q", "").strip()
        pattern = text if any(c in text for c in "*?[") else f"*{text}*"

        def context(locks: Admin) -> Iterator[tuple[str, Any]]:
            found = list(islice(locks.locks(pattern), MOST_SHOWN + 1))
            now = time.time()
            rows = [
                (quote(slot_name(each.key)), lock_cells(each, now))
                for each in sorted(found[:MOST_SHOWN], key=lambda lock: (-lock.waiting, lock.key))
            ]
            yield "rows", rows
            yield "columns", LOCK_COLUMNS
            yield "more", len(found) > MOST_SHOWN

        return self._page(request, "list", context, title="Locks", q=text, most=MOST_SHOWN)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show one key, a page of its queue, and the forms of the actions that are permitted."""
        lock = Lock(name=unquote(object_id))
        given = request.GET.get("first", "")
        first = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0

        def context(locks: Admin) -> Iterator[tuple[str, Any]]:
            key = key_of(lock.name)
            info, lists = locks.show(key), Ability.LIST in locks.store.abilities
            waiters = locks.queue(key, first=first, limit=QUEUE_PAGE) if lists else []
            lanes = locks.lanes(key, limit=QUEUE_PAGE) if info.waiting else []
            now = time.time()
            forms = [
                (name, form(auto_id=f"{name}_%s"))
                for name, form in ACTIONS.items()
                if self._may(request, form)
            ]
            acts = [action_cells(each, now) for each in locks.actions(key)]
            tables = [
                ("Holders", HOLD_COLUMNS, [hold_cells(each, now) for each in info.holds]),
                ("Lanes", LANE_COLUMNS, [lane_cells(each, info) for each in lanes]),
                ("Queue", WAITER_COLUMNS, [waiter_cells(each, now) for each in waiters]),
                ("Operators", ACTION_COLUMNS, acts),
            ]
            following = first + QUEUE_PAGE
            yield "facts", key_facts(info, now)
            yield "forms", [(name, form) for name, form in forms if form.fill(info, waiters)]
            yield "tables", tables
            yield "next", following if following < info.waiting + info.later else 0

        return self._page(request, "show", context, title=str(lock), object_id=object_id)

    def act_view(self, request: HttpRequest, object_id: str, action: str) -> HttpResponse:
        """Perform one action if it is a POST, and show the key again."""
        lock, kind = Lock(name=unquote(object_id)), ACTIONS.get(action)
        if kind is None:
            raise Http404
        name = f"{self.admin_site.name}:celery_distlock_lock_change"
        shown = HttpResponseRedirect(reverse(name, args=[quote(lock.name)]))
        if request.method != "POST":  # as after a log-in in between
            return shown
        if not self._may(request, kind):
            raise PermissionDenied
        form = kind(request.POST)
        author = f"{request.user.get_username()} in Django's admin"[:MOST_TEXT]
        try:
            if not form.is_valid():
                wrong = " ".join(f"{name}: {' '.join(said)}" for name, said in form.errors.items())
                messages.error(request, f"Nothing was done. {wrong.removeprefix('__all__: ')}")
            elif form.act(Admin(celery_app()), key_of(lock.name), author):
                self.log_change(request, lock, f"{action}: {form.cleaned_data['reason']}")
                messages.success(request, f"{form.outcome}: {lock}")
            else:
                messages.warning(request, f"Nothing was done: {lock} has changed in the meantime.")
        except DistlockError as error:
            messages.error(request, str(error))
        return shown

    def _may(self, request: HttpRequest, action: type[Action]) -> bool:
        return bool(request.user.has_perm(f"celery_distlock.{action.permission}_lock"))

    def _page(self, request: HttpRequest, template: str, context: Any, **more: Any) -> HttpResponse:
        """Return a page with what *context* reads from the store, or with the store's error."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        shown = {**self.admin_site.each_context(request), "opts": self.opts, **more}
        status = 200
        try:
            shown.update(context(Admin(celery_app())))
        except DistlockError as error:
            shown["error"], status = str(error), 503
        name = f"admin/celery_distlock/lock/{template}.html"
        return TemplateResponse(request, name, shown, status=status)
