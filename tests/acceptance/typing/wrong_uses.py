"""Every line that ends in an error's code and words is wrong in that way, and no other line is."""

from celery import Celery, Task

from celery_distlock import Key, Lock, LockedTask
from celery_distlock.typing import TypedTask, locked_task

app = Celery("shop")


@locked_task(app, lock_key="stock:{sku}")
def reserve(sku: str, quantity: int = 1) -> int:
    return quantity


reserve.delay("a", "many")  # E: arg-type: Argument 2 to "delay" of "TypedTask"
reserve.delay()  # E: call-arg: Missing positional argument "sku"
reserve("a", quantitty=1)  # E: call-arg: Unexpected keyword argument "quantitty"
reserve.si("a", 1, 2)  # E: call-arg: Too many arguments for "si"
key: str = reserve.key_for("a")  # E: assignment: expression has type "str | Key"
reserve.run(1)  # E: arg-type: expected "str"
reserve.apply_async(("a",), countdown="soon")  # E: arg-type: Argument "countdown"
reserve.apply_async(("a",), countdwon=3)  # E: call-arg: Unexpected keyword argument "countdwon"
reserve.apply_async("a", 1)  # E: arg-type: Argument 2 to "apply_async"
text: str = reserve("a")  # E: assignment: expression has type "int"
task: TypedTask[[int], int] = reserve  # E: assignment: "TypedTask[[str, int], int]"

locked_task(app, lock_key=[Key("a"), 3])  # E: list-item: List item 1 has incompatible type
Key(7)  # E: arg-type: Argument 1 to "Key"
Lock("a", capacity="3")  # E: arg-type: Argument "capacity"
locked_task(app, lock_key=3)  # E: call-overload: No overload variant
locked_task(app, lock_on_conflict="reque")  # E: call-overload: No overload variant
locked_task(app, lock_on_lost="ignore")  # E: call-overload: No overload variant
locked_task(app, lock_wait="long")  # E: call-overload: No overload variant
locked_task(app, lock_weit=3)  # E: call-overload: did you mean "lock_wait"?
locked_task(app, lock_key=len)  # E: arg-type: Argument "lock_key"
locked_task(app, base=Task)  # E: arg-type: expected "type[LockedTask]"
locked_task(app, bind=True, base=Task)  # E: call-overload: No overload variant
locked_task(reserve.run)  # E: call-overload: No overload variant


class Audited(LockedTask):
    abstract = True


@locked_task(app, bind=True)  # E: arg-type: expected "Callable[[TypedTask[[], None]], None]"
def needs_another_base(self: Audited) -> None: ...


@locked_task(app, bind=True)  # E: arg-type: expected "Callable[[TypedTask[[], None]], None]"
def is_not_given_the_task(sku: str) -> None: ...


@locked_task(app, bind=True, base=Audited)
def audited(self: Audited, sku: str) -> None:
    self.auditor = sku  # E: attr-defined: has no attribute "auditor"


audited("a", "b")  # E: call-arg: Too many arguments
