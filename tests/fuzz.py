"""Coverage-guided fuzzing of every decoder: `python -m tests.fuzz TARGET --seconds 600`.

Needs atheris, which no test does (`pip install atheris`). A finding is written beside the corpus in
`tests/data/fuzz/TARGET/`, where `tests/unit/test_fuzz_corpus.py` tries it again for ever.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from hrxmp import messages
from hrxmp.aggregator import check as checker
from hrxmp.aggregator import reader
from hrxmp.errors import ModelError
from hrxmp.kernels import entry
from hrxmp.kernels.keys import KeyComponents
from hrxmp.models import gguf_header
from hrxmp.records import OPENING

CORPUS = Path(__file__).parent / "data" / "fuzz"
_UNIONS = [
    msgspec.msgpack.Decoder(getattr(messages, name))
    for name in ("ToPool", "FromPool", "ToWorker", "FromWorker", "ToAggregator", "FromAggregator")
]


def messages_target(data: bytes) -> None:
    """First byte: which link and direction; the rest: a body."""
    if data:
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            found = _UNIONS[data[0] % len(_UNIONS)].decode(data[1:])
            assert isinstance(found, messages.Body)


def entries_target(data: bytes) -> None:
    """A store entry, whole and as the header alone."""
    with suppress(entry.EntryError):
        found = entry.decode(data)
        assert entry.decode(entry.encode(found)) == found
    with suppress(entry.EntryError):
        entry.decode_header(data)


def traces_target(data: bytes) -> None:
    """Mixed standard error, read and checked."""
    checker.check(reader.read(data.splitlines(keepends=True)))


def gguf_target(data: bytes) -> None:
    """The header of a model file."""
    with suppress(ModelError):
        gguf_header.read_header(memoryview(data), ModelError)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "messages": messages_target,
    "entries": entries_target,
    "traces": traces_target,
    "gguf": gguf_target,
}


def seeds(target: str) -> list[bytes]:
    """Good inputs to start from."""
    parts = KeyComponents(
        source="a" * 64, entry_point="f", params=(("K", 1),), local_size=(8,), build_options="",
        sanitizer="", platform="p", device="d", compute_units=1, driver="1",
    )  # fmt: skip
    if target == "entries":
        key = parts.digest()
        stored = entry.StoreEntry(key=key, components=parts, kind="fake", binary=b"binary")
        return [entry.encode(stored)]
    if target == "messages":
        made = [messages.StatusRequest(token=1), messages.Heartbeat(state="idle")]
        return [bytes([n]) + msgspec.msgpack.encode(body) for n in range(6) for body in made]
    if target == "traces":
        common = {"run": "r", "source": "executor", "incarnation": 1, "t_ns": 5, "exec": 1}
        begin = {"event": "graph-begin", **common, "seq": 0, "uid": 1, "nodes": 2}
        return [OPENING + json.dumps(begin).encode()[1:] + b"\nother output\n"]
    from tests.model_files import write_tiny

    with tempfile.TemporaryDirectory() as folder:
        return [write_tiny(Path(folder) / "tiny.gguf").read_bytes()[:20_000]]


def fuzz(target: str, seconds: int) -> None:
    """Run until the time is over; a finding ends it with a traceback and a file."""
    import atheris

    atheris.instrument_func(TARGETS[target])
    for module in (entry, reader, checker, gguf_header):
        for name, value in list(vars(module).items()):
            if callable(value) and getattr(value, "__module__", "") == module.__name__:
                with suppress(Exception):
                    setattr(module, name, _instrumented(atheris, value))
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (folder / f"seed-{number}").write_bytes(seed)
    with tempfile.TemporaryDirectory() as found:
        flags = [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/", "-max_len=65536"]
        flags += ["-rss_limit_mb=2048", "-timeout=10", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *flags, found, str(folder)], TARGETS[target])
        atheris.Fuzz()


def _instrumented(atheris: Any, value: Any) -> Any:
    if isinstance(value, type):
        for name, member in list(vars(value).items()):
            if callable(member) and hasattr(member, "__code__"):
                setattr(value, name, atheris.instrument_func(member))
        return value
    return atheris.instrument_func(value)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz one decoder.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=600)
    args = parser.parse_args()
    fuzz(args.target, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
