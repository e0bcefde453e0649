"""URLs, credentials, what `check` says, and what there is without kazoo or a server."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from celery_distlock.errors import ConfigurationError, StoreError, StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import Ability, Ownership, ParkRequest
from celery_distlock.stores.zookeeper import ZooKeeperStore, sessions
from celery_distlock.testing import die_with_parent
from tests.stores.zookeeper.znodes import BUSY, RENEWED, UNKNOWN, folder, holder, nodes, renew, take


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("zookeeper://h?timeout=3", "'timeout'"),
        ("zookeeper://h?session=30&lease=3", "'lease'"),
        ("zookeeper://h?session=", "session"),
        ("zookeeper://h?session=5&session=6", "names an option twice"),
        ("zookeeper://h?session=soon", "'soon'"),
        ("zookeeper://h?session=0", "session"),
        ("zookeeper://h?session=-1", "session"),
        ("zookeeper://h?session=nan", "session"),
        ("zookeeper://h?session=inf", "session"),
        ("zookeeper://h#part", "#part"),
        ("zookeeper://", "host"),
        ("zookeeper://h1,,h2", "host"),
        ("zookeeper://h:port", "port"),
        ("zookeeper://h:99999", "ort"),
        ("zookeeper://user@h", "password"),
        ("zookeeper://:secret@h", "user"),
        ("zookeeper://h/a/../b", "path"),
    ],
)
def test_a_wrong_url_is_refused_and_says_why(url, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        ZooKeeperStore(url, "p")

    assert "secret" not in str(caught.value)


def test_a_url_is_refused_without_its_password():
    with pytest.raises(ConfigurationError) as caught:
        ZooKeeperStore("zookeeper://user:hush@h?x=1", "p")

    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "zookeeper://h1,h2:2181,h3:2182/a/b",
        "zookeeper://h3:2182,H2,h1:2181/a/b/",
        "zookeeper://user:secret@h2,h1,h3:2182//a/b?session=5",
    ],
)
def test_the_same_place_has_the_same_identity(url):
    identity = ZooKeeperStore(url, "p").identity

    assert identity == "zookeeper://h1:2181,h2:2181,h3:2182/a/b#p"


@pytest.mark.parametrize("url", ["zookeeper://h1", "zookeeper://h1:2182/a", "zookeeper://h1/b"])
def test_another_place_has_another_identity(url):
    here = ZooKeeperStore("zookeeper://h1/a", "p").identity

    assert ZooKeeperStore(url, "p").identity != here
    assert ZooKeeperStore("zookeeper://h1/a", "q").identity != here


def test_ipv6_addresses_keep_their_brackets():
    store = ZooKeeperStore("zookeeper://[::1]:2182,[fe80::1]/a", "p")

    assert store._ensemble.hosts == "[::1]:2182,[fe80::1]:2181"


def test_nothing_is_sent_before_the_first_use():
    before = threading.active_count()

    assert ZooKeeperStore("zookeeper://127.0.0.1:1", "p")._contact.session is None

    assert threading.active_count() == before


def test_it_cannot_park():
    store = ZooKeeperStore("zookeeper://127.0.0.1:1", "p")

    assert store.abilities == set(Ability) - {Ability.QUEUE, Ability.COUNT, Ability.RECALL}
    with pytest.raises(StoreError, match="no task can be parked"):
        store.acquire(AcquireRequest("k", "a", 30.0, queue=ParkRequest(b"e"), run="run"))


def run_python(source, *arguments):
    command = die_with_parent([sys.executable, "-W", "error", "-c", source, *arguments])
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_without_kazoo_it_says_what_to_install():
    done = run_python("""
import sys
sys.modules["kazoo"] = None
from celery_distlock.errors import ConfigurationError
try:
    import celery_distlock.stores.zookeeper
except ConfigurationError as error:
    print(error)
""")

    assert "pip install 'celery-distlock[zookeeper]'" in done.stdout, done.stderr


def test_a_server_that_never_was_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr(sessions, "TIMEOUT", 0.3)
    with closing(ZooKeeperStore("zookeeper://user:secret@127.0.0.1:1", "p")) as store:
        started = time.monotonic()

        with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1") as caught:
            store.acquire(AcquireRequest("k", "a", 10.0))

        assert time.monotonic() - started < 12.0  # it would be fifteen
        assert "secret" not in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        ((outcome, _),) = store.renew([Ownership("k", "a", 10.0)], 0.1)
        assert outcome is UNKNOWN
        with pytest.raises(StoreUnavailableError):
            store.inspect("k", timeout=0.1)


def test_a_patience_of_15_seconds_at_most_is_the_rule():
    assert len(sessions.PAUSES) * sessions.TIMEOUT + sum(sessions.PAUSES) < 16.0


# With a server


def test_a_working_store_passes_its_check_with_a_doubt_about_a_single_server(store):
    (doubt,) = [found.message for found in store.check()]

    assert "a single server, not an ensemble" in doubt


def test_a_session_longer_than_asked_is_doubted(shared_server, prefix):
    with closing(ZooKeeperStore(f"{shared_server.url}?session=0.1", prefix)) as brief:
        assert any("0.4 s and not 0.1" in found.message for found in brief.check())


def test_the_nodes_of_a_user_are_for_that_user_alone(shared_server, prefix):
    bare = f"127.0.0.1:{shared_server.port}"
    with (
        closing(ZooKeeperStore(f"zookeeper://me:s%40cret@{bare}/mine", prefix)) as mine,
        closing(ZooKeeperStore(f"zookeeper://you:secret@{bare}/mine", prefix)) as yours,
        closing(ZooKeeperStore(f"zookeeper://{bare}/mine", prefix)) as without_user,
    ):
        take(mine, "k", "a")
        assert renew(mine, ("k", "a", 30.0)) == [RENEWED]
        for other in (yours, without_user):
            with pytest.raises(StoreError, match="NoAuth") as caught:
                other.acquire(AcquireRequest("k", "b", 30.0))
            assert not isinstance(caught.value, StoreUnavailableError)
            assert "cret" not in str(caught.value)
        assert mine.release(ReleaseRequest("k", "a", keep_for=("run", 5.0))).released
        take(mine, "k", "c", run="run")


def test_an_existing_chroot_that_is_closed_above_is_no_obstacle(shared_server, prefix):
    client = KazooClient(f"127.0.0.1:{shared_server.port}")
    client.start()
    client.add_auth("digest", "root:r")
    root = f"/closed-{prefix}"
    client.create(root, acl=[make_digest_acl("root", "r", all=True)])
    client.create(f"{root}/app")
    client.stop()
    client.close()

    with closing(ZooKeeperStore(f"{shared_server.url}{root}/app", prefix)) as store:
        take(store, "k", "a")


def test_it_mends_itself_when_all_its_folders_are_deleted(store):
    first = take(store, "k", "a")
    store._contact.session.client.delete(store._locks.rpartition("/")[0], recursive=True)

    assert renew(store, ("k", "a", 30.0)) != [RENEWED]
    assert take(store, "k2", "b") > first
    assert not store.release(ReleaseRequest("k", "a")).released


def test_foreign_nodes_do_not_stop_it_where_they_are_like_ours(store):
    take(store, "k", "a")
    store._contact.session.client.set(nodes(store, "k")[0], b"not ours")
    store._contact.session.client.create(f"{folder(store, 'k')}/neither")

    assert store.acquire(AcquireRequest("k", "b", 30.0)).status is BUSY
    assert not holder(store, "k")
    assert store.release(ReleaseRequest("k", "a")).released


PATCHED = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import warnings; warnings.simplefilter('ignore')  # it is deprecated\n"
    "import eventlet; eventlet.monkey_patch()",
}
HANDLERS = {"gevent": "SequentialGeventHandler", "eventlet": "SequentialEventletHandler"}
GREENLETS = """
import sys
from celery_distlock import Lock
from celery_distlock.stores.zookeeper import ZooKeeperStore
store = ZooKeeperStore(*sys.argv[1:3])
inside, seen, ticks = [], [], []

def live():
    for _ in range(10):
        with Lock("k", lease=5.0, store=store):
            inside.append(1)
            seen.append(len(inside))
            sleep(0.002)
            inside.pop()

def tick():
    while True:
        ticks.append(1)
        sleep(0.001)

spawn(tick)
for _ in range(5):
    spawn(live)
while len(seen) < 50 or inside:
    sleep(0.01)
print(type(store._contact.session.client.handler).__name__, len(seen), max(seen), len(ticks) > 20)
store.close()
"""


@pytest.mark.parametrize("kind", PATCHED)
def test_greenlets_exclude_one_another_and_none_blocks_the_loop(url, prefix, kind):
    begin = f"{PATCHED[kind]}\nfrom {kind} import sleep, spawn\n"
    done = run_python(f"{begin}{GREENLETS}", url, prefix)

    assert done.stdout.split() == [HANDLERS[kind], "50", "1", "True"], done.stderr
