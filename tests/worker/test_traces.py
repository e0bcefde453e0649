"""What Sentry, Datadog and OpenTelemetry show: whole traces, and as errors only what is one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from celery_distlock import clock
from celery_distlock.testing import die_with_parent
from tests import tracing
from tests.waiting import wait_until
from tests.worker.conftest import staffed
from tests.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.worker.conftest import Site

APP = "tests.apps.handed_on"
SLOTS = 4


class Call(NamedTuple):
    """What a web process has sent: its task's id, the trace, and the spans there."""

    id: str
    trace: str
    spans: list[str]


class Words(NamedTuple):
    """What a tracer calls the span of a run, and how it says that the run ended."""

    span: str
    away: str  # it waits, and another run follows
    done: str
    failed: str


WORDS = {
    "sentry": Words("queue.task.celery", "aborted", "ok", "internal_error"),
    "datadog": Words("celery.run", "IGNORED", "SUCCESS", "FAILURE"),
    "opentelemetry": Words("run/", "IGNORED", "SUCCESS", "FAILURE"),
}


class Traced:
    """A site with a tracer in its worker, and a web process with the same."""

    def __init__(self, name: str, site: Site, web: subprocess.Popen[str], file: Path) -> None:
        self.name = name
        self.words = WORDS[name]
        self.site = site
        self._web = web
        self._file = file

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

    def shown(self, sent: Call) -> list[dict[str, Any]]:
        """Return all spans and errors of a call's trace, so far."""
        return [each for each in tracing.sent(self._file) if each["trace"] == sent.trace]

    def ends(self, sent: Call, *wanted: str) -> list[str]:
        """Return how the runs of a call ended, once there are all of *wanted*."""

        def ended() -> list[str]:
            return [
                each["facts"].get("celery.state") or each["status"]
                for each in self.shown(sent)
                if each["kind"] == "span" and each["name"].startswith(self.words.span)
            ]

        what = f"runs that are {wanted}"
        wait_until(lambda: {*wanted} <= {*ended()}, timeout=60.0, what=what)
        return ended()

    def errors(self, sent: Call) -> list[str]:
        """Return what is reported as an error in a call's trace."""
        return [
            each["name"]
            for each in self.shown(sent)
            if each["kind"] == "error" or each["status"] in ("error", "ERROR")
        ]


@pytest.fixture(scope="module", params=tracing.PACKAGES)
def traced(request, bare_site: Site, tmp_path_factory) -> Iterator[Traced]:
    if reason := tracing.why_not(request.param):
        pytest.skip(f"no {request.param}: make test-all puts it into .venvs/tracers; {reason}")
    file = tmp_path_factory.mktemp("traced") / "sent"
    bare_site.env |= {**tracing.environment(request.param), tracing.FILE: str(file)}
    command, env = [sys.executable, "-m", APP], {**os.environ, **bare_site.env}
    workers = [{"concurrency": SLOTS}]
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
        yield Traced(request.param, site, web, file)


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


def fails_and_goes_back(traced: Traced, key: str) -> Call:
    return traced.call("locked", key, "fail")


def postpones_itself(traced: Traced, key: str) -> Call:
    return traced.call("locked", key, "postpone")


@pytest.mark.parametrize(
    "way",
    [parked_by_the_pool, resent, fails_and_goes_back, postpones_itself],
    ids=lambda way: way.__name__,
)
def test_a_run_that_another_one_follows_is_no_error(traced, key, way):
    words = traced.words
    sent = way(traced, key)

    ends = traced.ends(sent, words.away, words.done)

    assert {*ends} <= {words.away, words.done}
    assert ends.count(words.done) == 1
    assert traced.errors(sent) == []


def test_a_task_that_is_parked_on_receipt_has_one_run(traced, key):
    sent = parked_by_the_main_process(traced, key)

    assert traced.ends(sent, traced.words.done) == [traced.words.done]
    assert traced.errors(sent) == []


def test_a_skipped_task_has_succeeded(traced, key):
    with traced.site.held(key):
        sent = traced.call("skipped", key)
        ends = traced.ends(sent, traced.words.done)

    assert ends == [traced.words.done]
    assert traced.errors(sent) == []


def test_a_refused_task_has_failed_as_expected(traced, key):
    """OpenTelemetry's comparison with a task's `throws` misses it since Python 3.11."""
    with traced.site.held(key):
        sent = traced.call("refused", key)
        ends = traced.ends(sent, traced.words.failed)

    assert ends == [traced.words.failed]
    assert traced.errors(sent) == (["run/refused"] if traced.name == "opentelemetry" else [])


def test_a_refused_task_that_expects_nothing_is_an_error(traced, key):
    with traced.site.held(key):
        sent = traced.call("reported", key)
        traced.ends(sent, traced.words.failed)

    name = {
        "sentry": "LockConflictError",
        "datadog": "celery.run reported",
        "opentelemetry": "run/reported",
    }[traced.name]
    assert traced.errors(sent) == [name]


def test_a_lost_lock_is_an_error_of_its_own_task(traced, key):
    """Though a thread finds it that an earlier task of the process has started."""
    before = [traced.call("locked", f"{key}:{number}", "gate") for number in range(SLOTS)]
    for number, each in enumerate(before):
        traced.runs(each)
        traced.site.journal.open(f"{key}:{number}")
        traced.ends(each, traced.words.done)
    sent = traced.call("losing", key, "gate")
    traced.runs(sent)

    traced.site.forget(key)
    traced.ends(sent, traced.words.failed)

    line = f"Task losing[{sent.id}] lost its lock {key!r}"
    expected = {
        "sentry": ["LockLostError", line],
        "datadog": ["celery.run losing"],
        "opentelemetry": ["lock hold", "run/losing"],
    }[traced.name]
    # Threads report some of it, before or after the end of the run.
    wait_until(
        lambda: sorted(each.partition(" (token")[0] for each in traced.errors(sent)) == expected,
        what=f"{expected} and nothing else",
    )
    assert [traced.errors(each) for each in before] == [[]] * SLOTS


@pytest.mark.parametrize("traced", ["sentry"], indirect=True)
def test_the_latency_of_sentry_includes_the_wait(traced, key):
    with traced.site.held(key):
        sent = traced.call("locked", key)
        traced.site.wait_queued(key)
        queued_at = clock.monotonic()
        traced.ends(sent, traced.words.away)
        waited = clock.monotonic() - queued_at
    traced.ends(sent, traced.words.done)

    latency = "messaging.message.receive.latency"
    before, after = (
        each["facts"][latency] for each in traced.shown(sent) if latency in each["facts"]
    )
    assert after - before >= waited * 1000
