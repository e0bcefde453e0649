"""
The web page: ``celery locks web``.

Without the extra ``web``, only :mod:`~celery_distlock.ops.web.command` can be imported.
"""
