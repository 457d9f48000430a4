"""Which engines fit together, and who writes what."""

from typing import Any

import msgspec
import pytest

from kvflow.dataplane.compat import check_compatible, shares_for, targets_of, writers_for
from kvflow.messages import EngineProfile, EngineRef, KvGeometry, KvGroup, KvView, ModelFingerprint


def profiles(
    name: str,
    ranks: int = 1,
    *,
    heads: int = 4,
    layers: tuple[str, ...] = ("a", "b"),
    latent: bool = False,
    stages: int = 1,
    **view: Any,
) -> list[EngineProfile]:
    """Return an engine of `ranks` tensor ranks per pipeline stage; each stage owns a share of the layers."""
    made = []
    for rank in range(ranks * stages):
        stage, tp_rank = divmod(rank, ranks)
        own = layers[stage * len(layers) // stages : (stage + 1) * len(layers) // stages]
        share = max(1, heads // ranks)
        start = 0 if latent else tp_rank * heads // ranks
        base = KvView(
            layer="", part="latent" if latent else "kv", group=0, segment=0, offset=0, blocks=8, block_tokens=16,
            heads=1 if latent else share, head_start=start, total_heads=1 if latent else heads, row_bytes=64,
            block_stride=1 << 16, head_stride=1 << 12, token_stride=64,
        )  # fmt: skip
        views = tuple(msgspec.structs.replace(base, layer=layer, **view) for layer in own)
        geometry = KvGeometry(dtype="bfloat16", num_blocks=8, groups=(KvGroup(block_tokens=16),), views=views)
        made.append(
            EngineProfile(
                engine=EngineRef(engine_id=name, incarnation="1"), rank=rank, ranks=ranks * stages, tp_rank=tp_rank,
                tp_size=ranks, pp_rank=stage, pp_size=stages, roles=("source", "target"), host="h", model="m",
                geometry=geometry, fingerprint=ModelFingerprint(fields=(("model", "qwen"), ("revision", "1"))),
            )
        )  # fmt: skip
    return made


def writers(sources: list[EngineProfile], targets: list[EngineProfile]) -> list[list[int]]:
    return [writers_for(target, sources) for target in targets]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (profiles("p"), profiles("d"), [[0]]),
        (profiles("p", 2), profiles("d", 2), [[0], [1]]),
        (profiles("p", 2), profiles("d", 1), [[0, 1]]),
        (profiles("p", 1), profiles("d", 2), [[0], [0]]),
        (profiles("p", 4), profiles("d", 2), [[0, 1], [2, 3]]),
        # More ranks than heads: equal ranks stay with each other, others share the work.
        (profiles("p", 4, heads=2), profiles("d", 4, heads=2), [[0], [1], [2], [3]]),
        (profiles("p", 4, heads=2), profiles("d", 1, heads=2), [[0, 2]]),
        # MLA: every rank holds everything.
        (profiles("p", 4, latent=True), profiles("d", 4, latent=True), [[0], [1], [2], [3]]),
        (profiles("p", 4, latent=True), profiles("d", 2, latent=True), [[0], [1]]),
        (profiles("p", 2, latent=True), profiles("d", 4, latent=True), [[0], [1], [0], [1]]),
        # Pipeline stages own layers.
        (profiles("p", 1, stages=2), profiles("d", 1), [[0, 1]]),
        (profiles("p", 1), profiles("d", 1, stages=2), [[0], [0]]),
        (profiles("p", 2, stages=2), profiles("d", 2, stages=2), [[0], [1], [2], [3]]),
    ],
)
def test_each_target_rank_has_the_writers_that_hold_its_heads(
    source: list[EngineProfile], target: list[EngineProfile], expected: list[list[int]]
) -> None:
    assert check_compatible(source, target) is None
    assert writers(source, target) == expected
    for profile in source:
        wanted = [number for number, ranks in enumerate(expected) if profile.rank in ranks]
        assert targets_of(profile, target, source) == wanted


def test_i1_every_head_has_exactly_one_writer() -> None:
    sources, targets = profiles("p", 8, heads=4), profiles("d", 2, heads=4)
    for target in targets:
        for view in target.geometry.views:
            written = sorted(
                head
                for share in shares_for(target, sources).values()
                for low, high in share.get((view.layer, view.part), ())
                for head in range(low, high)
            )
            assert written == list(range(view.head_start, view.head_start + view.heads))


def change(profile: EngineProfile, **geometry: Any) -> EngineProfile:
    return msgspec.structs.replace(profile, geometry=msgspec.structs.replace(profile.geometry, **geometry))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ([change(profiles("d")[0], dtype="fp8")], ["dtype", "bfloat16", "fp8"]),
        (profiles("d", layers=("a", "c")), ["layers differ", "only the source has b", "only the target has c"]),
        (profiles("d", row_bytes=128), ["rows differ", "64 bytes", "128 bytes"]),
        (profiles("d", part="k"), ["rows differ", "kv of 64", "k of 64"]),
        (
            profiles("d", row_bytes=32, channels=4, channel_stride=1024),
            ["rows differ", "64", "128 bytes in 4 channels"],
        ),
        (profiles("d", heads=8), ["4 KV heads", "8 on the target"]),
        (
            [change(profiles("d")[0], groups=(KvGroup(block_tokens=16, kind="window", window_tokens=512),))],
            ["full attention", "window 512"],
        ),
        (
            [msgspec.structs.replace(profiles("d")[0], fingerprint=ModelFingerprint(fields=(("model", "qwen"),)))],
            ["models differ", "revision is '1' and 'unset'"],
        ),
        ([], ["0 target ranks"]),
    ],
)
def test_a_mismatch_is_refused_with_both_values(target: list[EngineProfile], words: list[str]) -> None:
    reason = check_compatible(profiles("p"), target)
    assert reason is not None
    for word in words:
        assert word in reason


def test_channels_are_matched_with_contiguous_content() -> None:
    strided = profiles("d", row_bytes=2, channels=32, channel_stride=1024)
    assert check_compatible(profiles("p"), strided) is None
    assert check_compatible(strided, profiles("p")) is None
    coarse = profiles("p", row_bytes=4, channels=16, channel_stride=2048)
    reason = check_compatible(coarse, strided)
    assert reason is not None
    assert "kv of 64 bytes in 16 channels on the source, kv of 64 bytes in 32 channels" in reason
    gapless = profiles("p", row_bytes=4, channels=16, channel_stride=4)
    assert check_compatible(gapless, strided) is None


def test_a_source_with_a_missing_rank_is_refused() -> None:
    reason = check_compatible(profiles("p", 2)[:1], profiles("d"))
    assert reason is not None
    assert "needs heads 0 to 3, the source ranks hold only 2" in reason
