"""A RabbitMQ of the tests' own, where one is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import amqp

from celery_distlock.testing import die_with_parent
from celery_distlock.testing.server import _free_ports
from tests import processes
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

# Debian puts a wrapper on the PATH, which becomes another user; behind it is the server's script.
_PLACES = os.pathsep.join(
    ["/usr/lib/rabbitmq/bin", os.environ.get("PATH", os.defpath), "/usr/sbin"]
)
SERVER = shutil.which("rabbitmq-server", path=_PLACES)
CONTROL = shutil.which("rabbitmqctl", path=_PLACES)
EPMD = shutil.which("epmd", path=_PLACES)

_ATTEMPTS = 5  # at free ports, which another process may take first
_START_TIMEOUT = 90.0  # seconds; three or four where nothing else runs
_STOP_TIMEOUT = 30.0
_CONFIGURATION = """\
listeners.tcp.1 = 127.0.0.1:{port}
cluster_name = {node}
log.file = false
log.console = true
log.console.level = warning
vm_memory_high_watermark.relative = 0.9
disk_free_limit.absolute = 1MB
"""


class RabbitServer:
    """
    A node of its own: on loopback and free ports, with its data in a temporary folder.

    So is the port mapper that every Erlang node needs (epmd): it must not outlive it or be shared
    with another one. A process that is killed takes both with it.
    """

    def __init__(self) -> None:
        self.node = f"distlock-{uuid.uuid4().hex[:12]}@localhost"
        self.port = 0
        self.folder = Path()
        self._stop = ExitStack()
        self._node: subprocess.Popen[bytes] | None = None
        self._env: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<RabbitServer {self.node}, port {self.port}>"

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")

    def start(self) -> None:
        """
        Start it, and return once it answers.

        Raises:
            RuntimeError: It did not come up; the message ends with its log.
        """
        assert SERVER, "there is no rabbitmq-server here"
        assert EPMD, "there is no epmd here"
        with ExitStack() as stop:
            self.folder = Path(tempfile.mkdtemp(prefix="celery-distlock-rabbitmq-"))
            stop.callback(shutil.rmtree, self.folder)
            for _ in range(_ATTEMPTS):
                attempt = stop.enter_context(ExitStack())
                if self._comes_up(attempt):
                    self._stop = stop.pop_all()
                    return
                attempt.close()
                if "eaddrinuse" not in self.log():
                    break
            raise RuntimeError(f"{SERVER} did not come up; its log:\n{self.log()}")

    def stop(self) -> None:
        """Shut node and port mapper down, and delete the folder; fail if a process is left."""
        self._stop.close()

    def delete(self, *queues: str) -> None:
        """Delete *queues*, where they are, and what is in them."""
        with self._connect() as connection:
            for queue in queues:
                connection.channel().queue_delete(queue)

    def close_connections(self) -> None:
        """Close all clients' connections; what they had not acknowledged is delivered again."""
        command = [CONTROL or "", "--node", self.node, "close_all_connections", "by a test"]
        subprocess.run(command, env=self._env, check=True, capture_output=True, timeout=60)

    def _connect(self) -> amqp.Connection:
        connection = amqp.Connection(f"127.0.0.1:{self.port}", connect_timeout=5)
        connection.connect()
        return connection

    def _comes_up(self, stop: ExitStack) -> bool:
        self.port, distribution, mapper = _free_ports()[:3]
        env = self._env = self._environment(distribution, mapper)
        mapping = [EPMD or "", "-port", str(mapper), "-address", "127.0.0.1"]
        self._spawn(mapping, env, stop)
        self._node = self._spawn([SERVER or ""], env, stop)
        with suppress(AssertionError):
            wait_until(self._answers, timeout=_START_TIMEOUT, what=f"{self!r} to answer")
        return self._node.poll() is None and self._answers()

    def _answers(self) -> bool:
        """Whether it, and not another server that has the port, answers, or never will."""
        assert self._node is not None
        if self._node.poll() is not None:
            return True
        with suppress(OSError, amqp.AMQPError), self._connect() as connection:
            return connection.server_properties.get("cluster_name") == self.node
        return False

    def _spawn(
        self, command: list[str], env: Mapping[str, str], stop: ExitStack
    ) -> subprocess.Popen[bytes]:
        with (self.folder / "server.log").open("ab") as log:
            process = subprocess.Popen(
                die_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=env,
                start_new_session=True,
            )
        stop.callback(_end, process)
        return process

    def _environment(self, distribution: int, mapper: int) -> dict[str, str]:
        configuration = self.folder / "rabbitmq.conf"
        configuration.write_text(_CONFIGURATION.format(port=self.port, node=self.node))
        (self.folder / "enabled_plugins").write_text("[].\n")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_"))}
        return {
            **inherited,
            "HOME": str(self.folder),  # where the cookie is made
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(mapper),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.folder / "generated"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none.conf"),
            "RABBITMQ_CONFIG_FILE": str(configuration),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "none.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            # The script becomes the node, instead of waiting for it.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
            # One scheduler, which sleeps when there is nothing to do; and loopback only.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "+S 1:1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}"
            ),
            "RABBITMQ_CTL_ERL_ARGS": "+S 1:1 +sbwt none",
        }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End *process* in an orderly way, or by force, and see that it leaves nothing behind."""
    helpers = _descendants(process.pid)  # of a session of their own; they end with the node
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    what = f"the end of all processes of {process.args!r}"
    wait_until(lambda: not any(map(processes.alive, helpers)), what=what)


def _descendants(pid: int) -> list[int]:
    found = processes.children(pid)
    for child in found:
        found += processes.children(child)
    return found
