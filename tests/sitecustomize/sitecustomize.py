"""Patches before all else is imported, as a command that starts an agent does."""

from tests import patching

patching.patch("before")
