"""Draw and check the identifiers that messages carry."""

import secrets

from kvflow.errors import ConfigError

MAX_ID_LENGTH = 256


def new_incarnation() -> str:
    """Draw the random id that tells one start of an engine from the next."""
    return secrets.token_hex(8)


def new_transfer_id() -> str:
    """Draw a transfer id."""
    return secrets.token_hex(16)


def check_id(value: object, what: str) -> str:
    """Return `value` if it can serve as an id, else raise ConfigError naming `what`."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{what} must be a non-empty string, got {type(value).__name__}", remedy=f"set {what}")
    if len(value) > MAX_ID_LENGTH:
        raise ConfigError(f"{what} has {len(value)} characters, at most {MAX_ID_LENGTH} are allowed")
    if not value.isprintable():  # also lone surrogates, which JSON can carry but UTF-8 cannot
        raise ConfigError(f"{what} must be printable, got {value!r}", remedy=f"set {what}")
    return value
