"""Find out how vLLM's CPU attention stores keys inside a block, by having it store some.

The kernels differ by instruction set. Most store per block and head all keys transposed (channels outside, tokens
inside) and then all values, token by token; those that feed matrix units interleave in ways of their own. What counts
is what the installed kernel does, so it is asked, with a scratch cache, and never guessed from its name.
"""

from functools import cache

import structlog
import torch

log = structlog.get_logger()

# Enough to tell every place of a block from every other one: block, head, token and channel all take part.
_PROBE_BLOCKS = 2
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@cache
def stores_keys_transposed(isa: str, dtype: torch.dtype, heads: int, block_tokens: int, head_dim: int) -> bool:
    """Return whether the kernel of an instruction set keeps keys transposed and values in order, bit by bit.

    False when it does otherwise, when the element type is not known, and when the kernel cannot be asked.
    """
    if dtype not in _BITS:
        return False
    tokens = _PROBE_BLOCKS * block_tokens
    draw = torch.Generator().manual_seed(0)
    key, value = (torch.randn(tokens, heads, head_dim, generator=draw).to(dtype) for _ in range(2))
    slots = torch.randperm(tokens, generator=draw)
    stored = torch.zeros(_PROBE_BLOCKS, heads, 2 * block_tokens, head_dim, dtype=dtype)
    try:
        _store(key, value, stored, slots, isa)
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        log.warning("cpu_layout_not_probed", isa=isa, detail=str(error).partition("\n")[0])
        return False
    place = torch.empty_like(slots)
    place[slots] = torch.arange(tokens)
    shape = (_PROBE_BLOCKS, block_tokens, heads, head_dim)
    keys = key[place].view(shape).permute(0, 2, 3, 1).reshape(_PROBE_BLOCKS, heads, -1)
    values = value[place].view(shape).permute(0, 2, 1, 3).reshape(_PROBE_BLOCKS, heads, -1)
    expected = torch.cat([keys, values], dim=2).contiguous()
    same: bool = torch.equal(stored.view(_PROBE_BLOCKS, heads, -1).view(_BITS[dtype]), expected.view(_BITS[dtype]))
    return same


def _store(key: torch.Tensor, value: torch.Tensor, stored: torch.Tensor, slots: torch.Tensor, isa: str) -> None:
    """Have vLLM's kernel store keys and values as its attention layers do; raise what it raises."""
    from vllm import _custom_ops as ops

    key_cache, value_cache = stored.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
