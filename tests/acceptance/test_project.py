"""What says how the project is built and released agrees with what is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = "https://github.com/celery-distlock/celery-distlock"
FILES = (
    f"{REPOSITORY}/blob/v",
    "https://raw.githubusercontent.com/celery-distlock/celery-distlock/v",
)
RELEASE_NOTES = ROOT / ".github" / "release_notes.py"


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def targets(text):
    """The targets that are made by *text*, commands of a shell."""
    command = r"^\s*(?:\w+=\S+ )*(?:- run: |tests |make )+([a-z0-9.-]+)"
    return set(re.findall(command, text, re.MULTILINE))


def test_github_runs_what_a_change_has_to_pass():
    has_to_pass = targets((ROOT / ".ci" / "run").read_text())
    jobs = workflow("ci.yml")["jobs"]
    run = targets((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    versions = {each["target"] for each in jobs["versions"]["strategy"]["matrix"]["include"]}

    assert {"lint", "test-all", "chaos"} | versions <= has_to_pass <= run | versions


def test_github_tries_the_pythons_that_are_claimed():
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))

    assert workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == claimed
    assert PROJECT["requires-python"] == f">={claimed[0]}"


def test_a_release_is_published_without_a_token_and_only_if_it_is_built():
    jobs = workflow("release.yml")["jobs"]

    assert jobs["publish"]["needs"] == "build"
    assert jobs["announce"]["needs"] == "publish"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_no_used_action_can_be_replaced_by_another(name):
    used = [step for job in workflow(name)["jobs"].values() for step in job["steps"]]
    actions = [step["uses"] for step in used if "uses" in step]

    loose = [each for each in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each)]
    assert set(loose) <= {"pypa/gh-action-pypi-publish@release/v1"}  # says why


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_what_is_checked_out_has_no_credentials(name):
    used = [step for job in workflow(name)["jobs"].values() for step in job["steps"]]
    checkouts = [step for step in used if step.get("uses", "").startswith("actions/checkout@")]

    assert checkouts
    assert [step.get("with", {}).get("persist-credentials") for step in checkouts] == [
        False for _ in checkouts
    ]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The distributions that are built of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    return folder


@pytest.fixture(scope="module")
def metadata(dist):
    """What an index reads in the wheel."""
    (wheel,) = dist.glob("*.whl")
    with ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_every_link_of_the_readme_works_on_an_index(metadata):
    readme = metadata.get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)]+)\)", readme)
    files = [
        link.removeprefix(prefix).partition("/")
        for link in links
        for prefix in FILES
        if link.startswith(prefix)
    ]

    assert metadata["Description-Content-Type"] == "text/markdown"
    assert [link for link in links if not link.startswith("https://")] == []
    assert len(files) > 10
    assert {version for version, _, _ in files} == {metadata["Version"]}
    assert [path for _, _, path in files if not (ROOT / path.partition("#")[0]).is_file()] == []


def test_pictures_of_the_readme_are_linked_as_files_and_not_as_pages(metadata):
    readme = metadata.get_payload(decode=True).decode()
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme)

    assert any(picture.startswith(FILES[1]) for picture in pictures)
    assert not any(picture.startswith(FILES[0]) for picture in pictures)


def test_an_index_links_to_the_project(metadata):
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))

    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} <= set(urls)
    assert urls["Source"] == REPOSITORY
    assert {"Framework :: Celery", "Framework :: Pytest"} <= set(metadata.get_all("Classifier"))


def test_the_wheel_has_every_file_of_the_package(dist):
    (wheel,) = dist.glob("*.whl")
    with ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    package = (path for path in (ROOT / "celery_distlock").rglob("*") if path.is_file())
    files = {path.relative_to(ROOT).as_posix() for path in package if path.suffix != ".pyc"}

    assert {"celery_distlock/py.typed"} <= files
    assert files - inside == set()


def test_the_source_distribution_has_what_the_readme_and_the_tests_read(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        inside = {name.partition("/")[2] for name in sources.getnames()}

    files = {"README.md", "CHANGELOG.md", "Makefile", ".ci/run", ".readthedocs.yaml"}
    files |= set(re.findall(r"\]\((?![a-z]+:)([^)#]+)", (ROOT / "README.md").read_text()))
    files |= {path.relative_to(ROOT).as_posix() for path in (ROOT / ".github").rglob("*.yml")}
    assert files - inside == set()


def tree(folder, changelog, entries=()):
    """Make a copy of what a release reads."""
    for name in (".github", "celery_distlock", "changes"):
        (folder / name).mkdir()
    (folder / ".github" / "release_notes.py").write_text(RELEASE_NOTES.read_text())
    (folder / "celery_distlock" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    for name, text in entries:
        (folder / "changes" / name).write_text(text)


def release_notes(folder, version):
    """Run the script of that copy."""
    command = [sys.executable, folder / ".github" / "release_notes.py", version]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


CHANGELOG = """# Changelog

<!-- towncrier release notes start -->

## 1.2.3 - 2026-12-01

### Fixed

- A fault; see [how it waits](docs/explanation/waiting.md) and [Celery](https://docs.celeryq.dev).

## 1.2.2

- Something older.
"""


def test_the_notes_of_a_release_are_what_the_changelog_says_of_it(tmp_path):
    tree(tmp_path, CHANGELOG)
    done = release_notes(tmp_path, "1.2.3")

    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "### Fixed\n\n- A fault; see [how it waits]"
        f"({REPOSITORY}/blob/v1.2.3/docs/explanation/waiting.md)"
        " and [Celery](https://docs.celeryq.dev).\n"
    )


def test_towncrier_makes_the_section_that_a_release_reads(tmp_path):
    entries = [("+a-fault.fixed.md", "A fault.\n"), ("+a-key.added.md", "A key.\n")]
    tree(tmp_path, CHANGELOG.replace("1.2.3", "1.2.2"), entries)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for command in (
        ["git", "init", "--quiet"],
        ["git", "add", "."],
        [sys.executable, "-m", "towncrier", "build", "--yes", "--version", "1.2.3"],
    ):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)

    done = release_notes(tmp_path, "1.2.3")

    assert done.returncode == 0, done.stderr
    assert done.stdout == "### Added\n\n- A key.\n\n### Fixed\n\n- A fault.\n"


@pytest.mark.parametrize(
    ("changelog", "version", "said"),
    [
        (CHANGELOG, "1.2.4", "another __version__ than 1.2.4"),
        (CHANGELOG.replace("1.2.3", "1x2.3"), "1.2.3", "no dated section of 1.2.3"),
        (CHANGELOG.replace("2026-12-01", "soon"), "1.2.3", "no dated section of 1.2.3"),
    ],
    ids=["another version", "not in the changelog", "no date"],
)
def test_a_tag_that_disagrees_with_the_tree_is_no_release(tmp_path, changelog, version, said):
    tree(tmp_path, changelog)
    done = release_notes(tmp_path, version)

    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


def test_a_tag_before_the_changelog_has_every_entry_is_no_release(tmp_path):
    tree(tmp_path, CHANGELOG, [("+a-key.added.md", "A key.\n")])
    done = release_notes(tmp_path, "1.2.3")

    assert (done.returncode, done.stdout) == (1, "")
    assert "entries that CHANGELOG.md lacks: +a-key.added.md" in done.stderr


def test_links_of_the_changelog_and_its_entries_lead_to_files():
    pages = [ROOT / "CHANGELOG.md", *(ROOT / "changes").glob("+*")]
    links = [
        link for page in pages for link in re.findall(r"\]\((?![a-z]+:)([^)#]+)", page.read_text())
    ]

    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_benchmarks_start():
    command = sys.executable, ROOT / "bench" / "run.py", "--help"

    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["keys", "crowds", "one_key", "masters", "idle", "distance"])
def test_the_benchmark_of_scale_measures(part, tmp_path):
    figures = tmp_path / "scale.json"
    command = sys.executable, ROOT / "bench" / "scale.py", "--scale", "0.002", "--json", figures

    subprocess.run([*command, part], check=True, capture_output=True, timeout=280)

    parts = json.loads(figures.read_text())["parts"]
    assert parts[0]["name"] == part
    page = (ROOT / "docs" / "explanation" / "scale.md").read_text()
    assert all(f"<!-- figures: {each['name']} -->" in page and each["rows"] for each in parts)
