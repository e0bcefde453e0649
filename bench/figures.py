"""What is measured, as it is kept, compared and shown."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Figure:
    """A number, and what it should be at most or at least."""

    value: float
    unit: str = ""
    places: int = 2
    at_most: float | None = None
    at_least: float | None = None

    @property
    def goal(self) -> str:
        for sign, limit in (("≤", self.at_most), ("≥", self.at_least)):
            if limit is not None:
                return f"{sign} {limit:,.{self.places}f}{self.unit and ' '}{self.unit}"
        return ""

    @property
    def missed(self) -> bool:
        # As it is shown: 1.104 is 1.10.
        shown = round(self.value, self.places)
        above = self.at_most is not None and shown > self.at_most
        return above or (self.at_least is not None and shown < self.at_least)

    def __str__(self) -> str:
        separator = "" if self.unit.startswith("/") else self.unit and " "
        return f"{self.value:,.{self.places}f}{separator}{self.unit}"


@dataclass(frozen=True)
class Row:
    name: str
    ratio: Figure
    figures: Sequence[Figure | str]


@dataclass(frozen=True)
class Part:
    """A table: what its ratios are, the heads of its other columns, its rows."""

    name: str
    title: str
    ratio: str
    columns: Sequence[str]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Self:
        """Undo :func:`dataclasses.asdict`."""
        rows = [
            Row(row["name"], _figure(row["ratio"]), [_figure(each) for each in row["figures"]])
            for row in plain["rows"]
        ]
        return cls(**{**plain, "rows": rows})


def _figure(plain: Any) -> Any:
    return Figure(**plain) if isinstance(plain, Mapping) else plain


def in_turn(works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call all *works* once a round: what disturbs one is to disturb the others as well."""
    results: dict[str, list[Any]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            results[name].append(work())
    return results


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


median = statistics.median
