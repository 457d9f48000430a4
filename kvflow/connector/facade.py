"""`KvflowConnector`, what vLLM loads: forwards every hook to the scheduler half or to the worker half."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from kvflow.connector.bridge import Bridge
from kvflow.connector.link import SchedulerLink
from kvflow.connector.options import read_options
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.connector.step import EMPTY_STEP, StepMeta, StepView
from kvflow.connector.vllm_geometry import groups_of
from kvflow.connector.vllm_worker import KvflowHandshake, VllmWorker
from kvflow.errors import ConfigError
from kvflow.messages import EngineRef

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = structlog.get_logger()

_WHOLE = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED})


@dataclass(slots=True)
class KvflowMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Carry one step's news to the workers."""

    step: StepMeta


_NOTHING_NEW = KvflowMetadata(EMPTY_STEP)


class KvflowConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Push KV cache between engines. One object per process and role."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Read the options and check that the cache can be transferred; raise ConfigError when not."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._options = read_options(transfer.kv_connector_extra_config, transfer.kv_role)
        self._groups = groups_of(kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: VllmWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            bridge = Bridge(self._options.settings, name=f"{transfer.engine_id}-scheduler")
            self._scheduler = SchedulerHalf(
                self._options.settings, SchedulerLink(bridge), roles=self._options.roles, groups=self._groups
            )
            if "target" in self._options.roles and transfer.kv_load_failure_policy != "recompute":
                log.warning(
                    "failed_transfers_fail_requests",
                    remedy='set "kv_load_failure_policy": "recompute" to compute such prompts here instead',
                )
        else:
            self._worker = VllmWorker(vllm_config, kv_cache_config, self._options)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return whether a preempted source has to be computed again instead of finishing without its KV."""
        return "source" in self._options.roles

    def shutdown(self) -> None:
        """Stop the bridge thread within a bound; calling it again does nothing."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    # Scheduler side.

    def on_new_request(self, request: "Request") -> None:
        """Take note of a request that asks for a transfer."""
        params = request.kv_transfer_params
        if params is None or self._scheduler is None:
            return
        # A streaming session's prompt grows, and embeddings have no token ids: both are computed without a transfer.
        usable = not getattr(request, "resumable", False) and request.prompt_embeds is None
        prompt = request.prompt_token_ids if usable else None
        self._scheduler.on_new_request(request.request_id, params, prompt, _salt(request))

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many more tokens a transfer brings."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request.request_id, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:  # noqa: ARG002
        """Return all groups: a transfer brings the blocks of each."""
        return tuple(range(len(self._groups)))

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Register the blocks allocated for a load."""
        if self._scheduler is not None:
            ids = blocks.get_block_ids() if num_external_tokens > 0 else ()
            self._scheduler.allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Collect the step's news for the workers."""
        scheduler = self._scheduler
        if scheduler is None:
            return _NOTHING_NEW
        view = self._view(scheduler_output) if scheduler.computing else StepView()
        step = scheduler.build_step(view)
        return KvflowMetadata(step) if step else _NOTHING_NEW

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Learn which loads have ended."""
        if self._scheduler is not None and connector_output.finished_recving:
            self._scheduler.loads_ended(connector_output.finished_recving, connector_output.failed_recving)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End a request whose cache has one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; hold its blocks while they may still be read."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.finished(request.request_id, request.status not in _WHOLE, block_ids)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Learn from the workers who this engine is."""
        self._introduce(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn from the workers of all stages who this engine is."""
        self._introduce(metadata.values())

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe this rank's cache and attach it."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Give the memory up before the engine sleeps."""
        if self._worker is not None:
            self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """Attach the memory again after the engine woke up."""
        if self._worker is not None:
            self._worker.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the scheduler half has to know of this engine."""
        return None if self._worker is None else self._worker.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's news before its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(_step(connector_metadata))

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ARG002
        """Do nothing: loads run outside the engine."""
        return

    def wait_for_layer_load(self, layer_name: str) -> None:  # noqa: ARG002
        """Do nothing: a request is scheduled only once all its KV is there."""
        return

    def save_kv_layer(
        self,
        layer_name: str,  # noqa: ARG002
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: "AttentionMetadata",  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Do nothing: blocks are pushed after the forward pass."""
        return

    def wait_for_save(self) -> None:
        """Publish what the step made final; waits for nothing."""
        if self._worker is not None and self._connector_metadata is not None:
            self._worker.after_forward(_step(self._connector_metadata))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report requests whose blocks may go and whose loads have ended."""
        results = KVConnectorTransferResults()
        if self._worker is not None:
            ended = self._worker.results(finished_req_ids)
            results.finished_sending |= ended.sent
            results.finished_recving |= ended.received
            results.failed_recving |= ended.failed
        return results

    # Inside.

    def _view(self, output: "SchedulerOutput") -> StepView:
        scheduled = dict(_computed(output))
        state = output.kv_connector_block_state

        def table(request_id: str) -> tuple[list[int], ...]:
            ids = state.get_block_ids(request_id) if state is not None else None
            if ids is None and self._kv_cache_manager is not None:
                ids = self._kv_cache_manager.get_block_ids(request_id)
            return ids or ()

        preempted = set(output.preempted_req_ids or ()) | set(output.scheduled_cached_reqs.resumed_req_ids)
        return StepView(scheduled=scheduled, block_table=table, preempted=preempted)

    def _introduce(self, handshakes: Iterable[KVConnectorHandshakeMetadata]) -> None:
        known = {item for item in handshakes if isinstance(item, KvflowHandshake)}
        if self._scheduler is None or not known:
            return
        if len({(item.engine_id, item.incarnation, item.ranks) for item in known}) != 1:
            raise ConfigError("the workers of this engine disagree on who they are", remedy="report this as a bug")
        first = next(iter(known))
        self._scheduler.start(
            EngineRef(engine_id=first.engine_id, incarnation=first.incarnation), first.ranks,
            atom_tokens=max(item.atom_tokens for item in known),
        )  # fmt: skip


def _computed(output: "SchedulerOutput") -> Iterable[tuple[str, int]]:
    """Yield each scheduled request with how many of its tokens are computed once the step has run."""
    scheduled: Mapping[str, int] = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + scheduled.get(new.req_id, 0)
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed + scheduled.get(request_id, 0)


def _step(metadata: KVConnectorMetadata) -> StepMeta:
    return metadata.step if isinstance(metadata, KvflowMetadata) else EMPTY_STEP


def _salt(request: "Request") -> str:
    """Return what besides the token ids decides a request's KV: cache salt, adapter, images and the like."""
    parts = [request.cache_salt or ""]
    if request.lora_request is not None:
        parts.append(f"lora:{request.lora_request.lora_name}")
    parts.extend(f"mm:{feature.identifier}" for feature in request.mm_features or ())
    return "\n".join(parts) if len(parts) > 1 else parts[0]
