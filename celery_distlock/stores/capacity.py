"""A store that counts how many units of a key are in use, and lets operators limit them."""

from abc import abstractmethod
from typing import ClassVar

from .base import Store
from .channels import Inbox
from .values import Ability, Limit, Release, Reply

__all__ = ["CapacityStore"]


class CapacityStore(Store):
    """
    A store in which several may hold a key, each with a weight.

    One admission decides: who is alone needs that nobody else has the key; everybody else that the
    units in use and its own are not more than the capacity that it asks with, or than an operator's
    limit. The queue is strict: nobody is granted anything while somebody waits before him, whether
    that one would fit or not. So nobody starves. What several give up goes to as many as fit.
    """

    _ability: ClassVar[Ability | None] = Ability.WEIGH

    @abstractmethod
    def upgrade(self, key: str, owner: str, lease: float, inbox: Inbox | None = None) -> Reply:
        """
        Give *owner*, who is not alone at the key, all of it; may be repeated.

        ``GRANTED``: with a new token. ``BUSY``: others have it as well; with an *inbox* it now
        waits before all that queue, nobody enters, and it is called when the last of the others has
        left: then it asks again. ``DEADLOCK``: another one who shares the key waits so already.
        ``FREE``: the key is not its own (any more).
        """

    @abstractmethod
    def downgrade(self, key: str, owner: str, lease: float) -> Reply:
        """
        Have *owner* share what it had alone; without a gap in which others enter.

        It has as many units, and the slot, as before its :meth:`upgrade`; if it was alone from the
        beginning, one unit beside any number.

        Never refused: ``GRANTED`` with the token of what is shared from now on, and who is let in
        is woken. ``FREE``: the key is not its own (any more). If it waits in `upgrade`, it waits no
        more, and has what it had: with ``GRANTED`` and the token of that.
        """

    @abstractmethod
    def rest(self, key: str, owner: str, seconds: float) -> bool:
        """
        Let nobody enter for *seconds* from now; those who have the key go on.

        False: it is not *owner*'s (any more).
        """

    @abstractmethod
    def set_limit(self, key: str, limit: Limit | None) -> Release:
        """
        Set an operator's limit, or take it back; who fits then is woken.

        Its `since` is the store's to know.
        """
