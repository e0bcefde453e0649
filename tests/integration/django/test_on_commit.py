"""Locked tasks in a project: they can be called when a transaction is committed."""

from __future__ import annotations

from celery import Celery

from celery_distlock import LockedTask

START = """
from django.db import transaction
from celery import current_app
from shop.models import Item
from shop.tasks import plain, reserve, reserve_elsewhere, reserve_in_order
from celery_distlock.ops.admin import Admin

admin, queue = Admin(current_app), current_app.conf.task_default_queue

def sent():
    with current_app.connection_for_read() as connection:
        print(connection.default_channel.client.llen(queue))

def show_queue():
    info = admin.show("stock:A")
    print(json.dumps([info.woken, *(each.who.task_id for each in admin.queue("stock:A"))]))
"""


def test_a_locked_task_is_sent_at_the_commit_like_any_other(project):
    code = """
for task in plain, reserve:
    with transaction.atomic():
        Item.objects.get_or_create(sku="A")
        assert task.delay_on_commit("A") is None
        assert task.apply_async_on_commit(["A"], countdown=0) is None
        sent()
    sent()
"""
    assert project.printed(START + code) == [0, 2, 2, 4]


def test_a_rollback_sends_nothing(project):
    code = """
try:
    with transaction.atomic():
        reserve.delay_on_commit("A")
        reserve_in_order.delay_on_commit("A")
        raise KeyError
except KeyError:
    sent(), show_queue()
"""
    assert project.printed(START + code) == [0, [0]]


def test_a_call_through_the_store_joins_its_queue_at_the_commit(project):
    code = """
with transaction.atomic():
    reserve_in_order.apply_async_on_commit(["A"], task_id="first")
    show_queue()
    reserve_in_order.apply_async(["A"], task_id="before")
    reserve_in_order.apply_async_on_commit(["A"], task_id="second")
    show_queue()
show_queue()
sent()
"""
    before = [1, "before"]
    assert project.printed(START + code) == [[0], before, [*before, "first", "second"], 1]


def test_a_savepoint_that_is_rolled_back_takes_its_calls_along(project):
    code = """
with transaction.atomic():
    reserve.delay_on_commit("A")
    try:
        with transaction.atomic():
            reserve.delay_on_commit("B")
            raise KeyError
    except KeyError:
        pass
sent()
"""
    assert project.printed(START + code) == [1]


def test_a_base_of_the_project_keeps_its_own_way(project):
    code = """
print(json.dumps(reserve_elsewhere.delay_on_commit("A")))
reserve_elsewhere.apply_async_on_commit(["A"])
sent()
"""
    assert project.printed(START + code) == ["its own", 1]


def test_a_task_without_django_has_no_such_method():
    app = Celery("plain", set_as_current=False)

    @app.task(base=LockedTask, lock_key="{sku}", shared=False)
    def task(sku):
        pass

    assert not hasattr(task, "delay_on_commit")
