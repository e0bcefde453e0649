import time

from celery import Celery

from celery_distlock import LockedTask, install

app = Celery("shop", broker="redis://localhost:6379/0", backend="redis://localhost:6379/1")
install(app)  # the worker's flags, its checks and its sweeper


@app.task(base=LockedTask, lock_key="stock:{sku}", bind=True)
def reserve(self, sku: str, quantity: int) -> int:
    time.sleep(1)  # whatever must not happen twice at once for one sku
    return self.lock.token  # rises with every grant: give it to what must refuse stale writers
