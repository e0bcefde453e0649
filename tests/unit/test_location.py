"""Where the locks are if only broker and results are named."""

from __future__ import annotations

import ssl

import pytest
from celery import Celery

from celery_distlock.errors import ConfigurationError
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.location import derive_store_location
from celery_distlock.stores import open_store
from celery_distlock.stores.redis.urls import locate

SENTINELS = "sentinel://a:1;sentinel://b:2;sentinel://c:3"


def conf(**settings):
    app = Celery("location", set_as_current=False)
    app.conf.update(settings)
    return app.conf


@pytest.mark.parametrize(
    ("settings", "url", "options"),
    [
        ({"broker_url": "redis://h/1"}, "redis://h/1", {}),
        ({"broker_url": "Redis://h/1\n"}, "redis://h/1", {}),
        ({"broker_url": "redis://h/1", "result_backend": "redis://r"}, "redis://h/1", {}),
        ({"broker_url": "amqp://h", "result_backend": "rediss://r/2"}, "rediss://r/2", {}),
        ({"broker_write_url": "redis://w/1", "broker_url": "redis://h/1"}, "redis://w/1", {}),
        ({"broker_url": "redis://h/1;redis://stand-in/1"}, "redis://h/1", {}),
        ({"broker_url": ["redis://h/1", "redis://stand-in/1"]}, "redis://h/1", {}),
        (
            {"broker_url": "redis+socket:///tmp/s?virtual_host=2"},
            "redis+socket:///tmp/s",
            {"virtual_host": "2"},
        ),
        ({"broker_url": "memory://anything"}, "memory://", {}),
        (
            {"broker_url": "redis://h/1", "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_NONE}},
            "rediss://h/1",
            {"ssl_cert_reqs": "CERT_NONE"},
        ),
        (
            {
                "broker_url": "rediss://h",
                "broker_use_ssl": {"ssl_cert_reqs": None, "ssl_check_hostname": False},
            },
            "rediss://h",
            {"ssl_cert_reqs": "none", "ssl_check_hostname": "false"},
        ),
        ({"broker_url": [], "result_backend": "redis://r"}, "redis://r", {}),
        (
            {
                "broker_url": "amqp://h",
                "result_backend": "redis://r/2",
                "redis_backend_use_ssl": {"ssl_ca_certs": "/ca.pem"},
            },
            "rediss://r/2",
            {"ssl_ca_certs": "/ca.pem"},
        ),
        (
            {"broker_url": SENTINELS, "broker_transport_options": {"master_name": "m"}},
            "sentinel://a:1;sentinel://b:2;sentinel://c:3",
            {"service": "m"},
        ),
        (
            {
                "broker_url": SENTINELS.split(";"),
                "broker_transport_options": {
                    "master_name": "m",
                    "sentinel_kwargs": {"password": "p&w"},
                },
            },
            "sentinel://a:1;sentinel://b:2;sentinel://c:3",
            {"service": "m", "sentinel_password": "p&w"},
        ),
        (
            {
                "broker_url": "amqp://h",
                "result_backend": "sentinel://:pw@a:1/5;sentinel://b:2/5",
                "result_backend_transport_options": {"master_name": "m"},
            },
            "sentinel://:pw@a:1/5;sentinel://b:2",
            {"service": "m"},
        ),
        (
            {"broker_url": "redis://h/1?socket_timeout=5&client_name=c&visibility_timeout=9"},
            "redis://h/1",
            {"client_name": "c"},
        ),
        ({"broker_url": "redis://h/1?virtual_host=2&timeout=&#more"}, "redis://h/1", {}),
        (
            {"broker_url": "amqp://h", "result_backend": "redis://r/2?health_check_interval=30"},
            "redis://r/2",
            {},
        ),
        ({"broker_url": "redis://h?ssl_ca_certs=c.pem"}, "rediss://h", {"ssl_ca_certs": "c.pem"}),
        (
            {
                "broker_url": "sentinel://:pw@a/1?socket_timeout=5&service=m;sentinel://:pw@b?x=1",
                "broker_transport_options": {"master_name": "n", "visibility_timeout": 5},
            },
            "sentinel://:pw@a/1;sentinel://b",
            {"service": "m"},
        ),
    ],
)
def test_what_celery_users_have_is_understood(settings, url, options):
    assert derive_store_location(conf(**settings)) == (url, options)
    open_store(url, "distlock", options)


def test_what_is_left_out_of_a_borrowed_url_is_said_for_debugging(caplog):
    with caplog.at_level("DEBUG", "celery_distlock.runtime.location"):
        derive_store_location(conf(broker_url="redis://h/1?socket_timeout=5"))

    assert "does not use the option 'socket_timeout' of Celery's URL" in caplog.text


@pytest.mark.parametrize("settings", [{"broker_url": "amqp://h"}, {"broker_url": "sqs://"}])
def test_without_a_redis_a_url_is_asked_for(settings):
    with pytest.raises(ConfigurationError, match="set distlock_url"):
        derive_store_location(conf(**settings))


def test_sentinels_without_a_name_for_the_master_are_refused():
    with pytest.raises(ConfigurationError, match="master_name"):
        derive_store_location(conf(broker_url=SENTINELS))


def test_the_sentinels_of_all_urls_are_asked():
    location = derive_store_location(
        conf(broker_url=SENTINELS, broker_transport_options={"master_name": "m"})
    )

    assert locate(*location).servers.address == "sentinel://a:1,b:2,c:3/0?service=m"


def test_the_number_of_replicas_is_a_setting():
    app = Celery("location", set_as_current=False)
    app.conf.update(broker_url="redis://localhost:1/0", distlock_replicas=2)

    assert Runtime.of(app).store._records._replicas == 2


def test_a_store_in_memory_has_no_replicas():
    app = Celery("location", set_as_current=False)
    app.conf.update(broker_url="memory://", distlock_replicas=2)

    with pytest.raises(ConfigurationError, match="no options"):
        _ = Runtime.of(app).store


@pytest.mark.parametrize("url", ["redis://h?replicas=1", "zookeeper://h?session=9"])
def test_an_option_is_given_in_the_url_or_besides_it(url):
    with pytest.raises(ConfigurationError, match="twice"):
        open_store(url, "distlock", {"replicas": "1", "session": "9"})


def test_a_wrong_option_besides_the_url_is_said():
    with pytest.raises(ConfigurationError, match="there is no option 'replica'"):
        open_store("redis://h", "distlock", {"replica": "1"})


@pytest.mark.parametrize(
    "url",
    [
        "sentinel://[::1]:1,b:2,[fe80::2]/0?service=m",
        "redis+cluster://[::1]:1,b:2,[fe80::2]/0",
        "redlock://[::1]:1,b:2,[fe80::2]/0",
        "zookeeper://[::1]:1,b:2,[fe80::2]/chroot",
    ],
)
def test_some_of_several_hosts_may_be_ipv6_addresses(url):
    address = open_store(url, "distlock").address

    assert "[::1]:1" in address
    assert "b:2" in address
    assert "[fe80::2]:" in address


def test_what_a_password_is_made_of_is_left_alone():
    password = "a%40b:c/d?e#f g&h"
    options = {"service": "m", "sentinel_password": password}

    servers = locate("sentinel://u:a%2540b@h/0", options).servers

    assert servers._settings.settings["password"] == "a%40b"
    assert servers._sentinels[0].settings["password"] == password


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sentinel://h:1/0", "names no service"),
        ("redis://a,b/0", r"several hosts are a cluster \(redis\+cluster://"),
        ("sentinel://h:port/0?service=m", "it should be like sentinel://"),
        ("redis+cluster://h:1/0?no_such=1", "no_such"),
        ("sentinel://h/0?service=m&no_such=1", "no_such"),
        ("sentinel://h/0?service=m&master_name=n", "has both"),
        ("sentinel://:a@h,:b@i/0?service=m", "password once, before all hosts"),
        ("sentinel://:a@h?service=m;sentinel://:b@i", "options in the first URL"),
        ("sentinel://h/1?service=m;sentinel://i/2", "options in the first URL"),
        ("sentinel://h?service=m;sentinel://i?ssl_password=p", "options in the first URL"),
        ("redis://h?service=m", "'service' is for other lock stores"),
        ("redis://h?ssl_ca_certs=c.pem", "'ssl_ca_certs' is for TLS, as in rediss://"),
        ("unix:///s?ssl_ca_certs=c.pem", "'ssl_ca_certs' is for TLS"),
        ("redis://h/1?db=2", "names two databases"),
        ("redis://h?db=1&db=2", "has 'db' twice"),
        ("redis://:a@h?password=b", "has 'password' twice"),
        ("redis://a@h?username=b", "has 'username' twice"),
        ("redis://h?client_name=", "'client_name' has no value"),
        ("redis://h/0#1", "write a # as %23"),
        ("unix://run/redis.sock", "no host, as in unix:///run"),
        ("redis+socket:///s?db=1&virtual_host=2", "names two databases"),
    ],
)
def test_a_wrong_url_gets_a_suggestion(url, message):
    with pytest.raises(ConfigurationError, match=message):
        locate(url)


SOME_OF_EACH = [
    "redis://h/{}",
    "redis://h?db={}",
    "rediss://h/{}",
    "unix:///run/redis.sock?db={}",
    "redis+socket:///run/redis.sock?virtual_host={}",
    "redis+socket:///run/redis.sock?db={}",
    "sentinel://h,i/{}?service=m",
    "sentinels://h/{}?service=m",
    "redis+cluster://h,i/{}",
    "redis+cluster://h,i?db={}",
    "rediss+cluster://h/{}",
    "redlock://h,i,j/{}",
    "redlocks://h,i,j/{}",
    "redis://h/{}?scripts=off",
]


@pytest.mark.parametrize("url", SOME_OF_EACH)
def test_a_database_is_a_number(url):
    for database in ("abc", "-1", "1.5", "1/2", "²", "0x1"):
        with pytest.raises(ConfigurationError, match="database is not a number"):
            open_store(url.format(database), "distlock")


@pytest.mark.parametrize("url", SOME_OF_EACH)
def test_the_database_that_is_named_is_used(url):
    store = open_store(url.format(7), "distlock")

    settings = store._settings[0] if "redlock" in url else store._servers._settings
    assert settings.settings["db"] == 7
    assert "7" in store.identity


NOT_FOR_LOCKS = (
    *("max_connections=10", "socket_timeout=5", "socket_connect_timeout=5", "timeout=5"),
    *("retry_on_timeout=true", "retry_on_error=x", "health_check_interval=30", "protocol=3"),
    *("decode_responses=true", "encoding=latin1", "encoding_errors=ignore"),
    "legacy_responses=false",
)


@pytest.mark.parametrize("url", [url.format(0) for url in SOME_OF_EACH])
def test_an_option_that_would_be_set_to_no_avail_is_refused(url):
    for option in NOT_FOR_LOCKS:
        name = option.partition("=")[0]
        with pytest.raises(ConfigurationError, match=f"option '{name}' is not for locks"):
            open_store(f"{url}{'&' if '?' in url else '?'}{option}", "distlock")


@pytest.mark.parametrize("option", ["replicas=1", "scripts=off", "service=m"])
def test_several_masters_refuse_the_options_of_other_places(option):
    with pytest.raises(ConfigurationError, match="is for other lock stores"):
        open_store(f"redlock://h,i,j/0?{option}", "distlock")


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


def test_a_location_is_shown_without_passwords():
    broker = "sentinel://user:secret@h/1"
    options = {"master_name": "m", "sentinel_kwargs": {"password": "hidden"}}

    location = derive_store_location(conf(broker_url=broker, broker_transport_options=options))

    assert location.options["sentinel_password"] == "hidden"
    assert "secret" not in repr(location)
    assert "hidden" not in repr(location)
