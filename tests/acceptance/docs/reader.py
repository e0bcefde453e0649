"""
Does what a page of the documentation asks its reader to do, in the current folder.

``python -m tests.acceptance.docs.reader docs/tutorial.md 23456 45`` takes the port of a server for
6379, and waits for up to 45 seconds for what the page shows. Of a page's blocks, in their order:

- ``python`` is executed in one namespace; with a caption, it is written to the file of that name;
- ``pycon`` is typed into that namespace's prompt. As a reader looks again when nothing has come
  yet, an expression that is only looked at is looked at again until it is as shown;
- ``console``'s commands are run, and have to print the lines that are shown;
- after a comment ``<!-- terminal: name -->`` a command goes on in the background, in a terminal of
  that name, once it has printed the lines; and a ``text`` shows what that terminal prints later.

In what is printed, ``...`` matches anything. Installing is left to the reader's machine.
"""

from __future__ import annotations

import doctest
import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sybil import Document
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser, SkipParser

from celery_distlock.testing import die_with_parent
from tests.waiting import wait_until

if TYPE_CHECKING:
    from sybil import Example

DOES_SOMETHING = re.compile(r"\b(delay|apply_async|kill|get|release|acquire|revoke)\(")
TERMINAL = re.compile(r"<!-- terminal: (\w+) -->\n+\Z")
NOT_OURS = ("pip install", "python -m venv")


class Terminal:
    """Where a command runs, and what it has printed."""

    def __init__(self, command: str, log: Path) -> None:
        self._command = command
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                die_with_parent(["bash", "-c", f"exec {command}"]),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_printed(self, lines: list[str], patience: float) -> None:
        def there() -> bool:
            running = self.process.poll() is None
            if missing(lines, self.printed) is None:
                return True
            assert running, f"{self._command} has ended"
            return False

        try:
            wait_until(there, timeout=patience, what=f"{self._command} to print {lines}")
        except AssertionError as error:
            raise AssertionError(
                f"not printed: {missing(lines, self.printed)!r}\n{self.printed}"
            ) from error

    def close(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            self.process.send_signal(signum)
            try:
                self.process.wait(10)
                break
            except subprocess.TimeoutExpired:
                print(self._command, "is killed\n", self.printed)  # noqa: T201
        self.process.stdin.close()


class Reader:
    def __init__(self, page: Path, port: str, patience: float) -> None:
        self._patience = patience
        text = re.sub(r"(localhost:|127\.0\.0\.1:|port=)6379\b", rf"\g<1>{port}", page.read_text())
        self._document = Document(text, str(page))
        self._document.namespace["__name__"] = "__main__"
        self._terminals: dict[str, Terminal] = {}
        self._python = PythonEvaluator()
        parsers = [
            CodeBlockParser("python", self.python),
            CodeBlockParser("pycon", self.prompt),
            CodeBlockParser("console", self.console),
            CodeBlockParser("text", self.text),
            SkipParser(),
        ]
        for parser in parsers:
            for region in parser(self._document):
                self._document.add(region)

    def read(self) -> None:
        try:
            for example in self._document.examples():
                example.evaluate()
        except BaseException:
            for name, terminal in self._terminals.items():
                print(f"---- terminal {name}", terminal.printed, sep="\n")  # noqa: T201
            raise
        finally:
            self._document.namespace.clear()  # results unsubscribe while the server is there
            gc.collect()
            for terminal in reversed(self._terminals.values()):
                terminal.close()

    def python(self, example: Example) -> None:
        options = example.region.lexemes.get("options") or {}
        if "caption" in options:
            file = Path(options["caption"])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(example.parsed))
        else:
            self._python(example)

    def prompt(self, example: Example) -> None:
        for step in doctest.DocTestParser().get_examples(str(example.parsed)):
            look_until = time.monotonic() + (self._patience if is_look(step.source) else 0.0)
            while (difference := self._differs(example, step)) and time.monotonic() < look_until:
                time.sleep(0.05)
            assert not difference, difference

    @staticmethod
    def _differs(example: Example, step: doctest.Example) -> str:
        said: list[str] = []
        test = doctest.DocTest([step], {}, example.path, example.path, example.line, None)
        test.globs = example.namespace  # not the copy that it has made
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(test, out=said.append, clear_globs=False)
        return "".join(said)

    def console(self, example: Example) -> None:
        terminal = self._terminal_of(example)
        for command, lines in commands(str(example.parsed)):
            if command.startswith(NOT_OURS):
                continue
            if terminal:
                log = Path(f"{terminal}.log").absolute()
                self._terminals[terminal] = Terminal(command, log)
                self._terminals[terminal].wait_printed(lines, self._patience)
            else:
                run(command, lines)

    def text(self, example: Example) -> None:
        terminal = self._terminal_of(example)
        if terminal:
            self._terminals[terminal].wait_printed(str(example.parsed).splitlines(), self._patience)

    def _terminal_of(self, example: Example) -> str:
        named = TERMINAL.search(self._document.text[: example.region.start])
        return named[1] if named else ""


def run(command: str, lines: list[str]) -> None:
    done = subprocess.run(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
    lost = missing(lines, done.stdout)
    assert lost is None, f"{command} does not print {lost!r}\n{done.stdout}"


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Split a console's text into commands and the lines that each prints."""
    found: list[tuple[str, list[str]]] = []
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line[2:].partition("  # ")[0], []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def missing(lines: list[str], printed: str) -> str | None:
    """Return the first of *lines* that does not follow the others in what was *printed*."""
    left = iter(printed.splitlines())
    for line in lines:
        words = ".*".join(re.escape(part) for part in line.strip().split("..."))
        shown = re.sub(r"(\\ )+", r"\\s+", words)  # a table has other gaps in a pipe
        if shown != ".*" and not any(re.search(shown, each) for each in left):
            return line
    return None


def is_look(source: str) -> bool:
    """Whether typing *source* again changes nothing."""
    try:
        compile(source, "prompt", "eval")
    except SyntaxError:
        return False
    return not DOES_SOMETHING.search(source)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  # as for a user that starts python there
    Reader(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])).read()
