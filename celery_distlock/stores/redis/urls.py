"""Find the servers that a URL names: as redis-py writes it, as Celery does, and ours."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.connection import (
    URL_QUERY_ARGUMENT_PARSERS,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import RedisError

from celery_distlock.errors import ConfigurationError
from celery_distlock.settings import closest
from celery_distlock.stores.urls import host_and_port, redact, split_url

from .cluster import Cluster
from .connections import NodeSettings, OneServer
from .sentinels import Sentinels
from .topology import HostPort, Topology

REDIS_PORT, SENTINEL_PORT = 6379, 26379
EXAMPLES = {
    "sentinel": "sentinel://host1:26379,host2:26379,host3:26379/0?service=mymaster",
    "redis+cluster": "redis+cluster://user:password@host1:6379,host2:6379/0",
    "redlock": "redlock://host1:6379,host2:6379,host3:6379/0",
    "redis": "redis://user:password@host:6379/0",
}
# Each scheme with TLS, and the scheme without it.
_WITHOUT_TLS = {
    "rediss": "redis",
    "sentinels": "sentinel",
    "rediss+cluster": "redis+cluster",
    "redlocks": "redlock",
}
_OVER_TLS = {without: scheme for scheme, without in _WITHOUT_TLS.items()}
_SOCKETS = ("unix", "redis+socket")
# The options after the question mark. The others of redis-py would have no effect.
_OUR_OPTIONS = frozenset({"replicas", "scripts"})
_SENTINELS_OPTIONS = frozenset({"service", "master_name", "sentinel_username", "sentinel_password"})
_PASSED_ON = frozenset(
    {"client_name", "db", "password", "socket_keepalive", "socket_read_size", "username"}
)
_TLS_OPTIONS = frozenset(
    {
        *("ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile"),
        *("ssl_check_hostname", "ssl_ciphers", "ssl_exclude_verify_flags"),
        *("ssl_include_verify_flags", "ssl_keyfile", "ssl_min_version"),
        *("ssl_ocsp_expected_cert", "ssl_password"),
        *("ssl_validate_ocsp", "ssl_validate_ocsp_stapled"),
    }
)
OPTIONS = _OUR_OPTIONS | _SENTINELS_OPTIONS | _PASSED_ON | _TLS_OPTIONS
_CONVERTERS: Mapping[str, Callable[[str], Any]] = URL_QUERY_ARGUMENT_PARSERS  # type: ignore[assignment]
_SET_BY_US = frozenset(
    {
        *("decode_responses", "encoding", "encoding_errors", "health_check_interval"),
        *("legacy_responses", "max_connections", "protocol", "retry_on_error", "retry_on_timeout"),
        *("socket_connect_timeout", "socket_timeout", "timeout"),
    }
)


class Address(NamedTuple):
    """The parts of a URL with any number of hosts."""

    scheme: str  # without TLS
    tls: bool
    user: str  # as in the URL: quoted, with the password
    hosts: tuple[HostPort, ...]
    path: str  # of a socket; otherwise the database, after a slash
    options: dict[str, str]

    @property
    def name(self) -> str:
        """The URL without passwords and options; equal for the same hosts in another order."""
        hosts = ",".join(sorted(host_and_port(host, port) for host, port in self.hosts))
        scheme = _OVER_TLS[self.scheme] if self.tls else self.scheme
        return f"{scheme}://{hosts}/{self.path.strip('/') or 0}"


class Location(NamedTuple):
    """
    Where a Redis store's records are.

    Attributes:
        servers: The servers.
        replicas: The number of replicas that must confirm what must not be lost.
    """

    servers: Topology
    replicas: int


def locate(url: str, options: Mapping[str, str] | None = None) -> Location:
    """
    Return the servers that *url* names; nothing is sent yet.

    Args:
        url: As the page about places has it, or as Celery writes it.
        options: Further options of its query.

    Raises:
        ConfigurationError: It does not parse, or names an unknown option.
    """
    with explained(url):
        address = split(url, options or {})
        address.options.pop("scripts", None)
        replicas = int(address.options.pop("replicas", "0"))
        if replicas < 0:
            raise ConfigurationError("replicas must not be negative")
        return Location(_servers(address), replicas)


def wants_scripts(url: str, options: Mapping[str, str] | None = None) -> bool:
    """
    Return whether the store at *url* uses scripts: the option ``scripts=off`` turns them off.

    Raises:
        ConfigurationError: The URL does not parse, or has another value there.
    """
    with explained(url):
        word = split(url, options or {}).options.get("scripts", "on")
        if word not in ("on", "off"):
            raise ConfigurationError(f"scripts are 'on' or 'off', not {word!r}")
        return word == "on"


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Add *url*, without its password, to the errors of the block."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"the lock store's URL {redact(url)!r}: {error}") from None
    except (ValueError, RedisError):  # its message may quote a part of the password
        scheme = _WITHOUT_TLS.get(url.partition("://")[0], url.partition("://")[0])
        raise ConfigurationError(
            f"the lock store's URL {redact(url)!r} does not parse; it should be like"
            f" {EXAMPLES.get(scheme, EXAMPLES['redis'])}"
        ) from None


def split(url: str, options: Mapping[str, str]) -> Address:
    """
    Return the parts of *url*, with *options* among its own.

    Several URLs with semicolons between them, as Celery has it, are one.

    Raises:
        ValueError: It does not parse.
        ConfigurationError: It does, and a part of it would be ignored.
    """
    first, *more = url.split(";") if url.startswith("sentinel") else [url]
    parts = split_url(first)
    if "#" in url:
        raise ConfigurationError("write a # as %23; otherwise what follows it is ignored")
    user, _, hosts = parts.netloc.rpartition("@")
    if "@" in user and "," in user:
        raise ConfigurationError("write user and password once, before all hosts")
    scheme = _WITHOUT_TLS.get(parts.scheme, parts.scheme)
    port = SENTINEL_PORT if scheme == "sentinel" else REDIS_PORT
    found = [_where(host, port) for host in hosts.split(",")]
    path, options = parts.path, _options(parts.query, user, options)
    if scheme in _SOCKETS:
        if hosts:
            raise ConfigurationError(f"a socket has no host, as in {scheme}:///run/redis.sock")
        database = options.pop("virtual_host", "") if scheme == "redis+socket" else ""
        options["db"] = _database(database, options)
    else:
        path = f"/{_database(path.strip('/'), options)}"
        options.pop("db", None)
    for other in map(split_url, more):
        theirs, _, hosts = other.netloc.rpartition("@")
        found += [_where(host, port) for host in hosts.split(",")]
        if theirs not in ("", user) or other.path.strip("/") not in ("", path[1:]) or other.query:
            raise ConfigurationError("write user, password, database and options in the first URL")
    return Address(scheme, scheme != parts.scheme, user, tuple(found), path, options)


def _options(query: str, user: str, others: Mapping[str, str]) -> dict[str, str]:
    pairs = [*parse_qsl(query, keep_blank_values=True), *others.items()]
    name, _, password = user.partition(":")
    before = ["username"] * bool(name) + ["password"] * bool(password)
    names = [name for name, _ in pairs] + before
    for name, value in pairs:
        if not name.isidentifier():  # not shown: it may be part of a password
            raise ConfigurationError("write special characters in user and password as %40")
        if not value:  # an unknown name may be part of a password
            named = f"the option {name!r}" if name in OPTIONS else "an option"
            raise ConfigurationError(f"{named} has no value")
        if names.count(name) > 1:
            raise ConfigurationError(f"it has {name!r} twice")
    return dict(pairs)


def _database(named: str, options: dict[str, str]) -> str:
    """Return the database that is *named*, or that *options* have."""
    found = {database for database in (named, options.get("db", "")) if database} or {"0"}
    if len(found) > 1:
        raise ConfigurationError("it names two databases")
    (database,) = found
    if not (database.isascii() and database.isdecimal()):  # not shown: it may be part of a password
        raise ConfigurationError("its database is not a number")
    return database


def _where(host: str, port: int) -> HostPort:
    parts = urlsplit(f"//{host}")
    return parts.hostname or "localhost", parts.port or port


def _servers(address: Address) -> Topology:
    if address.scheme == "sentinel":
        return _sentinels(address)
    if address.scheme == "redis+cluster":
        return Cluster(address.name, address.hosts, node_settings(address, address.hosts[0]))
    if len(address.hosts) > 1:
        raise ConfigurationError(
            f"several hosts are a cluster ({EXAMPLES['redis+cluster']}), or sentinels that"
            f" name the master ({EXAMPLES['sentinel']})"
        )
    if address.scheme in _SOCKETS:
        path = unquote(address.path)
        node = _settings(UnixDomainSocketConnection, address, {"path": path})
        return OneServer(f"unix://{path}?db={node.settings.get('db') or 0}", node)
    return OneServer(address.name, node_settings(address, address.hosts[0]))


def _sentinels(address: Address) -> Sentinels:
    options = dict(address.options)
    service = options.pop("service", "") or options.pop("master_name", "")
    if "master_name" in options:
        raise ConfigurationError("service and master_name are the same option, and it has both")
    if not service:
        raise ConfigurationError(f"it names no service, as in {EXAMPLES['sentinel']}")
    own = {
        "username": options.pop("sentinel_username", None),
        "password": options.pop("sentinel_password", None),
        "db": 0,
    }
    address = address._replace(options=options)
    sentinels = [node_settings(address, where) for where in address.hosts]
    return Sentinels(
        f"{address.name}?service={service}",
        service,
        [NodeSettings(each, {**settings, **own}) for each, settings in sentinels],
        node_settings(address, address.hosts[0]),
    )


def node_settings(address: Address, where: HostPort) -> NodeSettings:
    """Return how to connect to the server at *where*, one of those of *address*."""
    host, port = where
    place = {"host": host, "port": port, "db": int(address.path.strip("/"))}
    return _settings(SSLConnection if address.tls else Connection, address, place)


def _settings(connection_class: type[Any], address: Address, place: dict[str, Any]) -> NodeSettings:
    name, _, password = map(unquote, address.user.partition(":"))
    user = {"username": name, "password": password}
    settings = place | {option: value for option, value in user.items() if value}
    for option, value in address.options.items():
        _check_option(option, address)
        settings[option] = _CONVERTERS.get(option, str)(value)
    if "ssl_cert_reqs" in settings:
        settings["ssl_cert_reqs"] = settings["ssl_cert_reqs"].removeprefix("CERT_").lower()
    settings |= {"protocol": 2, "decode_responses": False, "health_check_interval": 0}
    if "path" not in settings:
        settings.setdefault("socket_keepalive", True)
    try:
        connection_class(**settings)  # connects when it is used
    except (TypeError, ValueError, RedisError) as error:
        raise ConfigurationError(str(error)) from None
    return NodeSettings(connection_class, settings)


def _check_option(name: str, address: Address) -> None:
    allowed = _PASSED_ON | (_TLS_OPTIONS if address.tls else frozenset())
    if name in allowed:
        return
    if name in _SET_BY_US:
        raise ConfigurationError(
            f"the option {name!r} is not for locks, whose connections, time limits, retries and"
            " encoding are the store's own"
        )
    if name in _TLS_OPTIONS:
        raise ConfigurationError(f"the option {name!r} is for TLS, as in rediss://")
    if name in OPTIONS:
        raise ConfigurationError(f"the option {name!r} is for other lock stores")
    if address.scheme != "redlock":
        allowed |= _OUR_OPTIONS
    if address.scheme == "sentinel":
        allowed |= _SENTINELS_OPTIONS
    raise ConfigurationError(f"there is no option {name!r}; {closest(name, allowed)}")
