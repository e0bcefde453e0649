import re
import subprocess
import sys
from contextlib import closing

import pytest

from tests.acceptance.examples.scripts import EXAMPLES, run

# One product of 3 units, and orders for 4: three are sold, one is refused.
HONEST_SALE = """
    INSERT INTO stock VALUES ('TEE', 2000, 3, 0);
    INSERT INTO orders VALUES (1, 'TEE', 1), (2, 'TEE', 1), (3, 'TEE', 1), (4, 'TEE', 1);
    INSERT INTO decisions VALUES
        (1, 'TEE', 1, 1, 10.0, 10.1),
        (2, 'TEE', 1, 1, 10.2, 10.3),
        (3, 'TEE', 1, 1, 10.4, 10.5),
        (4, 'TEE', 1, 0, 10.6, 10.7);
"""

CORRUPTIONS = {
    "more units sold": "UPDATE decisions SET sold = 1",
    "the stock left is not": "UPDATE stock SET units_left = 1",
    "refused although": "UPDATE stock SET on_hand = 4, units_left = 1",
    "lost": "DELETE FROM decisions WHERE order_id = 4",
    "decided more than once": "INSERT INTO decisions VALUES (4, 'TEE', 1, 0, 10.8, 10.9)",
    "decided otherwise": "UPDATE decisions SET quantity = 2 WHERE order_id = 4",
    "begun while": "UPDATE decisions SET began_at = 10.25 WHERE order_id = 3",
    "begun while a killed one": "INSERT INTO kills VALUES (99, 4, 'TEE', 10.15, 10.25)",
}


@pytest.fixture
def books(monkeypatch):
    """The examples' module of that name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "books", raising=False)
    import books

    yield books
    del sys.modules["books"]


@pytest.fixture
def shop(books, tmp_path):
    path = tmp_path / "shop.sqlite"
    with closing(books.open_shop(path, [], [])) as db:
        db.executescript(HONEST_SALE)
    return path


def corrupt(books, shop, statement):
    with closing(books.open_books(shop)) as db:
        db.execute(statement)


def test_an_honest_sale_passes_the_audit(books, shop):
    audit = books.audit(shop)

    assert audit.right, audit.faults
    assert (audit.orders, audit.sold, audit.refused) == (4, 3, 1)


@pytest.mark.parametrize("rule", CORRUPTIONS)
def test_the_audit_finds_a_fault(books, shop, rule):
    corrupt(books, shop, CORRUPTIONS[rule])

    broken = [name for name, rows in books.audit(shop).faults.items() if rows]

    assert any(name.startswith(rule.split(" a killed")[0]) for name in broken), broken


def test_what_is_oversold_is_counted(books, shop):
    corrupt(books, shop, "UPDATE decisions SET sold = 1")

    audit = books.audit(shop)

    assert (audit.oversold_units, audit.oversold_products, audit.oversold_cents) == (1, 1, 2000)


def test_the_audit_shows_when_a_killed_process_was_replaced(books, shop):
    corrupt(books, shop, "INSERT INTO kills VALUES (99, 4, 'TEE', 10.32, 10.35)")

    (kill,) = books.audit(shop).kills

    assert kill.until_next_order == pytest.approx(0.05)
    assert kill.until_this_order == pytest.approx(0.35)


def test_the_audit_exits_with_1_if_the_books_are_wrong(books, shop):
    command = [sys.executable, EXAMPLES / "books.py", shop]

    honest = subprocess.run(command, capture_output=True, text=True, check=False)
    corrupt(books, shop, CORRUPTIONS["more units sold"])
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (honest.returncode, honest.stdout) == (0, "exactly right\n")
    assert wrong.returncode == 1
    assert "more units sold than there were" in wrong.stdout


def test_the_shipped_orders_are_what_the_generator_makes(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import make_orders

    assert make_orders.load() == make_orders.make()


def run_demo(folder, *options, env=None):
    return run(folder, EXAMPLES / "demo.py", *options, env=env)


def table_of(output):
    """The figures of the three runs by their label."""
    rows = [line.strip("│ ").split("│") for line in output.splitlines() if line.startswith("│")]
    return {label.strip(): [number(cell) for cell in cells] for label, *cells in rows}


def number(cell):
    return float(re.sub(r"[,\s]", "", cell))


@pytest.mark.faults
def test_the_demo_sells_exactly_what_there_is_and_leaves_nothing_behind(tmp_path):
    demo = run_demo(tmp_path, "--orders", "300")

    assert demo.returncode == 0, demo.stdout + demo.stderr
    table = table_of(demo.stdout)
    assert table["orders"] == [300, 300, 300]
    assert [s + r for s, r in zip(table["sold"], table["refused"], strict=True)] == table["orders"]
    assert table["lost orders"] == [0, 0, 0]
    assert table["processes killed"][:2] == [0, 0]
    assert table["processes killed"][2] >= 1  # three, unless the orders run out before
    for figure in ("units oversold", "overlapping orders", "refused in error", "decided twice"):
        assert table[figure][1:] == [0, 0], figure
    assert "locked: exactly right" in demo.stdout
    assert "locked + kills: exactly right" in demo.stdout
    assert "never a sixth call of one tenant: yes" in demo.stdout
    assert "the small tenant does not wait for the flood: yes" in demo.stdout
    assert "takes longer, because orders for one product wait for one another" in demo.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_demo_says_what_is_missing(tmp_path):
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(name='rich')")

    demo = run_demo(tmp_path, env={"PYTHONPATH": str(tmp_path)})

    assert demo.returncode == 1
    assert demo.stderr.startswith("The demo needs rich")
