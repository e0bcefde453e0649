"""A trace of Sentry's or Datadog's is whole, however a task of it comes to run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from celery_distlock.testing import die_with_parent
from tests import tracing
from tests.waiting import wait_until
from tests.worker.conftest import staffed
from tests.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.conftest import Site

APP = "tests.apps.handed_on"


class Call(NamedTuple):
    """What a web process has sent: its task's id, the trace, and the spans there."""

    id: str
    trace: str
    spans: list[str]


class Traced:
    """A site with a tracer in its worker, and a web process with the same."""

    def __init__(self, site: Site, web: subprocess.Popen[str]) -> None:
        self.site = site
        self._web = web

    def call(self, task: str, *args: str, **options: Any) -> Call:
        """Send a task, from within a trace."""
        assert self._web.stdin is not None
        assert self._web.stdout is not None
        print(json.dumps([task, args, options]), file=self._web.stdin, flush=True)
        sent = json.loads(self._web.stdout.readline())
        return Call(sent["id"], sent["trace"]["trace"], sent["spans"])

    def runs(self, sent: Call, count: int = 1) -> list[dict[str, Any]]:
        """Return of what trace the runs of a call were a part, and of which span."""
        seen = self.site.journal.wait(f"{sent.id}:saw", count, timeout=60.0)
        return [run["trace"] for run in seen]


@pytest.fixture(scope="module", params=tracing.PACKAGES)
def traced(request, bare_site: Site, tmp_path_factory) -> Iterator[Traced]:
    if reason := tracing.why_not(request.param):
        pytest.skip(f"no {request.param}: make test-all puts it into .venvs/tracers; {reason}")
    bare_site.env |= tracing.environment(request.param)
    command, env = [sys.executable, "-m", APP], {**os.environ, **bare_site.env}
    workers = [{"concurrency": 4}]
    with (
        staffed(bare_site, tmp_path_factory.mktemp("workers"), workers) as site,
        subprocess.Popen(
            die_with_parent(command, signal.SIGKILL),
            env=env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as web,
    ):
        yield Traced(site, web)


def straight(traced: Traced, key: str) -> Call:
    return traced.call("locked", key)


def parked_by_the_pool(traced: Traced, key: str) -> Call:
    with traced.site.held(key):
        sent = traced.call("locked", key)
        traced.site.wait_queued(key)
    return sent


def parked_by_the_main_process(traced: Traced, key: str) -> Call:
    first = traced.call("locked", key, "gate")
    traced.runs(first)
    sent = traced.call("locked", key)
    traced.site.wait_queued(key)
    traced.site.journal.open(key)
    return sent


def sent_by_the_broker(traced: Traced, key: str) -> Call:
    with traced.site.held(key):
        sent = traced.call("locked", key)
        traced.site.wait_queued(key)
        traced.site.forget_channel(key)
    return sent


def resent(traced: Traced, key: str) -> Call:
    with traced.site.held(key):
        sent = traced.call("resent", key)
        result = traced.site.app.AsyncResult(sent.id)
        wait_until(lambda: result.state == "PARKED", what="a conflict")
    return sent


def through_the_store(traced: Traced, key: str) -> Call:
    return traced.call("locked", key, lock_via="store")


def waiting_in_the_store(traced: Traced, key: str) -> Call:
    with traced.site.held(key):
        sent = traced.call("locked", key, lock_via="store")
        traced.site.wait_queued(key)
    return sent


WAYS = [
    straight,
    parked_by_the_pool,
    parked_by_the_main_process,
    sent_by_the_broker,
    resent,
    through_the_store,
    waiting_in_the_store,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_task_goes_on_with_the_trace_of_its_call(traced, key, way):
    sent = way(traced, key)

    (run,) = traced.runs(sent)

    assert run["trace"] == sent.trace
    assert run["parent"] in sent.spans


@pytest.mark.parametrize("how", ["fail", "postpone"])
def test_a_task_that_is_put_back_goes_on_with_the_trace_of_its_call(traced, key, how):
    sent = traced.call("locked", key, how)

    first, second = traced.runs(sent, 2)

    assert first["trace"] == sent.trace
    assert first["parent"] in sent.spans
    assert second == first


@pytest.mark.parametrize("via", ["broker", "store"])
def test_a_retry_goes_on_with_the_trace_of_the_attempt_before(traced, key, via):
    plain = traced.call("plain", key, "retry")
    sent = traced.call("locked", key, "retry", lock_via=via)

    for each in (plain, sent):
        first, second = traced.runs(each, 2)
        assert first["trace"] == second["trace"] == each.trace
        assert first["parent"] in each.spans
        assert second["parent"] not in each.spans
