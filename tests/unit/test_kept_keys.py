"""Which keys an attempt leaves to the next one, with `lock_hold_on_retry`."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Retry

from celery_distlock.keys import KeyRule
from celery_distlock.runtime.body import Body


class Unreadable:
    """Can be written, and not be read again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def kept(retry: Retry) -> set[str]:
    """Return what is kept of the key "a" for an attempt that *retry* has sent."""
    signature = inspect.signature(lambda key, note=None: None)
    rule = KeyRule("{key}", task="work", signature=signature)
    settings = SimpleNamespace(hold_on_retry=True, lease=30.0, on_lost="abort")
    invocation = SimpleNamespace(
        plan=SimpleNamespace(settings=settings, rule=rule),
        task=SimpleNamespace(serializer="pickle"),
        request=SimpleNamespace(retries=0),
        has_message=True,
        execution_id_for=lambda retries: f"task:{retries}:0:0",
    )
    body = Body(invocation, SimpleNamespace(taken=[SimpleNamespace(key="a")]), None)  # type: ignore[arg-type]
    body._keep_keys(retry)
    return set(body.keep_for)


@pytest.mark.parametrize(
    ("args", "keys"),
    [(("a",), {"a"}), (("b",), set()), ((), {"a"}), (("b", Unreadable()), {"a"})],
    ids=["the same key", "another key", "none that fit", "what cannot be read"],
)
def test_what_the_next_attempt_wants_is_kept_or_all_if_nobody_can_say(args, keys):
    sent = SimpleNamespace(args=args, kwargs={}, options={})

    assert kept(Retry("again", when=1.0, sig=sent)) == keys
