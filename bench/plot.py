"""
Draw docs/explanation/benchmarks.svg from the figures of a run.

    python bench/plot.py [build/bench.json]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from figures import Part, Row
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from results import DEFAULT, Results

PICTURE = Path(__file__).parents[1] / "docs" / "explanation" / "benchmarks.svg"
OURS, OTHER = "#1f5fa8", "#b8c0c8"
OURSELVES = "celery-distlock"
STYLE = {
    "font.size": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "benchmarks",  # the same figures give the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def main() -> int:
    results = Results.load(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
    crowd = crowded(results.part("contention"))
    with mpl.rc_context(STYLE):
        picture = Picture(figsize=(9, 2))
        left, middle, right = picture.subplots(1, 3, sharey=True)
        draw(left, results.part("handoff").rows, 0, "hand-off, median [ms]")
        draw(middle, crowd, 4, "p99 wait, 32 processes [ms]")
        draw(right, crowd, 3, "Jain's fairness index, 32 processes")
        picture.tight_layout()
        picture.savefig(PICTURE, metadata={"Date": None})
    return 0


def crowded(part: Part) -> list[Row]:
    """Return the rows with the most processes."""
    most = max(row.figures[0].value for row in part.rows)
    return [row for row in part.rows if row.figures[0].value == most]


def draw(axes: Axes, rows: Sequence[Row], column: int, title: str) -> None:
    names = [row.name for row in rows]
    colours = [OURS if name == OURSELVES else OTHER for name in names]
    bars = axes.barh(names, [row.figures[column].value for row in rows], color=colours)
    axes.bar_label(bars, [str(row.figures[column]) for row in rows], padding=2)
    axes.set_title(title, loc="left", fontsize=8)
    axes.tick_params(left=False)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.25)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()


if __name__ == "__main__":
    sys.exit(main())
