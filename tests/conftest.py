"""Fixtures that several test packages share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvflow.broker import Broker, find_server, launch_broker
from kvflow.errors import BrokerError


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Run one private nats-server for the whole session; tests keep apart by cluster names of their own."""
    try:
        find_server()
    except BrokerError as error:
        pytest.skip(str(error))
    runtime: Path = tmp_path_factory.mktemp("broker")
    with launch_broker(runtime) as started:
        yield started


@pytest.fixture(scope="session")
def nats_url(broker: Broker) -> str:
    """Return the URL, with credentials, of the session's private nats-server."""
    return broker.url


@pytest.fixture
def anyio_backend() -> str:
    """Run async tests on asyncio only: nats-py knows nothing else."""
    return "asyncio"
