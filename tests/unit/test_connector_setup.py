import builtins
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.connector.digest import pack_u32, prompt_digest
from kvflow.connector.fingerprint import config_digest, weights_digest
from kvflow.connector.layout import LayerRole, LayerTensor, head_share, transposed_keys, views_of
from kvflow.connector.options import read_options
from kvflow.connector.plugin import register
from kvflow.errors import ConfigError
from kvflow.messages import unpack_blocks

BLOCKS, HEADS, TOKENS, CHANNELS, ITEM = 6, 2, 16, 8, 2


def tensor(shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> LayerTensor:
    """Lay the dimensions out in memory in `order`, outermost first."""
    strides = [0] * len(shape)
    step = ITEM
    for axis in reversed(order or tuple(range(len(shape)))):
        strides[axis] = step
        step *= shape[axis]
    return LayerTensor("layer", shape, tuple(strides), ITEM, segment=1, offset=64)


ROLE = LayerRole(group=0, group_tokens=TOKENS, heads=HEADS, head_start=2, total_heads=4)
LATENT = LayerRole(group=0, group_tokens=TOKENS, heads=1, head_start=0, total_heads=1, latent=True)


def test_packed_layout_with_heads_outside_or_inside_tokens() -> None:
    shape = (BLOCKS, HEADS, TOKENS, 2 * CHANNELS)
    (outside,) = views_of(tensor(shape), ROLE, BLOCKS)
    (inside,) = views_of(tensor(shape, (0, 2, 1, 3)), ROLE, BLOCKS)
    row = 2 * CHANNELS * ITEM
    assert (outside.part, outside.segment, outside.offset) == ("kv", 1, 64)
    assert (outside.head_start, outside.heads, outside.total_heads, outside.row_bytes) == (2, HEADS, 4, row)
    assert (outside.token_stride, outside.head_stride, outside.block_stride) == (
        row,
        row * TOKENS,
        row * TOKENS * HEADS,
    )
    assert (inside.token_stride, inside.head_stride, inside.block_stride) == (row * HEADS, row, row * TOKENS * HEADS)


@pytest.mark.parametrize(
    "shape",
    [
        (2, BLOCKS, TOKENS, HEADS, CHANNELS), (BLOCKS, 2, TOKENS, HEADS, CHANNELS),
        (2, BLOCKS, HEADS, TOKENS, CHANNELS), (BLOCKS, 2, HEADS, TOKENS, CHANNELS),
    ],
)  # fmt: skip
def test_separate_keys_and_values(shape: tuple[int, ...]) -> None:
    found = tensor(shape)
    key, value = views_of(found, ROLE, BLOCKS)
    assert (key.part, value.part) == ("k", "v")
    assert (key.heads, key.block_tokens, key.blocks) == (HEADS, TOKENS, BLOCKS)
    assert value.offset - key.offset == found.strides[shape.index(2)]
    assert key.token_stride == found.strides[shape.index(TOKENS)]


def test_transposed_keys_come_before_the_values_of_each_head() -> None:
    (packed,) = views_of(tensor((BLOCKS, HEADS, TOKENS, 2 * CHANNELS)), ROLE, BLOCKS)
    key, value = transposed_keys(packed, ITEM)
    assert (key.part, key.offset, key.row_bytes, key.token_stride) == ("k", packed.offset, ITEM, ITEM)
    assert (key.channels, key.channel_stride) == (CHANNELS, TOKENS * ITEM)
    assert (value.part, value.offset - key.offset) == ("v", TOKENS * CHANNELS * ITEM)
    assert (value.row_bytes, value.token_stride, value.channels) == (CHANNELS * ITEM, CHANNELS * ITEM, 1)
    for view in (key, value):
        assert (view.head_stride, view.block_stride) == (packed.head_stride, packed.block_stride)


def test_latents_have_one_head() -> None:
    for shape in ((BLOCKS, TOKENS, CHANNELS), (BLOCKS, 1, TOKENS, CHANNELS)):
        (view,) = views_of(tensor(shape), LATENT, BLOCKS)
        assert (view.part, view.heads, view.total_heads, view.row_bytes) == ("latent", 1, 1, CHANNELS * ITEM)


def test_kernel_blocks_may_be_smaller_than_the_group_s() -> None:
    role = LayerRole(group=0, group_tokens=4 * TOKENS, heads=HEADS, head_start=0, total_heads=HEADS)
    (view,) = views_of(tensor((4 * BLOCKS, HEADS, TOKENS, CHANNELS)), role, BLOCKS)
    assert (view.blocks, view.block_tokens) == (4 * BLOCKS, TOKENS)


@pytest.mark.parametrize(
    "bad",
    [
        tensor((BLOCKS, CHANNELS)), tensor((BLOCKS, HEADS + 1, TOKENS, CHANNELS)),
        tensor((BLOCKS + 1, HEADS, TOKENS, CHANNELS)), tensor((BLOCKS, HEADS, TOKENS - 1, CHANNELS)),
        tensor((3, BLOCKS, TOKENS, HEADS, CHANNELS)), tensor((BLOCKS, HEADS, TOKENS, CHANNELS), (0, 1, 3, 2)),
        tensor((BLOCKS, HEADS, 0, CHANNELS)),
    ],
)  # fmt: skip
def test_unknown_layouts_are_refused_with_the_layer_s_name(bad: LayerTensor) -> None:
    with pytest.raises(ConfigError, match="'layer'"):
        views_of(bad, ROLE, BLOCKS)


def test_heads_are_split_over_ranks_or_shared_by_neighbours() -> None:
    assert [head_share(4, 8, rank, 2) for rank in range(2)] == [(0, 8), (4, 8)]
    assert [head_share(1, 2, rank, 4) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert head_share(8, 8, 0, 1) == (0, 8)


def test_options_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFLOW_CONFIG", raising=False)
    options = read_options({"cluster": "c", "api_url": "http://h:1/", "roles": "target"}, "kv_both")
    assert (options.settings.cluster, options.api_url, options.roles) == ("c", "http://h:1", ("target",))
    assert read_options({}, "kv_both").roles == ("source", "target")
    assert read_options({}, "kv_producer").roles == ("source",)
    for extra, role, word in (
        ({"clutser": "c"}, "kv_both", "clutser"), ({"shards": "many"}, "kv_both", "shards"),
        ({"api_url": 5}, "kv_both", "api_url"), ({"api_url": "h:1"}, "kv_both", "api_url"),
        ({"roles": "boss"}, "kv_both", "roles"), ({"roles": 5}, "kv_both", "roles"), ({}, None, "kv_role"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            read_options(extra, role)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_block_ids_are_packed_as_the_messages_unpack_them(values: list[int]) -> None:
    assert unpack_blocks(pack_u32(values)).tolist() == values


def test_prompts_are_told_apart() -> None:
    prompt = list(range(10_000))
    assert prompt_digest(prompt) == prompt_digest(tuple(prompt))
    assert len({prompt_digest(prompt), prompt_digest(prompt[:-1]), prompt_digest(prompt, "salt")}) == 3
    assert len(prompt_digest([-1, 2**40])) == 16


def test_config_digest_ignores_what_does_not_touch_the_cache() -> None:
    base: dict[str, object] = {"hidden_size": 8, "text_config": {"rope_theta": 1.0, "dtype": "bfloat16"}}
    assert config_digest(base) == config_digest({**base, "_name_or_path": "elsewhere", "transformers_version": "9"})
    assert config_digest(base) != config_digest({**base, "text_config": {"rope_theta": 2.0}})


def test_weights_of_equal_size_are_told_apart(tmp_path: Path) -> None:
    assert not weights_digest(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(100_000))
    first = weights_digest(tmp_path)
    file.write_bytes(bytes(99_999) + b"\1")
    assert len({first, weights_digest(tmp_path)}) == 2


def test_plugin_never_raises_where_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("vllm"):
            raise RuntimeError("broken installation")
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    register()


def test_nothing_but_the_facade_imports_vllm_or_torch() -> None:
    import kvflow.connector.link
    import kvflow.connector.scheduler
    import kvflow.connector.worker  # noqa: F401

    assert "kvflow.connector.facade" not in sys.modules
