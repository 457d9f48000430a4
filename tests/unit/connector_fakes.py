"""Fakes of the connector's ports, shared by the connector's unit tests."""

from collections import deque
from collections.abc import Sequence

from kvflow.config import Settings
from kvflow.connector.port import Letter
from kvflow.connector.scheduler import SchedulerHalf
from kvflow.connector.step import StepMeta, StepView
from kvflow.connector.worker import WorkerHalf
from kvflow.dataplane.memory import MemoryRange
from kvflow.messages import (
    EngineProfile,
    EngineRef,
    KvGeometry,
    KvGroup,
    Message,
    ModelFingerprint,
    Role,
    SourceReleased,
    TransferCompleted,
    TransferFailed,
)

ENGINE = EngineRef(engine_id="engine", incarnation="one")
BLOCK = 16
GROUP = KvGroup(block_tokens=BLOCK)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeSchedulerPort:
    def __init__(self) -> None:
        self.ready = True
        self.letters: list[tuple[str, Message]] = []
        self.started: list[tuple[EngineRef, int]] = []
        self.closed = 0
        self.away = False
        self.outbox: list[tuple[str, Letter]] = []
        self.clock = Clock()

    def start(self, engine: EngineRef, ranks: int) -> None:
        self.started.append((engine, ranks))

    def post(self, subject: str, letter: Letter) -> None:
        if self.away:
            self.outbox.append((subject, letter))
            return
        message = letter if isinstance(letter, Message) else letter()
        if message is not None:
            self.letters.append((subject, message))

    def come_back(self) -> None:
        self.away = False
        waiting, self.outbox = self.outbox, []
        for subject, letter in waiting:
            self.post(subject, letter)

    def close(self) -> None:
        self.closed += 1

    def take(self) -> list[Message]:
        messages = [message for _, message in self.letters]
        self.letters.clear()
        return messages


class FakeWorkerPort:
    def __init__(self) -> None:
        self.letters: list[tuple[str, Message]] = []
        self.down = 0.0
        self.detached = 0.0
        self.fences = 0
        self.resumes = 0
        self.closed = 0

    def start(self, profile: EngineProfile, memory: Sequence[MemoryRange], inbox: deque[Message]) -> None:
        self.inbox = inbox

    def post(self, subject: str, letter: Letter) -> None:
        message = letter if isinstance(letter, Message) else letter()
        if message is not None:
            self.letters.append((subject, message))

    def bus_down_for(self) -> float:
        return self.down

    def detached_for(self) -> float:
        return self.detached

    def fence(self) -> None:
        self.fences += 1

    def resume(self) -> None:
        self.resumes += 1

    def close(self) -> None:
        self.closed += 1


def scheduler(
    roles: tuple[Role, ...] = ("source", "target"),
    groups: Sequence[KvGroup] = (GROUP,),
    *,
    atom_tokens: int = 1,
    settings: Settings | None = None,
) -> tuple[SchedulerHalf, FakeSchedulerPort]:
    port = FakeSchedulerPort()
    half = SchedulerHalf(settings or Settings(min_load_tokens=1), port, roles=roles, groups=groups, clock=port.clock)
    half.start(ENGINE, 2, atom_tokens=atom_tokens)
    return half, port


def profile(rank: int = 0, roles: tuple[Role, ...] = ("source", "target")) -> EngineProfile:
    return EngineProfile(
        engine=ENGINE, rank=rank, ranks=2, tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, roles=roles, host="host",
        model="model", geometry=KvGeometry(dtype="bfloat16", num_blocks=8, groups=(GROUP,), views=()),
        fingerprint=ModelFingerprint(fields=()),
    )  # fmt: skip


def worker(rank: int = 0, settings: Settings | None = None) -> tuple[WorkerHalf, FakeWorkerPort, Clock]:
    port, clock = FakeWorkerPort(), Clock()
    half = WorkerHalf(settings or Settings(), port, clock=clock)
    half.start(profile(rank), [])
    return half, port, clock


def source_params(transfer_id: str = "t1", **more: object) -> dict[str, object]:
    return {"transfer_id": transfer_id, "do_remote_decode": True, **more}


def target_params(transfer_id: str = "t1", **more: object) -> dict[str, object]:
    return {"transfer_id": transfer_id, "do_remote_prefill": True, **more}


def step(
    half: SchedulerHalf, scheduled: dict[str, int], tables: dict[str, list[int]] | None = None,
    preempted: frozenset[str] = frozenset(),
) -> StepMeta:  # fmt: skip
    found = tables or {}
    return half.build_step(
        StepView(scheduled=scheduled, block_table=lambda request_id: (found.get(request_id, []),), preempted=preempted)
    )


def completed(request_id: str, attempt: int, *, rank: int = 0, transfer_id: str = "t1") -> TransferCompleted:
    return TransferCompleted(
        transfer_id=transfer_id, binding=1, target=ENGINE, target_attempt=attempt, request_id=request_id, rank=rank
    )


def failed(request_id: str, attempt: int, *, transfer_id: str = "t1") -> TransferFailed:
    return TransferFailed(
        transfer_id=transfer_id, target=ENGINE, target_attempt=attempt, request_id=request_id, reason="source_lost"
    )


def released(request_id: str, attempt: int, *, transfer_id: str = "t1") -> SourceReleased:
    return SourceReleased(transfer_id=transfer_id, attempt=attempt, source=ENGINE, request_id=request_id)
