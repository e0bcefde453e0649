"""The public surface; a change to it is a change to this file."""

from __future__ import annotations

import importlib

import pytest

PUBLIC = {
    "celery_distlock": [
        "AsyncLock",
        "Key",
        "Lock",
        "LockedTask",
        "Rate",
        "TypedTask",
        "install",
        "locked_task",
    ],
    "celery_distlock.errors": [
        "ConfigurationError",
        "DistlockError",
        "LockConflictError",
        "LockError",
        "LockKeyError",
        "LockLostError",
        "LockNotOwnedError",
        "QuorumError",
        "StoreError",
        "StoreUnavailableError",
    ],
    "celery_distlock.policies": [
        "Answer",
        "Conflict",
        "Decision",
        "Fail",
        "Park",
        "Policy",
        "Refuse",
        "Requeue",
        "Resend",
        "Retry",
        "Skip",
        "Wait",
    ],
    "celery_distlock.signals": [
        "lock_acquired",
        "lock_changed",
        "lock_conflict",
        "lock_freed",
        "lock_lost",
        "lock_released",
        "lock_renewed",
        "task_dropped",
        "task_parked",
        "task_woken",
    ],
    "celery_distlock.stores": [
        "ALONE",
        "Ability",
        "AcquireRequest",
        "CapacityStore",
        "Completion",
        "CountingStore",
        "DeliveryChannel",
        "Finding",
        "Holder",
        "Inbox",
        "KeyState",
        "Limit",
        "ListingStore",
        "NotOursError",
        "Ownership",
        "ParkRequest",
        "ParkingStore",
        "PeerChannel",
        "PollingInbox",
        "Publisher",
        "Release",
        "ReleaseRequest",
        "RenewOutcome",
        "Reply",
        "Route",
        "Sending",
        "Severity",
        "StandRequest",
        "Starts",
        "Status",
        "Store",
        "UnsendableError",
        "Waiter",
        "Want",
        "WokenTask",
        "new_owner",
        "open_store",
        "redact",
    ],
    "celery_distlock.testing": [
        "EmbeddedServer",
        "FakeClock",
        "Locks",
        "StoreContract",
        "assert_free",
        "assert_locked",
        "assert_parked",
        "assert_units",
        "die_with_parent",
    ],
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_these(name):
    module = importlib.import_module(name)

    assert sorted(module.__all__) == PUBLIC[name]
    assert all(hasattr(module, public) for public in module.__all__)
