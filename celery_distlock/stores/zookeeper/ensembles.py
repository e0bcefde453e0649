"""Parses the URL of an ensemble, and finds what makes the ensemble unsuitable for locks."""

import contextlib
import re
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from celery_distlock.errors import ConfigurationError
from celery_distlock.stores.findings import Finding, Severity
from celery_distlock.stores.urls import host_and_port, redact, split_url

PORT = 2181
SESSION = 30.0  # seconds
EXAMPLE = "zookeeper://user:password@host:2181,host:2181/chroot?session=30"


class Ensemble(NamedTuple):
    """
    The parts of a URL.

    Attributes:
        session: The session timeout to ask for, in seconds.
        user: The only user with access to the nodes; empty: nodes are open to all.
    """

    servers: tuple[tuple[str, int], ...]
    chroot: str
    session: float
    user: str
    password: str

    @property
    def hosts(self) -> str:
        return ",".join(host_and_port(host, port) for host, port in self.servers)

    @property
    def address(self) -> str:
        """The URL without password and options; equal for the same hosts in another order."""
        return f"zookeeper://{self.hosts}{self.chroot}"


def locate(url: str, others: Mapping[str, str]) -> Ensemble:
    """
    Parse *url* and the options that were given separately; send nothing.

    Raises:
        ConfigurationError: The URL does not parse, or names an unknown option.
    """
    try:
        return _parsed(url, others)
    except ValueError as error:
        raise ConfigurationError(
            f"the lock store's URL {redact(url)!r}: {error}; it should be like {EXAMPLE}"
        ) from None


def _parsed(url: str, others: Mapping[str, str]) -> Ensemble:
    parts = split_url(url)
    userinfo, _, hosts = parts.netloc.rpartition("@")
    user, _, password = map(unquote, userinfo.partition(":"))
    if bool(user) != bool(password):
        raise ValueError("a user needs a password, and a password a user")
    pairs = [*parse_qsl(parts.query, keep_blank_values=True), *others.items()]
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ValueError("it names an option twice")
    session = options.pop("session", str(SESSION))
    if parts.fragment:  # not shown: it may be part of a password
        raise ValueError("write a # as %23, otherwise everything after it is ignored")
    if options:
        raise ValueError(f"there is no option {', '.join(map(repr, options))}")
    try:
        seconds = float(session)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError(f"session must be a number of seconds, not {session!r}")
    steps = [step for step in parts.path.split("/") if step]
    if {".", ".."} & set(steps):
        raise ValueError("a path must not contain '.' or '..'")
    servers = tuple(sorted({_server(each) for each in hosts.split(",")}))
    return Ensemble(servers, "".join(f"/{step}" for step in steps), seconds, user, password)


def _server(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a host is missing")
    return parts.hostname, parts.port or PORT


def find_doubts(ensemble: Ensemble, session: float) -> Iterator[Finding]:
    """Yield doubts about locks there, given that sessions of *session* seconds were agreed."""
    if session != ensemble.session:
        yield Finding(
            Severity.DOUBT,
            "store",
            f"a session lasts {session:g} s and not {ensemble.session:g} as requested (see"
            " minSessionTimeout and maxSessionTimeout): no lease can be longer, and the key of a"
            " process that dies stays locked for that time",
            figures={"timeout": session, "wanted": ensemble.session},
        )
    reports = filter(None, map(_report, ensemble.servers))  # the first answer is enough
    if "Mode: standalone" in next(reports, ""):
        yield Finding(
            Severity.DOUBT,
            "server",
            "this is a single server, not an ensemble: there are no locks while it is down",
            "use several servers that fail independently of one another",
        )


def described(ensemble: Ensemble) -> Iterator[str]:
    """Yield a description of each server, for people."""
    for server in ensemble.servers:
        facts = dict(_FACT.findall(_report(server)))
        host, port = server
        if "Mode" in facts:
            version = facts.get("Zookeeper version", "?")
            yield f"ZooKeeper {version}, {facts['Mode']}, {host} port {port}"
        else:
            yield f"{host} port {port} gives no status: it is down, or does not allow srvr"


_FACT = re.compile(r"^([\w ]+): ([^\s,-]+)", re.MULTILINE)


def _report(server: tuple[str, int]) -> str:
    """Return the status that *server* reports; "" if it does not answer or must not report."""
    with contextlib.suppress(OSError), socket.create_connection(server, 2.0) as connection:
        connection.sendall(b"srvr")
        return connection.makefile(encoding="utf-8", errors="replace").read()
    return ""
