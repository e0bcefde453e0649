"""Shell completion of keys from the store; offers none if the store does not answer soon."""

import glob
import logging
import re
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from celery_distlock.process.threads import DaemonThread
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import ListingStore, Store

PATIENCE = 2.0  # seconds that the tab key waits for the store
# The shell inserts a key unquoted, and would interpret other characters.
_HARMLESS = re.compile(r"(?!-)[\w@%+=:,./-]+").fullmatch
MOST = 100  # keys that are offered


def complete_key(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return keys that begin with *incomplete*."""
    found: list[str] = []
    logging.getLogger("celery_distlock").addHandler(logging.NullHandler())
    with suppress(Exception):
        store = _store(ctx)
        search = DaemonThread("distlock-completion", _search, store, incomplete, found)
        search.start()
        search.join(PATIENCE)
    return [CompletionItem(key) for key in found[:MOST]]


def _search(store: Store, incomplete: str, found: list[str]) -> None:
    with suppress(Exception):
        for keys in ListingStore.of(store).find_keys(f"{glob.escape(incomplete)}*"):
            found += filter(_HARMLESS, keys)
            if len(found) >= MOST:
                return


def _store(ctx: click.Context) -> Store:
    from celery.app.utils import find_app

    group, root = ctx.parent, ctx.find_root()
    runtime = Runtime.of(find_app(root.params["app"]))
    given = group.params if group is not None else {}
    if flags := {name: given[name] for name in ("url", "prefix") if given.get(name)}:
        runtime.use_flags(flags)
    return runtime.store
