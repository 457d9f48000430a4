"""Word the `kv_transfer_params` of both legs for kvflow and for upstream's two NIXL connectors.

Driving upstream's connectors through the same router lets an operator compare all three under one roof.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from kvflow.router.legs import Kind
from kvflow.router.placement import Engine

DialectName = Literal["kvflow", "nixl", "nixl-push"]
Params = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """Name one transfer: its id, and the request id that both engines are told."""

    transfer_id: str
    request_id: str
    kind: Kind


class Dialect(Protocol):
    """Word the transfer parameters of one connector.

    `late` says that the decode leg needs the prefill's answer, `movable` that a failed prefill may be retried elsewhere
    while the decode leg waits, `fan_out` that one prefill may serve several answers.
    """

    late: bool
    movable: bool
    fan_out: bool

    def prefill(self, ids: Ids, targets: int) -> Params:
        """Return the prefill leg's parameters."""

    def decode(self, ids: Ids, prefill: Engine, answered: Mapping[str, object]) -> Params:
        """Return the decode leg's parameters; `answered` are those in the prefill's answer, when it is there."""

    def can_prefill(self, engine: Engine) -> bool:
        """Return whether enough is known about an engine for it to compute prompts for others."""


class Kvflow:
    """Give both legs the same transfer id, and nothing else: neither engine needs the other's address."""

    late = False
    movable = True
    fan_out = True

    def prefill(self, ids: Ids, targets: int) -> Params:
        """Return the prefill leg's parameters."""
        return {
            "transfer_id": ids.transfer_id,
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "expected_targets": targets,
        }

    def decode(self, ids: Ids, prefill: Engine, answered: Mapping[str, object]) -> Params:  # noqa: ARG002
        """Return the decode leg's parameters."""
        return {"transfer_id": ids.transfer_id, "do_remote_decode": False, "do_remote_prefill": True}

    def can_prefill(self, engine: Engine) -> bool:  # noqa: ARG002
        """Return True: nothing needs to be known."""
        return True


class NixlPull:
    """Drive `NixlConnector`: the decode leg gets what the prefill's answer says."""

    late = True
    movable = True
    fan_out = False

    def prefill(self, ids: Ids, targets: int) -> Params:  # noqa: ARG002
        """Return the prefill leg's parameters."""
        empty = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        return {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(empty)}

    def decode(self, ids: Ids, prefill: Engine, answered: Mapping[str, object]) -> Params:  # noqa: ARG002
        """Return the decode leg's parameters."""
        return dict(answered)

    def can_prefill(self, engine: Engine) -> bool:  # noqa: ARG002
        """Return True: the engine tells its address in its answer."""
        return True


class NixlPush:
    """Drive `NixlPushConnector`: both legs at once under one request id, decode knowing prefill's address."""

    late = False
    movable = False
    fan_out = False

    def prefill(self, ids: Ids, targets: int) -> Params:  # noqa: ARG002
        """Return the prefill leg's parameters."""
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": ids.transfer_id}

    def decode(self, ids: Ids, prefill: Engine, answered: Mapping[str, object]) -> Params:  # noqa: ARG002
        """Return the decode leg's parameters."""
        # vLLM makes its request ids of ours: this prefix, ours, and the number of the prompt.
        name = f"cmpl-{ids.request_id}-0" if ids.kind == "completions" else f"chatcmpl-{ids.request_id}"
        side = prefill.side
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": ids.transfer_id,
            "remote_request_id": name,
            "remote_engine_id": side.engine_id if side else "",
            "remote_host": side.host if side else "",
            "remote_port": side.port if side else 0,
            "tp_size": side.tp_size if side else 1,
            "pp_size": side.pp_size if side else 1,
        }

    def can_prefill(self, engine: Engine) -> bool:
        """Return whether the engine's side channel is known."""
        return engine.side is not None


DIALECTS: Mapping[DialectName, Dialect] = {"kvflow": Kvflow(), "nixl": NixlPull(), "nixl-push": NixlPush()}
