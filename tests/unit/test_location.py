"""Where the locks are if only broker and results are named."""

from __future__ import annotations

import ssl

import pytest
from celery import Celery

from celery_distlock.errors import ConfigurationError
from celery_distlock.location import borrowed_url, with_option
from celery_distlock.runtime import Runtime
from celery_distlock.stores.urls import locate

SENTINELS = "sentinel://a:1;sentinel://b:2;sentinel://c:3"


def conf(**settings):
    app = Celery("location", set_as_current=False)
    app.conf.update(settings)
    return app.conf


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"broker_url": "redis://h/1"}, "redis://h/1"),
        ({"broker_url": "redis://h/1", "result_backend": "redis://r"}, "redis://h/1"),
        ({"broker_url": "amqp://h", "result_backend": "rediss://r/2"}, "rediss://r/2"),
        ({"broker_write_url": "redis://w/1", "broker_url": "redis://h/1"}, "redis://w/1"),
        ({"broker_url": "redis://h/1;redis://stand-in/1"}, "redis://h/1"),
        ({"broker_url": ["redis://h/1", "redis://stand-in/1"]}, "redis://h/1"),
        ({"broker_url": "redis+socket:///tmp/s?virtual_host=2"},) * 2,
        ({"broker_url": "memory://anything"}, "memory://"),
        (
            {"broker_url": "redis://h/1", "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_NONE}},
            "rediss://h/1?ssl_cert_reqs=CERT_NONE",
        ),
        (
            {
                "broker_url": "rediss://h",
                "broker_use_ssl": {"ssl_cert_reqs": None, "ssl_check_hostname": False},
            },
            "rediss://h?ssl_cert_reqs=none&ssl_check_hostname=false",
        ),
        ({"broker_url": [], "result_backend": "redis://r"}, "redis://r"),
        (
            {
                "broker_url": "amqp://h",
                "result_backend": "redis://r/2",
                "redis_backend_use_ssl": {"ssl_ca_certs": "/ca.pem"},
            },
            "rediss://r/2?ssl_ca_certs=%2Fca.pem",
        ),
        (
            {"broker_url": SENTINELS, "broker_transport_options": {"master_name": "m"}},
            "sentinel://a:1?service=m;sentinel://b:2;sentinel://c:3",
        ),
        (
            {
                "broker_url": SENTINELS.split(";"),
                "broker_transport_options": {
                    "master_name": "m",
                    "sentinel_kwargs": {"password": "p&w"},
                },
            },
            "sentinel://a:1?service=m&sentinel_password=p%26w;sentinel://b:2;sentinel://c:3",
        ),
        (
            {
                "broker_url": "amqp://h",
                "result_backend": "sentinel://:pw@a:1/5;sentinel://b:2/5",
                "result_backend_transport_options": {"master_name": "m"},
            },
            "sentinel://:pw@a:1/5?service=m;sentinel://b:2/5",
        ),
    ],
)
def test_what_celery_users_have_is_understood(settings, url):
    wanted = settings["broker_url"] if isinstance(url, dict) else url

    assert borrowed_url(conf(**settings)) == wanted


@pytest.mark.parametrize("settings", [{"broker_url": "amqp://h"}, {"broker_url": "sqs://"}])
def test_without_a_redis_a_url_is_asked_for(settings):
    with pytest.raises(ConfigurationError, match="set distlock_url"):
        borrowed_url(conf(**settings))


def test_sentinels_without_a_name_for_the_master_are_refused():
    with pytest.raises(ConfigurationError, match="master_name"):
        borrowed_url(conf(broker_url=SENTINELS))


def test_the_sentinels_of_all_urls_are_asked():
    url = borrowed_url(conf(broker_url=SENTINELS, broker_transport_options={"master_name": "m"}))

    assert locate(url).servers.address == "sentinel://a:1,b:2,c:3/0?service=m"


def test_the_number_of_replicas_is_a_setting():
    app = Celery("location", set_as_current=False)
    app.conf.update(broker_url="redis://localhost:1/0", distlock_replicas=2)

    assert Runtime.of(app).store._replicas == 2


def test_a_store_in_memory_has_no_replicas():
    app = Celery("location", set_as_current=False)
    app.conf.update(broker_url="memory://", distlock_replicas=2)

    with pytest.raises(ConfigurationError, match="no options"):
        _ = Runtime.of(app).store


def test_an_option_is_added_to_what_there_is():
    assert with_option("redis://h", a=1) == "redis://h?a=1"
    assert with_option("redis://h?b=2", a="x y") == "redis://h?b=2&a=x+y"
    assert with_option("redis://h", a="", b=None) == "redis://h"
    assert with_option("redis://h", a=False) == "redis://h?a=false"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sentinel://h:1/0", "names no service"),
        ("redis://a,b/0", r"several hosts are a cluster \(redis\+cluster://"),
        ("sentinel://h:port/0?service=m", "it should be like sentinel://"),
        ("redis+cluster://h:1/0?no_such=1", "no_such"),
        ("sentinel://h/0?service=m&no_such=1", "no_such"),
    ],
)
def test_a_wrong_url_is_told_what_is_right(url, message):
    with pytest.raises(ConfigurationError, match=message):
        locate(url)


@pytest.mark.parametrize("tls", ["sentinels://h/0?service=m", "rediss+cluster://h/0"])
def test_tls_is_for_all_servers(tls):
    servers = locate(f"{tls}{'&' if '?' in tls else '?'}ssl_ca_certs=/ca.pem").servers

    assert "SSL" in servers._settings.connection_class.__name__


def test_one_password_is_for_the_servers_and_another_for_the_sentinels():
    servers = locate("sentinel://user:p%40@h/3?service=m&sentinel_password=q").servers

    settings = servers._settings.settings
    assert (settings["username"], settings["password"], settings["db"]) == ("user", "p@", 3)
    (sentinel,) = servers._sentinels
    assert sentinel.settings["password"] == "q"
    assert "p@" not in servers.address
