"""A task that is woken may have to wait for a rate limit of Celery's as well."""

from __future__ import annotations

from contextlib import ExitStack

WORKERS = [{"concurrency": 2}]


def test_a_woken_task_that_waits_for_it_is_received_once(site, key):
    task, keys = site.tasks.work_requeue, [f"{key}-{number}" for number in range(2)]
    with ExitStack() as held:
        for each in keys:
            held.enter_context(site.held(each))
        results = [task.delay(each) for each in keys]
        for each in keys:
            site.wait_queued(each)
        begun = len(site.log())
        site.app.control.rate_limit(task.name, "12/m", reply=True)

    for result in results:
        assert result.get(timeout=60) == 0

    log = site.log()[begun:]
    assert [log.count(f"[{result.id}] received") for result in results] == [1, 1]
    assert "second delivery" not in log
