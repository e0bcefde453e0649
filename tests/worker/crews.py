"""Workers of an app, started once for all the modules that want the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests import servers
from tests.workers import WorkerProcess, stop_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


class Crew:
    """
    The workers of one app, for one broker and prefix.

    Args:
        app: A module of `tests.apps`, by its full name.
        env: Its environment.
        folder: Where the logs go.
        workers: For each worker, the other arguments of `WorkerProcess`.
    """

    def __init__(
        self, app: str, env: dict[str, str], folder: Path, workers: Iterable[Mapping[str, Any]]
    ) -> None:
        self.app, self.env, self._folder, self._arguments = app, env, folder, list(workers)
        self.workers: list[WorkerProcess] = []

    def start(self) -> list[WorkerProcess]:
        """Return the workers, all of them ready; start them all again if one has ended."""
        if not self.workers or not all(worker.running for worker in self.workers):
            self.stop()
            self.workers = [
                WorkerProcess(self.app, folder=self._folder, env=self.env, **each)
                for each in self._arguments
            ]
            for worker in self.workers:
                worker.start(wait=False)
        for worker in self.workers:
            worker.wait_ready()
        return self.workers

    def stop(self) -> None:
        stop_all(self.workers, warm=10.0)
        self.workers = []


class SharedCrews:
    """Crews that go on running for the next module that wants the same one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._crews: dict[str, Crew] = {}

    def find(
        self, app: str, env: Mapping[str, str], url: str, workers: Iterable[Mapping[str, Any]]
    ) -> Crew:
        """Return the crew of *app* over the server at *url*, with the additions *env*."""
        wanted = repr((app, sorted(env.items()), url, workers))
        if wanted not in self._crews:
            env = {**env, **servers.environment(url, servers.new_prefix())}
            self._crews[wanted] = Crew(app, env, self._folder, workers)
        return self._crews[wanted]

    def close(self) -> None:
        """Stop all workers at the same time: each takes seconds."""
        crews = self._crews.values()
        stop_all((worker for crew in crews for worker in crew.workers), warm=10.0)
        for crew in crews:
            servers.delete_keys(crew.env["DISTLOCK_TEST_BROKER"], crew.env["DISTLOCK_TEST_PREFIX"])
