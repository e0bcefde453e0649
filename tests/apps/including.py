"""An app whose tasks are in another module, which only a worker imports by itself."""

from __future__ import annotations

from functools import partial

from celery_distlock import install
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(__name__, include=["tests.apps.included"])
app.task = partial(app.task, shared=False)
install(app)
journal = Journal.of_environment()
