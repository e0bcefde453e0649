"""Tasks that report what came with their message, and a worker that reports what came to it."""

from __future__ import annotations

from typing import Any

from celery import signals
from kombu import Exchange, Queue

from celery_distlock import LockedTask, install, policies
from celery_distlock.runtime.message_facts import LockHeader
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(
    __name__,
    distlock_sweep_interval=0.5,
    accept_content=["json", "pickle", "yaml", "msgpack"],
    task_queues=[
        Queue("celery", Exchange("celery"), "celery"),
        Queue("stock", Exchange("shop", type="topic"), "stock.#"),
    ],
)
install(app)
journal = Journal.of_environment()

# The transport's own, what a transport says twice, and ours.
_APART = {
    *("delivery_tag", "delivery_info", "body_encoding"),
    *("application_headers", "content_type", "content_encoding"),
    "distlock",
}
# What the task's body sees of its message.
_SEEN = [
    *("id", "root_id", "parent_id", "lang", "task", "shadow", "expires", "group", "group_index"),
    *("retries", "timelimit", "argsrepr", "kwargsrepr", "origin", "ignore_result", "reply_to"),
    *("correlation_id", "callbacks", "errbacks", "chain", "chord", "stamps", "stamped_headers"),
    "replaced_task_nesting",
]


def _without_ours(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in _APART}


@signals.task_received.connect(weak=False)
def _note_message(request: Any, **_: Any) -> None:
    message = request._message
    if not message.headers["task"].startswith("echo_"):
        return
    headers = _without_ours(message.headers)
    headers.pop("eta", None)  # what sends a task again by countdown
    where = message.delivery_info
    body = message.body
    content = {
        "type": message.content_type,
        "encoding": message.content_encoding,
        "body": body if isinstance(body, str) else body.decode("latin-1"),
        "payload": repr(message.payload),
    }
    note = {
        "header": headers,
        "property": _without_ours(message.properties),
        "content": content,
        "delivery": {
            "exchange": where["exchange"],
            "routing key": where["routing_key"],
            "redelivered": bool(where.get("redelivered")),
        },
        "limit": {"hard": request.time_limits[0], "soft": request.time_limits[1]},
    }
    pushed = bool((message.properties.get("distlock") or {}).get("pushed"))
    journal.write(f"{request.id}:pushed", pushed)
    journal.write(f"{request.id}:woken", LockHeader.of(message.headers).woken)
    journal.write(f"{request.id}:received", note)


@signals.task_prerun.connect(weak=False)
def _put_into_request(task: Any, **_: Any) -> None:
    """Do as a tracer does that keeps what is its own in the request."""
    task.request.span = object()
    task.request.baggage = "not sent"


def echo(self: Any, key: str, *args: Any, **kwargs: Any) -> None:
    request = self.request
    seen = {
        "argument": {"all": repr((args, kwargs))},
        "delivery": {
            name: request.delivery_info.get(name)
            for name in ("exchange", "routing_key", "priority")
        },
        "property": _without_ours(request.properties),
        "header": {k: v for k, v in (request.headers or {}).items() if k[:2] == "x-"},
        "request": {name: repr(getattr(request, name)) for name in _SEEN},
    }
    journal.write(f"{request.id}:ran", seen)


echo_requeue = app.task(
    base=LockedTask, bind=True, name="echo_requeue", lock_key="{key}", shared=False
)(echo)
echo_retry = app.task(
    base=LockedTask,
    bind=True,
    name="echo_retry",
    lock_key="{key}",
    lock_on_conflict=policies.Retry(delay=1.0, factor=1.0, turns=False),
    shared=False,
)(echo)


@app.task(base=LockedTask, bind=True, lock_key="{key}", shared=False)
def block(self: Any, key: str, gate: str) -> None:
    """Keep the key until the gate is open."""
    journal.write(gate, None)
    journal.pass_gate(gate)


@app.task(shared=False)
def note(_result: Any, name: str) -> None:
    journal.write(name, None)
