"""Show on stderr what the demo is doing: one line per step, with a spinner while it runs and its time when done."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Steps:
    """Show steps; on a stderr that is no terminal, one plain line per finished step."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show a step for as long as the block runs; steps may overlap."""
        task: TaskID = self._progress.add_task(what, total=1)
        try:
            yield
        except BaseException:
            self._progress.update(task, description=f"[red]{what}: given up")
            self._progress.stop_task(task)
            raise
        self._progress.update(task, completed=1)
        if not self._console.is_terminal:
            sys.stderr.write(f"{what}: done\n")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
