"""Fingerprint a model: name everything that must be equal for two engines' KV bytes to mean the same."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvflow.messages import ModelFingerprint

# Keys of a model's configuration that do not change what its KV bytes mean.
_IRRELEVANT = frozenset({
    "_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "tokenizer_class",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "output_attentions", "return_dict",
    "output_hidden_states", "_attn_implementation_autoset", "attn_implementation", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward", "task_specific_params", "_commit_hash",
})  # fmt: skip
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def fingerprint_of(vllm_config: Any) -> ModelFingerprint:
    """Return the fingerprint of an engine's model, as sorted (name, value) pairs that people can compare."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = _plain(model.hf_config)
    found = {
        "config": config_digest(config),
        "weights": _weights(model),
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization or "none"),
        "speculative": _speculative(vllm_config.speculative_config),
    }
    if _scales_with_length(config):
        found["max_model_len"] = str(model.max_model_len)
    return ModelFingerprint(fields=tuple(sorted(found.items())))


def config_digest(config: Mapping[str, object]) -> str:
    """Digest a model's configuration without what is irrelevant to its KV bytes, at every depth."""
    text = json.dumps(_relevant(config), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def weights_digest(folder: Path) -> str:
    """Digest a folder's weight files by name, size and samples of their bytes; an empty string when there are none.

    Samples tell two fine-tunings of one model apart without reading gigabytes.
    """
    digest = hashlib.blake2b(digest_size=8)
    files = sorted({path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)})
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


def _weights(model: Any) -> str:
    folder = Path(str(model.model))
    try:
        if folder.is_dir() and (digest := weights_digest(folder)):
            return digest
    except OSError as error:
        return f"unreadable:{error.strerror}"
    # A model from a hub: its commit, or at least what the operator asked for.
    commit = getattr(model.hf_config, "_commit_hash", None)
    return str(commit or f"{model.model}@{model.revision or 'default'}")


def _speculative(config: Any) -> str:
    if config is None:
        return "none"
    method = str(getattr(config, "method", "") or "unknown")
    draft = getattr(config, "draft_model_config", None)
    if draft is None or method in {"ngram", "ngram_gpu", "suffix"}:
        return method
    return f"{method}:{config_digest(_plain(draft.hf_config))}:{_weights(draft)}"


def _plain(hf_config: Any) -> Mapping[str, object]:
    content = hf_config.to_dict()
    return content if isinstance(content, Mapping) else {}


def _relevant(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _relevant(inner) for key, inner in value.items() if key not in _IRRELEVANT}
    if isinstance(value, list | tuple):
        return [_relevant(inner) for inner in value]
    return value


def _scales_with_length(config: Mapping[str, object]) -> bool:
    """Return whether the rotary embedding depends on the engine's length limit, and with it the keys."""
    rope = json.dumps([config.get("rope_scaling"), config.get("rope_parameters")], default=str)
    return any(kind in rope for kind in ("longrope", "dynamic", '"su"'))
