"""`suite` is run by a pytest of its own, with pytest-celery: see `test_smoke`."""

collect_ignore = ["suite"]
