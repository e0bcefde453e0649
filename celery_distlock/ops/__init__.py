"""What operators see and do: the administration, ``celery locks``, the page, metrics."""
