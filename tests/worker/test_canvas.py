"""Chords, chains and groups complete, whatever their members find."""

from __future__ import annotations

import pytest
from celery import chain, chord, group

from celery_distlock.errors import LockKeyError

SHARED = True

SQUARES = sum(number * number for number in range(10))


@pytest.mark.parametrize("name", ["square", "square_retry", "square_wait"])
def test_a_chord_over_one_key_completes(site, key, name):
    square = getattr(site.tasks, name)

    result = chord(square.s(key, number) for number in range(10))(site.tasks.total.s())

    assert result.get(timeout=30) == SQUARES
    assert site.journal.read(f"{key}:overlaps") == []


def test_a_chord_whose_members_are_all_parked_first_completes(site, key):
    with site.held(key):
        result = chord(site.tasks.square.s(key, n) for n in range(10))(site.tasks.total.s())
        site.wait_queued(key, 10)

    assert result.get(timeout=30) == SQUARES


def test_a_chord_with_skipped_members_completes(site, key):
    members = [site.tasks.square.s(f"{key}:free", 3), site.tasks.square_skip.s(key, 4)]
    with site.held(key):
        result = chord(members)(site.tasks.total.s())

        assert result.get(timeout=30) == 9


def test_a_chord_with_a_parked_callback_completes(site, key):
    callback = site.tasks.increase.s(key)
    with site.held(key):
        result = chain(site.tasks.add.s(1, 2), callback).delay()
        site.wait_queued(key)

    assert result.get(timeout=30) == 4


def test_the_results_of_a_group_over_one_key_keep_their_order(site, key):
    result = group(site.tasks.square.s(key, number) for number in range(10)).delay()

    assert result.get(timeout=30) == [number * number for number in range(10)]


def test_a_chain_over_one_key_hands_the_results_on(site, key):
    first = site.tasks.square.s(key, 3)
    with site.held(key):
        result = chain(first, site.tasks.increase.s(key), site.tasks.increase.s(key)).delay()
        site.wait_queued(key)

    assert result.get(timeout=30) == 11


def test_a_chain_whose_every_link_is_parked_goes_on(site, key):
    keys = [f"{key}:{number}" for number in range(3)]
    with site.held(keys[2]):
        with site.held(keys[1]):
            with site.held(keys[0]):
                result = chain(
                    site.tasks.square.s(keys[0], 3),
                    site.tasks.increase.s(keys[1]),
                    site.tasks.increase.s(keys[2]),
                ).delay()
                site.wait_queued(keys[0])
            site.wait_queued(keys[1])
        site.wait_queued(keys[2])

    assert result.get(timeout=30) == 11


def test_a_link_with_an_option_that_no_call_takes_runs_and_the_log_says_so(site, key):
    second = site.tasks.increase.s(key).set(lock_on_conflict="fail")

    assert chain(site.tasks.square.s(key, 3), second).delay().get(timeout=30) == 10
    assert any(
        "a call does not take lock_on_conflict; it takes" in worker.log() for worker in site.workers
    )


def test_a_link_whose_key_cannot_be_made_fails_by_itself(site, key):
    link = chain(site.tasks.add.si(1, 2), site.tasks.miss_attribute.si(key))()

    with pytest.raises(LockKeyError):
        link.get(timeout=30)
    assert link.parent.get(timeout=30) == 3


def test_a_parked_task_may_be_replaced(site, key):
    with site.held(key):
        result = site.tasks.replace.delay(key, 3)
        site.wait_queued(key)

    assert result.get(timeout=30) == 10


def test_a_chord_inside_a_chain_goes_on_behind_parked_members(site, key):
    header = group(site.tasks.square.s(key, number) for number in range(5))
    with site.held(key):
        result = chain(header, site.tasks.total.s(), site.tasks.increase.s(key)).delay()
        site.wait_queued(key, 5)

    assert result.get(timeout=30) == 31


def test_an_errback_that_is_a_locked_task_is_called_with_what_has_happened(site, key):
    failing = site.tasks.end.signature((key, "exception"), link_error=site.tasks.note_failure.s())
    result = failing.delay()

    with pytest.raises(ValueError, match="exception"):
        result.get(timeout=30)

    site.journal.wait(key, 2)
    assert site.journal.read(key) == ["exception", [result.id, "exception", True]]
