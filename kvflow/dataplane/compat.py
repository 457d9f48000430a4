"""Decide whether two engines' caches can be mapped, and which source rank writes which heads of which target rank.

All functions are pure. A layer may be held by several source ranks: by parts of its heads (tensor parallelism), or
whole, when heads are replicated (MLA, or more ranks than KV heads). Each head of each target rank has one writer.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import msgspec

from kvflow.messages import EngineProfile, KvGeometry, KvView

Heads = tuple[int, int]  # global KV heads [first, end)
_Layers = dict[str, list[KvView]]
Share = Mapping[
    tuple[str, str], tuple[Heads, ...]
]  # (layer, part of the target) → the heads that one source rank writes


@dataclass(frozen=True, slots=True)
class ViewPair:
    """Pair a source view and a target view of one layer and part, equal in channels and row bytes."""

    source: KvView
    target: KvView


def check_compatible(source: Sequence[EngineProfile], target: Sequence[EngineProfile]) -> str | None:
    """Return None when every target rank's cache can be written from the source ranks, else one readable reason.

    Both sequences hold the profiles of all ranks of their engine; geometries must have been checked already.
    """
    if not source or not target:
        return (
            f"profiles of {len(source)} source ranks and {len(target)} target ranks are known; both need at least one"
        )
    for ours, theirs in ((source[0], other) for other in (*source[1:], *target)):
        if ours.fingerprint != theirs.fingerprint:
            return _fingerprint_reason(ours, theirs)
        if ours.geometry.dtype != theirs.geometry.dtype:
            return f"KV dtype differs: {ours.geometry.dtype} on {_who(ours)}, {theirs.geometry.dtype} on {_who(theirs)}"
    reason = _layers_reason(source, target)
    if reason:
        return reason
    holders = _holders(source)
    for profile in target:
        layers = by_layer(profile.geometry)
        for view in profile.geometry.views:
            reason = _group_reason(view, profile, source, holders) or _rows_reason(view, profile, layers, holders)
            if reason:
                return reason
    return None


def writers_for(target: EngineProfile, sources: Sequence[EngineProfile]) -> list[int]:
    """Return, sorted, the source ranks that write to one target rank."""
    return sorted(shares_for(target, sources))


def targets_of(source: EngineProfile, targets: Sequence[EngineProfile], sources: Sequence[EngineProfile]) -> list[int]:
    """Return, sorted, the target ranks that one source rank writes to; `sources` are all ranks of its engine."""
    return sorted(target.rank for target in targets if source.rank in shares_for(target, sources))


def shares_for(target: EngineProfile, sources: Sequence[EngineProfile]) -> dict[int, Share]:
    """Return for each source rank that writes to a target rank the heads that it writes, by layer and part.

    Replicated heads go to the source rank of the target rank's number where it holds them, else round robin.
    """
    holders = _holders(sources)
    layers = by_layer(target.geometry)
    shares: dict[int, dict[tuple[str, str], tuple[Heads, ...]]] = defaultdict(dict)
    for view in target.geometry.views:
        held = tuple((rank, found[0].head_start, found[0].heads) for rank, found in _held(view, layers, holders))
        for rank, heads in _assign(view.head_start, view.heads, held, target.rank):
            shares[rank][view.layer, view.part] = heads
    return dict(shares)


def match_views(source: Iterable[KvView], target: KvView, siblings: Iterable[KvView]) -> list[ViewPair]:
    """Pair the views of one layer of a source rank with one target view, splitting packed K and V where needed.

    `source` are the source rank's views of the target view's layer, `siblings` all views of that layer on the target.
    Returns nothing when they cannot be paired.
    """
    ours = {view.part: view for view in source}
    theirs = {view.part: view for view in siblings}
    if target.part in ours:
        found = ours[target.part]
        return _pair(found, target) if found.atom_tokens == target.atom_tokens else []
    if any(view.atom_tokens > 1 for view in (target, *ours.values(), *theirs.values())):
        return []  # K and V cannot be told apart inside an atom
    if target.part in {"k", "v"} and "kv" in ours and _splits(ours["kv"], theirs):
        key, value = _split(ours["kv"], theirs["k"].content_bytes)
        return _pair(key if target.part == "k" else value, target)
    if target.part == "kv" and _splits(target, ours) and _same_heads(ours["k"], ours["v"]):
        key, value = _split(target, ours["k"].content_bytes)
        keys, values = _pair(ours["k"], key), _pair(ours["v"], value)
        return keys + values if keys and values else []
    return []


def _pair(source: KvView, target: KvView) -> list[ViewPair]:
    """Pair two views of equal content, seeing the one that is contiguous in the other's channels where they differ."""
    if source.content_bytes != target.content_bytes:
        return []
    source, target = _contiguous(source), _contiguous(target)
    if source.channels == 1:
        source = _in_channels(source, target.channels)
    elif target.channels == 1:
        target = _in_channels(target, source.channels)
    return [ViewPair(source, target)] if source.channels == target.channels else []


def _contiguous(view: KvView) -> KvView:
    """Return the view with one channel when its channels follow each other without gaps."""
    if view.channels == 1 or view.channel_stride != view.row_bytes:
        return view
    return msgspec.structs.replace(view, channels=1, channel_stride=0, row_bytes=view.content_bytes)


def _in_channels(view: KvView, channels: int) -> KvView:
    """Return a view of one channel as one of several, none of which moves."""
    if channels == 1:
        return view
    row = view.row_bytes // channels
    return msgspec.structs.replace(view, channels=channels, channel_stride=row, row_bytes=row)


def _splits(packed: KvView, parts: Mapping[str, KvView]) -> bool:
    """Return whether separate K and V make up the content of a packed view, cut between two of its channels."""
    if "k" not in parts or "v" not in parts:
        return False
    key, value = parts["k"].content_bytes, parts["v"].content_bytes
    return key + value == packed.content_bytes and (packed.channels == 1 or key % packed.row_bytes == 0)


def _same_heads(one: KvView, other: KvView) -> bool:
    return (one.head_start, one.heads) == (other.head_start, other.heads)


def _split(packed: KvView, key_bytes: int) -> tuple[KvView, KvView]:
    """Return the K and the V view of a packed one: K's bytes, or its channels, come first."""
    if packed.channels > 1:
        channels = key_bytes // packed.row_bytes
        key = msgspec.structs.replace(packed, part="k", channels=channels)
        value = msgspec.structs.replace(
            packed, part="v", channels=packed.channels - channels,
            offset=packed.offset + channels * packed.channel_stride,
        )  # fmt: skip
        return key, value
    key = msgspec.structs.replace(packed, part="k", row_bytes=key_bytes)
    value = msgspec.structs.replace(
        packed, part="v", row_bytes=packed.row_bytes - key_bytes, offset=packed.offset + key_bytes
    )
    return key, value


def by_layer(geometry: KvGeometry) -> _Layers:
    """Group a rank's views by layer."""
    layers: dict[str, list[KvView]] = defaultdict(list)
    for view in geometry.views:
        layers[view.layer].append(view)
    return layers


_Holders = dict[str, list[tuple[int, list[KvView]]]]


def _holders(sources: Sequence[EngineProfile]) -> _Holders:
    """Return for each layer the source ranks that hold it, in rank order, with their views of it."""
    holders: _Holders = defaultdict(list)
    for profile in sorted(sources, key=lambda item: item.rank):
        for layer, views in by_layer(profile.geometry).items():
            holders[layer].append((profile.rank, views))
    return holders


def _held(view: KvView, layers: _Layers, holders: _Holders) -> list[tuple[int, list[KvView]]]:
    """Return the source ranks whose views can be paired with a target view, with the paired source views."""
    held = []
    for rank, views in holders.get(view.layer, ()):
        pairs = match_views(views, view, layers[view.layer])
        if pairs:
            held.append((rank, [pair.source for pair in pairs]))
    return held


@lru_cache(maxsize=4096)
def _assign(
    head_start: int, heads: int, held: tuple[tuple[int, int, int], ...], target_rank: int
) -> tuple[tuple[int, tuple[Heads, ...]], ...]:
    """Choose one writer per head; `held` are (source rank, first head, heads). Returns (source rank, head ranges)."""
    cuts = {head_start, head_start + heads}
    for _, first, count in held:
        cuts.update(cut for cut in (first, first + count) if head_start < cut < head_start + heads)
    chosen: dict[int, list[Heads]] = defaultdict(list)
    edges = sorted(cuts)
    for low, high in pairwise(edges):
        owners = [rank for rank, first, count in held if first <= low and high <= first + count]
        if not owners:
            continue
        rank = target_rank if target_rank in owners else owners[target_rank % len(owners)]
        ranges = chosen[rank]
        if ranges and ranges[-1][1] == low:
            ranges[-1] = (ranges[-1][0], high)
        else:
            ranges.append((low, high))
    return tuple((rank, tuple(ranges)) for rank, ranges in sorted(chosen.items()))


def _layers_reason(source: Sequence[EngineProfile], target: Sequence[EngineProfile]) -> str | None:
    ours = {view.layer for profile in source for view in profile.geometry.views}
    theirs = {view.layer for profile in target for view in profile.geometry.views}
    if ours == theirs:
        return None
    only_source, only_target = sorted(ours - theirs), sorted(theirs - ours)
    return (
        f"layers differ: {len(ours)} on {_who(source[0])}, {len(theirs)} on {_who(target[0])}; "
        f"only the source has {_some(only_source)}, only the target has {_some(only_target)}"
    )


def _group_reason(
    view: KvView, profile: EngineProfile, sources: Sequence[EngineProfile], holders: _Holders
) -> str | None:
    geometries = {item.rank: item.geometry for item in sources}
    wanted = profile.geometry.groups[view.group]
    for rank, views in holders[view.layer]:
        for found in views:
            group = geometries[rank].groups[found.group]
            if found.total_heads != view.total_heads:
                return (
                    f"layer {view.layer}: {found.total_heads} KV heads on the source, {view.total_heads} on the target"
                )
            if (group.kind, group.window_tokens) != (wanted.kind, wanted.window_tokens):
                return (
                    f"layer {view.layer}: {group.kind} attention (window {group.window_tokens}) on the source, "
                    f"{wanted.kind} (window {wanted.window_tokens}) on the target"
                )
    return None


def _rows_reason(view: KvView, profile: EngineProfile, layers: _Layers, holders: _Holders) -> str | None:
    for _, views in holders[view.layer]:
        if not match_views(views, view, layers[view.layer]):
            held = ", ".join(_rows(found) for found in views)
            return f"layer {view.layer}: rows differ: {held} on the source, {_rows(view)} on the target"
    held_heads = tuple((rank, found[0].head_start, found[0].heads) for rank, found in _held(view, layers, holders))
    assigned = _assign(view.head_start, view.heads, held_heads, profile.rank)
    written = sum(high - low for _, ranges in assigned for low, high in ranges)
    if written != view.heads:
        return (
            f"layer {view.layer}: target rank {profile.rank} needs heads {view.head_start} to "
            f"{view.head_start + view.heads - 1}, the source ranks hold only {written} of them"
        )
    return None


def _fingerprint_reason(ours: EngineProfile, theirs: EngineProfile) -> str:
    left, right = dict(ours.fingerprint.fields), dict(theirs.fingerprint.fields)
    differing = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    shown = "; ".join(
        f"{name} is {left.get(name, 'unset')!r} and {right.get(name, 'unset')!r}" for name in differing[:4]
    )
    more = f"; {len(differing) - 4} more" if len(differing) > 4 else ""
    return f"models differ between {_who(ours)} and {_who(theirs)}: {shown or 'order of fields'}{more}"


def _rows(view: KvView) -> str:
    atoms = f" in atoms of {view.atom_tokens} tokens" if view.atom_tokens > 1 else ""
    channels = f" in {view.channels} channels" if view.channels > 1 else ""
    return f"{view.part} of {view.content_bytes} bytes{channels}{atoms}"


def _who(profile: EngineProfile) -> str:
    return f"{profile.engine.engine_id} rank {profile.rank}"


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
