"""
A page to look at: ``celery locks web``.

Only :mod:`~celery_distlock.web.command` may be imported where the extra ``web`` is not installed.
"""
