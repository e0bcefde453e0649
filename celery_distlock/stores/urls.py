"""Parsing and redacting of stores' URLs, for all schemes."""

import re
from typing import NamedTuple

__all__ = ["UrlParts", "host_and_port", "normalize", "redact", "split_url"]

_URL = re.compile(r"(?:([^:/?#]*):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)

_OPTION = re.compile(r"([?&;])([^=&;?]*)=[^&;]*")
_WORD = re.compile(r"([?&])[^=&;]+(?=[&;]|$)")
_PLACE = re.compile(r"(?!:)[\w.-]*(:\d+)?(,[\w.-]+(:\d+)?)*(/[\w/.-]*)?(\?|$)")
# Options whose values are not secret. Any other one may be a password with a misspelt name.
_HARMLESS = frozenset(
    {
        *("client_name", "db", "master_name", "replicas", "scripts", "sentinel_username"),
        *("service", "session", "socket_keepalive", "socket_read_size", "username"),
        *("virtual_host", "ssl_ca_certs", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile"),
        *("ssl_check_hostname", "ssl_ciphers", "ssl_keyfile", "ssl_min_version"),
    }
)


class UrlParts(NamedTuple):
    """The parts of a URL, not decoded."""

    scheme: str
    netloc: str
    path: str
    query: str
    fragment: str


def normalize(url: str) -> str:
    """Return *url* stripped, without tabs and line ends, and with its scheme in lower case."""
    scheme, slashes, rest = re.sub(r"[\t\r\n]", "", url).strip().partition("://")
    return f"{scheme.lower() if slashes else scheme}{slashes}{rest}"


def host_and_port(host: str, port: object) -> str:
    """Return ``host:port`` as in a URL; an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_url(url: str) -> UrlParts:
    """
    Return the parts of *url*, which may name several hosts.

    Uses the regular expression of RFC 3986, appendix B, since `urllib.parse.urlsplit` refuses
    several hosts if one of them is an IPv6 address.
    """
    found = _URL.fullmatch(url)
    assert found is not None  # every text matches
    return UrlParts(*(part or "" for part in found.groups()))


def redact(url: str) -> str:
    """Return *url* with passwords, and everything that may be one, replaced by ``***``."""
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        scheme, rest = "", url
    shown = _OPTION.sub(_masked, rest)
    userinfo, at, address = shown.rpartition("@")
    if shown.count("@") < rest.count("@") and not _PLACE.match(address):
        return f"{scheme}{slashes}***"  # a password with special characters may look like options
    user = f"{userinfo.partition(':')[0]}:***@" if at else ""
    address = _WORD.sub(r"\1***", address)
    return f"{scheme}{slashes}{user}{address}"


def _masked(option: re.Match[str]) -> str:
    before, name = option.groups()
    return option[0] if name.lower() in _HARMLESS else f"{before}{name}=***"
