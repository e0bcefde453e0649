"""Every line here is right; mypy has to find nothing."""

from typing import Any, assert_type

from celery import Celery, Signature, Task, chain
from celery.result import AsyncResult, EagerResult

from celery_distlock import AsyncLock, Key, Lock, LockedTask, policies
from celery_distlock.engine.lease import Lease
from celery_distlock.typing import CallResult, TypedTask, locked_task

app = Celery("shop")


@locked_task(app, lock_key="stock:{sku}", lock_wait=3, acks_late=True, max_retries=None)
def reserve(sku: str, quantity: int = 1) -> int:
    return quantity


assert_type(reserve("a", 1), int)
assert_type(reserve(quantity=1, sku="a"), int)
assert_type(reserve.delay("a"), CallResult[int])
assert_type(reserve.delay("a", quantity=2).get(timeout=3), int)
assert_type(reserve.apply_async(("a", 1), countdown=3.0, queue="slow"), CallResult[int])
assert_type(reserve.apply_async(kwargs={"sku": "a"}), CallResult[int])
assert_type(reserve.apply(("a", 1)), EagerResult[int])
assert_type(reserve.s("a"), Signature[int])
assert_type(reserve.si("a", 2), Signature[int])
assert_type(reserve.signature(("a",), immutable=True), Signature[int])
assert_type(reserve.AsyncResult("id"), AsyncResult[int])
assert_type(reserve.run("a"), int)
assert_type(reserve.lock, Lease)
assert_type(reserve.key_for("a"), str | Key)
assert_type(reserve.keys_for(quantity=1, sku="a"), list[str | Key])
Lock(reserve.key_for("a"), timeout=3)
assert_type(reserve.name, str)
chain(reserve.s("a"), reserve.si("b", 2))


def either(sku: str, quantity: int) -> list[str] | None:
    return [sku] if quantity else None


@locked_task(app, lock_key=either, lock_on_conflict=policies.Wait(then="skip"))
def keyed(sku: str, quantity: int) -> None: ...


@locked_task(app, lock_key=lambda sku, **_: f"stock:{sku}", lock_on_conflict="skip")
def keyed_loosely(sku: str, quantity: int = 1) -> None: ...


def several(sku: str) -> list[Key | str]:
    return [Key(sku, shared=True), "all"]


@locked_task(app, lock_key=Key("api:{sku}", capacity=3, weight=2, min_hold=1, cooldown=2.5))
def counted(sku: str) -> None: ...


@locked_task(app, lock_key=["all", Key("{sku}", capacity=None)])
def listed(sku: str) -> None: ...


@locked_task(app, lock_key=several)
def made(sku: str) -> None: ...


@locked_task(app, bind=True, lock_key=lambda sku: Key(sku, shared=True))
def changing(self: LockedTask, sku: str) -> None:
    assert_type(self.lock.slot, int | None)
    assert_type(self.lock.units, int)
    assert_type(self.lock.shared, bool)
    self.lock.upgrade(timeout=3)
    self.lock.downgrade()
    self.lock.cool_down(2)


with Lock(Key("a", capacity=3)) as lease, Lock("a", shared=True), Lock("b", capacity=2, weight=2):
    assert_type(lease, Lease)
AsyncLock("a", capacity=None)

annotated: TypedTask[[str, int], object] = keyed
keyed_loosely.delay("a", quantity=2)


@locked_task(app, bind=True, lock_key=["a:{sku}", "b"], lock_max_hold=None)
def bound(self: LockedTask, sku: str) -> str:
    assert_type(self.lock, Lease)
    return sku


assert_type(bound.delay("a"), CallResult[str])


@locked_task(app, bind=True)
def bound_to_its_own_type(self: TypedTask[[str], int], sku: str) -> int:
    raise self.retry(countdown=assert_type(self(sku), int))


@locked_task(app, bind=True)
def bound_to_any_task(self: Task[Any, Any], sku: str) -> None: ...


@locked_task(bind=True, name="shared", lock_on_outage="run")
def shared(self: LockedTask, sku: str) -> int:
    return len(sku)


@locked_task()
def shared_unbound(sku: str) -> int:
    return len(sku)


assert_type(shared("a"), int)
assert_type(shared_unbound("a"), int)


class Audited(LockedTask):
    abstract = True
    auditor = "none"


@locked_task(app, bind=True, base=Audited)
def audited(self: Audited, sku: str) -> str:
    return assert_type(self.auditor, str)


@locked_task(app, base=Audited, bind=False)
def audited_unbound(sku: str) -> None: ...


def look(task: LockedTask) -> Task[Any, Any]:
    return task


assert_type(audited("a"), str)
look(audited_unbound)


@locked_task(app)
async def unheard_of(*skus: str, **quantities: int) -> None: ...


unheard_of.delay("a", "b", c=3)
