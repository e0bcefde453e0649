"""What the commands show in a terminal."""

from __future__ import annotations

import io
import re
import signal
import subprocess

import pytest
from rich.console import Console

from celery_distlock.ops.cli.display import (
    HOLD_COLUMNS,
    LOCK_COLUMNS,
    OPTIONAL,
    filled,
    hold_cells,
    lock_cells,
)
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.holders import Holder, HoldInfo
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.values import KeyState, Limit, Want
from tests.integration.cli.conftest import command, environment
from tests.integration.cli.terminal import Terminal
from tests.waiting import wait_until
from tests.workers import ROOT


def test_a_table_in_a_terminal_keeps_whole_keys(bare_site, terminal, key):
    name = f"{key}:{'long' * 30}"
    with bare_site.held(name):
        screen = terminal("list", f"{key}*", columns=100)
        assert screen.status() == 0

    column = "".join(line.split("  ")[0].strip() for line in screen.text.splitlines()[1:])
    assert column == name
    assert "\x1b[1m" in screen.raw.decode()


@pytest.mark.parametrize("words", [["list"], ["top"]], ids=" ".join)
def test_keys_are_whole_in_80_columns(bare_site, terminal, key, words):
    name = f"{key}:{'x' * (45 - len(key))}"
    with bare_site.held(name):
        screen = terminal(*words, columns=80)
        screen.wait(name)
        if words == ["top"]:
            screen.type("q")
        assert screen.status() == 0

    (line,) = [line for line in screen.text.splitlines() if name in line]
    assert len(line.rstrip()) <= 80
    heads = next(line.split() for line in screen.text.splitlines() if line.startswith("KEY"))
    assert heads[:2] == ["KEY", "HOLDER"]
    assert {"AGE", "WAITING"} <= set(heads)
    assert not {"TOKEN", "WORKER"} & set(heads)


def test_a_wide_terminal_shows_every_column_that_says_anything(bare_site, terminal, key):
    with bare_site.held(key):
        screen = terminal("list", key, columns=160)
        assert screen.status() == 0

    shown = [name.upper() for name in LOCK_COLUMNS if name not in OPTIONAL]
    assert screen.text.splitlines()[0].split() == shown


def test_a_key_that_is_too_long_for_any_screen_goes_on_and_takes_no_more_than_two_columns(
    bare_site, terminal, key
):
    name = f"{key}:{'long' * 30}"
    with bare_site.held(name):
        screen = terminal("list", f"{key}*", columns=80)
        assert screen.status() == 0

    heads = screen.text.splitlines()[0].split()
    assert heads == ["KEY", "HOLDER", "AGE", "LEASE", "WAITING", "WOKEN"]


@pytest.mark.parametrize("width", [30, 45, 60])
def test_a_key_goes_on_in_a_terminal_that_is_narrow(width):
    name = "stock:" + "4711" * 20
    owner = "vm|3225|shop.reserve[id]|nonce"
    held = KeyState(owner, 1795325354819785, "", 1.0, 30.0, 3, key=name)
    console = Console(file=io.StringIO(), width=width)

    console.print(filled(LOCK_COLUMNS, [lock_cells(held, 5.0)], width))

    head, *lines = console.file.getvalue().splitlines()
    column = slice(0, head.index("HOLDER"))
    assert "".join(line[column].strip() for line in lines) == name
    assert column.stop >= 10


def printed(columns, rows, width):
    """The heads of a table, and its lines."""
    console = Console(file=io.StringIO(), width=width)
    console.print(filled(columns, rows, width))
    head, *lines = console.file.getvalue().splitlines()
    return head, [line.rstrip() for line in lines]


@pytest.mark.parametrize("length", [60, 90, 150])
def test_a_long_key_is_readable_next_to_its_notes(length):
    name = "stock:" + "4711" * ((length - 6) // 4)
    limit = Limit(2, since=1.0, until=3600.0, author="ann@ops-1")
    owner = "worker-7.example|3225|shop.reserve[id]|nonce"
    held = KeyState(owner, 1795325354819785, "", 1.0, 30.0, 3, key=name)
    shut = held._replace(limit=limit, opens=3540.0)

    head, lines = printed(LOCK_COLUMNS, [lock_cells(shut, 5.0)], 80)

    column = slice(0, head.index("HOLDER"))
    assert "".join(line[column].strip() for line in lines) == name
    assert column.stop >= 80 // 3
    assert {"AGE", "LEASE", "WAITING", "NOTES"} <= set(head.split())
    assert max(map(len, [head, *lines])) <= 80


@pytest.mark.parametrize("task", ["shop.f", "shop.warehouse.reserve_and_tell"])
def test_each_holder_of_a_shared_key_has_its_age_and_its_lease_in_80_columns(task):
    holder = Holder(task, "0f5c3a0e-21f1-4cbb-9c0d-c1d4a54f0a3d", "worker-7.example", 3226, "owner")
    rows = [hold_cells(HoldInfo(holder, "held", 2, 0, 1.0, 21.0), 5.8, brief=True)]

    head, (first, *others) = printed(HOLD_COLUMNS, rows, 80)

    assert {"HOLDER", "ID", "UNITS", "SINCE", "LEASE"} <= set(head.split())
    assert first.split()[1:3] == [holder.task_id, "2"]
    assert first.split()[-3:] == ["4.8s", "ago", "21.0s"]
    assert "".join([first.split()[0], *others]).replace(" ", "") == task
    assert max(map(len, [head, first, *others])) <= 80


def test_a_shared_key_s_holders_are_shown_in_a_terminal(bare_site, terminal, key):
    task_id = "0f5c3a0e-21f1-4cbb-9c0d-c1d4a54f0a3d"
    owner = new_owner(f"shop.f[{task_id}]")
    bare_site.store.acquire(AcquireRequest(key, owner, 60.0, want=Want(1, 5)))

    screen = terminal("show", key, columns=80)
    assert screen.status() == 0

    (row,) = [line for line in screen.text.splitlines() if f" {task_id} " in line]
    assert re.search(r"\ds ago +\d+\.\ds$", row.rstrip())
    bare_site.store.release(ReleaseRequest(key, owner))


def test_top_is_printed_once_in_a_dumb_terminal(bare_site, key):
    env = {**environment(bare_site), "TERM": "dumb"}
    with bare_site.held(key):
        screen = Terminal(command(bare_site, "top"), env=env, columns=160)
        assert screen.status() == 0
    screen.close()

    assert key in screen.text
    assert b"\x1b" not in screen.raw


def test_what_the_output_s_encoding_lacks_is_escaped(bare_site, key):
    env = {**environment(bare_site), "PYTHONIOENCODING": "latin-1"}
    words = command(bare_site, "list", f"{key}*")
    with bare_site.held(f"{key}:\u4e2d\xfc"):
        done = subprocess.run(
            words, env=env, cwd=ROOT, capture_output=True, timeout=60, check=False
        )

    assert done.returncode == 0, done.stderr
    assert f"{key}:\\u4e2d\xfc".encode("latin-1") in done.stdout


def test_ids_are_whole_in_80_columns(site, terminal, key):
    first = site.tasks.work_requeue.delay(key, 0, key)
    site.journal.wait(key)
    parked = site.tasks.work_requeue.delay(key, 1)
    wait_until(lambda: site.look(key).waiting == 1, timeout=60, what="the second to be parked")

    screen = terminal("queue", key, columns=80)
    assert screen.status() == 0

    site.journal.open(key)
    first.get(timeout=60)
    assert any(f" {parked.id} " in line for line in screen.text.splitlines())
    assert "WORKER" not in screen.text


def test_the_page_s_server_ends_with_ctrl_c_without_a_complaint(bare_site, terminal):
    pytest.importorskip("uvicorn")
    screen = terminal("web", "--port", "0")
    screen.wait("until Ctrl-C.")

    screen.process.send_signal(signal.SIGINT)

    assert screen.status() == 0
    assert screen.text.endswith("until Ctrl-C.\n")


def test_no_color_means_no_colour(bare_site, terminal, key):
    with bare_site.held(key):
        screen = terminal("list", key, options=("--no-color",))
        assert screen.status() == 0

    assert b"\x1b[" not in screen.raw
    assert key in screen.text


def test_nothing_in_a_key_moves_the_cursor(bare_site, terminal, key):
    with bare_site.held(f"{key}\x1b[2J[red]\n"):
        screen = terminal("list", f"{key}*", options=("--no-color",))
        assert screen.status() == 0

    assert rf"{key}\x1b[2J[red]\n" in screen.text
    assert b"\x1b" not in screen.raw


def test_top_is_refreshed_until_q_is_typed(bare_site, terminal, key):
    with bare_site.held(f"{key}-1"):
        screen = terminal("top", "--interval", "0.2s")
        screen.wait(f"{key}-1")
        assert "1 held, 0 waiting, 0 in flight" in screen.text
        with bare_site.held(f"{key}-2"):
            screen.wait(f"{key}-2")

            screen.type("xq")

            assert screen.status() == 0
    assert screen.raw.endswith((b"\x1b[?25h", b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l"))


def test_top_ends_with_ctrl_c_as_with_q(bare_site, terminal):
    screen = terminal("top", "--interval", "10m")
    screen.wait("q quits")

    screen.process.send_signal(signal.SIGINT)

    assert screen.status() == 0
    assert "Traceback" not in screen.text


def looks(text: str) -> list[str]:
    """The whole frames that are in *text*."""
    return text.split("q quits")[1:-1]


@pytest.mark.faults
def test_top_says_that_the_store_is_unreachable_and_goes_on_when_it_is_back(
    terminal, private_server
):
    server = private_server()
    screen = terminal("--url", server.url, "top", "--interval", "0.2s")
    screen.wait("0 held")

    server.kill()
    screen.wait("cannot serve")
    server.start()
    seen = len(screen.read())
    wait_until(
        lambda: any("cannot serve" not in look for look in looks(screen.read()[seen:])),
        timeout=60,
        what="the store to be seen again",
    )
    screen.type("q")
    assert screen.status() == 0


def test_top_is_printed_once_where_there_is_no_terminal(bare_site, locks, key):
    with bare_site.held(key):
        done = locks("top")

    first, head, *rows = done.stdout.splitlines()
    assert done.returncode == 0
    assert first.endswith("1 held, 0 waiting, 0 in flight")
    assert head.startswith("KEY\t")
    assert [row.split("\t")[0] for row in rows] == [key]
