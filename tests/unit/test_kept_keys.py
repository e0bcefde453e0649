"""Which keys an attempt leaves to the next one, with `lock_hold_on_retry`."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Retry

from celery_distlock.keys import KeyRule
from celery_distlock.runtime.message_facts import execution_id
from celery_distlock.runtime.retries import kept_for_retry


class Unreadable:
    """Can be written, and not be read again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def kept(retry: Retry, **facts: Any) -> dict[str, tuple[str, float]]:
    """Return what is kept of the key "a", for which run, of an attempt that *retry* sent."""
    signature = inspect.signature(lambda key, note=None: None)
    rule = KeyRule("{key}", task="work", signature=signature)
    settings = SimpleNamespace(hold_on_retry=True, lease=30.0, on_lost="abort")
    invocation = SimpleNamespace(
        plan=SimpleNamespace(settings=settings, rule=rule),
        task=SimpleNamespace(serializer="pickle"),
        request=SimpleNamespace(id="task", retries=0, replaced_task_nesting=0, **facts),
        has_message=True,
        taken=[SimpleNamespace(key="a")],
    )
    return kept_for_retry(invocation, retry)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "keys"),
    [(("a",), {"a"}), (("b",), set()), ((), set()), (("a", Unreadable()), set())],
    ids=["the same key", "another key", "none that fit", "what cannot be read"],
)
def test_what_the_next_attempt_wants_is_kept_and_nothing_if_it_cannot_say(args, keys):
    sent = SimpleNamespace(args=args, kwargs={}, options={})

    assert kept(Retry("again", when=1.0, sig=sent)).keys() == keys


@pytest.mark.parametrize("copied", [False, True], ids=["Celery 5.7", "before"])
def test_the_key_is_kept_for_the_attempt_whose_message_was_sent(copied):
    deaths = {"x-death": [{"reason": "rejected", "queue": "jobs", "count": 1}]}
    headers = deaths if copied else {}
    sent = SimpleNamespace(args=("a",), kwargs={}, options={"headers": headers})

    run, _ = kept(Retry("again", when=1.0, sig=sent), **deaths)["a"]

    assert run == execution_id({"id": "task", "retries": 1, **headers})
