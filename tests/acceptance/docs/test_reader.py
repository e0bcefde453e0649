"""The reader notices what is wrong with a page."""

from __future__ import annotations

import pytest

from tests.acceptance.docs.reader import Reader

RIGHT = {
    "code": """
```python
x = 1
```
```python
assert x == 1
```
""",
    "hidden code": """
<!--- invisible-code-block: python
x = 1
-->
```python
assert x == 1
```
""",
    "a file": """
```{code-block} python
:caption: there/is.py

x = 1
```
```python
from there.is_ import x
```
""".replace("is.py", "is_.py"),
    "a prompt": """
```pycon
>>> x = "a long word"
>>> x
'a ... word'
```
""",
    "a command": """
```console
$ echo one; echo between; echo "two   three"
one
two three
```
""",
    "a terminal": """
<!-- terminal: one -->
```console
$ sh -c 'echo ready; echo steady; exec sleep 600'
ready
```
Later:
<!-- terminal: one -->
```text
...eady
```
""",
}
WRONG = {
    "code": ("```python\nassert not 'right'\n```\n", "AssertionError"),
    "hidden code": ("<!--- invisible-code-block: python\n1 / 0\n-->\n", "ZeroDivisionError"),
    "a prompt": ("```pycon\n>>> 1 + 1\n3\n```\n", "Expected:\n    3\nGot:\n    2"),
    "a command": ("```console\n$ echo one\ntwo\n```\n", "does not print 'two'"),
    "a status": ("```console\n$ false\n```\n", "false: 1"),
    "a terminal": (
        "<!-- terminal: one -->\n```console\n$ sh -c 'echo one; exec sleep 600'\ntwo\n```\n",
        "not printed: 'two'",
    ),
    "a warning": ("```python\nimport warnings; warnings.warn('it')\n```\n", "UserWarning: it"),
}


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def read(text, patience=30.0):
        (tmp_path / "page.md").write_text(text)
        Reader(tmp_path / "page.md", "6379", patience).read()

    return read


@pytest.mark.parametrize("page", RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_done(page, read):
    read(page)


@pytest.mark.parametrize(("page", "reason"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(page, reason, read):
    with pytest.raises((AssertionError, ZeroDivisionError, UserWarning)) as caught:
        read(page, patience=1.0)

    assert reason in f"{caught.typename}: {caught.value}"


def test_the_port_is_the_given_one_wherever_the_page_names_the_usual(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = ['redis://localhost:6379/0', '127.0.0.1:6379', dict(port=6379)]\n```\n"
    )

    text = Reader(page, "12345", 1.0)._document.text

    assert "6379" not in text
    assert text.count("12345") == 3
