"""A browser, for pages."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
REQUIRED = os.environ.get("DISTLOCK_TEST_CHROMIUM") == "require"


# Of a module and no longer: while it lives, this thread can run no other event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None and not REQUIRED:
        pytest.skip("NO BROWSER: install chromium to test the page in one")
    assert CHROMIUM, "DISTLOCK_TEST_CHROMIUM=require, and there is no chromium on the PATH"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The second name of this machine is for tests of other sites.
        rules = "--host-resolver-rules=MAP evil.example 127.0.0.1, MAP page.example 127.0.0.1"
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", rules, "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def tab(browser) -> Iterator[Page]:
    """A fresh tab, without cookies; fails if a script of the page fails, or runs from a key."""
    context = browser.new_context()
    context.set_default_timeout(120_000)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
    yield page
    context.close()
    assert not errors
