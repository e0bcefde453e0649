"""How long tasks of this process hold their keys; it tells when a key may be free again."""

__all__ = ["note", "usual"]

WEIGHT = 0.3  # of the newest
MOST = 1000  # names; a program has fewer tasks

_seconds: dict[str, float] = {}


def note(task: str, seconds: float) -> None:
    """Take the *seconds* for which *task* held its keys into its average."""
    known = _seconds.get(task)
    if known is None and len(_seconds) >= MOST:
        _seconds.clear()
    _seconds[task] = seconds if known is None else known + WEIGHT * (seconds - known)


def usual(task: str) -> float:
    """Return the moving average of the seconds for which *task* holds its keys; 0: not known."""
    return _seconds.get(task, 0.0)
