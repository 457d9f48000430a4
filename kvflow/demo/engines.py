"""Start vLLM engines on the CPU as guarded processes: for the demo, the end-to-end tests and the benchmarks."""

import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvflow.config import PlacementChoice, Settings
from kvflow.demo.processes import GuardedProcess

EngineRole = Literal["producer", "consumer", "both", "none"]

READY_TIMEOUT_S = 300.0
HEALTH_TIMEOUT_S = 2.0
# Set by whoever runs the demo for other engines; here they would only bend the measurement.
_DROPPED_ENV = ("VLLM_USE_V1", "VLLM_PLUGINS")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Describe one engine. `cores` are CPU numbers as vLLM takes them ("0", "0-1", "0|1" for two ranks; "auto")."""

    name: str
    model: Path
    role: EngineRole = "none"
    served_name: str = "tiny"
    connector: str = "KvflowConnector"
    connector_options: Mapping[str, object] = field(default_factory=dict)
    host: str = "127.0.0.1"
    block_size: int = 128
    max_model_len: int = 16384
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    prefix_caching: bool = False
    num_blocks: int | None = None
    cache_gib: int = 1
    tensor_parallel: int = 1
    cores: str = "auto"
    omp_threads: int | None = None
    placement: PlacementChoice = "auto"
    min_load_tokens: int = Settings().min_load_tokens
    cluster: str = "default"
    runtime_dir: Path | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class VllmEngine(GuardedProcess):
    """Own one engine: its processes, its port and its log."""

    def __init__(self, spec: EngineSpec, log_dir: Path, *, port: int | None = None) -> None:
        self.spec = spec
        self.port = port or free_port(spec.host)
        super().__init__(
            spec.name,
            command_line(spec, self.port),
            log_dir / f"{spec.name}.log",
            env=environment(spec, os.environ),
        )

    @property
    def url(self) -> str:
        """Return the engine's base URL."""
        return f"http://{self.spec.host}:{self.port}"

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the engine answers; raise ConfigError with the end of its log when it does not."""
        self.wait_until(self.healthy, timeout_s)

    def healthy(self) -> bool:
        """Ask the engine's health page."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_TIMEOUT_S) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def command_line(spec: EngineSpec, port: int) -> list[str]:
    """Return the command that serves the engine on the port."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options: dict[str, object] = {
        "model": spec.model,
        "served-model-name": spec.served_name,
        "host": spec.host,
        "port": port,
        "dtype": "bfloat16",
        "block-size": spec.block_size,
        "max-model-len": spec.max_model_len,
        "max-num-seqs": spec.max_num_seqs,
        "tensor-parallel-size": spec.tensor_parallel,
        "max-num-batched-tokens": spec.max_num_batched_tokens,
        "num-gpu-blocks-override": spec.num_blocks,
    }
    for name, value in options.items():
        if value is not None:
            command += [f"--{name}", str(value)]
    command += ["--enforce-eager", "--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching"]
    if spec.role != "none":
        command += ["--kv-transfer-config", json.dumps(transfer_config(spec, port))]
    return [*command, *spec.extra_args]


def transfer_config(spec: EngineSpec, port: int) -> dict[str, object]:
    """Return the engine's `--kv-transfer-config`."""
    config: dict[str, object] = {"kv_connector": spec.connector, "kv_role": f"kv_{spec.role}", "engine_id": spec.name}
    options = dict(spec.connector_options)
    if spec.connector == "KvflowConnector":
        options.setdefault("api_url", f"http://{spec.host}:{port}")
        options.setdefault("min_load_tokens", spec.min_load_tokens)
        config["kv_load_failure_policy"] = "recompute"
    else:
        config["kv_buffer_device"] = "cpu"
    if options:
        config["kv_connector_extra_config"] = options
    return config


def environment(spec: EngineSpec, base: Mapping[str, str]) -> dict[str, str]:
    """Return the engine's environment: quiet, offline, and bound to its cores."""
    env = {name: value for name, value in base.items() if name not in _DROPPED_ENV}
    env |= {
        "VLLM_CPU_KVCACHE_SPACE": str(spec.cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": spec.cores,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "UCX_TLS": "tcp,self",
    }
    if spec.role != "none":
        env |= {"KVFLOW_CLUSTER": spec.cluster, "KVFLOW_PLACEMENT": spec.placement}
        if spec.runtime_dir is not None:
            env["KVFLOW_RUNTIME_DIR"] = str(spec.runtime_dir)
    if spec.omp_threads is not None:
        env["OMP_NUM_THREADS"] = str(spec.omp_threads)
    return env | dict(spec.extra_env)
