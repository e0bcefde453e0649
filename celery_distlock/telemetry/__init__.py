"""Counters, Celery events and OpenTelemetry spans about locks."""
