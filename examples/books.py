"""
The shop's books, and their audit: do orders, sales and stock agree?

    python examples/books.py FOLDER/shop.sqlite     # exit status 1 if they do not
"""

import sqlite3
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

# Nothing here keeps an order from being decided twice, nor the stock from
# being oversold: that is left to the lock, and the audit looks at the outcome.
SCHEMA = """
CREATE TABLE stock (
    sku TEXT PRIMARY KEY, price INTEGER, on_hand INTEGER, units_left INTEGER
);
CREATE TABLE orders (order_id INTEGER PRIMARY KEY, sku TEXT, quantity INTEGER);
CREATE TABLE decisions (
    order_id INTEGER, sku TEXT, quantity INTEGER, sold INTEGER,
    began_at REAL, decided_at REAL
);
CREATE INDEX decisions_by_order ON decisions (order_id);
CREATE TABLE at_the_till (
    pid INTEGER PRIMARY KEY, order_id INTEGER, sku TEXT, began_at REAL
);
CREATE TABLE kills (
    pid INTEGER, order_id INTEGER, sku TEXT, began_at REAL, killed_at REAL
);
"""


def open_books(path: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=15, isolation_level=None)
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def open_shop(path: Path | str, products, orders) -> sqlite3.Connection:
    """Put *products* on the shelf of a new shop, and keep a copy of *orders*."""
    db = open_books(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript(SCHEMA)
    with db:
        db.execute("BEGIN")
        db.executemany(
            "INSERT INTO stock VALUES (?, ?, ?, ?)",
            [(p.sku, p.price, p.on_hand, p.on_hand) for p in products],
        )
        db.executemany(
            "INSERT INTO orders VALUES (?, ?, ?)",
            [(o.order_id, o.sku, o.quantity) for o in orders],
        )
    return db


# Every rule lists the rows that break it; an honest sale leaves all of them
# empty, in whatever order the customers were served.
RULES = {
    "more units sold than there were": """
        SELECT sku, units_sold, on_hand FROM shelf WHERE units_sold > on_hand
    """,
    "the stock left is not what was there less what was sold": """
        SELECT sku, on_hand, units_sold, units_left FROM shelf
        WHERE units_left <> on_hand - units_sold
    """,
    # Stock only ever falls, so what suffices at the end sufficed all along.
    "refused although there was enough": """
        SELECT order_id, sku, quantity, units_left
        FROM decisions JOIN shelf USING (sku)
        WHERE NOT sold AND quantity <= units_left
    """,
    "lost: ordered and never decided": """
        SELECT order_id, sku FROM orders
        WHERE order_id NOT IN (SELECT order_id FROM decisions)
    """,
    "decided more than once": """
        SELECT order_id, count(*) FROM decisions GROUP BY order_id HAVING count(*) > 1
    """,
    "decided otherwise than ordered": """
        SELECT order_id, sku, quantity FROM decisions
        EXCEPT SELECT order_id, sku, quantity FROM orders
    """,
    "begun while another order for the product was at work": """
        SELECT order_id, sku FROM (
            SELECT *, max(ended_at) OVER (
                PARTITION BY sku ORDER BY began_at
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS busy_until
            FROM visits
        )
        WHERE began_at < busy_until
    """,
}

VIEWS = """
CREATE TEMP VIEW shelf AS
    SELECT sku, price, on_hand, units_left, (
        SELECT coalesce(sum(quantity), 0) FROM decisions
        WHERE decisions.sku = stock.sku AND sold
    ) AS units_sold
    FROM stock;
CREATE TEMP VIEW visits AS
    SELECT order_id, sku, began_at, decided_at AS ended_at FROM decisions
    UNION ALL SELECT order_id, sku, began_at, killed_at FROM kills;
"""

FIGURES = """
SELECT
    (SELECT count(*) FROM orders) AS orders,
    (SELECT count(*) FROM decisions WHERE sold) AS sold,
    (SELECT count(*) FROM decisions WHERE NOT sold) AS refused,
    (SELECT coalesce(max(decided_at) - min(began_at), 0) FROM decisions) AS seconds,
    (SELECT count(*) FROM shelf WHERE units_sold > on_hand) AS oversold_products,
    (SELECT coalesce(sum(max(0, units_sold - on_hand)), 0) FROM shelf)
        AS oversold_units,
    (SELECT coalesce(sum(max(0, units_sold - on_hand) * price), 0) FROM shelf)
        AS oversold_cents
"""

KILLS = """
SELECT pid, order_id, sku,
    (SELECT min(began_at) FROM visits
        WHERE visits.sku = kills.sku AND began_at > killed_at) - killed_at
        AS until_next_order,
    (SELECT min(decided_at) FROM decisions
        WHERE decisions.order_id = kills.order_id) - killed_at
        AS until_this_order
FROM kills ORDER BY killed_at
"""


@dataclass(frozen=True)
class Kill:
    """A process that died at work, and the seconds until its product sold again."""

    pid: int
    order_id: int
    sku: str
    until_next_order: float | None
    until_this_order: float | None


@dataclass(frozen=True)
class Audit:
    orders: int
    sold: int
    refused: int
    seconds: float
    oversold_products: int
    oversold_units: int
    oversold_cents: int
    faults: dict[str, list[tuple]]
    kills: list[Kill]

    @property
    def right(self) -> bool:
        return not any(self.faults.values())

    def count(self, rule: str) -> int:
        """Return how often the rule that starts with *rule* was broken."""
        (name,) = (name for name in RULES if name.startswith(rule))
        return len(self.faults[name])


def audit(path: Path | str) -> Audit:
    """Read the books of the shop in *path*."""
    with closing(sqlite3.connect(path, timeout=15)) as db:
        db.executescript(VIEWS)
        figures = db.execute(FIGURES).fetchone()
        faults = {rule: db.execute(query).fetchall() for rule, query in RULES.items()}
        kills = [Kill(*row) for row in db.execute(KILLS)]
    return Audit(*figures, faults, kills)


def faults_in_words(books: Audit, examples: int = 3) -> list[str]:
    return [
        f"{rule}: {len(rows):,}, such as {rows[:examples]}"
        for rule, rows in books.faults.items()
        if rows
    ]


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("usage: python examples/books.py FOLDER/shop.sqlite", file=sys.stderr)
        return 2
    books = audit(sys.argv[1])
    print("\n".join(faults_in_words(books)) or "exactly right")
    return 0 if books.right else 1


if __name__ == "__main__":
    sys.exit(main())
