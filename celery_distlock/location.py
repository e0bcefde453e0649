"""Where the locks are if `distlock_url` is not set: where broker or results are, if a Redis is."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from .errors import ConfigurationError

__all__ = ["borrowed_url", "with_option"]

SCHEMES = (
    *("redis", "rediss", "redis+socket", "memory", "sentinel"),
    *("redis+cluster", "rediss+cluster"),
)
_OVER_TLS = {"redis": "rediss", "sentinel": "sentinels", "redis+cluster": "rediss+cluster"}


def borrowed_url(conf: Any) -> str:
    """
    Return the URL of the Redis that *conf*, an app's configuration, names for something else.

    What its transport options say of sentinels, and its TLS options of certificates, is in it.

    Raises:
        ConfigurationError: Neither the broker nor the result backend is a Redis.
    """
    broker = conf.broker_transport_options, conf.broker_use_ssl
    results = conf.result_backend_transport_options, conf.redis_backend_use_ssl
    places = (
        (conf.broker_write_url, *broker),
        (conf.broker_url, *broker),
        (conf.result_backend, *results),
    )
    for given, options, tls in places:
        several = given if isinstance(given, list | tuple) and given else [given or ""]
        urls = [str(url) for url in several]
        urls = [part for url in urls for part in url.split(";")]
        scheme = urlsplit(urls[0]).scheme
        if scheme == "memory":
            return "memory://"
        if scheme in SCHEMES:
            # Several are the broker's stand-ins for one another, but all the sentinels are asked.
            url = ";".join(urls) if scheme == "sentinel" else urls[0]
            return _with_sentinels_options(_with_tls(url, tls), options or {})
    raise ConfigurationError(
        "no lock store: set distlock_url, as in distlock_url = 'redis://localhost:6379/0'; it"
        " follows the broker's or the result backend's URL only where one of them is a Redis"
    )


def with_option(url: str, **options: Any) -> str:
    """Return *url* with *options* in its query; those that are None or empty are left out."""
    words = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in options.items()
        if value not in (None, "")
    }
    query = urlencode(words)
    first, semicolon, others = url.partition(";")
    joint = "&" if "?" in first else "?"
    return f"{first}{joint}{query}{semicolon}{others}" if query else url


def _with_tls(url: str, tls: Any) -> str:
    if not tls:
        return url
    scheme, _, rest = url.partition("://")
    options = dict(tls) if isinstance(tls, Mapping) else {}
    if "ssl_cert_reqs" in options:  # a constant of the ssl module, its name, or None
        wanted = options["ssl_cert_reqs"]
        options["ssl_cert_reqs"] = getattr(wanted, "name", str(wanted or "none"))
    return with_option(f"{_OVER_TLS.get(scheme, scheme)}://{rest}", **options)


def _with_sentinels_options(url: str, options: Mapping[str, Any]) -> str:
    if not url.startswith("sentinel"):
        return url
    if "?" not in url and not options.get("master_name"):
        raise ConfigurationError(
            "the lock store follows the sentinels of broker or results, and the transport options"
            " have no master_name"
        )
    own = options.get("sentinel_kwargs") or {}
    return with_option(
        url,
        service=options.get("master_name"),
        sentinel_username=own.get("username"),
        sentinel_password=own.get("password"),
    )
