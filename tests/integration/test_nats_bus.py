"""What only a real nats-server can show: restarts, refusals, TLS, slow consumers."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvflow.broker import Broker, find_server, launch_broker
from kvflow.bus.connect import connect_bus
from kvflow.bus.nats import BACKLOG_BYTES, NatsBus
from kvflow.bus.port import Delivery, KvUpdate, StreamSpec
from kvflow.config import Settings
from kvflow.directory import Directory, DirectoryChange, Joined, Left, Synced
from kvflow.errors import BusError, ConfigError
from kvflow.messages import EngineCard, EngineProfile, EngineRef, KvGeometry, ModelFingerprint

pytestmark = [pytest.mark.anyio, pytest.mark.nats]

States = list[tuple[str, str]]


async def eventually(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A broker that can be restarted at the same address, losing everything it held in memory."""

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self.broker: Broker = launch_broker(runtime)
        self.settings = Settings(nats_url=self.broker.url, nats_connect_timeout_s=3.0)

    def stop(self) -> None:
        self.broker.stop()

    def start(self) -> None:
        self.broker = launch_broker(self._runtime, port=self.broker.port, password=self.broker.password)


@pytest.fixture
def server(tmp_path: Path, nats_url: str) -> Iterator[Server]:
    started = Server(tmp_path / "run")
    yield started
    started.stop()


@pytest.fixture
async def bus(server: Server) -> AsyncIterator[NatsBus]:
    connected = await NatsBus.connect(server.settings, name="one")
    yield connected
    await connected.close()


@pytest.fixture
async def other(server: Server) -> AsyncIterator[NatsBus]:
    connected = await NatsBus.connect(server.settings, name="other")
    yield connected
    await connected.close()


STREAM = StreamSpec(name="s", subjects=("s.>",), max_age_s=60)


async def test_i4_a_restarted_server_gets_its_streams_and_followers_back(
    server: Server, bus: NatsBus, other: NatsBus
) -> None:
    plain: list[bytes] = []
    followed: list[bytes] = []
    caught_up: list[int] = []
    await bus.ensure_stream(STREAM)
    await bus.subscribe("p", lambda delivery: plain.append(delivery.data))
    await bus.replay(
        "s",
        "s.x",
        lambda delivery: followed.append(delivery.data),
        on_caught_up=lambda: caught_up.append(len(followed)),
    )
    await other.publish("s.x", b"before")
    await eventually(lambda: followed == [b"before"])
    server.stop()
    await eventually(lambda: not bus.connected)
    await bus.publish("s.x", b"meanwhile")  # waits in the backlog until the stream is there again
    await bus.publish("p", b"meanwhile")
    server.start()
    await eventually(lambda: bus.connected and other.connected)
    await other.publish("s.x", b"after")
    await other.publish("p", b"after")
    await eventually(lambda: len(followed) == 3 and len(plain) == 2)
    assert followed == [b"before", b"meanwhile", b"after"]
    assert plain == [b"meanwhile", b"after"]
    assert caught_up == [0]


async def test_a_lost_connection_alone_loses_nothing_of_a_stream(server: Server, bus: NatsBus, other: NatsBus) -> None:
    followed: list[bytes] = []
    await bus.ensure_stream(STREAM)
    await bus.replay("s", "s.x", lambda delivery: followed.append(delivery.data))
    for number in range(50):
        await other.publish("s.x", b"%d" % number)
        if number == 25:
            assert bus._client is not None
            await bus._client.close()
    await eventually(lambda: len(followed) == 50)
    assert followed == [b"%d" % number for number in range(50)]


async def test_a_stream_deleted_under_us_is_made_anew(server: Server, bus: NatsBus, other: NatsBus) -> None:
    followed: list[bytes] = []
    await bus.ensure_stream(STREAM)
    await bus.replay("s", "s.x", lambda delivery: followed.append(delivery.data))
    await other.publish("s.x", b"1")
    await eventually(lambda: followed == [b"1"])
    assert bus._client is not None
    await bus._client.jetstream().delete_stream("s")
    started = time.monotonic()
    while followed[-1:] != [b"2"]:
        await other.publish("s.x", b"2")
        await asyncio.sleep(0.1)
        assert time.monotonic() - started < 15


async def test_i7_what_reaches_a_followers_inbox_from_others_does_no_harm(server: Server, bus: NatsBus) -> None:
    followed: list[bytes] = []
    await bus.ensure_stream(STREAM)
    await bus.replay("s", "s.x", lambda delivery: followed.append(delivery.data))
    client = bus._client
    assert client is not None
    for subscription in list(client._subs.values()):
        if subscription.subject.startswith("_INBOX") and "*" not in subscription.subject:
            await client.publish(subscription.subject, b"rubbish")
            await client.publish(subscription.subject, b"rubbish", reply="$JS.ACK.a.b.c.d.e.f.g")
            await client.publish(subscription.subject, b"", headers={"Status": "100", "Nats-Last-Consumer": "x"})
    await bus.publish("s.x", b"1")
    await eventually(lambda: followed == [b"1"])


async def test_a_stalled_server_is_survived(server: Server, bus: NatsBus, other: NatsBus) -> None:
    followed: list[bytes] = []
    await bus.ensure_stream(STREAM)
    await bus.replay("s", "s.x", lambda delivery: followed.append(delivery.data))
    os.kill(server.broker.server_pid, signal.SIGSTOP)
    await asyncio.sleep(0.1)  # its threads stop one after the other
    try:
        with pytest.raises(BusError, match="did not confirm"):
            await bus.flush(0.2)
        await other.publish("s.x", b"1")
    finally:
        os.kill(server.broker.server_pid, signal.SIGCONT)
    await bus.flush()  # the late pong of the abandoned flush must not have broken the reader
    await other.publish("s.x", b"2")
    await eventually(lambda: followed == [b"1", b"2"])


async def test_states_are_told(server: Server) -> None:
    states: States = []
    bus = await NatsBus.connect(
        server.settings, name="one", on_state=lambda state, detail: states.append((state, detail))
    )
    server.stop()
    await eventually(lambda: not bus.connected)
    server.start()
    await eventually(lambda: bus.connected)
    await bus.close()
    assert [state for state, _ in states if state != "error"] == ["connected", "disconnected", "reconnected", "closed"]
    assert not any(server.broker.password in detail for _, detail in states)


async def test_a_watch_survives_a_restart_and_does_not_invent_departures(
    server: Server, bus: NatsBus, other: NatsBus
) -> None:
    updates: list[KvUpdate | None] = []
    bucket = await bus.key_value("b", ttl_s=30)
    await (await other.key_value("b", ttl_s=30)).watch(updates.append)
    await bucket.put("k", b"1")
    await eventually(lambda: len(updates) == 2)
    server.stop()
    await eventually(lambda: not bus.connected and not other.connected)
    with pytest.raises(BusError, match="away"):
        await bucket.put("k", b"lost")
    server.start()
    await eventually(lambda: bus.connected and other.connected)
    await bucket.put("k", b"2")
    await eventually(lambda: len(updates) == 3)
    assert updates == [None, KvUpdate("k", b"1"), KvUpdate("k", b"2")]


async def test_i4_a_servers_restart_loses_no_engine(server: Server, bus: NatsBus, other: NatsBus) -> None:
    settings = msgspec.structs.replace(server.settings, card_ttl_s=1.0)
    publisher, watcher = Directory(bus, settings), Directory(other, settings)
    changes: list[DirectoryChange] = []
    await watcher.watch(changes.append)
    profile = EngineProfile(
        engine=EngineRef(engine_id="e", incarnation="1"), rank=0, ranks=1, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1,
        roles=("source",), host="h", model="m", geometry=KvGeometry(dtype="f", num_blocks=1, groups=(), views=()),
        fingerprint=ModelFingerprint(fields=()),
    )  # fmt: skip
    card = EngineCard(profile=profile, agent="a", nixl_metadata=b"", segments=(), placement="process")
    await publisher.publish(card)
    await eventually(lambda: changes == [Synced(), Joined(card)])
    server.stop()
    await asyncio.sleep(2.5)
    server.start()
    await eventually(lambda: bus.connected and other.connected)
    await asyncio.sleep(2.5)
    assert changes == [Synced(), Joined(card)]
    await publisher.close()
    await eventually(lambda: changes[2:] == [Left(profile.engine, 0, "lost")])
    await watcher.close()


async def test_the_backlog_is_bounded(server: Server, bus: NatsBus) -> None:
    server.stop()
    await eventually(lambda: not bus.connected)
    for _ in range(BACKLOG_BYTES // 1_000_000):
        await bus.publish("p", bytes(1_000_000))
    with pytest.raises(BusError, match="backlog"):
        await bus.publish("p", bytes(1_000_000))


async def test_closing_is_bounded_while_the_server_is_away(server: Server, bus: NatsBus) -> None:
    server.stop()
    await eventually(lambda: not bus.connected)
    started = time.monotonic()
    await bus.close()
    assert time.monotonic() - started < 5


async def test_a_message_beyond_the_servers_limit_is_refused(bus: NatsBus) -> None:
    with pytest.raises(BusError, match="exceeds the server's limit"):
        await bus.publish("p", bytes(2 << 20))
    await bus.flush()


async def test_slow_consumers_are_counted_and_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflow.bus.nats_core.PENDING_MESSAGES", 10)
    states: States = []
    bus = await NatsBus.connect(
        server.settings, name="one", on_state=lambda state, detail: states.append((state, detail))
    )
    seen: list[bytes] = []

    def slow(delivery: Delivery) -> None:
        seen.append(delivery.data)

    await bus.subscribe("p", slow)
    for _ in range(500):
        await bus.publish("p", b"x")
    await bus.flush()
    await eventually(lambda: bus.slow_consumers + len(seen) >= 500)
    assert bus.slow_consumers > 0
    assert ("slow_consumer", "p") in states
    await bus.close()


async def test_nothing_listening_is_said_with_a_remedy() -> None:
    settings = Settings(nats_url=f"nats://user:secret@127.0.0.1:{free_port()}", nats_connect_timeout_s=0.5)
    started = time.monotonic()
    with pytest.raises(BusError, match=r"nothing listens at 127\.0\.0\.1") as caught:
        await connect_bus(settings, name="test")
    assert time.monotonic() - started < 2
    assert "KVFLOW_NATS_URL" in caught.value.remedy
    assert "secret" not in str(caught.value)


async def test_a_server_that_starts_late_is_waited_for(tmp_path: Path, nats_url: str) -> None:
    port, password = free_port(), secrets.token_hex(8)
    settings = Settings(nats_url=f"nats://kvflow:{password}@127.0.0.1:{port}", nats_connect_timeout_s=5.0)
    connecting = asyncio.create_task(NatsBus.connect(settings, name="test"))
    await asyncio.sleep(0.3)
    with launch_broker(tmp_path / "run", port=port, password=password):
        bus = await connecting
        await bus.close()


async def test_a_silent_listener_is_given_up_in_time() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        started = time.monotonic()
        with pytest.raises(BusError, match="did not answer"):
            await NatsBus.connect(
                Settings(nats_url=f"nats://127.0.0.1:{port}", nats_connect_timeout_s=0.5), name="test"
            )
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("credentials", [{}, {"nats_user": "kvflow", "nats_password": "wrong"}])
async def test_rejected_credentials_are_said_at_once(broker: Broker, credentials: dict[str, str]) -> None:
    settings = Settings(nats_url=broker.address, **credentials)  # type: ignore[arg-type]
    started = time.monotonic()
    with pytest.raises(BusError, match="rejected the credentials") as caught:
        await NatsBus.connect(settings, name="test")
    assert "KVFLOW_NATS_USER" in caught.value.remedy
    assert time.monotonic() - started < settings.nats_connect_timeout_s / 2


async def test_user_and_password_from_settings(broker: Broker) -> None:
    bus = await NatsBus.connect(
        Settings(nats_url=broker.address, nats_user="kvflow", nats_password=broker.password), name="test"
    )
    await bus.flush()
    await bus.close()


async def test_bad_credential_files_are_said(tmp_path: Path, nats_url: str) -> None:
    junk = tmp_path / "junk"
    junk.write_text("not credentials\n", encoding="utf-8")
    for settings, match in (
        (Settings(nats_url=nats_url, nats_creds=str(junk)), "not a NATS credentials file"),
        (Settings(nats_url=nats_url, nats_creds=str(tmp_path / "missing")), "cannot read"),
        (Settings(nats_url=nats_url, nats_nkey_seed=str(tmp_path / "missing")), "cannot read the nkey seed"),
        (Settings(nats_url=nats_url, nats_nkey_seed="SUnotaseed"), "bad NATS key"),
        (Settings(nats_url=nats_url, nats_tls_ca=str(junk)), "cannot load the TLS files"),
    ):
        with pytest.raises(BusError, match=match):
            await NatsBus.connect(settings, name="test")


async def test_configured_tls_is_not_dropped_silently(broker: Broker) -> None:
    with pytest.raises(BusError, match="offers no TLS"):
        await NatsBus.connect(Settings(nats_url=broker.url.replace("nats://", "tls://")), name="test")


async def test_an_unknown_scheme_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="http"):
        await connect_bus(Settings(nats_url="http://127.0.0.1:4222"), name="test")


async def test_no_url_is_said() -> None:
    with pytest.raises(BusError, match="no NATS URL"):
        await NatsBus.connect(Settings(), name="test")


@pytest.fixture
def plain_server(tmp_path: Path, nats_url: str) -> Iterator[Callable[[str], str]]:
    """Return a function that runs a nats-server with a configuration of the test's own and returns its address."""
    running: list[subprocess.Popen[bytes]] = []

    def start(extra: str) -> str:
        port = free_port()
        config = tmp_path / f"nats-{port}.conf"
        config.write_text(f"listen: 127.0.0.1:{port}\n{extra}\n", encoding="utf-8")
        running.append(subprocess.Popen([find_server(), "-c", str(config)], stderr=subprocess.DEVNULL))
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return f"127.0.0.1:{port}"
            time.sleep(0.02)
        raise AssertionError("nats-server did not start")

    yield start
    for process in running:
        process.terminate()
        process.wait(10)


async def test_a_server_without_jetstream_is_named(plain_server: Callable[[str], str]) -> None:
    bus = await NatsBus.connect(Settings(nats_url=plain_server("")), name="test")
    with pytest.raises(BusError, match="no JetStream") as caught:
        await bus.ensure_stream(STREAM)
    assert "-js" in caught.value.remedy
    with pytest.raises(BusError, match="no JetStream"):
        await bus.key_value("b", ttl_s=5)
    await bus.close()


async def test_a_server_without_room_is_named(plain_server: Callable[[str], str], tmp_path: Path) -> None:
    address = plain_server(f'jetstream {{ max_mem: 10MB, store_dir: "{tmp_path}/js" }}')
    bus = await NatsBus.connect(Settings(nats_url=address), name="test")
    with pytest.raises(BusError, match="no room") as caught:
        await bus.ensure_stream(STREAM)
    assert "max_memory_store" in caught.value.remedy
    await bus.close()


async def test_nkey(plain_server: Callable[[str], str], tmp_path: Path) -> None:
    nkeys = pytest.importorskip("nkeys")
    pair = nkeys.from_seed(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    seed = pair.seed.decode()
    address = plain_server(f"authorization {{ users: [{{ nkey: {pair.public_key.decode()} }}] }}")
    file = tmp_path / "user.nk"
    file.write_text(seed + "\n", encoding="utf-8")
    for value in (seed, str(file)):
        bus = await NatsBus.connect(Settings(nats_url=address, nats_nkey_seed=value), name="test")
        await bus.flush()
        await bus.close()


async def test_tls_with_client_certificates(plain_server: Callable[[str], str], tmp_path: Path) -> None:
    make_certificates(tmp_path)
    address = plain_server(
        f'tls {{ cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server.key", '
        f'ca_file: "{tmp_path}/ca.pem", verify: true }}'
    )
    files = {
        "nats_tls_ca": str(tmp_path / "ca.pem"),
        "nats_tls_cert": str(tmp_path / "client.pem"),
        "nats_tls_key": str(tmp_path / "client.key"),
    }
    bus = await NatsBus.connect(Settings(nats_url=f"tls://{address}", **files), name="test")  # type: ignore[arg-type]
    await bus.flush()
    await bus.close()
    started = time.monotonic()
    with pytest.raises(BusError, match="TLS") as caught:  # a certificate of an authority that we do not know
        await NatsBus.connect(Settings(nats_url=f"tls://{address}"), name="test")
    assert "KVFLOW_NATS_TLS_CA" in caught.value.remedy
    assert time.monotonic() - started < 3


def make_certificates(folder: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    try:
        openssl("version")
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n", encoding="utf-8")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", "names",
        )  # fmt: skip
