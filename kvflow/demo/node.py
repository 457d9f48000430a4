"""Run `kvflow up` as a guarded process, for demo, tests and benchmarks."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvflow.config import ENV_PREFIX, SETTING_NAMES, Settings
from kvflow.connector.node_file import read_node_url
from kvflow.demo.processes import GuardedProcess

READY_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Node:
    """Own one node with a private NATS server; `settings` reach it once it is ready."""

    settings: Settings
    log_dir: Path
    extra_env: Mapping[str, str] = field(default_factory=dict)
    _process: GuardedProcess | None = None

    @property
    def process(self) -> GuardedProcess:
        """Return the node's process, made at first use."""
        if self._process is None:
            self._process = GuardedProcess(
                "node",
                [sys.executable, "-m", "kvflow.cli", "up"],
                self.log_dir / "node.log",
                env=self._environment(),
                grace_s=self.settings.stop_grace_s + 10.0,
            )
        return self._process

    def start(self) -> None:
        """Start the node."""
        self.process.start()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> Settings:
        """Wait until the node has told where its NATS is, and return settings that reach it; raise ConfigError."""
        self.process.wait_until(lambda: bool(read_node_url(self.settings)), timeout_s)
        return msgspec.structs.replace(self.settings, nats_url=read_node_url(self.settings))

    def stop(self) -> None:
        """Stop the node and wait for its end; calling it again does nothing."""
        self.process.stop()

    def _environment(self) -> dict[str, str]:
        env = {name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)}
        defaults = Settings()
        for name in SETTING_NAMES:
            value = getattr(self.settings, name)
            if value != getattr(defaults, name):
                env[ENV_PREFIX + name.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
        return {**env, "UCX_TLS": "tcp,self", **self.extra_env}
