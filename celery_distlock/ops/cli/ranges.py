"""The numbers that the command line takes."""

import math
from typing import Any

import click

__all__ = ["COUNT", "DAY", "PLACE", "PORT", "Seconds"]

DAY = 86_400.0  # seconds

PORT = click.IntRange(0, 65_535)
PLACE = click.IntRange(0, 10**9)  # further than any queue or list is long
COUNT = click.IntRange(1, 10**9)


class Seconds(click.FloatRange):
    """Finite seconds from *least* to *most*; to click alone, nan is in every range."""

    name = "seconds"

    def __init__(self, least: float, most: float) -> None:
        super().__init__(least, most)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return *value* as a number; raise :exc:`click.BadParameter` if it is none of them."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return number
