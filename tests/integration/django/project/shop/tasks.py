from celery import shared_task
from celery.contrib.django.task import DjangoTask

from celery_distlock import LockedTask


class SeveralDatabases(DjangoTask):
    """What a project may have: its own way to wait for a commit."""

    abstract = True

    def delay_on_commit(self, *args):
        return "its own"


@shared_task
def plain(sku):
    pass


@shared_task(base=LockedTask, lock_key="stock:{sku}")
def reserve(sku):
    pass


@shared_task(base=LockedTask, lock_key="stock:{sku}", lock_via="store")
def reserve_in_order(sku):
    pass


@shared_task(base=type("Own", (LockedTask, SeveralDatabases), {"abstract": True}), lock_key="{sku}")
def reserve_elsewhere(sku):
    pass
