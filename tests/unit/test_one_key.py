"""One value makes one key, whatever serializes it, and so does one that is in no message."""

from __future__ import annotations

import enum
import itertools
from typing import Any

import pytest
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.serialization import dumps, loads

from celery_distlock import Key, Lock, LockedTask
from celery_distlock.errors import LockKeyError
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.message_facts import Received, receive_of_request
from celery_distlock.unique import Throttle
from tests.argument_values import VALUES, Point, State
from tests.fidelity import SERIALIZERS

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")


@pytest.fixture(scope="module")
def app():
    with Celery("one_key", broker="memory://", set_as_current=False) as made:
        made.conf.distlock_url = "memory://"
        yield made


def take(value): ...


def declared(app: Celery, lock_key: Any, function: Any = None, **options: Any) -> Any:
    options = {"base": LockedTask, "shared": False, "name": f"t{next(_number)}", **options}
    return app.task(**options, lock_key=lock_key)(function or take)


_number = itertools.count()


def arrives(value: Any, serializer: str) -> bool:
    try:
        kind, encoding, body = dumps([value], serializer=serializer)
        loads(body, kind, encoding, accept=[kind])
    except Exception:  # noqa: BLE001  # each serializer has others
        return False
    return True


def by_message(task: Any, value: Any, serializer: str) -> list[str] | None:
    """The keys that a worker makes of *value*; None: it cannot be sent so."""
    try:
        kind, encoding, body = dumps([value], serializer=serializer)
        (received,) = loads(body, kind, encoding, accept=[kind])
    except Exception:  # noqa: BLE001  # each serializer has others
        return None
    rule = Runtime.of(task.app).plan_of(task).rule
    properties = Received(content_type=kind).attach_to({})
    task.push_request(called_directly=False, properties=properties)
    try:
        keys = rule.keys((received,), {}, receive_of_request(task, task.request))
    finally:
        task.pop_request()
    return [key.template for key in keys]


leaves = st.one_of(
    *map(st.just, VALUES), st.text(), st.integers(), st.floats(allow_nan=False), st.binary()
)
hashable = st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.sampled_from(State))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, st.integers(), inner),
        st.sets(hashable, max_size=3),
        st.dictionaries(st.one_of(hashable, st.none(), st.booleans()), inner, max_size=3),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("own", SERIALIZERS)
@pytest.mark.parametrize("lock_key", ["{value}", "k:{value!r}", "{task}:{digest}"])
@settings(deadline=None, max_examples=60)
@given(value=values)
def test_a_template_makes_one_key_of_one_value(app, own, lock_key, value):
    task = app.tasks.get(f"{own}:{lock_key}") or declared(
        app, lock_key, serializer=own, name=f"{own}:{lock_key}"
    )
    try:
        expected = [task.key_for(value)]
    except LockKeyError as error:
        assert "empty key" in str(error)  # noqa: PT017  # the only one that it may be
        return

    found = {each: by_message(task, value, each) for each in SERIALIZERS}

    assert found.pop("pickle") == expected
    assert [each for each in found.items() if each[1] not in (None, expected)] == []


@settings(deadline=None, max_examples=60)
@given(value=values)
def test_a_callable_gets_what_the_tasks_serializer_gives(app, value):
    task = app.tasks.get("by_code") or declared(app, lambda value: f"k:{value}", name="by_code")
    if not arrives(value, "json"):  # what it never gets by a message stays as it is
        return
    expected = [task.key_for(value)]

    found = {each: by_message(task, value, each) for each in ("json", "pickle", "msgpack")}

    assert [each for each in found.items() if each[1] not in (None, expected)] == []


# What is no key


class Order:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize("value", [Order(7), [Order(7)], {"order": Order(7)}, lambda: 7])
def test_an_object_without_a_text_of_its_own_is_refused_by_name(app, value):
    task = declared(app, "order:{value}")

    with pytest.raises(LockKeyError, match=r"has an address.*name what identifies it.*value\.id"):
        task.key_for(value)


def test_so_is_one_whose_method_a_template_names(app):
    task = declared(app, "point:{value.count}")

    with pytest.raises(LockKeyError, match="has an address"):
        task.key_for(Point(1, 2))


def test_a_callable_that_returns_an_address_is_refused(app):
    task = declared(app, lambda value: f"order:{value}")

    with pytest.raises(LockKeyError, match="an address differs in each process"):
        task.key_for(Order(7))


def test_what_only_looks_like_an_address_is_a_text(app):
    assert declared(app, "bug:{value}").key_for("<A at 0x7f>") == "bug:<A at 0x7f>"


def test_an_object_that_says_what_it_is_counts_as_that(app):
    class Sku:
        def __str__(self) -> str:
            return "tee"

    assert declared(app, "stock:{value}").key_for(Sku()) == "stock:tee"


@pytest.mark.parametrize(
    ("template", "value", "words"),
    [
        ("{value.value}", State.PAID, r"an enum arrives as its value: write \{value\}"),
        ("{value.x}", Point(1, 2), r"a named tuple arrives as a list: write \{value\[0\]\}"),
        ("{value.id}", {"id": 7}, r"may arrive as a dictionary: write \{value\[id\]\}"),
    ],
)
def test_a_template_that_reads_what_no_message_has_gets_a_suggestion(app, template, value, words):
    with pytest.raises(LockKeyError, match=words):
        declared(app, template).key_for(value)


def test_what_pickles_bring_can_be_looked_into(app):
    assert declared(app, "{value.value}", serializer="pickle").key_for(State.PAID) == "paid"


def test_the_refusal_of_a_digest_names_the_parameter(app):
    task = declared(app, "{digest}")

    with pytest.raises(
        LockKeyError, match=r"cannot represent value, an object of type Order: .*value\.id"
    ):
        task.key_for(Order(7))


# What a task reports


def test_the_key_of_a_plain_template_is_a_text(app):
    task = declared(app, "stock:{value}")

    assert task.key_for("tee") == task.key_for(value="tee") == "stock:tee"
    assert task.keys_for("tee") == ["stock:tee"]


def test_a_key_has_the_terms_that_the_task_takes_it_by(app):
    task = declared(app, Key("api:{value}", capacity=5, weight=2))

    assert task.key_for("acme") == Key("api:acme", capacity=5, weight=2)
    assert Lock(task.key_for("acme")).wanted == task.key_for("acme")


def test_a_bound_task_is_not_among_the_arguments(app):
    def bound(self, value): ...

    assert declared(app, "{task}:{value}", bound, bind=True, name="b").key_for("tee") == "b:tee"


def test_several_keys_are_listed_in_the_order_of_acquisition(app):
    task = declared(app, ["b:{value}", Key("a:{value}", shared=True), "b:{value}"])

    assert task.keys_for(1) == [Key("a:1", shared=True), "b:1"]
    with pytest.raises(LockKeyError, match=r"takes 2 keys; use keys_for\(\)"):
        task.key_for(1)


def test_no_key_is_shown_as_none(app):
    task = declared(app, lambda value: None, name="unlocked")

    assert task.keys_for(1) == []
    with pytest.raises(LockKeyError, match=r"task unlocked: .* no key, and runs unlocked"):
        task.key_for(1)


def test_the_period_of_a_throttle_is_not_in_the_key(app):
    task = declared(app, "sync:{value}", lock_unique=Throttle(60.0))

    assert task.key_for(7) == "sync:7"


def test_arguments_that_do_not_fit_are_reported_as_those_of_a_call(app):
    with pytest.raises(TypeError, match=r"missing a required argument: 'value'"):
        declared(app, "{value}").key_for()


def stock(sku, quantity, *, note): ...


@pytest.mark.parametrize(
    "lock_key", ["stock:{sku}", ["stock:{sku}"], lambda sku, *_, **__: f"stock:{sku}"]
)
def test_arguments_that_the_key_does_not_name_may_be_left_out(app, lock_key):
    task = declared(app, lock_key, stock)

    assert task.key_for("tee") == task.key_for(sku="tee") == task.key_for("tee", 1) == "stock:tee"
    assert task.key_for("tee", 1, note="x") == "stock:tee"


@pytest.mark.parametrize("lock_key", ["{quantity}:{note}", "{sku}:{digest}"])
def test_those_that_it_names_may_not(app, lock_key):
    with pytest.raises(TypeError, match=r"t\d+\(\) missing a required argument: 'quantity'"):
        declared(app, lock_key, stock).key_for("tee")
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        declared(app, lock_key, stock).key_for("tee", colour="red")


def test_a_default_is_what_it_is_in_the_worker(app):
    def pay(state=State.PAID): ...

    task = declared(app, "{state}", pay)
    assert task.key_for() == task.key_for(State.PAID) == task.key_for("paid") == "paid"


def test_a_missing_argument_is_a_value_like_any_other(app):
    assert declared(app, "stock:{value}").key_for(None) == "stock:None"


class Names(enum.StrEnum):
    STOCK = "stock:tee"


class OldNames(str, enum.Enum):  # noqa: UP042  # its text is "OldNames.STOCK"
    STOCK = "stock:tee"


@pytest.mark.parametrize("name", [*Names, *OldNames])
def test_a_lock_and_a_task_have_one_key_of_a_name_that_is_an_enum(app, name):
    task = declared(app, lambda value: value)

    assert type(Lock(name).key) is str
    assert Lock(name).key == task.key_for(name) == declared(app, name).key_for(1) == "stock:tee"
