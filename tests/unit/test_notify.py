"""What a service manager hears, over real sockets, and what it must not hear."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hrxmp import notify


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """NOTIFY_SOCKET's value, and the socket behind it."""
    address = str(tmp_path / "n") if request.param == "path" else f"@hrxmp-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address.replace("@", "\0", 1) if address[0] == "@" else address)
        listening.settimeout(1)
        yield address, listening


def heard(listening: socket.socket) -> list[bytes]:
    """All that has arrived; datagrams of one host are there when sendto returns."""
    listening.setblocking(False)
    found = []
    while True:
        try:
            found.append(listening.recv(256))
        except BlockingIOError:
            return found


def test_ready_names_this_process_and_stopping_follows(manager: tuple[str, socket.socket]) -> None:
    address, listening = manager
    service = notify.Service({"NOTIFY_SOCKET": address})
    service.ready()
    service.beat(10**18)
    service.stopping()
    ready = f"READY=1\nMAINPID={os.getpid()}".encode()
    assert heard(listening) == [ready, b"STOPPING=1"], "no watchdog was asked for"


def test_the_watchdog_is_fed_three_times_an_interval(manager: tuple[str, socket.socket]) -> None:
    address, listening = manager
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": ""}
    service = notify.Service(environ | {"WATCHDOG_PID": str(os.getpid())})
    for now_ms in range(10_000, 13_000, 10):
        service.beat(now_ms * 1_000_000)
    assert heard(listening) == [b"WATCHDOG=1"] * 3


def test_a_watchdog_of_another_process_is_not_fed(manager: tuple[str, socket.socket]) -> None:
    address, listening = manager
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}
    notify.Service(environ).beat(10**18)
    assert heard(listening) == []


@pytest.mark.parametrize("address", ["", "/no/such/socket", "@nobody-listens"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    service = notify.Service({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "rubbish"})
    service.ready()
    service.beat(10**18)
    service.stopping()


def test_children_are_no_service() -> None:
    environ = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "HOME": "/h"}
    assert notify.without(environ) == {"HOME": "/h"}
