"""How Celery runs a task under its lock."""
