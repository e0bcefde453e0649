"""
Find words that CONTRIBUTING rules out, in docstrings, comments and docs: `python -m tests.words`.

Reports each with its file and line, and exits with status 1 if there is one.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

__all__ = ["found_in"]

ROOT = Path(__file__).parent.parent
WORDS = re.compile(
    r"\b(who|whom|whoever|nobody|somebody|told|beside|anew|likewise|lest|in vain|is to be|are to be"
    r"|any more|set aside|put off|superfluous|himself|his|him|he|stands?|stood|meanwhile)\b",
    re.IGNORECASE,
)
# People, the title of a page, names of arguments, and quotes of any kind.
ALLOWED = re.compile(
    r"(anyone|everyone|user|users|readers|engineer|operators?) who|who (may write|maintains)"
    r"|^\s*(-- )?(who|beside)(:|  )|`[^`]*`|(?<![*\w])\*[^*]+\*(?![*\w])",
    re.IGNORECASE,
)


def found_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the words that *path* must not have, each with its line."""
    text = path.read_text()
    texts = {".py": _python, ".lua": _lua, ".md": _markdown}[path.suffix](text)
    for line, prose in texts:
        for word in WORDS.finditer(ALLOWED.sub("", prose)):
            yield line, word[0]


def _python(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is None:
                continue
            docstring = node.body[0]
            lines = text.splitlines()[docstring.lineno - 1 : docstring.end_lineno]
            yield from enumerate(lines, docstring.lineno)


def _lua(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        yield number, line.partition("--")[2]


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code:
            yield number, re.sub(r"\]\([^)]*\)", "]", line)


def _paths() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    for folder in ("bench", "celery_distlock", "docs", "examples", "tests"):
        for pattern in ("*.md", "*.py", "*.lua"):
            yield from sorted((ROOT / folder).rglob(pattern))


if __name__ == "__main__":
    sys.exit(
        "\n".join(
            f"{path.relative_to(ROOT)}:{line}: {word!r}: see English in CONTRIBUTING.md"
            for path in _paths()
            for line, word in found_in(path)
        )
        or None
    )
