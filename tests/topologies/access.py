"""Other ways into one server: as a user with few rights, and through a Unix socket."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from celery_distlock.testing import EmbeddedServer

# Options of a server that subscribed on a Unix socket too. The path is relative to its folder: an
# absolute one has to be known before the folder is, and must not be longer than about 100 bytes.
UNIX_SOCKET = {"unixsocket": "server.sock", "unixsocketperm": "700"}


def url_of_user(server: EmbeddedServer, name: str, password: str, rules: str) -> str:
    """
    Make a user with *rules*, such as ``"~* &* +@all -@scripting"``, and return its URL.

    A user of that name is made again.
    """
    user = [name, "reset", "on", f">{password}", *rules.split()]
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", *user)
    return f"redis://{quote(name, safe='')}:{quote(password, safe='')}@127.0.0.1:{server.port}/0"


def unix_socket(server: EmbeddedServer) -> str:
    """The URL of the socket of a server that was started with the options `UNIX_SOCKET`."""
    return f"unix://{quote(str(server.folder / UNIX_SOCKET['unixsocket']))}?db=0"
