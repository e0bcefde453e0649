"""What is asked of the result backend about a task that waits."""

from __future__ import annotations

from celery import Celery
from celery.contrib.abortable import AbortableTask

from celery_distlock.runtime.reporting import is_aborted


def test_a_task_that_can_be_aborted_is_not_where_no_results_are_stored():
    def work() -> None: ...

    with Celery("states", broker="memory://", set_as_current=False) as app:
        task = app.task(base=AbortableTask, shared=False)(work)

        assert not is_aborted(app.tasks[task.name], "an-id")
