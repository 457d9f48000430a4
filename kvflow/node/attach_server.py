"""Take engine workers that attach to the node, and run a data process for each while its socket stays open."""

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
import structlog

from kvflow.config import Settings
from kvflow.errors import KvflowError, NodeError, PeerError, WireError, cause_of
from kvflow.messages import Attached, AttachRefused, EngineProfile, EngineRef, Role, encode
from kvflow.node.attach_protocol import (
    AttachRequest,
    check_peer,
    receive_request,
    refusal,
    send_message,
    wait_for_end,
)
from kvflow.node.process import ProcessSpec
from kvflow.node.restart import Children, RestartPolicy

log = structlog.get_logger()

REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
MAX_CLIENTS = 512
BACKLOG = 128
# A worker that reconnects may find its former data process still winding down.
TAKEOVER_WAIT_S = 15.0

ROLE_ACTORS: dict[Role, str] = {"source": "transfer", "target": "completion"}

RankKey = tuple[EngineRef, int]


def actors_of(roles: tuple[Role, ...]) -> tuple[str, ...]:
    """Return the actors that serve an engine with these roles, in one process since they share one agent."""
    return tuple(actor for role, actor in ROLE_ACTORS.items() if role in roles)


@contextlib.contextmanager
def listen(path: Path) -> Iterator[socket.socket]:
    """Open the attach socket (0600), and remove it at the end; raise NodeError when that is not possible."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.setblocking(False)
        # Connecting needs write permission on the socket, and the folder is 0700 as well.
        previous = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
            listener.listen(BACKLOG)
        except OSError as error:
            raise NodeError(f"cannot listen on {path}: {error.strerror}", remedy="set another --runtime-dir") from error
        finally:
            os.umask(previous)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


@dataclass(slots=True)
class _Place:
    """Tell others that a rank's former attachment is on its way out, and when it has gone."""

    leaving: bool = False
    gone: anyio.Event = field(default_factory=anyio.Event)


class AttachServer:
    """Serve the attach socket. One client's mistake or crash ends that client's attachment only."""

    def __init__(self, settings: Settings, children: Children, policy: RestartPolicy) -> None:
        self._settings = settings
        self._children = children
        self._policy = policy
        self._places: dict[RankKey, _Place] = {}
        self._clients = 0

    @property
    def attached(self) -> int:
        """Return the number of engine ranks that are attached or attaching."""
        return len(self._places)

    async def serve(self, listener: socket.socket) -> None:
        """Accept workers until cancelled; then stop their data processes."""
        async with anyio.create_task_group() as group:
            while True:
                await anyio.wait_readable(listener)
                try:
                    client, _ = listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                except OSError as error:  # out of descriptors, most likely: the waiting client must not spin us
                    log.error("attach_accept_failed", error=error.strerror)
                    await anyio.sleep(0.5)
                    continue
                client.setblocking(False)
                group.start_soon(self._serve_client, client)

    async def _serve_client(self, client: socket.socket) -> None:
        self._clients += 1
        try:
            with client:
                await self._handshake(client)
        except (KvflowError, OSError) as error:
            log.warning("attach_ended", error=str(error))
        except Exception:
            # A defect met with one client must not take the other engines' data processes down.
            log.exception("attach_client_crashed")
        finally:
            self._clients -= 1

    async def _handshake(self, client: socket.socket) -> None:
        try:
            pid = check_peer(client)
            if self._clients > MAX_CLIENTS:
                raise PeerError(f"{MAX_CLIENTS} workers are connected already", remedy="spread engines over more nodes")
            request = await receive_request(client, REQUEST_TIMEOUT_S)
        except (WireError, PeerError) as error:
            log.warning("attach_refused", reason=error.message)
            await send_message(client, refusal(error), ANSWER_TIMEOUT_S)
            return
        try:
            with structlog.contextvars.bound_contextvars(
                engine=str(request.profile.engine), rank=request.profile.rank, worker_pid=pid
            ):
                await self._attach(client, request)
        finally:
            request.close()

    async def _attach(self, client: socket.socket, request: AttachRequest) -> None:
        profile = request.profile
        key = (profile.engine, profile.rank)
        refused: AttachRefused | None = None
        try:
            async with self._claim(key) as place:
                await self._run_data_process(client, request, place)
        except* KvflowError as group:
            error = cause_of(group) or NodeError(str(group))
            log.error("attach_failed", reason=error.message, remedy=error.remedy)
            refused = refusal(error)
        if refused is not None:
            await send_message(client, refused, ANSWER_TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def _claim(self, key: RankKey) -> AsyncIterator[_Place]:
        """Hold the place of one start of one engine rank; another incarnation has a place of its own."""
        former = self._places.get(key)
        if former is not None and former.leaving:
            with anyio.move_on_after(TAKEOVER_WAIT_S):
                await former.gone.wait()
        if key in self._places:
            raise PeerError(
                f"rank {key[1]} of {key[0]} is attached already",
                remedy="an engine worker attaches once; a restarted engine draws another incarnation",
            )
        place = self._places[key] = _Place()
        try:
            yield place
        finally:
            del self._places[key]
            place.gone.set()

    async def _run_data_process(self, client: socket.socket, request: AttachRequest, place: _Place) -> None:
        """Run the rank's data process until the worker goes; raise NodeError when it cannot run."""
        spec = self._spec(request, client)
        async with anyio.create_task_group() as group:

            async def follow_worker() -> None:
                why = await wait_for_end(client)
                log.info("worker_gone", how=why)
                place.leaving = True
                group.cancel_scope.cancel()

            group.start_soon(follow_worker)
            log.info("worker_attaching", roles=request.profile.roles, segments=len(request.fds))
            await group.start(self._children.keep_running, spec, self._policy)
            answer = Attached(nats_url=self._settings.nats_url, cluster=self._settings.cluster)
            await send_message(client, answer, ANSWER_TIMEOUT_S)
            log.info("worker_attached")

    def _spec(self, request: AttachRequest, client: socket.socket) -> ProcessSpec:
        profile = request.profile
        return ProcessSpec(
            name=_process_name(profile),
            actors=actors_of(profile.roles),
            settings=self._settings,
            profile=encode(request.message),
            memory_fds=tuple(request.fds),
            # The worker takes the end of its socket for "nobody has my memory any more". That must stay true when this
            # process is killed, so the data process holds the socket too.
            held_fds=(client.fileno(),),
        )


def _process_name(profile: EngineProfile) -> str:
    return f"data {profile.engine} rank {profile.rank}"
