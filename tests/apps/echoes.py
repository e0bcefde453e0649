"""Tasks that tell what came with their message."""

from __future__ import annotations

import os
from typing import Any

from kombu import Exchange, Queue

from celery_distlock import LockedTask, install, policies
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(__name__)
app.conf.update(
    distlock_prefix=f"{os.environ['DISTLOCK_TEST_PREFIX']}:lock",
    distlock_lease=1.0,
    distlock_sweep_interval=0.5,
    accept_content=["json", "pickle", "yaml", "msgpack"],
    task_queues=[
        Queue("celery", Exchange("celery"), "celery"),
        Queue("stock", Exchange("shop", type="topic"), "stock.#"),
    ],
)
install(app)
journal = Journal.of_environment()

# What no two messages have in common, and what is noted on the way. The expiry in the properties
# counts from the moment of sending; the one in the headers is a date.
PASSING = {
    *("delivery_tag", "delivery_info", "correlation_id", "body_encoding", "distlock"),
    "expiration",
}
FACTS = [
    *("lang", "task", "shadow", "expires", "group", "group_index", "retries", "timelimit"),
    *("parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result", "reply_to", "callbacks"),
    *("errbacks", "chain", "chord", "stamps", "stamped_headers", "replaced_task_nesting"),
]


def echo(self: Any, key: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    request = self.request
    journal.write(request.id, None)
    return {
        "args": repr((args, kwargs)),
        "exchange": request.delivery_info["exchange"],
        "routing key": request.delivery_info["routing_key"],
        "properties": {k: v for k, v in request.properties.items() if k not in PASSING},
        "headers": {k: v for k, v in (request.headers or {}).items() if k[:2] == "x-"},
        **{name: repr(getattr(request, name)) for name in FACTS},
    }


echo_requeue = app.task(
    base=LockedTask, bind=True, name="echo_requeue", lock_key="{key}", shared=False
)(echo)
echo_retry = app.task(
    base=LockedTask,
    bind=True,
    name="echo_retry",
    lock_key="{key}",
    lock_on_conflict=policies.Retry(delay=0.01, factor=1.0),
    shared=False,
)(echo)


@app.task(shared=False)
def note(_result: Any, name: str) -> None:
    journal.write(name, None)
