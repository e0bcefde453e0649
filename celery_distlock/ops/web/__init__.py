"""
A page to look at: ``celery locks web``.

Without the extra ``web``, only :mod:`~celery_distlock.ops.web.command` may be imported.
"""
