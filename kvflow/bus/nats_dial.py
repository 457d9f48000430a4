"""Connect one nats-py client, with errors that say what to do."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.js.errors import APIError, ServiceUnavailableError

from kvflow.config import Settings
from kvflow.errors import BusError

# Two missed pings make a peer that stopped answering without closing (a host that lost power) show within 15 s.
PING_INTERVAL_S = 5
MAX_PINGS_OUTSTANDING = 2
PENDING_WRITE_BYTES = 8 * 1024 * 1024
# How long a publisher is held back while that much waits for a server that does not read.
WRITE_TIMEOUT_S = 5.0
# Error codes of JetStream: no memory, no storage, and more reserved than the account may have.
NO_ROOM = (10023, 10028, 10047)

ErrorCallback = Callable[[Exception], Awaitable[None]]
ClosedCallback = Callable[[], Awaitable[None]]

# Everything that nats-py raises when the peer, the network or the server's configuration is at fault.
NATS_ERRORS = (nats.errors.Error, OSError, asyncio.TimeoutError, EOFError)


def servers_of(settings: Settings) -> list[str]:
    """Return the server URLs of the settings (comma separated); raise BusError when there is none."""
    servers = [url.strip() for url in settings.nats_url.split(",") if url.strip()]
    if not servers:
        raise BusError("no NATS URL is set", remedy="set KVFLOW_NATS_URL, or start a node with `kvflow up`")
    return servers


def readable(servers: list[str]) -> str:
    """Return the URLs for people to read, without the credentials that they may hold."""
    return ", ".join(url.rpartition("@")[2] if "@" in url else url.rpartition("//")[2] for url in servers)


async def dial(
    settings: Settings, servers: list[str], *, name: str, timeout_s: float, on_error: ErrorCallback,
    on_closed: ClosedCallback,
) -> Client:  # fmt: skip
    """Connect within `timeout_s` or raise BusError.

    The client never reconnects by itself: the bus replaces it, since streams and consumers have to be restored, too.
    """
    options = _credentials(settings) | _tls(settings)
    if options.get("tls") or any(url.startswith("tls://") for url in servers):
        await _require_tls(servers, timeout_s)
    client = Client()
    problems: list[Exception] = []

    async def note(error: Exception) -> None:
        # While dialling, nats-py tells why an attempt failed here only; afterwards the bus wants to know.
        if client.is_connected:
            await on_error(error)
        else:
            problems.append(error)

    attempt = client.connect(
        servers, name=name, allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0,
        connect_timeout=max(1, round(timeout_s / len(servers))), ping_interval=PING_INTERVAL_S,
        max_outstanding_pings=MAX_PINGS_OUTSTANDING, pending_size=PENDING_WRITE_BYTES, flush_timeout=WRITE_TIMEOUT_S,
        error_cb=note, closed_cb=on_closed, **options,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            await attempt
    except Exception as error:  # nats-py lets pass whatever the key and TLS libraries raise
        await _abandon(client)
        cause = problems[-1] if isinstance(error, nats.errors.NoServersError) and problems else error
        raise explain(cause, servers, timeout_s) from error
    except BaseException:
        await _abandon(client)
        raise
    return client


def explain(error: Exception, servers: list[str], timeout_s: float) -> BusError:
    """Turn what nats-py raised into a BusError with a remedy."""
    where = readable(servers)
    text = str(error).lower()
    if isinstance(error, nats.errors.AuthorizationError) or "authorization" in text or "authentication" in text:
        return AccessError(
            f"NATS at {where} rejected the credentials",
            remedy="check KVFLOW_NATS_USER and _PASSWORD, KVFLOW_NATS_CREDS or KVFLOW_NATS_NKEY_SEED",
        )
    if text.startswith("nkeys:"):
        return AccessError(f"bad NATS key: {error}", remedy="check KVFLOW_NATS_NKEY_SEED or KVFLOW_NATS_CREDS")
    if isinstance(error, ssl.SSLError):
        return AccessError(
            f"TLS with NATS at {where} failed: {error}",
            remedy="check KVFLOW_NATS_TLS_CA, _CERT and _KEY, and the host name in the server's certificate",
        )
    if isinstance(error, TimeoutError):
        return BusError(
            f"NATS at {where} did not answer within {timeout_s:g} s", remedy="check the address and firewalls"
        )
    if isinstance(error, ConnectionRefusedError) or "connect call failed" in text:
        return BusError(
            f"nothing listens at {where}", remedy="start nats-server there, or check --nats-url (KVFLOW_NATS_URL)"
        )
    return BusError(f"cannot connect to NATS at {where}: {error}", remedy="check KVFLOW_NATS_URL")


def stream_error(what: str, error: Exception) -> BusError:
    """Turn what a JetStream request raised into a BusError with a remedy."""
    if isinstance(error, nats.errors.NoRespondersError | ServiceUnavailableError):
        return BusError(f"{what}: NATS has no JetStream", remedy="start nats-server with JetStream (-js)")
    if isinstance(error, APIError) and error.err_code in NO_ROOM:
        return BusError(
            f"{what}: JetStream has no room for it", remedy="raise max_memory_store in the server's JetStream settings"
        )
    return BusError(f"{what}: {str(error) or type(error).__name__}")


class AccessError(BusError):
    """The server is there but does not let us in: trying again at once is of no use."""


def _credentials(settings: Settings) -> dict[str, Any]:
    if settings.nats_creds:
        # nats-py reads for ever when the file has no credentials in it.
        try:
            content = Path(settings.nats_creds).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise AccessError(
                f"cannot read {settings.nats_creds}: {error}", remedy="check KVFLOW_NATS_CREDS"
            ) from error
        if "BEGIN NATS USER JWT" not in content or "BEGIN USER NKEY SEED" not in content:
            raise AccessError(f"{settings.nats_creds} is not a NATS credentials file", remedy="check KVFLOW_NATS_CREDS")
        return {"user_credentials": settings.nats_creds}
    if settings.nats_nkey_seed:
        return {"nkeys_seed_str": _nkey_seed(settings.nats_nkey_seed)}
    if settings.nats_user:
        return {"user": settings.nats_user, "password": settings.nats_password}
    return {}


def _nkey_seed(value: str) -> str:
    """Return the user nkey seed: the value itself, or the content of the file that it names."""
    seed = value.strip()
    if not seed.startswith("SU"):
        try:
            seed = Path(value).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AccessError(
                f"cannot read the nkey seed: {error}", remedy="set KVFLOW_NATS_NKEY_SEED to a seed (SU...) or a file"
            ) from error
    if not seed.startswith("SU") or not seed.isalnum():
        raise AccessError("the nkey seed is not one of a user", remedy="set KVFLOW_NATS_NKEY_SEED to a seed (SU...)")
    return seed


def _tls(settings: Settings) -> dict[str, Any]:
    if not (settings.nats_tls_ca or settings.nats_tls_cert):
        return {}
    try:
        context = ssl.create_default_context(cafile=settings.nats_tls_ca or None)
        if settings.nats_tls_cert:
            context.load_cert_chain(settings.nats_tls_cert, settings.nats_tls_key or None)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise AccessError(
            f"cannot load the TLS files: {error}", remedy="check KVFLOW_NATS_TLS_CA, _CERT and _KEY"
        ) from error
    return {"tls": context}


async def _require_tls(servers: list[str], timeout_s: float) -> None:
    """Refuse a server that does not insist on TLS when TLS was asked for.

    nats-py only follows what the server announces, so it would send the password in the clear.
    """
    for url in servers:
        parts = urlsplit(url if "//" in url else f"nats://{url}")
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 4222)
                try:
                    info = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            continue  # dialling reports it
        if b'"tls_required":true' not in info.replace(b" ", b""):
            raise AccessError(
                f"NATS at {readable([url])} offers no TLS, but TLS is configured",
                remedy="enable TLS on the server, or remove the TLS settings and tls:// from the URL",
            )


async def _abandon(client: Client) -> None:
    """Let go of a client whose connect failed."""
    if not (client.is_connecting or client.is_connected):
        return
    try:
        async with asyncio.timeout(1.0):
            await client.close()
    except NATS_ERRORS:
        return  # it never was connected: there is nothing to lose
