"""What our own stores promise beyond `StoreContract`, as tests: a class for each subject."""

from __future__ import annotations

from celery_distlock.testing import StoreContract
from tests.contract.parts.delayed import Delayed
from tests.contract.parts.delivery import Delivery
from tests.contract.parts.identities import Identities
from tests.contract.parts.limits import Limits
from tests.contract.parts.parking import Parking
from tests.contract.parts.rate_limits import RateLimits
from tests.contract.parts.rates import Rates
from tests.contract.parts.recording import Recording
from tests.contract.parts.resting import Resting
from tests.contract.parts.retaining import Retaining
from tests.contract.parts.sending import Sending
from tests.contract.parts.several_keys import SeveralKeys
from tests.contract.parts.several_queues import WaitingAtSeveralKeys
from tests.contract.parts.sweeping import Sweeping
from tests.contract.parts.timing import Timing
from tests.contract.parts.units import Queued, Units
from tests.contract.parts.upgrading import Upgrading


class Everything(
    StoreContract,
    Parking,
    Retaining,
    Delivery,
    Sweeping,
    SeveralKeys,
    WaitingAtSeveralKeys,
    Units,
    Queued,
    Upgrading,
    Resting,
    Limits,
    Rates,
    RateLimits,
    Timing,
    Sending,
    Identities,
    Delayed,
    Recording,
):
    """Every test of every part."""
