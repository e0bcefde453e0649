"""How long this process's tasks had their keys of late; it says when a key may be free again."""

__all__ = ["note", "usual"]

WEIGHT = 0.3  # of the newest
MOST = 1000  # names; a program has fewer tasks

_seconds: dict[str, float] = {}


def note(task: str, seconds: float) -> None:
    """Note that *task* has had its keys for so long."""
    known = _seconds.get(task)
    if known is None and len(_seconds) >= MOST:
        _seconds.clear()
    _seconds[task] = seconds if known is None else known + WEIGHT * (seconds - known)


def usual(task: str) -> float:
    """Return the seconds that *task* has its keys for, of late; 0 if it has not run here."""
    return _seconds.get(task, 0.0)
