"""Canvas is as ever where all locked tasks are sent through the store."""

from __future__ import annotations

from tests.worker import test_canvas

ENV = {"DISTLOCK_TEST_VIA": "store"}
SHARED = True

globals().update({name: fact for name, fact in vars(test_canvas).items() if name[:5] == "test_"})
