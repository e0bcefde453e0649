"""
Print what CHANGELOG.md says of a version, as the notes of its release.

    python .github/release_notes.py 1.2.3

Links to files of the project become links to that version's. The exit status is 1 if the
changelog has no dated section of the version, if `__version__` is another one, or if changes/ has
entries that the changelog lacks.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = "https://github.com/celery-distlock/celery-distlock/blob"


def notes(changelog: str, version: str) -> str:
    """Return the section of *version*, without its heading."""
    heading = rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d\n"
    section = re.search(rf"(?ms){heading}(.*?)(?=^## |\Z)", changelog)
    if section is None or not section[1].strip():
        sys.exit(f"CHANGELOG.md has no dated section of {version}: run towncrier build")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({FILES}/v{version}/", section[1].strip())


if __name__ == "__main__":
    version = sys.argv[1]
    if f'__version__ = "{version}"\n' not in (ROOT / "celery_distlock/__init__.py").read_text():
        sys.exit(f"celery_distlock/__init__.py has another __version__ than {version}")
    if left := sorted(each.name for each in (ROOT / "changes").glob("+*")):
        sys.exit(f"changes/ has entries that CHANGELOG.md lacks: {', '.join(left)}")
    sys.stdout.write(notes((ROOT / "CHANGELOG.md").read_text(), version) + "\n")
