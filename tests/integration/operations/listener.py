"""What subscribed to events, as Flower does."""

from __future__ import annotations

import threading

from celery.events.state import State

from tests.waiting import wait_until


class Listener(threading.Thread):
    """Keeps the events that the broker brings, as Flower does."""

    def __init__(self, app) -> None:
        super().__init__(daemon=True)
        self.seen = []
        self.state = State()
        self._listening = threading.Event()
        self._connection = app.connection_for_read()
        self._receiver = app.events.Receiver(self._connection, handlers={"*": self._note})
        self._receiver.on_consume_ready = lambda *_, **__: self._listening.set()
        self.start()
        assert self._listening.wait(60)
        # kombu subscribes to what is sent to all only when it reads for the first time.
        with app.events.default_dispatcher() as dispatcher:
            wait_until(lambda: dispatcher.send("listener-ready") or self.seen, what="an event")

    def run(self) -> None:
        with self._connection:
            self._receiver.capture(limit=None, timeout=None, wakeup=False)

    def _note(self, event) -> None:
        self.state.event(dict(event))
        self.seen.append(event)

    def of(self, key: str):
        return [e for e in list(self.seen) if e["type"][:9] == "distlock-" and e["key"] == key]

    def kinds(self, key: str):
        return [event["type"].removeprefix("distlock-") for event in self.of(key)]

    def stop(self) -> None:
        self._receiver.should_stop = True
        self.join(60)
