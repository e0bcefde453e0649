"""
Prints the oldest versions that pyproject.toml allows of what the package and its extras need.

One requirement a line, as pip takes them. What only development and benchmarks need is left out.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
NOT_OF_USERS = {"bench", "dev"}
REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+(\[[a-z,]+\])?)>=(?P<oldest>[0-9.]+)(?P<where>; .+)?"
)


def oldest(project: dict[str, Any]) -> list[str]:
    """Return the requirements of *project*, each with its oldest version."""
    extras = project["optional-dependencies"]
    needed = set(project["dependencies"])
    needed.update(*(extras[name] for name in extras.keys() - NOT_OF_USERS))
    return sorted(map(pinned, needed))


def pinned(requirement: str) -> str:
    """Return *requirement* with its lower bound as the one version that will do."""
    found = REQUIREMENT.fullmatch(requirement)
    if found is None:
        sys.exit(f"pyproject.toml must name the oldest version, as in name>=1.2: {requirement}")
    return f"{found['name']}=={found['oldest']}{found['where'] or ''}"


if __name__ == "__main__":
    pins = oldest(tomllib.loads(PYPROJECT.read_text())["project"])
    sys.stdout.writelines(f"{pin}\n" for pin in pins)
