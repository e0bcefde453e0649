"""What is done with a store's URL, whatever its scheme."""

import re

__all__ = ["redact"]


def redact(url: str) -> str:
    """Return *url* without its passwords."""
    scheme, slashes, rest = url.partition("://")
    rest = re.sub(r"((?:password|secret|token)=)[^&;]*", r"\1***", rest, flags=re.IGNORECASE)
    userinfo, at, address = rest.rpartition("@")
    user = f"{userinfo.partition(':')[0]}:***@" if at else ""
    return f"{scheme}{slashes}{user}{address}"
