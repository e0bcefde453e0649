"""What the commands show in a terminal."""

from __future__ import annotations

import signal

import pytest

from tests.waiting import wait_until


def test_a_table_in_a_terminal_keeps_whole_keys(bare_site, terminal, key):
    name = f"{key}:{'long' * 30}"
    with bare_site.held(name):
        screen = terminal("list", f"{key}*", columns=100)
        assert screen.status() == 0

    column = "".join(line.split("  ")[0].strip() for line in screen.text.splitlines()[1:])
    assert column == name
    assert "\x1b[1m" in screen.raw.decode()


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


def test_top_is_refreshed_until_somebody_types_q(bare_site, terminal, key):
    with bare_site.held(f"{key}-1"):
        screen = terminal("top", "--interval", "0.2")
        screen.wait(f"{key}-1")
        assert "1 held, 0 waiting, 0 on their way" in screen.text
        with bare_site.held(f"{key}-2"):
            screen.wait(f"{key}-2")

            screen.type("xq")

            assert screen.status() == 0
    assert screen.raw.endswith((b"\x1b[?25h", b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l"))


def test_top_ends_with_ctrl_c_as_with_q(bare_site, terminal):
    screen = terminal("top", "--interval", "600")
    screen.wait("q quits")

    screen.process.send_signal(signal.SIGINT)

    assert screen.status() == 0
    assert "Traceback" not in screen.text


def looks(text: str) -> list[str]:
    """The whole frames that are in *text*."""
    return text.split("q quits")[1:-1]


@pytest.mark.faults
def test_top_says_that_the_store_is_away_and_goes_on_when_it_is_back(terminal, private_server):
    server = private_server()
    screen = terminal("--url", server.url, "top", "--interval", "0.2")
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
    assert first.endswith("1 held, 0 waiting, 0 on their way")
    assert head.startswith("KEY\t")
    assert [row.split("\t")[0] for row in rows] == [key]
