"""A store within one process, which runs the Redis store's own scripts."""

from .store import MemoryStore

__all__ = ["MemoryStore"]
