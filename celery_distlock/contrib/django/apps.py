"""The configuration of the Django app."""

from django.apps import AppConfig


class DistlockConfig(AppConfig):
    """Registers the system checks."""

    name = "celery_distlock.contrib.django"
    label = "celery_distlock"
    verbose_name = "Celery locks"

    def ready(self) -> None:
        """Import the system checks, which registers them."""
        from . import checks  # noqa: F401
