"""Build and parse every subject: `kvflow.<cluster>.v1.<channel>.…`.

Ids become single tokens: characters outside [A-Za-z0-9_-] turn into `=XX` per UTF-8 byte. No other module spells a
subject.
"""

import re
import zlib
from dataclasses import dataclass

from kvflow.errors import WireError
from kvflow.messages.base import EngineRef

VERSION = "v1"
_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")


def encode_token(value: str) -> str:
    """Encode any non-empty string as one subject token; raise WireError for what has no UTF-8 (lone surrogates)."""
    if not value:
        raise WireError("a subject token cannot be empty")
    try:
        raw = value.encode()
    except UnicodeEncodeError as error:
        raise WireError(f"{value!r} cannot be part of a subject: it has no UTF-8") from error
    return _UNSAFE.sub(lambda m: b"=%02X" % m.group()[0], raw).decode()


def decode_token(token: str) -> str:
    """Decode a token made by `encode_token`; raise WireError when it was not."""
    try:
        value = _ESCAPE.sub(lambda m: bytes([int(m.group(1), 16)]), token.encode()).decode()
    except UnicodeError as error:
        raise WireError(f"subject token {token!r} is not valid UTF-8") from error
    if not value or encode_token(value) != token:
        raise WireError(f"subject token {token!r} is not canonical")
    return value


def shard_of(transfer_id: str, shards: int) -> int:
    """Return the matching shard that owns a transfer."""
    return zlib.crc32(transfer_id.encode()) % shards


@dataclass(frozen=True, slots=True)
class Subjects:
    """Build the subjects of one cluster."""

    cluster: str

    @property
    def root(self) -> str:
        """Return the prefix of all subjects."""
        return f"kvflow.{encode_token(self.cluster)}.{VERSION}"

    def registration(self) -> str:
        """Where target schedulers send registrations and cancels (queue group `registration`)."""
        return f"{self.root}.registration"

    def control(self, shard: int, kind: str, engine: EngineRef) -> str:
        """Where a matching shard takes its input; `kind` is source, target or report."""
        return f"{self.root}.control.{shard}.{kind}.{_engine(engine)}"

    def control_shard(self, shard: int) -> str:
        """All input of one matching shard."""
        return f"{self.root}.control.{shard}.>"

    def control_all(self) -> str:
        """All input of all matching shards: what the control stream captures."""
        return f"{self.root}.control.>"

    def control_source(self, engine: EngineRef) -> str:
        """What a source says to matching, which its own transfer actors hear as well."""
        return f"{self.root}.control.*.source.{_engine(engine)}"

    def transfer(self, engine: EngineRef, rank: int | None = None) -> str:
        """The transfer actor of one source rank, or of all ranks."""
        return f"{self.root}.transfer.{_engine(engine)}.{_rank(rank)}"

    def completion(self, engine: EngineRef, rank: int | None = None) -> str:
        """The completion actor of one target rank, or of all ranks."""
        return f"{self.root}.completion.{_engine(engine)}.{_rank(rank)}"

    def engine(self, engine: EngineRef, rank: int | None = None) -> str:
        """The worker half of one engine rank, or of all ranks."""
        return f"{self.root}.engine.{_engine(engine)}.{_rank(rank)}"

    def event(self, kind: str, key: str) -> str:
        """A lifecycle event; `key` is the transfer id, or the engine id for engine events."""
        return f"{self.root}.events.{encode_token(kind)}.{encode_token(key)}"

    def events_all(self) -> str:
        """All lifecycle events."""
        return f"{self.root}.events.>"

    def stream(self, name: str) -> str:
        """Name a JetStream stream of this cluster."""
        return f"kvflow_{_bucket(self.cluster)}_{name}"

    def bucket(self, name: str) -> str:
        """Name a key-value bucket of this cluster."""
        return f"kvflow_{_bucket(self.cluster)}_{name}"

    def card_key(self, engine: EngineRef, rank: int) -> str:
        """Key of a rank's card in the directory bucket."""
        return f"{_engine(engine)}.{rank}"


def parse_card_key(key: str) -> tuple[EngineRef, int]:
    """Parse a directory key; raise WireError when it is not one."""
    parts = key.split(".")
    if len(parts) != 3 or not _RANK.fullmatch(parts[2]):
        raise WireError(f"directory key {key!r} is not engine.incarnation.rank")
    return EngineRef(engine_id=decode_token(parts[0]), incarnation=decode_token(parts[1])), int(parts[2])


def parse_event(subject: str) -> tuple[str, str]:
    """Return (kind, key) of an event subject; raise WireError when it is not one."""
    parts = subject.split(".")
    if len(parts) != 6 or parts[0] != "kvflow" or parts[2] != VERSION or parts[3] != "events":
        raise WireError(f"{subject!r} is not an event subject")
    return decode_token(parts[4]), decode_token(parts[5])


def _engine(engine: EngineRef) -> str:
    return f"{encode_token(engine.engine_id)}.{encode_token(engine.incarnation)}"


def _rank(rank: int | None) -> str:
    # Broadcasts have a token of their own: a rank's actor subscribes to its number and to `all`.
    return "all" if rank is None else str(rank)


def _bucket(cluster: str) -> str:
    # Bucket names admit no '='. Doubling '-' first keeps the names of different clusters apart.
    return encode_token(cluster).replace("-", "--").replace("=", "-x")
