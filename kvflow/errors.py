"""One error tree: every error that kvflow raises on purpose is a `KvflowError`.

Each error carries a `remedy`, one sentence that says what to do; the command line prints it and the logs keep it.
"""


class KvflowError(Exception):
    """Base of all errors that kvflow raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class ConfigError(KvflowError):
    """A setting is missing, unknown or out of range."""

    exit_code = 2


class WireError(KvflowError):
    """Bytes from another process are not a valid message."""


class BusError(KvflowError):
    """The message bus cannot be reached or refused an operation."""

    exit_code = 3


class PeerError(KvflowError):
    """Another engine cannot be used: unknown, stale or incompatible."""

    exit_code = 4


class TransferError(KvflowError):
    """Moving bytes failed, or would have left the registered memory."""

    exit_code = 5


class MemoryAccessError(TransferError):
    """A segment cannot be mapped, registered or addressed."""


class BrokerError(BusError):
    """The private nats-server cannot be found or started."""


class NodeError(KvflowError):
    """A node cannot start, or cannot keep one of its processes running."""

    exit_code = 6


def cause_of(error: BaseException) -> KvflowError | None:
    """Return the KvflowError that ended a tree of tasks, None when anything else is among the causes."""
    if isinstance(error, KvflowError):
        return error
    if isinstance(error, BaseExceptionGroup):
        causes = [cause_of(inner) for inner in error.exceptions]
        return causes[0] if None not in causes else None
    return None
