import pytest
from sqlite_store import SQLiteStore

from celery_distlock.testing import StoreContract


class TestSQLiteStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path):
        return lambda name: SQLiteStore(f"sqlite://{tmp_path}/locks", prefix=name)
