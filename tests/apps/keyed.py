"""Tasks that return the keys which they have."""

from __future__ import annotations

from typing import Any

from celery_distlock import LockedTask, install
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(__name__, accept_content=["json", "pickle", "yaml", "msgpack"])
install(app)
journal = Journal.of_environment()


def by_code(value: Any) -> str:
    return f"code:{value}"


def _keys(self: LockedTask, value: Any) -> list[str]:
    return list(self.lock.keys)


def _task(name: str, lock_key: Any, **options: Any) -> Any:
    options = {"base": LockedTask, "bind": True, "shared": False, "name": name, **options}
    return app.task(**options, lock_key=lock_key)(_keys)


TASKS = {
    "whole": _task("whole", "whole:{value}"),
    "repr": _task("repr", "repr:{value!r}"),
    "digest": _task("digest", "{task}:{digest}"),
    "code": _task("code", by_code),
}
# Of dictionaries with a state, whose keys may be no text.
inside = _task("inside", "inside:{value[7]}:{value[state]}:{value[more][0]}")
once = _task("once", "once", lock_unique="started")
by_state = _task("by_state", "state:{value.value}")
