"""
Signs parked messages, so that nobody without the secret can have one sent.

The signature is the last member of the envelope, a JSON object. It covers the bytes before it, the
key, and the execution id: copied to another key or execution, an envelope is refused.
"""

import hashlib
import hmac
from collections.abc import Iterable

__all__ = ["is_signed", "is_signed_with", "sign"]

_OPENING, _CLOSING = b', "signature": "', b'"}'
_LENGTH = len(_OPENING) + 2 * hashlib.sha256().digest_size + len(_CLOSING)


def sign(secret: str, name: str, run: str, envelope: bytes) -> bytes:
    """Return *envelope* signed, to be parked as *run* at the key of slot name *name*."""
    digest = _digest(secret, name, run, envelope).encode()
    return envelope[:-1] + _OPENING + digest + _CLOSING


def is_signed(envelope: bytes) -> bool:
    """Whether *envelope* has a signature, right or wrong."""
    return envelope[-_LENGTH:].startswith(_OPENING) and envelope.endswith(_CLOSING)


def is_signed_with(secrets: Iterable[str], name: str, run: str, envelope: bytes) -> bool:
    """Whether *envelope* was signed with one of *secrets*, for just this run of this key."""
    if not is_signed(envelope):
        return False
    unsigned = envelope[:-_LENGTH] + b"}"
    given = envelope[-_LENGTH + len(_OPENING) : -len(_CLOSING)]
    return any(
        hmac.compare_digest(_digest(secret, name, run, unsigned).encode(), given)
        for secret in secrets
    )


def _digest(secret: str, name: str, run: str, envelope: bytes) -> str:
    at, what = name.encode(errors="surrogatepass"), run.encode(errors="surrogatepass")
    lengths = b"%d %d " % (len(at), len(what))  # or a part of one could pass for the other's
    return hmac.new(secret.encode(), lengths + at + what + envelope, hashlib.sha256).hexdigest()
