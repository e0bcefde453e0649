"""An app whose tasks are in another module, which only a worker imports by itself."""

from __future__ import annotations

import os
from functools import partial

from celery_distlock import install
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(__name__)
app.task = partial(app.task, shared=False)
app.conf.update(
    include=["tests.apps.included"],
    distlock_prefix=f"{os.environ['DISTLOCK_TEST_PREFIX']}:lock",
)
install(app)
journal = Journal.of_environment()
