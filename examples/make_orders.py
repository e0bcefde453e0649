"""
Make the orders and the stock of the demo: a tour's merchandise goes on sale.

A few designs are far more popular than the shop expected, so it runs out of
them while others stay on the shelf. One seed always gives the same orders;
`orders.csv` and `stock.csv` were written by running this file as it is:

    python examples/make_orders.py
"""

import csv
import random
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path

HERE = Path(__file__).parent
ORDERS = 2400
SEED = 7

SALE_OPENS = datetime(2026, 3, 6, 10, tzinfo=UTC)
MEAN_GAP = 0.3  # seconds between two orders
FIRST_ORDER_ID = 100_001
STOCK_PER_DEMAND = 0.62  # units on hand for each unit that will be ordered
QUANTITIES, QUANTITY_WEIGHTS = (1, 2, 3, 4), (72, 20, 6, 2)

SIZES = ("S", "M", "L")
DESIGNS = (  # code, name, price in cents
    ("HOOD", "Hoodie, embroidered", 5900),
    ("TOUR", "Tour shirt with dates", 3200),
    ("LONG", "Long sleeve, black", 3800),
    ("CREW", "Crew neck sweater", 5200),
    ("LOGO", "Logo shirt", 2800),
    ("RING", "Ringer shirt", 3000),
    ("TANK", "Tank top", 2600),
    ("COAC", "Coach jacket", 7900),
    ("POLO", "Polo shirt", 3600),
    ("SOCK", "Socks, two pairs", 1400),
    ("RAIN", "Rain jacket", 6900),
    ("KIDS", "Kids' shirt", 2200),
)


@dataclass(frozen=True)
class Product:
    sku: str
    name: str
    price: int  # cents
    on_hand: int


@dataclass(frozen=True)
class Order:
    order_id: int
    sku: str
    quantity: int
    customer: str
    placed_at: str


def make(count: int = ORDERS, seed: int = SEED) -> tuple[list[Product], list[Order]]:
    """Return the stock, and *count* orders that ask for more than there is."""
    rng = random.Random(seed)
    labels = [
        (f"{code}-{size}", f"{name}, size {size}", price)
        for code, name, price in DESIGNS
        for size in SIZES
    ]
    # What people want is steeper than what the shop has planned for.
    ranks = sorted(range(1, len(labels) + 1), key=lambda _: rng.random())
    wanted = [rank**-0.8 for rank in ranks]
    planned = [rank**-0.35 for rank in ranks]

    orders = list(make_orders(rng, [sku for sku, _, _ in labels], wanted, count))
    units = STOCK_PER_DEMAND * sum(order.quantity for order in orders)
    products = [
        Product(sku, name, price, max(1, round(units * share / sum(planned))))
        for (sku, name, price), share in zip(labels, planned, strict=True)
    ]
    return products, orders


def make_orders(rng, skus, wanted, count):
    placed_at = SALE_OPENS
    for number in range(count):
        placed_at += timedelta(seconds=2 * MEAN_GAP * rng.random())
        yield Order(
            order_id=FIRST_ORDER_ID + number,
            sku=rng.choices(skus, wanted)[0],
            quantity=rng.choices(QUANTITIES, QUANTITY_WEIGHTS)[0],
            customer=f"C-{int(rng.random() * count * 0.8) + 1:05d}",
            placed_at=placed_at.isoformat(timespec="milliseconds"),
        )


def load() -> tuple[list[Product], list[Order]]:
    """Return what the two shipped files hold."""
    return read(HERE / "stock.csv", Product), read(HERE / "orders.csv", Order)


def read(path, kind):
    types = {field.name: field.type for field in fields(kind)}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            kind(**{name: types[name](text) for name, text in row.items()})
            for row in csv.DictReader(file)
        ]


def write(path, kind, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    products, orders = make()
    write(HERE / "stock.csv", Product, products)
    write(HERE / "orders.csv", Order, orders)
