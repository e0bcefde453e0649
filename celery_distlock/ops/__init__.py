"""Tools for operators: the admin API, ``celery locks``, the web page and metrics."""
