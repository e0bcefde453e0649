"""An app with an option of its own for every command, which reports what it was given."""

from __future__ import annotations

import sys

from celery.signals import user_preload_options
from click import Option

from tests.apps import make_app

app = make_app(__name__)
app.user_options["preload"].add(Option(("--site",), default="none"))


@user_preload_options.connect(weak=False)
def report(options, **_):
    sys.stderr.write(f"site {options['site']}\n")
