import time

from celery import Celery

from celery_distlock import LockedTask, install

app = Celery("shop", broker="redis://localhost:6379/0", backend="redis://localhost:6379/1")
install(app)


@app.task(base=LockedTask, lock_key="stock:{sku}")
def reserve(sku: str, quantity: int) -> str:
    time.sleep(1)  # the work that must not happen twice at once for one sku
    return f"{quantity} {sku} reserved"
