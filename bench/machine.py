"""What the figures were measured on, in one line."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from celery_distlock.testing import EmbeddedServer

LIBRARIES = (
    "celery",
    "redis",
    "hiredis",
    "python-redis-lock",
    "pottery",
    "dramatiq",
    "celery-singleton",
    "celery-once",
)


def describe(server: EmbeddedServer, libraries: Sequence[str] = LIBRARIES) -> str:
    parts = [
        f"{os.cpu_count()} cores",
        f"{platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}",
        _server(server),
        *(f"{library} {_version(library)}" for library in libraries),
        f"load average {os.getloadavg()[0]:.1f} before",
    ]
    return ", ".join(parts)


def _server(server: EmbeddedServer) -> str:
    with server.client() as client:
        facts = client.info("server")
    valkey = facts.get("valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {facts['redis_version']}"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "(not installed)"
