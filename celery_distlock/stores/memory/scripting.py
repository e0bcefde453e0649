"""Runs the scripts of the Redis store in this process."""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from celery_distlock.errors import ConfigurationError
from celery_distlock.process.forks import ForkStage, PerProcess
from celery_distlock.stores.redis.scripts import Script

from .commands import Status, number
from .keyspace import RefusedError

Call: TypeAlias = Callable[..., Any]  # executes a command: its name and words

# The environment that a server gives to scripts. A script is the body of a function without
# arguments.
_PRELUDE = b"""
local call, decode, encode = ...
redis = {}

local function answer(is_done, found)
    if is_done then
        return found
    end
    error(found, 0)
end

function redis.call(...)
    return answer(call(...))
end

function redis.pcall(...)
    local is_done, found = call(...)
    if is_done then
        return found
    end
    return { err = found }
end

cjson = { decode = decode }

function cjson.encode(value)
    return answer(encode(value))
end

local set, compile, G = rawset, loadstring, _G
setmetatable(G, {
    __index = function(_, name)
        error('ERR script attempted to access nonexistent global variable ' .. tostring(name), 0)
    end,
    __newindex = function(_, name)
        error('ERR script attempted to create global variable ' .. tostring(name), 0)
    end,
})

return function(body, many, ...)
    local words = { ... }
    set(G, 'KEYS', { unpack(words, 1, many) })
    set(G, 'ARGV', { unpack(words, many + 1) })
    return (body())
end, compile
"""


class Interpreter:
    """
    A Lua 5.1 interpreter, shared by all stores in this process.

    Attributes:
        mutex: Must be held while a script or a command is executed. A signal handler may interrupt
            the thread that holds it, and must not enter again: see :meth:`Server.execute`.

    Raises:
        ConfigurationError: Lua 5.1 is not installed.
    """

    def __init__(self) -> None:
        try:
            from lupa import lua51
        except ImportError as error:
            raise ConfigurationError(
                "locks in memory need lupa, with Lua 5.1: pip install 'celery-distlock[memory]'"
            ) from error
        self.mutex = threading.RLock()
        self._error: type[Exception] = lua51.LuaError
        self._type: Callable[[Any], str | None] = lua51.lua_type
        self._lua = lua51.LuaRuntime(
            encoding=None,
            unpack_returned_tuples=True,
            register_eval=False,
            register_builtins=False,
        )
        self._run, self._compile = self._lua.execute(
            _PRELUDE, self._from_lua, self._decode, self._encode
        )
        self._bodies: dict[str, Any] = {}
        self._call: Call

    def run(self, script: Script, many: int, words: Sequence[bytes], call: Call) -> Any:
        """
        Execute *script* and return its answer.

        Args:
            script: The script.
            many: The number of words that are keys.
            words: Its keys, then its arguments.
            call: Executes its commands.

        Raises:
            RefusedError: The script ended with an error.
        """
        body = self._bodies.get(script.sha)
        if body is None:
            body = self._compile(script.source.encode(), f"@{script.name}.lua".encode())
            self._bodies[script.sha] = body
        self._call = call
        try:
            return self._from_table(self._run(body, many, *words))
        except self._error as error:
            line = _text(error.args[0]).partition("\nstack traceback:")[0]
            code, _, said = line.partition(" ")
            if code.isupper():
                raise RefusedError(said, code) from None
            raise RefusedError(f"{code} {said}") from None

    def _from_lua(self, name: bytes, *words: Any) -> tuple[bool, Any]:
        """Execute a command; return whether it succeeded, and its answer or the error."""
        try:
            found = self._call(
                name, *[word if type(word) is bytes else number(word) for word in words]
            )
        except RefusedError as error:
            return False, str(error).encode()
        return True, found if type(found) is bytes else self._to_lua(found)

    def _to_lua(self, found: Any) -> Any:
        if found is None:
            return False
        if isinstance(found, list):
            return self._lua.table_from([self._to_lua(each) for each in found])
        return self._lua.table_from({b"ok": bytes(found)}) if isinstance(found, Status) else found

    def _from_table(self, found: Any) -> Any:
        """Convert the result of a script to the answer of a server."""
        if isinstance(found, bytes):
            return found
        if isinstance(found, bool) or found is None:
            return 1 if found else None
        if isinstance(found, int | float):
            return int(found)
        if (error := found[b"err"]) is not None:
            code, _, words = error.decode(errors="replace").partition(" ")
            raise RefusedError(words, code)
        if (status := found[b"ok"]) is not None:
            return status
        answers: list[Any] = []
        while (each := found[len(answers) + 1]) is not None:
            answers.append(self._from_table(each))
        return answers

    def _decode(self, written: bytes) -> Any:
        return self._read(json.loads(written.decode("utf-8", "surrogateescape")))

    def _read(self, found: Any) -> Any:
        if isinstance(found, str):
            return found.encode("utf-8", "surrogateescape")
        if isinstance(found, list):
            return self._lua.table_from([self._read(each) for each in found])
        if isinstance(found, dict):
            return self._lua.table_from({self._read(k): self._read(v) for k, v in found.items()})
        return found

    def _encode(self, value: Any) -> tuple[bool, bytes]:
        """Encode a value as JSON; return whether that succeeded, and the JSON or the error."""
        try:
            written = json.dumps(self._written(value), ensure_ascii=False, allow_nan=False)
        except ValueError:
            return False, b"ERR Cannot serialise number: must not be NaN or Inf"
        return True, written.encode("utf-8", "surrogateescape")

    def _written(self, value: Any) -> Any:
        """Convert a value of Lua for `json`; bytes that are not UTF-8 are preserved."""
        if isinstance(value, bytes):
            return value.decode("utf-8", "surrogateescape")
        if type(value) in (int, float):
            shortened = float(f"{value:.14g}")  # a server writes 14 digits
            return value if shortened == value else shortened
        if self._type(value) != "table":
            return value
        if value[1] is not None:
            return [self._written(value[number + 1]) for number in range(len(value))]
        return {self._written(name): self._written(each) for name, each in value.items()}


def _text(said: object) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


# Re-created after a fork, before the stores are: a thread of the parent may be in a script.
interpreter = PerProcess(Interpreter, ForkStage.IDENTITY)
