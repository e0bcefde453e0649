"""Derives the lock store's URL from the broker's or result backend's, without `distlock_url`."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from celery.app import utils

from celery_distlock.errors import ConfigurationError
from celery_distlock.stores.urls import normalize, redact, split_url

__all__ = ["StoreLocation", "derive_store_location", "mask_urls"]

logger = logging.getLogger(__name__)

SCHEMES = (
    *("redis", "rediss", "redis+socket", "memory", "sentinel"),
    *("redis+cluster", "rediss+cluster"),
)
_OVER_TLS = {"redis": "rediss", "sentinel": "sentinels", "redis+cluster": "rediss+cluster"}


class StoreLocation(NamedTuple):
    """The URL of a store, and options that are given in addition."""

    url: str
    options: dict[str, str]

    def __repr__(self) -> str:  # without passwords: it may be logged
        return f"{type(self).__name__}({redact(self.url)!r}, {[*self.options]})"


def derive_store_location(conf: Any) -> StoreLocation:
    """
    Return the location of the Redis that *conf*, an app's configuration, uses as broker or backend.

    Its options include the sentinels of its transport options and the certificates of its TLS
    options. Options of the URL that only concern Celery, such as a time limit, are left out.

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
        urls = [normalize(part) for url in several for part in str(url).split(";")]
        scheme = split_url(urls[0]).scheme
        if scheme == "memory":
            return StoreLocation("memory://", {})
        if scheme in SCHEMES:
            bare, own = _for_locks(urls[0])
            if tls or any(name.startswith("ssl_") for name in own):  # as kombu has it
                bare = f"{_OVER_TLS.get(scheme, scheme)}{bare.removeprefix(scheme)}"
            # Several URLs are the broker's failover list; of sentinels all are used.
            others = urls[1:] if scheme == "sentinel" else ()
            url = ";".join([bare, *map(_host_alone, others)])
            named = {**_tls_options(tls), **_sentinels_options(scheme, options or {}, own), **own}
            return StoreLocation(url, _as_text(named))
    raise ConfigurationError(
        "no lock store: set distlock_url, as in distlock_url = 'redis://localhost:6379/0'; it"
        " follows the broker's or the result backend's URL only where one of them is a Redis"
    )


def _as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Return *options* as texts for a URL, without those that are None or empty."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value not in (None, "")
    }


def _host_alone(url: str) -> str:
    parts = split_url(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _for_locks(url: str) -> tuple[str, dict[str, str]]:
    """Return *url* without its options, and those options that concern the lock store."""
    from celery_distlock.stores.redis.urls import (
        OPTIONS,  # imports redis-py, which not every store needs
    )

    bare, _, query = url.partition("#")[0].partition("?")
    known = {*OPTIONS, "virtual_host"} if bare.startswith("redis+socket") else OPTIONS
    own = {}
    for name, value in parse_qsl(query):
        if name in known or name.startswith("ssl_"):  # a wrong TLS option is reported, not dropped
            own[name] = value
        else:
            logger.debug("the lock store does not use the option %r of Celery's URL", name)
    return bare, own


def _tls_options(tls: Any) -> dict[str, Any]:
    options = dict(tls) if isinstance(tls, Mapping) else {}
    if "ssl_cert_reqs" in options:  # a constant of the ssl module, its name, or None
        wanted = options["ssl_cert_reqs"]
        options["ssl_cert_reqs"] = getattr(wanted, "name", str(wanted or "none"))
    return options


def _sentinels_options(
    scheme: str, options: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    if scheme != "sentinel":
        return {}
    named = {"service", "master_name"} & own.keys()
    if not named and not options.get("master_name"):
        raise ConfigurationError(
            "the lock store follows the sentinels of broker or results, and the transport options"
            " have no master_name"
        )
    theirs = options.get("sentinel_kwargs") or {}
    return {
        "service": None if named else options["master_name"],
        "sentinel_username": theirs.get("username"),
        "sentinel_password": theirs.get("password"),
    }


_filter = utils.filter_hidden_settings  # Celery passes all settings that it shows through it


def mask_urls() -> None:
    """
    Make Celery hide passwords in ``distlock_url``, with any namespace before the name.

    Celery masks only its own URLs, and settings whose names sound secret. This applies to all apps:
    the output must not depend on whether an app was installed, or its tasks declared, before.
    """
    utils.filter_hidden_settings = _masked


def _masked(conf: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = _filter(conf)
    for name, value in shown.items():
        if isinstance(name, str) and name.lower().endswith("distlock_url") and value is not None:
            shown[name] = redact(value) if isinstance(value, str) else "********"
    return shown
