from celery import Celery

from celery_distlock import Lock, LockedTask, install

app = Celery("shop", broker="redis://localhost:6379/0", backend="redis://localhost:6379/1")
install(app)  # the worker's flags, its checks and its sweeper


@app.task(base=LockedTask, lock_key="stock:{sku}", bind=True)
def reserve(self, sku: str, quantity: int) -> int:
    # No other task, and no other process that takes the lock below, runs for this sku now.
    self.lock.ensure_held()  # raises LockLostError; costs no round trip
    return self.lock.token  # rises with every grant: give it to what must refuse stale writers


def restock(sku: str, quantity: int) -> None:
    with Lock(f"stock:{sku}", timeout=3.0):  # the same lock, from web code; else LockConflictError
        ...
