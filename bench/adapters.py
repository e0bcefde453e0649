"""Packages with a module for each of the things that are compared; not all can be imported."""

from collections.abc import Iterable
from importlib import import_module
from types import ModuleType


def present(package: str, modules: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the *modules* that can be imported, and a line for each that cannot."""
    found, absent = [], []
    for module in modules:
        try:
            adapter(package, module)
        except ImportError as error:
            absent.append(f"{module} is left out: {error}")
        else:
            found.append(module)
    return found, absent


def adapter(package: str, module: str) -> ModuleType:
    return import_module(f"{package}.{module}")
