"""A task that each worker gets a copy of, as by a `Broadcast` queue, and that is sent again."""

from __future__ import annotations

from contextlib import ExitStack

from kombu import Exchange

from tests.waiting import wait_until

WORKERS = [{"concurrency": 1}, {"concurrency": 1}]


def test_each_worker_sends_again_its_own_copy_alone(site, key):
    exchange = Exchange(f"of-{key}", "fanout")
    names = [worker.name for worker in site.workers]
    for name in names:
        consume(site, name, f"{key}-{name}", exchange)

    with ExitStack() as held:
        for name in names:
            held.enter_context(site.held(f"{key}:{name}"))
        how = {"exchange": exchange, "routing_key": "all", "declare": [exchange]}
        result = site.tasks.work_for_its_worker.apply_async((key,), **how)
        for worker in site.workers:
            worker.wait_log(f"[{result.id}] is sent again")

    assert sorted(site.journal.wait(key, 2)) == sorted(names)
    received = site.log().count(f"[{result.id}] received")
    assert received == 2 + site.log().count(f"[{result.id}] is sent again")


def consume(site, worker: str, queue: str, exchange: Exchange) -> None:
    def consumes() -> object:  # again, if it did not listen yet
        return site.app.control.add_consumer(
            queue, exchange.name, "fanout", "all", destination=[worker], reply=True
        )

    wait_until(consumes, what=f"{worker} to consume it")
    wait_until(
        lambda: site.store.channels.find_channels([queue]), timeout=30.0, what="it to be consumed"
    )
