"""What the commands show, without a terminal: to pipes and scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import datetime

import pytest
import redis

from celery_distlock.keys import slot_name
from celery_distlock.stores import Ability, AcquireRequest, ParkRequest, SendRequest, Want
from celery_distlock.stores.values import ALONE
from celery_distlock.testing.contract.actions import TWO, take
from tests.contract.parts.several_queues import TURNS, frees, turned_away, wants
from tests.integration.cli.conftest import command, environment
from tests.servers import grant
from tests.workers import ROOT

HOSTILE = ["two\nlines", "\x1b[31mred\x1b]0;title\x07", "[red]markup[/red]", "a\tb", "\u202eback"]


def records(done: subprocess.CompletedProcess[str]) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows(text: str) -> list[dict[str, str]]:
    head, *lines = [line.split("\t") for line in text.splitlines()]
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_the_list_has_a_line_for_every_held_key(bare_site, locks, key):
    with bare_site.held(key), bare_site.held(f"{key}2"):
        done = locks("list", f"{key}*")

    assert (done.returncode, done.stderr) == (0, "")
    (row,) = [row for row in rows(done.stdout) if row["KEY"] == key]
    assert row["HOLDER"] == "thread MainThread"
    assert row["WORKER"].endswith(f":{os.getpid()}")
    assert (row["WAITING"], row["WOKEN"]) == ("0", "0")
    assert (row["HELD"], row["NOTES"]) == ("exclusive", "-")
    assert len(rows(done.stdout)) == 2


def test_the_list_in_json_has_times_in_two_forms(bare_site, locks, key):
    with bare_site.held(key):
        state = bare_site.look(key)
        (record,) = records(locks("list", key, "--json"))

    assert set(record) == {
        *("key", "state", "holder", "since", "since_seconds", "age_seconds"),
        *("remaining_seconds", "token", "waiting", "oldest", "oldest_seconds", "woken"),
        *("mode", "units", "capacity", "holders", "limit", "lane_limits", "rest_seconds"),
        *("starts", "opens_in_seconds", "later", "due_in_seconds", "identities"),
    }
    assert set(record["holder"]) == {"task", "task_id", "host", "pid", "owner"}
    assert (record["key"], record["state"], record["token"]) == (key, "held", state.token)
    assert (record["mode"], record["units"], record["capacity"]) == ("exclusive", 1, 1)
    (only,) = record["holders"]
    assert only["owner"] == record["holder"]["owner"]
    assert (record["limit"], record["rest_seconds"]) == (None, 0)
    assert record["since_seconds"] == state.since
    assert datetime.fromisoformat(record["since"]).timestamp() == pytest.approx(state.since, abs=1)
    assert record["age_seconds"] >= 0
    assert 0 < record["remaining_seconds"] <= 30


def test_filters_narrow_the_list(bare_site, invoke, key):
    def listed(*options: str) -> set[str]:
        lines = invoke("list", f"{key}*", "--json", *options).stdout.splitlines()
        return {json.loads(line)["key"] for line in lines}

    with bare_site.held(key), bare_site.held(f"{key}2"):
        every = {key, f"{key}2"}
        assert listed() == every
        assert listed("--task", "MainThread") == every
        assert listed("--task", "other") == set()
        assert listed("--waiting") == listed("--limited") == set()
        assert listed("--older-than", "0") == every
        assert listed("--older-than", "1000s") == set()
        assert len(listed("--limit", "1")) == 1


@pytest.mark.parametrize("limit", [[], ["--limit", "2"]])
def test_the_oldest_come_first_when_sorted_by_age(bare_site, invoke, key, limit):
    with bare_site.held(f"{key}b"), bare_site.held(f"{key}a"), bare_site.held(f"{key}c"):
        by_age = invoke("list", f"{key}*", "--sort", "age", *limit).stdout
        by_key = invoke("list", f"{key}*", "--sort", "key", *limit).stdout

    most = 2 if limit else 3
    assert [row["KEY"] for row in rows(by_age)] == [f"{key}{c}" for c in "bac"][:most]
    assert [row["KEY"] for row in rows(by_key)] == [f"{key}{c}" for c in "abc"][:most]


def test_an_empty_list_is_reported_apart_from_the_output(locks, key):
    done = locks("list", key)

    assert (done.returncode, done.stdout) == (0, "")
    assert "No matching key is held or waited for at redis://" in done.stderr
    assert ", prefix 'test-" in done.stderr


def test_a_list_of_nothing_blames_no_pattern_that_was_not_given(locks):
    done = locks("--prefix", "nobody-uses-this", "list")

    assert done.stderr.startswith("No key is held or waited for at redis://")


def test_a_key_that_is_kept_for_a_task_names_the_one_that_the_task_waits_for(
    bare_site, invoke, key
):
    store, other = bare_site.store, f"{key}2"
    take(store, key, f"{key}-1")
    names = [slot_name(each) for each in (f"{key}3", key, other)]
    wants(store, names, wants=(TWO, ALONE, ALONE))
    turned_away(store, key, other, TURNS)

    with bare_site.held(other):
        assert frees(store, key, f"{key}{TURNS - 1}") == []
        text = invoke("show", key).stdout
        (record,) = map(json.loads, invoke("show", key, "--json").stdout.splitlines())
        store.parking.cancel(key, "run")

    assert "reserved for a parked task that waits for another key" in text
    assert re.search(rf"^waits for\s+{other}, held by thread MainThread on ", text, re.MULTILINE)
    (kept,) = record["holders"]
    assert (kept["task_id"], kept["waits_for"]["key"]) == ("run", other)
    assert kept["waits_for"]["holder"]["task"] == "MainThread"


def test_a_held_key_is_shown(bare_site, locks, key):
    with bare_site.held(key):
        token = bare_site.look(key).token
        done = locks("show", key)

    shown = dict(line.split("\t") for line in done.stdout.splitlines())
    assert done.returncode == 0
    assert (shown["key"], shown["state"], shown["token"]) == (key, "held", str(token))
    assert shown["worker"].endswith(f":{os.getpid()}")


@pytest.fixture
def endless(bare_site, key):
    """A lock as no acquire makes it: without an expiry, with a token that is no time."""
    with redis.Redis.from_url(bare_site.app.conf.result_backend) as client:
        fields = {"x": grant("host|1|task[id]|1", 10**30), "token": "9" * 30}
        client.hset(bare_site.record(key), mapping=fields)
        yield key
        client.delete(bare_site.record(key))


def test_the_lanes_of_a_queue_are_shown(bare_site, locks, invoke, key):
    with bare_site.held(key):
        for number, lane in enumerate(["acme", "acme", "a\tb", None]):
            want = ALONE if lane is None else Want(1, 9, (), 1, lane, 3000, 5)
            request = SendRequest(key, f"{number}:0:0:0", ParkRequest(b"{}"), want=want)
            bare_site.store.calls.send(request)
        shown, queued = locks("show", key), locks("queue", key)
        acme, rest = (invoke("queue", key, "--lane", lane).stdout for lane in ("acme", ""))
        second = json.loads(invoke("queue", key, "--lane=acme", "--first=1", "--json").stdout)
        none = locks("queue", key, "--lane", "other")
        (record,) = records(locks("show", key, "--json"))
        (waiters,) = records(locks("queue", key, "--json"))
        for number in range(4):
            bare_site.store.parking.cancel(key, f"{number}:0:0:0")

    assert (
        "LANE\tWAITING\tIN USE\tSHARE\n(none)\t1\t-\t1\na\\tb\t1\t0 of 5\t3\nacme\t2\t0 of 5\t3\n"
    ) in shown.stdout
    assert record["lanes"] == [
        {"name": "", "waiting": 1, "share": 1.0, "most": 0, "used": 0},
        {"name": "a\tb", "waiting": 1, "share": 3.0, "most": 5, "used": 0},
        {"name": "acme", "waiting": 2, "share": 3.0, "most": 5, "used": 0},
    ]
    assert [row["WANTS"] for row in rows(queued.stdout)][:2] == ["1 of 9, lane acme"] * 2
    assert [each["lane"] for each in waiters["waiters"]] == ["acme", "acme", "a\tb", None]
    assert [(row["PLACE"], row["ID"]) for row in rows(acme)] == [("0", "0"), ("1", "1")]
    assert [(each["place"], each["task_id"]) for each in second["waiters"]] == [(1, "1")]
    assert [(row["PLACE"], row["ID"]) for row in rows(rest)] == [("0", "3")]
    assert none.returncode == 1
    assert f"{key} has no waiters in the lane 'other' at " in none.stdout


def test_the_queue_shows_when_a_task_gives_up(bare_site, locks, key):
    with bare_site.held(key):
        for number, leaves in enumerate([3600.0, None]):
            request = SendRequest(key, f"{number}:0:0:0", ParkRequest(b"{}", leaves=leaves))
            bare_site.store.calls.send(request)
        queued = locks("queue", key)
        (record,) = records(locks("queue", key, "--json"))
        for number in range(2):
            bare_site.store.parking.cancel(key, f"{number}:0:0:0")

    first, second = rows(queued.stdout)
    assert first["LEAVES"].startswith("in 59m")
    assert second["LEAVES"] == "-"
    left, none = [each["leaves_in_seconds"] for each in record["waiters"]]
    assert 3400 < left <= 3600
    assert none is None


def test_a_lock_without_an_end_is_listed_and_shown(bare_site, endless, invoke):
    with bare_site.held(f"{endless}2"):
        listed = {row["KEY"]: row for row in rows(invoke("list", f"{endless}*").stdout)}
        top = invoke("top")
    shown = invoke("show", endless)

    assert set(listed) == {endless, f"{endless}2"}
    assert (listed[endless]["LEASE"], listed[endless]["AGE"]) == ("no end", "-")
    assert (top.exit_code, endless in top.stdout) == (0, True)
    assert shown.exit_code == 0
    facts = dict(line.split("\t") for line in shown.stdout.splitlines())
    assert facts["lease"] == "no end, unless it is renewed or released"
    assert (facts["since"], facts["token"]) == ("-", "-")


@pytest.mark.parametrize("sort", ["key", "task", "age", "lease", "waiting"])
def test_a_lock_without_an_end_is_null_in_json(bare_site, endless, invoke, sort):
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    with bare_site.held(f"{endless}2"):
        lines = invoke("list", f"{endless}*", "--json", "--sort", sort).stdout.splitlines()
    lines += invoke("show", endless, "--json").stdout.splitlines()

    records = [json.loads(line, parse_constant=refuse) for line in lines]
    ends = [(each["key"], each["remaining_seconds"] is None) for each in records]
    assert sorted(ends) == [(endless, True), (endless, True), (f"{endless}2", False)]
    assert {each["since"] for each in records if each["key"] == endless} == {None}


def test_a_lock_without_an_end_is_released(endless, invoke):
    assert invoke("release", endless, "--force").exit_code == 0
    assert invoke("show", endless).exit_code == 1


@pytest.mark.parametrize(
    "words",
    [
        *(("top", "--interval", number) for number in ("nan", "inf", "-inf", "0", "1e300", "2")),
        *(("list", "--older-than", number) for number in ("nan", "inf", "-1", "300")),
        *(("list", "--limit", number) for number in ("0", "-1", "nan", "1" + 20 * "0")),
        *(("queue", "k", "--limit", number) for number in ("0", "nan", "1" + 20 * "0")),
        *(("queue", "k", "--first", number) for number in ("-1", "1" + 20 * "0")),
        *(("doctor", "--samples", number) for number in ("0", "1" + 20 * "0")),
        *(("exporter", "--every", number) for number in ("nan", "inf", "-1", "5")),
        *(("exporter", "--port", number) for number in ("99999", "-1", "nan")),
        *(("web", "--interval", number) for number in ("nan", "inf", "0", "2")),
        *(("web", "--port", number) for number in ("65536", "-1")),
        *(("pause", "k", "--for", time) for time in ("0", "1x", "nan", "366d", "-1", "", "8")),
        *(("limit", "k", "2", "--for", time) for time in ("1.5.h", "0s")),
    ],
    ids=" ".join,
)
def test_a_number_that_makes_no_sense_is_refused(invoke, words):
    done = invoke(*words)

    assert done.exit_code == 2
    assert f"Invalid value for '{words[-2]}'" in done.stderr


def test_a_free_key_has_status_1(locks, key):
    done = locks("show", key)

    assert done.returncode == 1
    assert "state\tfree" in done.stdout
    assert json.loads(locks("show", key, "--json").stdout)["holder"] is None


def test_an_empty_queue_has_status_1(invoke, key):
    assert invoke("queue", key).exit_code == 1
    done = invoke("queue", key, "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (1, {"key": key, "waiters": []})


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_key_is_shown_on_one_line_and_harmlessly(bare_site, invoke, key, hostile):
    name = f"{key}{hostile}"
    with bare_site.held(name):
        listed = invoke("list", f"{key}*", no_color=False)
        shown = invoke("show", name, no_color=False)
        record = json.loads(invoke("list", f"{key}*", "--json").stdout)

    (row,) = rows(listed.stdout)
    assert row["KEY"].isprintable()
    assert row["KEY"] in shown.stdout
    if hostile.isprintable():
        assert row["KEY"] == name
    assert record["key"] == name


def test_a_key_of_10_kb_is_listed_by_a_name_that_show_takes(bare_site, invoke, key):
    name = key + "x" * 10_000
    with bare_site.held(name):
        (row,) = rows(invoke("list", f"{key}*").stdout)
        shown = invoke("show", row["KEY"])

    assert row["KEY"] == slot_name(name)
    assert shown.exit_code == 0
    assert row["TOKEN"] in shown.stdout


def test_a_key_that_reads_as_the_name_of_a_long_one_is_not_taken_for_it(bare_site, invoke, key):
    long_key = key.ljust(10_000, "x")
    with bare_site.held(long_key), bare_site.held(slot_name(long_key)):
        listed = {row["KEY"]: row["TOKEN"] for row in rows(invoke("list", f"{key}*").stdout)}
        shown = {name: invoke("show", name).stdout for name in listed}

    assert len(listed) == 2
    assert all(token in shown[name] for name, token in listed.items())


def test_a_closed_pipe_ends_the_list_quietly(bare_site, key):
    with bare_site.held(key):
        process = subprocess.Popen(
            command(bare_site, "list", key),
            env=environment(bare_site),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        process.stdout.close()  # long before it has begun to write
        with process.stderr:
            said = process.stderr.read()
        process.wait(60)

    assert said == b""


def test_the_url_and_the_prefix_may_be_given(bare_site, locks, key):
    url, prefix = bare_site.env["DISTLOCK_TEST_BROKER"], bare_site.app.conf.distlock_prefix
    with bare_site.held(key):
        assert locks("--prefix", f"{prefix}:other", "show", key).returncode == 1
        assert locks("--url", url, "--prefix", prefix, "show", key).returncode == 0


UNREACHABLE = "redis://user:geheim@127.0.0.1:1/0"


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["show", "k"],
        ["queue", "k"],
        ["release", "k", "--force"],
        ["wake", "k"],
        ["tick"],
        ["drop", "t", "--force"],
        ["top"],
        ["limit", "k", "2"],
        ["pause", "k"],
        ["resume", "k"],
    ],
    ids=" ".join,
)
def test_an_unreachable_store_is_one_line_without_passwords(invoke, bare_site, words):
    done = invoke("--url", UNREACHABLE, *words)
    invoke("--url", bare_site.env["DISTLOCK_TEST_BROKER"], "list")  # flags are the app's

    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "127.0.0.1:1" in line
    assert "geheim" not in line


@pytest.mark.parametrize("url", ["nonsense", "nonsense://x", "redis://127.0.0.1:1/0?nonsense=1"])
def test_a_wrong_url_is_one_line(locks, url):
    done = locks("--url", url, "list")

    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", ["list", "top", "web --port 0", "exporter --port 0"])
def test_a_store_of_one_process_cannot_be_seen(locks, words):
    done = locks("--url", "memory://", *words.split())

    assert done.returncode == 2
    assert "within one process" in done.stderr


def test_a_store_that_cannot_list_still_shows_and_releases(bare_site, invoke, key, monkeypatch):
    able = bare_site.store.abilities
    lacking = able - {Ability.LIST, Ability.QUEUE}
    monkeypatch.setattr(bare_site.store, "abilities", lacking, raising=False)
    bare_site.store.acquire(AcquireRequest(key, "somebody", 60.0))
    cannot_list, cannot_queue = "cannot list its keys", "cannot keep tasks until the key is free"
    for *words, message in (
        ["list", cannot_list],
        ["top", cannot_list],
        ["queue", key, cannot_list],
        ["wake", key, cannot_queue],
        ["tick", cannot_list],
        ["drop", "x", "--force", cannot_queue],
        ["limit", key, "2", cannot_queue],
        ["pause", key, cannot_queue],
        ["resume", key, cannot_queue],
    ):
        done = invoke(*words)
        assert done.exit_code == 2
        assert message in done.stderr
    assert invoke("show", key).exit_code == 0
    assert invoke("release", key, "--force").exit_code == 0
    assert not bare_site.look(key).token


def test_the_help_names_the_commands_and_the_exit_statuses(locks):
    done = locks("--help")

    assert done.returncode == 0
    for word in (
        *("list", "show", "queue", "release", "wake", "drop", "limit", "pause", "resume"),
        *("top", "doctor", "tick"),
    ):
        assert f"\n  {word} " in done.stdout
    assert "EXIT STATUS" in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2]  # as wide as a pipe is to click: 80


def test_a_forgotten_app_is_said(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "celery", "locks", "list"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )

    assert done.returncode == 2
    assert done.stderr.startswith("Error: no app was named, as in: celery -A proj locks; ")


def test_a_wrong_flag_is_called_as_it_was_typed(locks):
    for words, message in (
        (("--url", "localhost:6379"), "--url must be a URL such as redis://localhost:6379/0"),
        (("--prefix", "a b"), "--prefix must be a text without braces"),
    ):
        done = locks(*words, "list")

        assert done.returncode == 2
        assert done.stderr.startswith(f"Error: {message}")


WRONG = """
from celery import Celery
from celery_distlock import LockedTask, install

app = Celery("wrong", broker="memory://")
install(app)
{setting}

@app.task(base=LockedTask, {option})
def work(): ...
"""


@pytest.mark.parametrize(
    ("setting", "option", "message"),
    [
        ("app.conf.distlock_leese = 3", "", "unknown setting distlock_leese; did you mean"),
        ("app.conf.distlock_lease = 0", "", "setting distlock_lease must be a number of seconds"),
        ("", "lock_leese=3", "task wrong.work: unknown option lock_leese; did you mean"),
        ("", "lock_key='{x}'", "task wrong.work: lock_key '{x}' names {x}"),
    ],
)
@pytest.mark.parametrize("words", [("worker", "-P", "solo"), ("locks", "doctor")], ids=" ".join)
def test_wrong_settings_are_reported_in_one_line(tmp_path, words, setting, option, message):
    (tmp_path / "wrong.py").write_text(WRONG.format(setting=setting, option=option))
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "wrong", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )

    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {message}")
    assert done.returncode == (1 if words[0] == "worker" else 2)


@pytest.mark.parametrize("words", [["limit", "k"], ["limit", "k", "--for", "1h"]], ids=" ".join)
def test_a_limit_has_to_be_said(invoke, words):
    done = invoke(*words)

    assert done.exit_code == 2
    assert "give N, --rate or --clear: limit KEY N, limit KEY --rate 10/s, limit" in done.stderr


@pytest.mark.parametrize("more", [["2"], ["--for", "1h"], ["--rate", "1/s"]], ids=" ".join)
def test_a_limit_that_is_taken_back_takes_no_number(invoke, more):
    done = invoke("limit", "k", *more, "--clear")

    assert done.exit_code == 2
    assert "it takes no N, --rate or --for" in done.stderr


@pytest.mark.parametrize("number", ["1.5", "two", "nan", "1000001", "1e3"])
def test_a_limit_that_is_no_number_of_units_is_refused(invoke, number):
    done = invoke("limit", "k", number)

    assert done.exit_code == 2
    assert "Invalid value for '[N]'" in done.stderr


@pytest.mark.parametrize("word", ["show", "queue", "release", "wake", "limit", "pause", "resume"])
def test_an_empty_key_is_a_usage_error(invoke, word):
    done = invoke(word, "")

    assert done.exit_code == 2
    assert "key must not be empty" in done.stderr


@pytest.mark.parametrize("word", ["show", "limit", "pause", "resume", "release"])
def test_a_missing_key_is_a_usage_error(invoke, word):
    done = invoke(word)

    assert done.exit_code == 2
    assert "Missing argument 'KEY'" in done.stderr


def test_an_unknown_command_is_a_usage_error(invoke):
    assert invoke("unlock").exit_code == 2


def test_an_app_s_own_option_for_every_command_is_taken(celery_env):
    words = ["-m", "celery", "-A", "tests.apps.preloaded", "locks", "--site", "north", "list"]
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **celery_env, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0
    assert "site north\n" in done.stderr


def test_the_broker_does_not_have_to_answer(bare_site, key):
    away = {"DISTLOCK_TEST_AMQP": "amqp://127.0.0.1:1//"}
    store = {"DISTLOCK_TEST_STORE": bare_site.env["DISTLOCK_TEST_BROKER"]}
    with bare_site.held(key):
        done = subprocess.run(
            command(bare_site, "show", key),
            env={**environment(bare_site), **away, **store},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert (done.returncode, done.stderr) == (0, "")
    assert "state\theld" in done.stdout


@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("show", "it")])
def test_a_command_whose_reader_has_gone_ends_as_others_do_in_a_pipe(bare_site, key, words):
    reader, output = os.pipe()
    os.close(reader)
    with bare_site.held(key):
        done = subprocess.run(
            command(bare_site, *(key if word == "it" else word for word in words)),
            env=environment(bare_site),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )
    os.close(output)

    assert (done.returncode, done.stderr) == (141, "")
