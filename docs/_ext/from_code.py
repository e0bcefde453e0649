"""
Directives that make documentation from the code: ``settings`` and ``worker-flags``.

Names, defaults and what is allowed come from :mod:`celery_distlock.settings`; the words from the
docstrings of `LockedTask` and `Settings`; the flags from what ``celery worker`` is given.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from celery import Celery
from celery.bin.base import CeleryOption
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from celery_distlock import LockedTask, settings, task
from celery_distlock.errors import ConfigurationError
from celery_distlock.settings import APP_ONLY, Layer, Settings
from celery_distlock.worker import start


def words(documented: type, section: str) -> dict[str, str]:
    """Return what the docstring's *section* says of each name."""
    text = inspect.getdoc(documented) or ""
    body = re.search(rf"^{section}:\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
    if body is None:
        raise LookupError(f"the docstring of {documented.__name__} has no section {section}")
    entries = re.findall(r"^    (\w+): ((?:.*\n)(?:     +.*\n)*)", body[1], re.MULTILINE)
    return {name: " ".join(said.split()) for name, said in entries}


def allowed(name: str) -> str:
    """Return what the check of *name* asks for, in the words of its message; or nothing."""
    try:
        Settings.from_layers(Layer("{}", {name: object()}))
    except ConfigurationError as error:
        said = re.sub(r"^.*?(must be|one of) ", "", str(error)).partition(", not ")[0]
        said = said.replace(f"{settings.MAX_LEASE:g}", f"{settings.MAX_LEASE:.0f}")
        return f"{said}; or None" if getattr(Settings(), name) is None else said
    return ""


def worker_flags() -> dict[str, str]:
    """Return the flags that are added to ``celery worker``, with their help."""
    app = Celery(set_as_current=False)
    start.add_options(app)
    added: list[CeleryOption] = sorted(app.user_options["worker"], key=lambda each: each.opts)
    return {each.opts[0]: each.help or "" for each in added}


def flag_of(name: str) -> str:
    """Return the worker's flag for the setting *name*, or nothing."""
    flag = "--distlock-disable" if name == "enabled" else f"--distlock-{name.replace('_', '-')}"
    return flag if flag in worker_flags() else ""


def setting_lines() -> Iterator[str]:
    """Yield a description of each setting, in reStructuredText; each name is an anchor."""
    said = words(Settings, "Attributes") | {
        name.removeprefix("lock_"): text for name, text in words(LockedTask, "Options").items()
    }
    for name, field in Settings.__dataclass_fields__.items():
        names = [f"distlock_{name}"] if name in APP_ONLY else [f"lock_{name}", f"distlock_{name}"]
        yield f".. confval:: {names[0]}"
        yield from (f"             {each}" for each in names[1:])
        yield ""
        yield f"   {said[name]}"
        yield ""
        facts = (
            ("Default", f"``{field.default!r}``"),
            ("Allowed", allowed(name)),
            ("Flag", flag_link(name)),
        )
        yield "   " + " ".join(f"{what}: {fact}." for what, fact in facts if fact)
        yield ""


def flag_link(name: str) -> str:
    """Return a link to the worker's flag for the setting *name*, or nothing."""
    flag = flag_of(name)
    return f":option:`{flag} <{flag}>`" if flag else ""


def flag_lines() -> Iterator[str]:
    """Yield a description of each flag, in reStructuredText; each is an anchor."""
    for flag, said in worker_flags().items():
        yield f".. option:: {flag}"
        yield ""
        yield f"   {said}"
        yield ""


class FromCode(SphinxDirective):
    """A placeholder for the lines that its function yields."""

    lines = staticmethod(setting_lines)

    def run(self) -> list[nodes.Node]:
        """Return what the lines say."""
        for module in (settings, task, start):
            self.env.note_dependency(inspect.getfile(module))
        parent = nodes.Element()
        self.state.nested_parse(StringList([*self.lines()], source=self.name), 0, parent)
        return parent.children


class WorkerFlags(FromCode):
    """The same as above."""

    lines = staticmethod(flag_lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives."""
    app.add_directive("settings", FromCode)
    app.add_directive("worker-flags", WorkerFlags)
    return {"parallel_read_safe": True}
