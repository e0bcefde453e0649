"""A store within one process, which runs the scripts of the Redis store itself."""

from .store import MemoryStore

__all__ = ["MemoryStore"]
