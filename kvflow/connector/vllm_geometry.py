"""Describe vLLM's KV cache: its groups, its tensors as views, and its memory as ranges that actors can map.

CPU attention stores the keys of a block transposed (channels outside, tokens inside) before its values, which is two
views of other strides. Where its kernel interleaves in a way of its own (see `cpu_layout`), single tokens cannot be
moved: blocks are *atoms*, and the geometry's dtype names the instruction set, which keeps apart engines that store
otherwise.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from kvflow.connector.cpu_layout import stores_keys_transposed
from kvflow.connector.layout import LayerRole, LayerTensor, dims, head_share, transposed_keys, views_of
from kvflow.dataplane.memory import MemoryRange
from kvflow.errors import ConfigError
from kvflow.messages import KvGeometry, KvGroup, KvView, Placement

_FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
_WINDOW = {"SlidingWindowSpec", "SlidingWindowMLASpec"}


@dataclass(frozen=True, slots=True)
class Cache:
    """Hold a rank's described cache; `storages` keeps the memory alive, `atom_tokens` is 1 unless blocks are atoms."""

    geometry: KvGeometry
    memory: tuple[MemoryRange, ...]
    placement: Placement
    atom_tokens: int
    storages: tuple[torch.UntypedStorage, ...]


def groups_of(kv_cache_config: Any) -> tuple[KvGroup, ...]:
    """Return vLLM's KV cache groups; raise ConfigError for a kind that cannot be transferred."""
    groups = tuple(_group(number, group) for number, group in enumerate(kv_cache_config.kv_cache_groups))
    if not groups:
        raise ConfigError("this model has no KV cache", remedy="run it without a KV connector")
    return groups


def describe_cache(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any, *, placement: str, total_heads: int, tp_rank: int,
    tp_size: int, isas: Mapping[str, str],
) -> Cache:  # fmt: skip
    """Describe the tensors; with placement `process` their storages move into shared memory, in place.

    `isas` says by layer for which instruction set CPU attention stores, as far as it is known.
    Raises ConfigError, naming the layer, when something cannot be mapped.
    """
    groups = groups_of(kv_cache_config)
    layers = {
        name: (number, _spec_of(group, name))
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }
    # A layer that shares another's cache is in no group: its tensor is described under the other's name.
    tensors = {name: tensor for name, tensor in kv_caches.items() if name in layers}
    if not tensors:
        raise ConfigError("no layer of this rank has a KV cache", remedy="run it without a KV connector")
    device = _one_device(tensors)
    where = _choose_placement(placement, device)
    storages = _storages(tensors)
    views: list[KvView] = []
    interleaved: set[str] = set()
    for name, tensor in tensors.items():
        number, spec = layers[name]
        role = _role(spec, number, groups[number], total_heads, tp_rank, tp_size)
        segment = list(storages).index(tensor.untyped_storage().data_ptr())
        found = views_of(_place(name, tensor, segment), role, kv_cache_config.num_blocks)
        if device.type == "cpu" and found[0].part == "kv":
            isa = isas.get(name, "unknown")
            found = _as_stored(found[0], tensor, isa)
            if found[0].atom_tokens > 1:
                interleaved.add(isa)
        views.extend(found)
    atom = math.lcm(*(view.atom_tokens for view in views))
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    layout = f":cpu-{'+'.join(sorted(interleaved))}-blocks-of-{atom}" if interleaved else ""
    held = tuple(storages.values())
    return Cache(
        geometry=KvGeometry(
            dtype="+".join(dtypes) + layout, num_blocks=kv_cache_config.num_blocks, groups=groups, views=tuple(views)
        ),
        memory=tuple(_range(storage, where, device) for storage in held),
        placement=where,
        atom_tokens=atom,
        storages=held,
    )


def isas_of(vllm_config: Any, layers: Iterable[str]) -> dict[str, str]:
    """Return the instruction set that each layer's CPU attention stores for; vLLM notes it before the cache is ready."""
    known = vllm_config.compilation_config.static_forward_context
    return {name: str(known[name].isa) for name in layers if hasattr(known.get(name), "isa")}


def _as_stored(packed: KvView, tensor: torch.Tensor, isa: str) -> tuple[KvView, ...]:
    """Return the views of what CPU attention says is K and V packed in the innermost dimension, but stores otherwise."""
    item = tensor.element_size()
    channels = packed.row_bytes // (2 * item)
    if packed.token_stride == packed.row_bytes and stores_keys_transposed(
        isa, tensor.dtype, packed.heads, packed.block_tokens, channels
    ):
        return transposed_keys(packed, item)
    return (msgspec.structs.replace(packed, atom_tokens=packed.block_tokens),)


def _group(number: int, group: Any) -> KvGroup:
    specs = _specs(group)
    windows = {int(spec.sliding_window) if type(spec).__name__ in _WINDOW else 0 for spec in specs}
    for spec in specs:
        kind = type(spec).__name__
        if kind not in _FULL | _WINDOW or getattr(spec, "tokens_per_state", 1) != 1:
            raise _unsupported(f"group {number} is a {kind}")
    if not getattr(group, "enable_kv_transfer", True):
        raise _unsupported(f"group {number} is not part of what can be transferred")
    if len(windows) != 1:
        raise _unsupported(f"the layers of group {number} have different windows")
    window = windows.pop()
    tokens = int(group.kv_cache_spec.block_size)
    return KvGroup(block_tokens=tokens, kind="window" if window else "full", window_tokens=window)


def _specs(group: Any) -> list[Any]:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [group.kv_cache_spec]


def _spec_of(group: Any, layer: str) -> Any:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return inner[layer] if inner else group.kv_cache_spec


def _role(spec: Any, number: int, group: KvGroup, total_heads: int, tp_rank: int, tp_size: int) -> LayerRole:
    if "MLA" in type(spec).__name__:
        # Every rank holds the whole latent.
        return LayerRole(number, group.block_tokens, 1, 0, 1, latent=True)
    heads = int(spec.num_kv_heads)
    start, total = head_share(heads, total_heads, tp_rank, tp_size)
    return LayerRole(number, group.block_tokens, heads, start, total)


def _one_device(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        raise _unsupported(f"the layers lie on {len(devices)} devices")
    return devices.pop()


def _choose_placement(wanted: str, device: torch.device) -> Placement:
    if wanted == "auto":
        return "process" if device.type == "cpu" else "engine"
    if wanted == "process" and device.type != "cpu":
        raise ConfigError(
            f"placement=process cannot serve KV on {device.type}, which only the allocating process can register",
            remedy="set placement to auto or engine",
        )
    return "process" if wanted == "process" else "engine"


def _storages(tensors: Mapping[str, torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the distinct storages by their present address, in order of first use."""
    return {(storage := tensor.untyped_storage()).data_ptr(): storage for tensor in tensors.values()}


def _place(name: str, tensor: torch.Tensor, segment: int) -> LayerTensor:
    item = tensor.element_size()
    return LayerTensor(
        layer=name, shape=dims(tensor.shape), strides=tuple(step * item for step in dims(tensor.stride())),
        item_bytes=item, segment=segment, offset=int(tensor.storage_offset()) * item,
    )  # fmt: skip


def _range(storage: torch.UntypedStorage, placement: Placement, device: torch.device) -> MemoryRange:
    if device.type != "cpu":
        return MemoryRange.at(storage.data_ptr(), storage.nbytes(), memory="VRAM", device=device.index or 0)
    if placement == "engine":
        return MemoryRange.at(storage.data_ptr(), storage.nbytes())
    # Moves the bytes in place: every tensor over this storage, vLLM's included, follows.
    fd, size = storage._share_fd_cpu_()
    return MemoryRange(fd=os.dup(fd), length=int(size))


def _unsupported(why: str) -> ConfigError:
    return ConfigError(f"this model's KV cache cannot be transferred: {why}", remedy="run this engine without kvflow")
