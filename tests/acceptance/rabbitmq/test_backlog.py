"""Calls that were published, as their keys were free, and wait at RabbitMQ behind other work."""

from __future__ import annotations

from tests.worker.test_backlog import (
    APP,
    site,
    test_a_call_that_is_dropped_does_not_run_however_late_its_message_comes,
    test_a_message_that_comes_hours_after_its_copy_has_run_does_not_run,
    test_calls_of_one_key_stay_in_order_though_the_first_waits_at_the_broker,
    test_many_calls_that_are_due_at_once_are_pushed_to_no_worker_that_is_full,
    test_two_hours_behind_other_work_they_pass_nothing_and_run_once,
    test_what_the_broker_has_lost_is_sent_again,
)

__all__ = [
    "APP",
    "site",
    "test_a_call_that_is_dropped_does_not_run_however_late_its_message_comes",
    "test_a_message_that_comes_hours_after_its_copy_has_run_does_not_run",
    "test_calls_of_one_key_stay_in_order_though_the_first_waits_at_the_broker",
    "test_many_calls_that_are_due_at_once_are_pushed_to_no_worker_that_is_full",
    "test_two_hours_behind_other_work_they_pass_nothing_and_run_once",
    "test_what_the_broker_has_lost_is_sent_again",
]
