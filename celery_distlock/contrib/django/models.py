"""The model that gives locks a place in Django's admin, and their permissions; it has no table."""

from typing import Any

from django.db import models

from celery_distlock.keys import key_of
from celery_distlock.naming import printable, shown


class _NoRows(models.Manager):
    """Finds no rows, as ``dumpdata`` and others ask for those of every model."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class Lock(models.Model):
    """A key, by its `slot_name`; what is known of it is in the lock store."""

    name = models.CharField(primary_key=True, max_length=200)
    objects = _NoRows()

    class Meta:
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions = (
            ("release_lock", "Can release locks"),
            ("drop_lock", "Can drop waiting tasks"),
            ("limit_lock", "Can limit locks"),
            ("pause_lock", "Can pause and resume locks"),
        )

    def __str__(self) -> str:
        return printable(shown(key_of(self.name)))
