"""What the pages ask their readers to do can be done; see `tests.acceptance.docs.reader`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)  # a page may start several workers, one after the other

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
ELSEWHERE = {
    DOCS / "explanation" / "benchmarks.md",  # `make bench`
    DOCS / "explanation" / "scale.md",  # tests/acceptance/test_project.py
    DOCS / "howto" / "monitoring.md",  # tests/integration/operations
    DOCS / "howto" / "write_a_store.md",  # tests/acceptance/examples/test_sqlite_store.py
}
DONE = re.compile(r"^(```|<!--- \S+: )(python|pycon|console|\{code-block\})", re.MULTILINE)
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in set(DOCS.rglob("*.md")) - ELSEWHERE
    if DONE.search(page.read_text())
)


def test_there_is_something_to_do():
    assert {"docs/tutorial.md", "docs/howto/django.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_as_it_says(page, follow, private_server):
    server = private_server()
    if page == "docs/tutorial.md":
        server.stop()  # its reader starts one

    said = follow(ROOT / page, server.port)

    assert not said, said
