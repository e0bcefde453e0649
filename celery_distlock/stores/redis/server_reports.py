"""What servers report about themselves, and the findings from it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from celery_distlock.naming import shown
from celery_distlock.stores.findings import Finding, Severity, clock_finding
from celery_distlock.stores.urls import host_and_port

from .answers import seconds_of
from .connections import ANSWERLESS, TIMEOUT, Command, command
from .permissions import IN_A_CLUSTER, REHEARSAL, lacking, unknown
from .reading import NOT_READ, REMEDY
from .records import Records
from .request_runner import LONE_NODE, Answered, RequestRunner
from .topology import Topology

# The questions to a server for `parse_info`, and for `describe_answers`.
INFO = [command(b"", "INFO"), command(b"", "CONFIG", "GET", "save")]
QUESTIONS = [*INFO, command(b"", "TIME")]


def describe_server(
    servers: Topology, attempt: Callable[[Sequence[Command]], Answered]
) -> Iterator[Finding]:
    """Describe *servers*, as `Store.describe` does, by what they answer to *attempt*."""
    for node in servers.nodes():
        asked_at = time.time()
        answers = attempt([call._replace(node=node) for call in QUESTIONS]).answers
        silence = next((each for each in answers if isinstance(each, ANSWERLESS)), None)
        if silence is not None:
            message, remedy = f"does not answer: {silence}", "start it: its keys cannot be taken"
            yield Finding(Severity.DOUBT, "server", message, remedy)
        else:
            yield from describe_answers(answers, (asked_at + time.time()) / 2)


def describe_answers(answers: Sequence[Any], at: float) -> Iterator[Finding]:
    """Describe a server by its answers to `QUESTIONS`, which it gave *at* about that time."""
    info, save, now = answers
    failures = [each for each in (info, now) if isinstance(each, Exception)]
    if failures:
        yield Finding(Severity.OK, "server", f"reports nothing about itself: {failures[0]}")
        return
    try:
        ahead = seconds_of(now) - at
        facts = parse_info(info, save)
    except NOT_READ:
        message = f"reports nothing about itself: {shown(repr((info, now)))}"
        yield Finding(Severity.DOUBT, "server", message, REMEDY)
    else:
        yield from describe_info(facts, ahead)


def missing_rights(servers: Topology, requests: RequestRunner, records: Records) -> Finding | None:
    """Return which rights are missing; None if none are, or if that is unknown."""
    calls = [records.command("rights", *words) for words in REHEARSAL]
    if not servers.in_order:
        calls += [records.command("rights", *words) for words in IN_A_CLUSTER]
    try:
        answers = requests.exchange(calls, TIMEOUT)
    except RedisError:
        return None
    hidden, rights = unknown(answers[: len(REHEARSAL)]), lacking(answers, records.prefix)
    if hidden:
        message = f"this server has no {' '.join(hidden)}"
        message += f", and this user lacks the rights {' '.join(rights)}" if rights else ""
        remedy = "see its configuration, which may have given them other names (rename-command)"
        return Finding(Severity.DOUBT, "rights", message, remedy)
    if not rights:
        return None
    message = f"this user lacks the rights {' '.join(rights)}"
    remedy = "give them to the user in the URL by ACL SETUSER, on every server"
    return Finding(Severity.DOUBT, "rights", message, remedy)


def examine(servers: Topology, requests: RequestRunner) -> Iterator[Finding]:
    """Report why servers may not keep their locks; names the servers if not all of them."""
    replicas = servers.replicas()
    nodes = [*servers.nodes(), *replicas]
    asked = [call._replace(node=node) for node in nodes for call in INFO]
    answers = requests.attempt_briefly(asked)
    found: dict[str, tuple[Finding, list[Any]]] = {}
    for node, info, save in zip(nodes, answers[::2], answers[1::2], strict=True):
        facts = parse_info(info, save) if isinstance(info, bytes) else {}
        if node in replicas:
            facts.pop("role", None)  # as expected for a replica
        for finding in _server_findings(facts):
            found.setdefault(finding.message, (finding, []))[1].append(node)
        if servers.in_order and facts.get("cluster_enabled") == "1":
            remedy = "begin the URL with redis+cluster://"
            yield Finding(Severity.DOUBT, "server", f"this is {LONE_NODE}", remedy)
    for finding, of in found.values():
        where = ", ".join(host_and_port(*node) for node in of) if len(of) < len(nodes) else ""
        message = f"{where}: {finding.message}" if where else finding.message
        yield replace(finding, message=message)


def parse_info(info: bytes, save: object = None) -> dict[str, str]:
    """Return a server's INFO by name, and its CONFIG GET save, if that is permitted."""
    text = info.decode(errors="replace")  # paths may have any bytes
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if isinstance(save, list) and len(save) == 2:
        facts["save"] = save[1].decode()
    return facts


def memory_findings(facts: Mapping[str, str]) -> Iterator[Finding]:
    """Report why a server may not keep the locks that it has."""
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        evicted = facts.get("evicted_keys", "0")
        so_far = f"; {evicted} records were, since its start" if evicted != "0" else ""
        yield Finding(
            Severity.DOUBT,
            "memory",
            f"maxmemory-policy is {policy}: the server may evict locks and parked tasks when it is"
            f" full{so_far}; noeviction keeps them",
            "CONFIG SET maxmemory-policy noeviction, there and in its configuration file; caches go"
            " to another server",
        )
    if facts.get("role") == "slave":
        yield Finding(
            Severity.DOUBT,
            "server",
            "this is a replica: locks cannot be taken here",
            "name its master, or the sentinels that know the master",
        )


def _server_findings(facts: Mapping[str, str]) -> Iterator[Finding]:
    yield from memory_findings(facts)
    if facts.get("aof_enabled") == "0" and facts.get("save") == "":
        yield Finding(
            Severity.DOUBT,
            "persistence",
            "nothing is persisted: parked tasks end with the server",
            "CONFIG SET appendonly yes, there and in its configuration file; or lock_on_conflict ="
            ' "retry", which keeps nothing there',
        )
    version = facts.get("valkey_version") or facts.get("redis_version", "")
    if "valkey_version" not in facts and version and _version(version) < (6, 2):
        yield Finding(
            Severity.DOUBT,
            "server",
            f"Redis {version} is older than 6.2, the oldest that is supported",
            "use Redis 6.2 or later, or Valkey 7.2 or later",
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def describe_info(facts: Mapping[str, str], ahead: float) -> Iterator[Finding]:
    """
    Describe a server.

    Args:
        facts: Its answer to INFO.
        ahead: Seconds by which its clock is before ours.
    """
    name = "Valkey" if "valkey_version" in facts else "Redis"
    version = facts.get("valkey_version") or facts.get("redis_version", "?")
    role = "master" if facts.get("role") == "master" else "replica"
    server = f"{name} {version}, {role}, port {facts.get('tcp_port', '?')}"
    yield Finding(Severity.OK, "server", server)
    limit = facts.get("maxmemory", "0")
    limit = "no limit" if limit == "0" else f"limit {facts.get('maxmemory_human', limit)}"
    policy = facts.get("maxmemory_policy", "?")
    used = facts.get("used_memory_human", "?")
    yield Finding(Severity.OK, "memory", f"{used} used, {limit}, {policy}")
    yield _persistence(facts)
    yield Finding(Severity.OK, "replicas", facts.get("connected_slaves", "?"))
    yield clock_finding(ahead)


def _persistence(facts: Mapping[str, str]) -> Finding:
    writes = {}
    if facts.get("aof_enabled") == "1":
        writes["append-only file"] = facts.get("aof_last_write_status", "?")
    if facts.get("save"):
        writes["snapshots"] = facts.get("rdb_last_bgsave_status", "?")
    if not writes and "save" not in facts:
        message = "no append-only file; it does not report whether there are snapshots"
        return Finding(Severity.OK, "persistence", message)
    message = " and ".join(f"{way} ({status})" for way, status in writes.items()) or "none"
    if not any(status.startswith("err") for status in writes.values()):
        return Finding(Severity.OK, "persistence", message)
    return Finding(
        Severity.DOUBT,
        "persistence",
        message,
        "the server's last write to its disk failed: see its log; it may refuse to take any lock"
        " until one succeeds",
    )
