"""
``make chaos``: real workers under real faults, over each place that locks can be in.

Exit status 1: something is broken; what, and where the logs are, is said.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from celery_distlock import clock
from tests.chaos.breakages import BREAKAGES
from tests.chaos.judge import PATIENCE, counted, judge
from tests.chaos.places import PLACES
from tests.chaos.stage import Stage

if TYPE_CHECKING:
    from tests.chaos.judge import History, Verdict

LEAST = 40.0  # seconds for one place; less shows nothing
ENDING = 0.25  # of a place's time, for what was sent to run
MOST_LINES = 20  # of what is broken, for one place
LEAST_RUNS = 1.0  # a second; fewer show nothing


class Report(NamedTuple):
    """What became of one place."""

    place: str
    verdict: Verdict
    control: Verdict
    faults: str
    broken: list[str]


def main() -> int:
    given = _arguments()
    logging.getLogger().addHandler(logging.NullHandler())  # our own store's, under faults
    names = given.place or [name for name, place in PLACES.items() if not place.missing]
    for name, place in PLACES.items():
        if place.missing and not given.place:
            print(f"{name} is left out: this machine lacks {place.missing}")
    count = max(1, int(given.seconds // LEAST))
    if count < len(names):  # another one at another time
        names = random.Random(given.seed).sample(names, count)
    each = given.seconds / len(names)
    print(f"SEED={given.seed}; {each:.0f} s for each of: {', '.join(names)}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="celery-distlock-chaos-"))
    try:
        reports = [_play(name, each, folder / name, given) for name in names]
    except BaseException:
        print(f"BROKEN OFF. The workers' logs are in {folder}")
        raise
    _print(reports)
    broken = [line for report in reports for line in _lines(report)]
    if not broken:
        shutil.rmtree(folder)
        return 0
    print(*broken, sep="\n")
    print(f"BROKEN. The workers' logs and all that is known are in {folder}")
    return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of all places together")
    parser.add_argument("--seed", default="", help="repeats what is sent and what happens")
    parser.add_argument("--place", action="append", choices=PLACES, help="only this one")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        help="seconds that a key with waiters may stay idle; more on a busy machine",
    )
    parser.add_argument("--pairs", action="store_true", help="tasks that need two keys, too")
    parser.add_argument("--break", dest="breakage", choices=BREAKAGES, default="")
    given = parser.parse_args()
    given.seed = given.seed or str(random.SystemRandom().randrange(10**6))
    return given


def _play(name: str, seconds: float, folder: Path, given: argparse.Namespace) -> Report:
    folder.mkdir()
    begin = clock.monotonic()
    choose = random.Random(f"{given.seed} {name}")
    with (
        PLACES[name]() as place,
        Stage(place, folder, choose, pairs=given.pairs, breakage=given.breakage) as stage,
    ):
        stage.play(begin + seconds * (1 - ENDING))
        locked, plain = stage.history()
    verdict, control = judge(locked), judge(plain)
    _save(folder, locked)
    broken = [*verdict.broken(given.patience), *stage.died]
    if len(locked.runs) < LEAST_RUNS * seconds:
        broken.append(f"only {len(locked.runs)} runs, which shows nothing")
    print(f"{name}: {clock.monotonic() - begin:.0f} s, {'BROKEN' if broken else 'ok'}", flush=True)
    faults = counted(locked.faults) + (f", {stage.callers_killed} caller" * bool(verdict.calls))
    return Report(name, verdict, control, faults, broken)


def _save(folder: Path, seen: History) -> None:
    for what in ("runs", "faults", "looks", "calls"):
        lines = (json.dumps(each._asdict()) for each in getattr(seen, what))
        (folder / f"{what}.json").write_text("\n".join(lines))
    sent = (f"{task} {seen.sent_at.get(task, 0.0)} {task in seen.dropped}" for task in seen.sent)
    (folder / "sent").write_text("\n".join(sorted(sent)))


def _print(reports: list[Report]) -> None:
    table = [
        ["", *(report.place for report in reports)],
        *_rows(reports),
        ["without locks: tasks", *(str(report.control.tasks) for report in reports)],
        ["  lost", *(str(len(report.control.lost)) for report in reports)],
        ["  lost by the broker's driver", *(str(report.control.dropped) for report in reports)],
        ["  ran again", *(str(report.control.twice) for report in reports)],
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells))
    for report in reports:
        print(f"{report.place}: {report.faults}")


def _lines(report: Report) -> list[str]:
    lines = [f"{report.place}: {what}" for what in report.broken[:MOST_LINES]]
    left = len(report.broken) - len(lines)
    return [*lines, f"{report.place}: and {left} more"] if left else lines


def _rows(reports: list[Report]) -> list[list[str]]:
    rows = {
        "tasks": lambda found: found.tasks,
        "lost": lambda found: len(found.lost),
        "lost by the broker's driver": lambda found: found.dropped,
        "overlaps believed": lambda found: len(found.overlaps),
        "fallen tokens": lambda found: len(found.fallen),
        "out of order": lambda found: f"{len(found.disordered)} of {found.pairs}",
        "ran again for no reason": lambda found: f"{len(found.repeated)} of {found.twice}",
        "locks lost": lambda found: found.locks_lost,
        "calls through the store": lambda found: f"{found.calls}, {found.joined} joined",
        "wrong calls": lambda found: len(found.wrong_calls),
        "begun too often": lambda found: len(found.too_often),
        "out of turn": lambda found: f"{len(found.out_of_turn)} of {found.turns}",
        "standstills over 5 s": lambda found: found.long_standstills,
        "longest standstill": lambda found: f"{found.standstill.seconds:.1f} s",
    }
    return [[what, *(str(ask(each.verdict)) for each in reports)] for what, ask in rows.items()]


if __name__ == "__main__":
    sys.exit(main())
