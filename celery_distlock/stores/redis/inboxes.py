"""Where the callers of a process wait for keys of a store over Redis."""

import uuid
from collections.abc import Hashable

from celery_distlock.stores.channels import Inbox

from .parts import Part, Reach
from .subscriptions import PubSubInbox, WaiterSubscriptions
from .topology import PushTarget


class Inboxes(Part):
    """One channel for all inboxes of this process, and a subscription at each server."""

    def __init__(self, reach: Reach) -> None:
        super().__init__(reach)
        self.channel = f"{self._records.prefix}:inbox:{uuid.uuid4().hex}"
        self.subscriptions: dict[Hashable, WaiterSubscriptions] = {}

    def subscribed(self, stem: str) -> bool:
        """Whether an inbox for the records of *stem* costs nothing now."""
        place = self._place_of(stem, self.channel)
        here = self.subscriptions.get(place.node)
        return here is not None and here.is_subscribed(place.channel)

    def inbox(self, stem: str, owner: str) -> Inbox:
        """Return an inbox at which the server of the records of *stem* can wake *owner*."""

        def find() -> tuple[WaiterSubscriptions, PushTarget]:
            place = self._place_of(stem, self.channel)
            return self._subscribed_at(place.node), place

        return PubSubInbox(owner, find)

    def _subscribed_at(self, node: Hashable) -> WaiterSubscriptions:
        here = self.subscriptions.get(node)
        if here is None:  # no mutex: a signal handler may wait while its thread is here
            for gone in [each for each in list(self.subscriptions) if not self._servers.has(each)]:
                self.subscriptions.pop(gone, None)  # its waiters look up another one themselves
            made = WaiterSubscriptions(self._servers.connect(node))
            here = self.subscriptions.setdefault(node, made)
        return here

    def close(self) -> None:
        """Close the connections."""
        subscriptions, self.subscriptions = self.subscriptions, {}
        for each in list(subscriptions.values()):
            each.close()
