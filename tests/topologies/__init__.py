"""
Real arrangements of servers: replicas, sentinels, clusters, several masters, TLS before one.

Each is a context manager that starts its servers, on loopback and free ports, and returns once they
are as they should be; each has a ``url``, and ways to break it and to mend it.
"""

from tests.topologies.access import UNIX_SOCKET, unix_socket, url_of_user
from tests.topologies.cluster import Cluster, Move
from tests.topologies.masters import Masters
from tests.topologies.node import Node
from tests.topologies.replicated import Replicated
from tests.topologies.sentinels import Sentinels
from tests.topologies.tls import TlsFront

__all__ = [
    "UNIX_SOCKET",
    "Cluster",
    "Masters",
    "Move",
    "Node",
    "Replicated",
    "Sentinels",
    "TlsFront",
    "unix_socket",
    "url_of_user",
]
