"""The documentation can be built, offline, and nothing in it leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from celery_distlock import errors, policies, signals, testing
from celery_distlock.settings import APP_ONLY, TASK_OPTIONS

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
# A proxy that is not there: nothing is reachable in the network.
OFFLINE = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "all")}


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    return subprocess.run(
        [*command, str(source), str(target)],
        env={**os.environ, **OFFLINE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=230,
        check=False,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    target = tmp_path_factory.mktemp("docs")
    return target, build(DOCS, target)


@pytest.fixture
def pages(built):
    folder, _ = built
    return {page: Page(page) for page in folder.rglob("*.html")}


class Page(HTMLParser):
    """The places that a page has, those that it leads to, and what it loads from elsewhere."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        loads = given.get("src") or (given.get("href") if tag == "link" else None)
        if loads:
            self.loaded.add(loads)


def test_the_build_has_no_warnings(built):
    _, done = built

    assert done.returncode == 0, done.stdout
    assert not done.stdout


def test_a_link_to_nowhere_is_a_warning(tmp_path):
    (tmp_path / "conf.py").write_text((DOCS / "conf.py").read_text())
    (tmp_path / "_ext").symlink_to(DOCS / "_ext")
    (tmp_path / "index.md").write_text("# A page\n\n[one](nowhere.md) {py:func}`nothing`\n")

    done = build(tmp_path, tmp_path / "built")

    assert done.returncode != 0
    assert "nowhere.md" in done.stdout
    assert "nothing" in done.stdout


def test_every_link_leads_somewhere(pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target in pages:
                if unquote(parts.fragment) not in pages[target].anchors:
                    broken.append((path.name, link))
            elif not target.exists():
                broken.append((path.name, link))

    assert not broken


def test_nothing_is_loaded_from_the_network(pages):
    loaded = {each for page in pages.values() for each in page.loaded}

    assert loaded
    assert not {each for each in loaded if urlsplit(each).netloc}


def test_readme_links_to_pages_that_there_are():
    linked = re.findall(r"\]\((docs/[^)#]+)", (ROOT / "README.md").read_text())

    assert linked
    assert [page for page in linked if not (ROOT / page).is_file()] == []


def test_the_reference_has_every_setting(built):
    page = (built[0] / "reference" / "settings.html").read_text()

    names = [f"lock_{name}" for name in TASK_OPTIONS]
    names += [f"distlock_{name}" for name in (*TASK_OPTIONS, *APP_ONLY)]
    assert [name for name in names if f">{name}<" not in page] == []


PUBLIC = {module.__name__: module for module in (errors, policies, signals, testing)}


@pytest.mark.parametrize("module", PUBLIC.values(), ids=PUBLIC)
def test_the_reference_has_every_public_name(built, module):
    page = (built[0] / "reference" / f"{module.__name__.rpartition('.')[2]}.html").read_text()

    assert [name for name in module.__all__ if name not in page] == []


def test_each_setting_and_flag_has_an_address_of_its_own(pages, built):
    names = [f"lock_{name}" for name in TASK_OPTIONS]
    names += [f"distlock_{name}" for name in (*TASK_OPTIONS, *APP_ONLY)]
    settings, worker = (
        pages[built[0] / "reference" / f"{page}.html"] for page in ("settings", "worker")
    )

    assert {f"confval-{name}" for name in names} <= settings.anchors
    assert {"cmdoption-distlock-url", "cmdoption-distlock-disable"} <= worker.anchors


def test_pages_are_a_tutorial_or_in_the_folder_of_their_kind():
    pages = {page.relative_to(DOCS).parts for page in DOCS.rglob("*.md")}
    folders = {parts[0] for parts in pages if len(parts) == 2}

    assert {parts[0] for parts in pages if len(parts) == 1} == {
        "index.md",
        "tutorial.md",
        "changes.md",
    }
    assert folders == {"howto", "reference", "explanation"}


def test_the_footer_says_whose_it_is(built):
    assert (
        "Copyright &#169; 2026, celery-distlock contributors"
        in (built[0] / "index.html").read_text()
    )
