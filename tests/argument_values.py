"""Arguments of every kind that people give to tasks."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import uuid
import zoneinfo
from collections import OrderedDict
from typing import Any, NamedTuple


class State(str, enum.Enum):  # noqa: UP042  # which `StrEnum` is not: its text is "State.PAID"
    PAID = "paid"


class Size(enum.StrEnum):
    LARGE = "L"


class Rank(int, enum.Enum):
    FIRST = 1


class Level(enum.IntEnum):
    HIGH = 3


class Rights(enum.IntFlag):
    READ = 4


class Colour(enum.Enum):
    RED = "red"


class Sku(str):
    __slots__ = ()

    def __str__(self) -> str:
        return f"<{super().__str__()}>"


class Count(int):
    def __repr__(self) -> str:
        return f"Count({int(self)})"


class Celsius(float):
    def __format__(self, spec: str) -> str:
        return f"{super().__format__(spec)} °C"


class Moment(datetime.datetime):
    def __str__(self) -> str:
        return "a moment"


class Price(decimal.Decimal):
    def __str__(self) -> str:
        return "a price"


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass(frozen=True)
class Order:
    number: int
    state: State


class Told:
    """Has a form for JSON."""

    def __json__(self) -> dict[str, Any]:
        return {"told": (1, State.PAID)}


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
VALUES: list[Any] = [
    *(None, True, 7, -0.0, 2.5, 1e300, "tee", "", "né"),
    *(State.PAID, Size.LARGE, Rank.FIRST, Level.HIGH, Rights.READ, Colour.RED),
    *(Sku("tee"), Count(7), Celsius(2.5)),
    *((1, State.PAID), [1, (2, State.PAID)], Point(1, State.PAID), Point(1, (2.0, None))),
    *({3, 1, 2}, frozenset("abcdef"), {("a", 1), ("b", 2)}, set(State)),
    *({"b": 1, "a": State.PAID}, {7: "x", "8": "y"}, {None: 1, True: 2, 1.5: 3}),
    *({State.PAID: 1, Rank.FIRST: 2}, OrderedDict(b=1, a=2)),
    *(b"ab", b"\xff", bytearray(b"ab")),
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, 12, 30),  # noqa: DTZ001
    datetime.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=datetime.UTC),
    datetime.datetime(2024, 2, 29, 12, 30, tzinfo=BERLIN),
    [datetime.datetime(2024, 7, 29, 12, 30, tzinfo=BERLIN)],
    Moment(2024, 2, 29, tzinfo=datetime.UTC),
    datetime.time(12, 30, tzinfo=datetime.UTC),
    datetime.timedelta(days=1, seconds=2),
    *(decimal.Decimal("1.10"), Price("1.10"), uuid.UUID(int=7)),
    *(Order(7, State.PAID), [Order(7, State.PAID)], Told()),
]
