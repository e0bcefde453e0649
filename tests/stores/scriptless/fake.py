"""
A small server that has the commands of one kind of server, and few others.

It is a fake: Tair is a service and Redis 8.4 is not installed here, so what they do with the
commands in question is done as their documentation has it (Tair: "CAS and CAD"; redis.io: "SET",
"DELEX"). It shows that the store speaks these words, and not that such a server understands them.
"""

from __future__ import annotations

import socketserver
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

TAIR = frozenset({"CAS", "CAD"})
REDIS_8_4 = frozenset({"IFEQ", "DELEX"})
VALKEY_8_1 = frozenset({"IFEQ"})
NOTHING: frozenset[str] = frozenset()


class RefusedError(Exception):
    """An error as the server sends it."""


class FakeServer:
    """Listens on a free port of loopback; *words* are those that it has beyond the usual."""

    def __init__(self, words: frozenset[str]) -> None:
        self.words = words
        self._values: dict[bytes, tuple[Any, float]] = {}
        self._mutex = threading.Lock()
        fake = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while line := self.rfile.readline():
                    words = [self._word() for _ in range(int(line[1:]))]
                    self.wfile.write(fake._answer(words))

            def _word(self) -> bytes:
                size = int(self.rfile.readline()[1:])
                return self.rfile.read(size + 2)[:-2]

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.asked: list[str] = []  # commands, in their order

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._server.server_address[1]}/0?scripts=off"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, words: list[bytes]) -> bytes:
        name, *arguments = words
        with self._mutex:
            self.asked.append(name.decode().upper())
            try:
                return _packed(self._execute(name.decode().upper(), arguments))
            except RefusedError as refusal:
                return b"-ERR %s\r\n" % str(refusal).encode()

    def _execute(self, name: str, arguments: list[bytes]) -> Any:
        if name in {"CAS", "CAD", "DELEX"} and name not in self.words:
            raise RefusedError(f"unknown command '{name}'")
        do = getattr(self, f"_{name.lower()}", None)
        if do is None:
            raise RefusedError(f"unknown command '{name}'")
        return do(*arguments)

    # Commands

    def _client(self, *_: bytes) -> str:
        return "OK"

    def _info(self, *_: bytes) -> bytes:
        return b"role:master\r\nmaxmemory_policy:noeviction\r\n"

    def _time(self) -> list[bytes]:
        now = time.time_ns() // 1000
        return [b"%d" % (now // 10**6), b"%d" % (now % 10**6)]

    def _get(self, key: bytes) -> bytes | None:
        value, until = self._values.get(key, (None, 0.0))
        return value if time.time() < until else None

    def _pttl(self, key: bytes) -> int:
        return -2 if self._get(key) is None else int(1000 * (self._values[key][1] - time.time()))

    def _del(self, key: bytes) -> int:
        return int(self._values.pop(key, None) is not None)

    def _pexpire(self, key: bytes, ms: bytes) -> int:
        value, _ = self._values[key]
        self._values[key] = (value, time.time() + int(ms) / 1000)
        return 1

    def _zadd(self, key: bytes, gt: bytes, score: bytes, _member: bytes) -> int:
        assert gt == b"GT"
        last = self._get(key)
        if last is None or int(score) > int(last):
            self._values[key] = (score, time.time() + 3600)
        return int(last is None)

    def _zscore(self, key: bytes, _member: bytes) -> bytes | None:
        return self._get(key)

    def _set(self, key: bytes, value: bytes, *options: bytes) -> str | None:
        left, until = list(options), float("inf")
        while left:
            option = left.pop(0).decode().upper()
            if option == "NX":
                if self._get(key) is not None:
                    return None
            elif option == "IFEQ" and "IFEQ" in self.words:
                if self._get(key) != left.pop(0):
                    return None
            elif option == "PX":
                until = time.time() + int(left.pop(0)) / 1000
            elif option == "PXAT":
                until = int(left.pop(0)) / 1000
            else:
                raise RefusedError("syntax error")
        self._values[key] = (value, until)
        return "OK"

    def _cas(self, key: bytes, old: bytes, new: bytes, unit: bytes, ms: bytes) -> int:
        assert unit == b"PX"
        if (found := self._get(key)) != old:
            return -1 if found is None else 0
        self._values[key] = (new, time.time() + int(ms) / 1000)
        return 1

    def _cad(self, key: bytes, old: bytes) -> int:
        if (found := self._get(key)) != old:
            return -1 if found is None else 0
        return self._del(key)

    def _delex(self, key: bytes, condition: bytes, old: bytes) -> int:
        assert condition == b"IFEQ"
        return self._del(key) if self._get(key) == old else 0


def _packed(answer: Any) -> bytes:
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, str):
        return b"+%s\r\n" % answer.encode()
    if isinstance(answer, list):
        return b"*%d\r\n" % len(answer) + b"".join(map(_packed, answer))
    return b"$%d\r\n%b\r\n" % (len(answer), answer)
