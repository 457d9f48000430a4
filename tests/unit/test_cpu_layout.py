"""How CPU attention keeps K and V: asked of the kernels of the installed vLLM, bit by bit."""

import importlib.util

import pytest

pytest.importorskip("torch")

import torch

from kvflow.connector import cpu_layout

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(autouse=True)
def _forget() -> None:
    cpu_layout.stores_keys_transposed.cache_clear()


@pytest.fixture
def kernels() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vllm is not built for CPUs")
    current_platform.import_kernels()


@needs_vllm
@pytest.mark.vllm
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_tokens", [32, 64, 96, 128])
def test_vector_kernels_keep_keys_transposed(dtype: torch.dtype, block_tokens: int) -> None:
    for isa, head_dim in (("vec", 32), ("vec", 64), ("vec", 128), ("vec16", 80)):
        assert cpu_layout.stores_keys_transposed(isa, dtype, 2, block_tokens, head_dim), (isa, head_dim)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.usefixtures("kernels")
def test_matrix_and_unknown_kernels_are_not_taken_for_it() -> None:
    assert not cpu_layout.stores_keys_transposed("amx", torch.bfloat16, 2, 32, 64)
    assert not cpu_layout.stores_keys_transposed("unknown", torch.bfloat16, 2, 32, 64)
    assert not cpu_layout.stores_keys_transposed("vec", torch.uint8, 2, 32, 64)


def _store_rows(key: torch.Tensor, value: torch.Tensor, stored: torch.Tensor, slots: torch.Tensor, _isa: str) -> None:
    rows = stored.shape[2]
    for part, content in enumerate((key, value)):
        half = stored[:, :, part * rows // 2 : (part + 1) * rows // 2]
        for token, slot in enumerate(slots.tolist()):
            half[slot // (rows // 2), :, slot % (rows // 2)] = content[token]


def test_a_kernel_that_stores_row_by_row_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_layout, "_store", _store_rows)
    assert not cpu_layout.stores_keys_transposed("vec", torch.float32, 2, 32, 64)


def test_a_kernel_that_cannot_be_asked_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(cpu_layout, "_store", refuse)
    assert not cpu_layout.stores_keys_transposed("vec", torch.float32, 2, 32, 64)
