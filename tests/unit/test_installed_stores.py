"""Stores that other packages bring."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from celery_distlock import Lock
from celery_distlock.errors import ConfigurationError
from celery_distlock.stores import open_store

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As if the example were a package that is installed."""
    about = tmp_path / "shop-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[celery_distlock.stores]\n"
        "sqlite = sqlite_store:SQLiteStore\n"
        "gone = no_such_module:Store\n"
        "redis = sqlite_store:SQLiteStore\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)


def test_a_scheme_is_found_among_installed_packages(installed, tmp_path):
    url = f"sqlite://{tmp_path}/locks"

    with Lock("k", store=url):
        assert open_store(url).inspect("k").token

    assert type(open_store(url)).__name__ == "SQLiteStore"
    assert open_store(url) is open_store(url)


def test_a_scheme_of_this_package_is_not_replaced(installed):
    assert type(open_store("redis://localhost", "installed")).__name__ == "RedisStore"


def test_a_store_that_cannot_be_loaded_is_an_error_of_the_configuration(installed):
    with pytest.raises(ConfigurationError, match="'gone://x' cannot be loaded: No module named"):
        open_store("gone://x")


def test_an_unknown_scheme_gets_the_closest_one_of_all(installed):
    with pytest.raises(ConfigurationError, match="did you mean 'sqlite'"):
        open_store("sqlit:///x")


def test_options_that_a_store_does_not_take_are_an_error_of_the_configuration(installed, tmp_path):
    with pytest.raises(ConfigurationError, match=r"sqlite.* does not take replicas"):
        open_store(f"sqlite://{tmp_path}/locks", options={"replicas": "1"})


def test_an_error_inside_a_store_is_not_taken_for_an_option_that_it_does_not_take(
    installed, tmp_path, monkeypatch
):
    import sqlite_store

    def factory(url: str, prefix: str, **options: str) -> None:
        raise TypeError("of the store itself")

    monkeypatch.setattr(sqlite_store, "SQLiteStore", factory)

    with pytest.raises(TypeError, match="of the store itself"):
        open_store(f"sqlite://{tmp_path}/broken", options={"replicas": "1"})


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated when defined")
def test_annotations_of_a_store_may_name_what_only_type_checkers_import(
    installed, tmp_path, monkeypatch
):
    import sqlite_store

    found = {"store": sqlite_store.SQLiteStore}
    source = "def factory(url: Checked, prefix: str, **options: str): return store(url, prefix)"
    exec(compile(source, __file__, "exec", dont_inherit=True), found)
    monkeypatch.setattr(sqlite_store, "SQLiteStore", found["factory"])

    assert open_store(f"sqlite://{tmp_path}/typed", options={"replicas": "1"})
