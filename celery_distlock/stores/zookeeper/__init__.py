"""The store over ZooKeeper; needs ``celery-distlock[zookeeper]``."""

from .store import ZooKeeperStore

__all__ = ["ZooKeeperStore"]
