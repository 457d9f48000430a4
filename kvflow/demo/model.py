"""Make a tiny Qwen3 model and its tokenizer on the spot: no download, the same bytes for the same spec.

The weights are random, yet greedy output varies with the prompt and depends on the KV cache, so that two engines agree
token by token only when the cache between them is right.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from kvflow.errors import ConfigError

# Changes whenever the same spec would give other files.
RECIPE = 1
BUILD_TIMEOUT_S = 180.0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ 't4 ' if message['role'] == 'assistant' else 't3 ' }}"
    "{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}t4{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """Describe the model to make. Heads must be a multiple of KV heads."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    max_position: int = 32768
    weight_std: float = 0.1
    seed: int = 0

    def key(self) -> str:
        """Return a name that is equal exactly when the files are."""
        text = json.dumps({"recipe": RECIPE, **asdict(self)}, sort_keys=True)
        return f"tiny-qwen3-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def default_cache_dir() -> Path:
    """Return this user's folder for models that were made before (not created here)."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvflow" / "models"


def ensure_model(spec: TinyModel | None = None, cache_dir: Path | None = None) -> Path:
    """Return the model's folder, making it when it is not cached; raise ConfigError when it cannot be made.

    Making takes some seconds and happens in a process of its own, so that torch does not stay in the caller's memory.
    Callers that race each other end with one complete folder.
    """
    spec = spec or TinyModel()
    cache = cache_dir or default_cache_dir()
    final = cache / spec.key()
    if final.is_dir():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{spec.key()}-", dir=cache))
    try:
        _build_in_child(spec, draft)
        draft.chmod(0o755)
        draft.rename(final)
    except OSError as error:
        if not final.is_dir():  # else another caller was first, and its files are as good as ours
            raise ConfigError(f"cannot store the model in {cache}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _build_in_child(spec: TinyModel, folder: Path) -> None:
    command = [sys.executable, "-m", "kvflow.demo.model", str(folder), json.dumps(asdict(spec))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"making the model took more than {BUILD_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ConfigError(f"cannot make the model: {tail}", remedy="install vllm with its transformers and torch")


def build_model(spec: TinyModel, folder: Path) -> None:
    """Write configuration, weights and tokenizer into the folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0.0, spec.weight_std, generator=generator)
    model.to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(spec, folder)


def _write_tokenizer(spec: TinyModel, folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{token}": token for token in range(spec.vocab_size)}
    core = Tokenizer(WordLevel(vocabulary, unk_token="t0"))  # noqa: S106 - a word of the vocabulary, no secret
    core.pre_tokenizer = WhitespaceSplit()
    names = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=spec.max_position, chat_template=CHAT_TEMPLATE, **names
    )
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> None:
    """Build into the folder named first from the JSON spec named second."""
    build_model(TinyModel(**json.loads(arguments[1])), Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
