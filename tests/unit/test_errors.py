from __future__ import annotations

import copy
import inspect
import json
import pickle

import pytest

from celery_distlock import errors
from celery_distlock.naming import PARKED, RESTING

REST = f"{PARKED}{RESTING}k"

EXAMPLES = [
    errors.DistlockError("broken"),
    errors.ConfigurationError("lock_lease must be positive"),
    errors.LockError("broken"),
    errors.LockConflictError("k{}\n", holder="host|1|w|a", remaining=2.25),
    errors.QueueFullError("k", holder="host|1|w|a", remaining=2.25, max_waiting=3),
    errors.DuplicateTaskError("4f1c"),
    errors.LockKeyError("no key", task="shop.reserve"),
    errors.LockLostError("k", token=7, reason="its lease ran out"),
    errors.LockNotOwnedError("not held by this thread"),
    errors.StoreError("refused"),
    errors.StoreUnavailableError("no answer"),
    errors.QuorumError("too few", votes=1, nodes=3),
    errors.RecalledError("k", token=7, by="superseded by a newer call"),
]
each_error = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)


def test_there_is_an_example_of_every_error():
    assert sorted(type(error).__name__ for error in EXAMPLES) == sorted(errors.__all__)


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (errors.ConfigurationError, [errors.DistlockError]),
        (errors.LockError, [errors.DistlockError]),
        (errors.LockConflictError, [errors.LockError]),
        (errors.QueueFullError, [errors.LockConflictError]),
        (errors.DuplicateTaskError, [errors.LockError]),
        (errors.LockKeyError, [errors.LockError, ValueError]),
        (errors.LockLostError, [errors.LockError, errors.Interruption]),
        (errors.LockNotOwnedError, [errors.LockError, RuntimeError]),
        (errors.StoreError, [errors.DistlockError]),
        (errors.StoreUnavailableError, [errors.StoreError]),
        (errors.QuorumError, [errors.StoreUnavailableError]),
        (errors.RecalledError, [errors.Interruption]),
    ],
)
def test_each_error_can_be_caught_as_what_it_is(error, bases):
    assert list(error.__bases__) == bases


def test_an_unavailable_store_is_not_a_lock_error():
    assert not issubclass(errors.StoreError, errors.LockError)


@each_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_pickling_with_its_attributes(error, protocol):
    again = pickle.loads(pickle.dumps(error, protocol))

    assert type(again) is type(error)
    assert again.args == error.args
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@each_error
def test_every_error_can_be_copied(error):
    assert str(copy.deepcopy(error)) == str(error)
    assert vars(copy.copy(error)) == vars(error)


@each_error
def test_every_error_survives_a_json_result_backend(error):
    # Celery stores the class and the arguments, and the caller's side makes `cls(*args)` of them.
    again = type(error)(*json.loads(json.dumps(error.args)))

    assert str(again) == str(error)
    assert vars(again) == vars(error)


@each_error
def test_every_error_has_a_docstring(error):
    assert inspect.getdoc(type(error))


def test_a_conflict_names_the_holder_and_the_remaining_time():
    error = errors.LockConflictError("stock:tee", holder="web1|7|main|a", remaining=12.34)

    assert str(error) == (
        "lock 'stock:tee' is held by thread main on web1, process 7, for 12.3 s more unless renewed"
    )
    assert (error.key, error.holder, error.remaining) == ("stock:tee", "web1|7|main|a", 12.34)


def test_a_full_queue_names_its_length_and_the_holder():
    error = errors.QueueFullError("stock:tee", "web1|7|main|a", 12.34, max_waiting=3)

    assert str(error) == (
        "the queue of lock 'stock:tee' is full, 3 wait; it is held by thread main on web1,"
        " process 7"
    )
    assert str(errors.QueueFullError("k", max_waiting=3)) == "the queue of lock 'k' is full, 3 wait"


def test_a_conflict_has_the_same_words_in_a_log_line_of_celery_s():
    error = errors.LockConflictError("stock:tee", holder="web1|7|main|a", remaining=12.34)

    assert repr(error) == f"LockConflictError({str(error)!r})"


def test_a_conflict_with_time_alone_says_for_how_long():
    error = errors.LockConflictError("k", holder="a", remaining=9.0, wait=0.44)

    assert str(error) == "lock 'k' admits no holder for 0.4 s more"
    assert (error.wait, errors.LockConflictError("k").wait) == (0.44, None)
    assert (error.args, errors.LockConflictError("k").args) == (
        ("k", "a", 9.0, 0.44),
        ("k", "", 0.0),
    )


def test_a_conflict_without_a_holder_does_not_pretend_one():
    error = errors.LockConflictError("k")

    assert str(error) == "lock 'k' is held, for 0.0 s more unless renewed"
    assert error.holder == ""


def test_a_loss_says_which_grant_and_why():
    error = errors.LockLostError("k", token=5, reason="its lease ran out")

    assert str(error) == "lock 'k' (token 5) was lost: its lease ran out"
    assert (error.key, error.token) == ("k", 5)


def test_a_loss_can_be_made_without_arguments():
    # That is how an asynchronous exception is made.
    assert errors.LockLostError().key == ""


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (errors.LockConflictError("k", holder="a", remaining=9.0), 1),
        (errors.LockConflictError("k", holder="a", remaining=9.0, wait=4.2), 5),
        (errors.LockConflictError("k", holder="a", remaining=9.0, wait=0.0), 1),
        (errors.LockConflictError("k", holder=REST, remaining=9.5), 10),
        (errors.LockConflictError("k", holder=REST, remaining=3.0, wait=0.01), 1),
    ],
)
def test_a_conflict_says_when_to_retry(error, seconds):
    assert error.retry_after == seconds
