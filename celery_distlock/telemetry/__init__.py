"""What is told of locks: counters, Celery's events, spans."""
