"""
Put the figures of a run into a page, between its markers.

    python bench/report.py [build/bench.json [docs/explanation/benchmarks.md]]
"""

import re
import sys
from pathlib import Path

from figures import Part
from results import DEFAULT, Results, head, lines

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "benchmarks.md"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    results = Results.load(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
    page = Path(sys.argv[2]) if len(sys.argv) > 2 else PAGE
    page.write_text(BLOCK.sub(lambda block: _block(results, *block.groups()), page.read_text()))
    return 0


def _block(results: Results, begin: str, name: str, end: str) -> str:
    if name == "machine":
        return f"{begin}{results.machine}\n{end}"
    return f"{begin}{_table(results.part(name))}\n{end}"


def _table(part: Part) -> str:
    columns = head(part)
    aligned = ["---" if not column or column == "terms" else "---:" for column in columns]
    rows = [columns, aligned, *lines(part)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([table, *(f"\n{note}" for note in part.notes)])


if __name__ == "__main__":
    sys.exit(main())
