"""Processes that do what is ordered, one thing at a time each."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

# Not forks of this process, which has threads and connections, nor interpreters of their own, which
# take long to start: forks of one that has done nothing but import.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["contention", "dues", "handoff", "leases", "units"])


class Team:
    """*size* processes, ended by leaving the ``with`` block."""

    def __init__(self, size: int) -> None:
        self._pipes, theirs = zip(*(context.Pipe() for _ in range(size)), strict=True)
        self._members = [
            context.Process(target=_serve, args=(pipe,), daemon=True) for pipe in theirs
        ]

    def __enter__(self) -> Self:
        for member in self._members:
            member.start()
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for member in self._members:
            member.join()

    def submit(self, member: int, work: Callable[..., Any], *arguments: Any) -> None:
        self._pipes[member].send((work, arguments))

    def hear(self, member: int) -> Any:
        """Return the answer of *member* to its last order."""
        result = self._pipes[member].recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def together(self, members: int, work: Callable[..., Any], *arguments: Any) -> Sequence[Any]:
        """Have the first *members* do the same."""
        for member in range(members):
            self.submit(member, work, *arguments)
        return [self.hear(member) for member in range(members)]


def _serve(pipe: Connection) -> None:
    while order := pipe.recv():
        work, arguments = order
        try:
            pipe.send(work(*arguments))
        except Exception as error:  # noqa: BLE001  # the caller raises it
            pipe.send(error)
