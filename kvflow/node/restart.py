"""Keep a child process running: restart with back-off, within a budget, then give up loudly."""

import time
from collections import deque
from dataclasses import dataclass, field

import anyio
import anyio.abc
import structlog

from kvflow.errors import NodeError
from kvflow.node.process import ChildProcess, ProcessSpec, describe_exit

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Say how often and how fast a child may be restarted, and how long it may take to be ready. Seconds."""

    limit: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    ready_timeout_s: float = 30.0


@dataclass(slots=True)
class RestartBudget:
    """Count the ends of a child within the policy's window."""

    policy: RestartPolicy
    _ends: deque[float] = field(default_factory=deque)

    def next_delay(self, now: float) -> float | None:
        """Return the seconds to wait before the next start, doubling, or None when the budget is spent."""
        while self._ends and now - self._ends[0] > self.policy.window_s:
            self._ends.popleft()
        self._ends.append(now)
        if len(self._ends) > self.policy.limit:
            return None
        doubled: float = self.policy.first_delay_s * 2 ** (len(self._ends) - 1)
        return min(self.policy.max_delay_s, doubled)


@dataclass(slots=True)
class Children:
    """Start children and know which ones live."""

    stop_grace_s: float
    _running: dict[int, ChildProcess] = field(default_factory=dict)

    def pids(self) -> dict[str, int]:
        """Return the process id of every child by name."""
        return {child.spec.name: pid for pid, child in self._running.items()}

    def kill_all(self) -> None:
        """End all children at once."""
        for child in self._running.values():
            child.kill()

    async def keep_running(
        self,
        spec: ProcessSpec,
        policy: RestartPolicy,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run the child until cancelled; raise NodeError when its first start fails or its restarts are used up."""
        budget = RestartBudget(policy)
        started = False
        while True:
            cause = await self._run_once(spec, policy, task_status if not started else None)
            started = True
            delay = budget.next_delay(time.monotonic())
            if delay is None:
                log.error("child_given_up", child=spec.name, cause=cause, restarts=policy.limit)
                raise NodeError(
                    f"the {spec.name} process ended more than {policy.limit} times within {policy.window_s:g} s,"
                    f" last by: {cause}",
                    remedy="its log lines say why; start the node again when that is repaired",
                )
            log.error("child_ended", child=spec.name, cause=cause, restart_in_s=delay)
            await anyio.sleep(delay)

    async def _run_once(
        self, spec: ProcessSpec, policy: RestartPolicy, first: anyio.abc.TaskStatus[None] | None
    ) -> str:
        """Run one life of the child and return why it ended; `first` is told when the child is ready."""
        child = await ChildProcess.spawn(spec, stop_grace_s=self.stop_grace_s)
        pid = child.process.pid
        self._running[pid] = child
        try:
            async with child:
                try:
                    await child.ready(policy.ready_timeout_s)
                except NodeError as error:
                    if first is not None:
                        raise
                    return str(error)  # the child leaves it to us to say
                log.info("child_ready", child=spec.name, pid=pid)
                if first is not None:
                    first.started()
                return describe_exit(await child.wait())
        finally:
            del self._running[pid]
