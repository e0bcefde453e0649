"""What is done with a store's URL, whatever its scheme."""

import re
from typing import NamedTuple

__all__ = ["UrlParts", "normalize", "redact", "split_url"]

_URL = re.compile(r"(?:([^:/?#]*):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)


class UrlParts(NamedTuple):
    """The parts of a URL, as they stand there."""

    scheme: str
    netloc: str
    path: str
    query: str
    fragment: str


def normalize(url: str) -> str:
    """Return *url* without blanks around it and line ends in it, its scheme in lower case."""
    scheme, slashes, rest = re.sub(r"[\t\r\n]", "", url).strip().partition("://")
    return f"{scheme.lower() if slashes else scheme}{slashes}{rest}"


def split_url(url: str) -> UrlParts:
    """
    Return the parts of *url*, which may name several hosts.

    By the regular expression of RFC 3986, appendix B: `urllib.parse.urlsplit` refuses several hosts
    of which one is an IPv6 address.
    """
    found = _URL.fullmatch(url)
    assert found is not None  # every text matches
    return UrlParts(*(part or "" for part in found.groups()))


def redact(url: str) -> str:
    """Return *url* without its passwords."""
    scheme, slashes, rest = url.partition("://")
    rest = re.sub(r"((?:password|secret|token)=)[^&;]*", r"\1***", rest, flags=re.IGNORECASE)
    userinfo, at, address = rest.rpartition("@")
    user = f"{userinfo.partition(':')[0]}:***@" if at else ""
    return f"{scheme}{slashes}{user}{address}"
