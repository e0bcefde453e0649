"""What is found about a server by what it reports, and what can be done about its refusals."""

from __future__ import annotations

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from celery_distlock.errors import QuorumError, StoreError
from celery_distlock.stores import Severity
from celery_distlock.stores.redis.connections import NotRedisError
from celery_distlock.stores.redis.server_errors import remedy_for
from celery_distlock.stores.redis.server_reports import describe_info, parse_info


def described(ahead: float = 0.0, **facts: str):
    return {found.subject: found for found in describe_info(facts, ahead)}


def test_a_clock_that_is_near_ours_is_fine_and_its_offset_a_figure():
    found = described(ahead=-0.25)["clock"]

    assert (found.severity, found.figures) == (Severity.OK, {"offset": -0.25})
    assert found.message == "250.0 ms behind this host's"


def test_a_clock_more_than_a_second_away_is_a_doubt():
    found = described(ahead=1.5)["clock"]

    assert found.severity is Severity.DOUBT
    assert "NTP" in found.remedy


def test_a_servers_report_is_read_whatever_its_paths_are_called():
    info = b"config_file:/srv/caf\xe9/redis.conf\r\nredis_version:8.0.0\r\n"

    assert parse_info(info)["redis_version"] == "8.0.0"


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        ({"aof_enabled": "1", "aof_last_write_status": "ok"}, Severity.OK),
        ({"aof_enabled": "1", "aof_last_write_status": "err"}, Severity.DOUBT),
        ({"save": "60 1", "rdb_last_bgsave_status": "err"}, Severity.DOUBT),
        ({"save": "", "rdb_last_bgsave_status": "err"}, Severity.OK),
    ],
)
def test_a_write_to_the_disk_that_failed_is_a_doubt(facts, severity):
    assert described(**facts)["persistence"].severity is severity


@pytest.mark.parametrize(
    ("failure", "remedy"),
    [
        (NoPermissionError("User a has no permissions to run the 'get' command"), "ACL SETUSER"),
        (ResponseError("NOAUTH Authentication required."), "set a password"),
        (ResponseError("WRONGPASS invalid username-password pair"), "correct user and password"),
        (ResponseError("DB index is out of range"), "correct the number"),
        (NotRedisError("not a Redis server"), "correct host and port"),
        (ResponseError("value is not an integer or out of range script: on @x"), "delete the rec"),
        (ResponseError("OOM command not allowed"), ""),
    ],
)
def test_a_refusal_has_its_remedy(failure, remedy):
    found = remedy_for(failure)

    assert remedy in found
    assert bool(found) == bool(remedy)


def test_an_error_keeps_its_remedy_next_to_its_message():
    assert StoreError("refused", remedy="try").args == ("refused",)
    assert StoreError("refused", remedy="try").remedy == "try"
    assert "servers" in QuorumError("too few", 1, 3).remedy
