"""The only module that makes sockets: endpoints, CURVE, size limits, framing, codecs.

A `Link` is one ROUTER or DEALER with its typed decoder; it belongs to the thread that made it.
Bad messages (another protocol, too large, not decodable) are counted and dropped here; they
never reach the logic and never stop a process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket as unix
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from hrxmp.clock import HybridLogicalClock, mono_ns, wall_ns
from hrxmp.errors import UsageError
from hrxmp.identity import Identity
from hrxmp.messages import MAX_BODY_BYTES, MAX_MESSAGE_BYTES, PROTOCOL, Body, Envelope

T = TypeVar("T")
HIGH_WATER = 10_000
_BAD_AT_ONCE = 256
IPC_PATH_MAX = zmq.IPC_PATH_MAX_LEN


class Received(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """One good message. `peer` is the routing id on a ROUTER, empty on a DEALER."""

    peer: bytes
    envelope: Envelope
    body: T
    buffers: list[bytes]


class Link(Generic[T]):
    """One socket with its codec. `receive` merges clocks before a body is handed out."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        incoming: Any,
        identity: Identity,
        clock: HybridLogicalClock,
    ) -> None:
        self.socket = socket
        self.identity = identity
        self.clock = clock
        self.dropped: dict[str, int] = {}
        self._router = socket.type == zmq.ROUTER
        self._decode: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(incoming)
        self._sent = 0

    def send(
        self,
        body: Body,
        *,
        to: bytes = b"",
        run_id: str = "",
        exec_id: int | None = None,
        cause: Envelope | None = None,
        buffers: tuple[bytes, ...] = (),
    ) -> bool:
        """Send without blocking. False when the peer is gone or takes nothing more now."""
        envelope = Envelope(
            protocol=PROTOCOL,
            run_id=run_id or self.identity.run_id,
            exec_id=exec_id,
            source=self.identity.source,
            incarnation=self.identity.incarnation,
            msg_seq=self._sent,
            mono_ns=mono_ns(),
            hlc=self.clock.tick(wall_ns()),
            cause=(cause.source, cause.incarnation, cause.msg_seq) if cause else None,
        )
        frames = [_encoder.encode(envelope), _encoder.encode(body), *buffers]
        if self._router:
            frames.insert(0, to)
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        self._sent += 1
        return True

    def receive(self) -> Received[T] | None:
        """The next good message that is already here, or None. Never blocks.

        After some bad ones it is None too, so that a flood of them does not hold the caller up.
        """
        for _ in range(_BAD_AT_ONCE):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            peer = frames.pop(0) if self._router else b""
            message = self._open(peer, frames)
            if message is not None:
                return message
        return None

    def poll(self, timeout_ms: int) -> bool:
        """Wait at most `timeout_ms` for something to receive."""
        return bool(self.socket.poll(timeout_ms, zmq.POLLIN))

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; unsent messages may linger for `linger_ms`."""
        self.socket.close(linger_ms)

    def _open(self, peer: bytes, frames: list[bytes]) -> Received[T] | None:
        if len(frames) < 2 or len(frames) > 10:
            return self._drop("frames")
        if len(frames[0]) > 4096 or len(frames[1]) > MAX_BODY_BYTES:
            return self._drop("size")
        try:
            envelope = _envelope.decode(frames[0])
        except (msgspec.DecodeError, ValueError, RecursionError):
            return self._drop("envelope")
        if envelope.protocol != PROTOCOL:
            return self._drop("protocol")
        try:
            body = self._decode.decode(frames[1])
        except (msgspec.DecodeError, ValueError, RecursionError):
            return self._drop("body")
        if not _plausible(envelope):
            return self._drop("clock")
        self.clock.merge(envelope.hlc, wall_ns())
        return Received(peer, envelope, body, frames[2:])

    def _drop(self, reason: str) -> Received[T] | None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        return None


def router(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    curve_dir: str = "",
    *,
    group: bool = False,
) -> zmq.Socket[bytes]:
    """A bound ROUTER. ipc files are 0600, with `group` 0660; tcp needs keys in `curve_dir`."""
    check_endpoint(endpoint, curve_dir)
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        if endpoint.startswith("tcp://"):
            _serve_curve(socket, Path(curve_dir))
        _bind(socket, endpoint, 0o660 if group else 0o600)
    except BaseException:
        socket.close(0)
        raise
    return socket


def dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    curve_dir: str = "",
    *,
    immediate: bool = False,
) -> zmq.Socket[bytes]:
    """A connected DEALER; it reconnects by itself when the peer restarts.

    With `immediate` nothing is queued for an absent peer: `Link.send` is False instead.
    """
    check_endpoint(endpoint, curve_dir)
    socket = _socket(context, zmq.DEALER)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
    socket.setsockopt(zmq.IMMEDIATE, int(immediate))
    try:
        if endpoint.startswith("tcp://"):
            _use_curve(socket, Path(curve_dir))
        socket.connect(endpoint)
    except BaseException:
        socket.close(0)
        raise
    return socket


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context of this process; whoever makes it terminates it."""
    return zmq.Context(io_threads=1)


@contextlib.contextmanager
def doorkeeper(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve_dir: str
) -> Iterator[None]:
    """While it is open, peers over tcp are let in when their key lies in `curve_dir`/clients.

    Whoever binds a tcp endpoint needs one, from before the bind on: without it nobody is let in.
    """
    if not endpoint.startswith("tcp://"):
        yield
        return
    check_endpoint(endpoint, curve_dir)
    from zmq.auth.thread import ThreadAuthenticator  # brings asyncio: tcp only

    keeper = ThreadAuthenticator(context)
    keeper.start()
    try:
        keeper.configure_curve(domain="hrxmp", location=str(Path(curve_dir) / "clients"))
        yield
    finally:
        keeper.stop()


def make_keys(folder: Path) -> None:
    """New CURVE keys in `folder` (made, 0700): the server's, a client's, and the list of clients.

    UsageError when there are keys already: replacing them would lock out whoever uses them.
    """
    from zmq import auth  # brings logging, and most runs have no keys

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / "server.key_secret").exists():
        raise UsageError(f"{folder} has keys already", remedy="choose another folder")
    old = os.umask(0o077)
    try:
        (folder / "clients").mkdir(mode=0o700, exist_ok=True)
        for name in ("server", "client"):
            auth.create_certificates(folder, name)
        shutil.copy(folder / "client.key", folder / "clients" / "client.key")
    finally:
        os.umask(old)


def check_endpoint(endpoint: str, curve_dir: str = "") -> None:
    """UsageError unless `endpoint` is a short enough ipc path or tcp with keys."""
    if endpoint.startswith("ipc://"):
        if len(endpoint) - 6 > IPC_PATH_MAX:
            raise UsageError(
                f"{endpoint}: an ipc path may have {IPC_PATH_MAX} bytes",
                remedy="set HRXMP_RUNTIME_DIR to a shorter folder",
            )
    elif endpoint.startswith("tcp://"):
        if not curve_dir:
            raise UsageError(
                f"{endpoint}: tcp needs CURVE keys", remedy="make them with `hrxmp-run keygen`"
            )
    else:
        raise UsageError(f"{endpoint!r} is neither ipc:// nor tcp://")


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    return socket


def _serve_curve(socket: zmq.Socket[bytes], folder: Path) -> None:
    public, secret = _certificate(folder / "server.key_secret")
    socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
    # Without a doorkeeper everybody who knows the server's public key would be let in.
    socket.setsockopt(zmq.ZAP_DOMAIN, b"hrxmp")
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _use_curve(socket: zmq.Socket[bytes], folder: Path) -> None:
    socket.curve_serverkey, _ = _certificate(folder / "server.key")
    socket.curve_publickey, socket.curve_secretkey = _certificate(folder / "client.key_secret")


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    """Public and secret key of a file; UsageError when it is not there, is none, or is open."""
    from zmq import auth

    try:
        if path.suffix == ".key_secret" and path.stat().st_mode & 0o077:
            raise UsageError(f"{path} can be read by other users", remedy=f"chmod 600 {path}")
        return auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: no usable CURVE key", remedy="make keys with `hrxmp-run keygen`"
        ) from error


def _bind(socket: zmq.Socket[bytes], endpoint: str, mode: int) -> None:
    if not endpoint.startswith("ipc://"):
        socket.bind(endpoint)
        return
    path = Path(endpoint[6:])
    if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
        raise UsageError(f"{path} exists and is not a socket")
    if _is_served(path):  # the bind would take the address away from under a living service
        raise UsageError(f"{path} is served by another process already")
    old = os.umask(0o777 & ~mode)
    try:
        socket.bind(endpoint)
    finally:
        os.umask(old)


def _is_served(path: Path) -> bool:
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _plausible(envelope: Envelope) -> bool:
    """A clock days ahead would drag every merged clock with it; such a message is dropped."""
    return 0 <= envelope.hlc[0] < wall_ns() + 86_400_000_000_000 and 0 <= envelope.hlc[1] < 1 << 32


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(Envelope)
