"""The file that a run leaves behind, and its tables as text."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from figures import Figure, Part, Row

DEFAULT = Path(__file__).parents[1] / "build" / "bench.json"


@dataclass(frozen=True)
class Results:
    machine: str
    parts: Sequence[Part]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Results":
        plain = json.loads(path.read_text())
        return cls(plain["machine"], [Part.load(part) for part in plain["parts"]])

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)


def head(part: Part) -> list[str]:
    return [part.ratio, "goal", "", *part.columns]


def lines(part: Part) -> Iterator[list[str]]:
    """Give the cells of each row: the ratio, what it should be, of what, everything else."""
    for row in part.rows:
        yield [str(row.ratio), _goal(row.ratio), row.name, *map(_cell, row.figures)]


def misses(part: Part) -> list[str]:
    """Name what missed its goal."""
    return [
        f"{part.name}: {row.name}: {column} is {figure}, not {figure.goal}"
        for row in part.rows
        for column, figure in _named(part, row)
        if isinstance(figure, Figure) and figure.missed
    ]


def _named(part: Part, row: Row) -> Iterator[tuple[str, Figure | str]]:
    yield part.ratio, row.ratio
    yield from zip(part.columns, row.figures, strict=True)


def _goal(figure: Figure) -> str:
    return f"{figure.goal}, missed" if figure.missed else figure.goal


def _cell(figure: Figure | str) -> str:
    goal = _goal(figure) if isinstance(figure, Figure) else ""
    return f"{figure} ({goal})" if goal else str(figure)
