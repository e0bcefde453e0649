"""The keys of tasks whose arguments Celery validates by Pydantic."""

import pydantic
import pytest
from celery import Celery

from celery_distlock import LockedTask
from celery_distlock.errors import ConfigurationError
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.declaration import Validation

KEY = "order:{order.number}"


class Order(pydantic.BaseModel):
    number: int
    urgent: bool = False


class Even(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def _is_even(cls, value: int, info: pydantic.ValidationInfo) -> int:
        assert info.context["most"] > value
        if value % 2:
            raise ValueError("odd")
        return value


@pytest.fixture
def app():
    with Celery("validation", broker="memory://", set_as_current=False) as made:
        made.conf.distlock_url = "memory://"
        yield made


def keys(app, task, *args, **kwargs):
    made = Runtime.of(app).plans[task.name].rule.keys(args, kwargs)
    return tuple(key.template for key in made)


def declared(app, lock_key, **options):
    def take(order: Order, note: str = "") -> None: ...

    return app.task(take, base=LockedTask, lock_key=lock_key, pydantic=True, **options)


@pytest.mark.parametrize(
    "lock_key",
    [KEY, [KEY], lambda order, note="": KEY.format(order=order)],
    ids=["template", "list", "callable"],
)
def test_a_key_is_made_of_models_by_message_and_by_call(app, lock_key):
    task = declared(app, lock_key)

    assert keys(app, task, {"number": 7}, "note") == ("order:7",)
    assert keys(app, task, order={"number": 7}, note="note") == ("order:7",)
    assert keys(app, task, Order(number=7), "note") == ("order:7",)


def test_a_bound_task_is_not_taken_for_its_first_argument(app):
    def take(self, order: Order) -> None: ...

    options = {"base": LockedTask, "bind": True, "pydantic": True}
    task = app.task(take, lock_key=KEY, **options)

    assert keys(app, task, {"number": 7}) == ("order:7",)


def test_a_digest_is_the_same_whether_defaults_are_sent_or_not(app):
    task = declared(app, "{digest}")

    sent = keys(app, task, {"number": 7})

    assert sent == keys(app, task, {"number": 7, "urgent": False})
    assert sent == keys(app, task, Order(number=7))
    assert sent != keys(app, task, {"number": 7, "urgent": True})


def test_what_is_wrong_is_said_as_without_a_lock(app):
    task = declared(app, KEY)

    with pytest.raises(pydantic.ValidationError, match="number"):
        task.apply(({"number": "seven"},)).get()


def test_validators_get_the_tasks_context_and_strictness(app):
    def take(even: Even) -> None: ...

    options = {"pydantic": True, "pydantic_strict": True, "pydantic_context": {"most": 10}}
    task = app.task(take, base=LockedTask, lock_key="{even.number}", **options)

    assert keys(app, task, {"number": 2}) == ("2",)
    for wrong in (1, "2", 12):
        with pytest.raises(pydantic.ValidationError):
            keys(app, task, {"number": wrong})


def test_validators_do_not_run_in_the_workers_main_process(app):
    assert not Runtime.of(app).plans[declared(app, "{note}").name].rule.runs_no_code


def test_a_celery_that_validates_in_another_way_is_refused():
    with pytest.raises(ConfigurationError, match="task take: the Pydantic validation"):
        Validation(lambda order: None, "task take", bound=False)


def test_a_call_is_validated_as_a_whole_for_its_key(app):
    def take(number: int, order: Order) -> None: ...

    task = app.task(take, base=LockedTask, lock_key="order:{number}", pydantic=True)

    assert task.key_for("7", {"number": 8}) == "order:7"
    with pytest.raises(TypeError, match="missing a required argument: 'order'"):
        task.key_for("7")
