"""`hrxmp-run status`: what the user's live runs are doing at this moment.

Runs in the launcher's process and starts nothing: it asks the pool and the aggregator of every
run whose sockets it finds (or those that are named), and prints what has answered in time. The
services answer from their poll loops, also while compilers run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hrxmp import wire
from hrxmp.clock import HybridLogicalClock, mono_ns
from hrxmp.identity import new_identity
from hrxmp.messages import FromAggregator, FromPool, StatusJob, StatusReply, StatusRequest
from hrxmp.scratch import parent_folder
from hrxmp.settings import Settings

_PATIENCE_NS = 1_000_000_000
_POLL_MS = 2


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One service's state, and how long it took to say so; no state when it did not answer."""

    endpoint: str
    answer_ms: float
    status: StatusReply | None


def main(argv: list[str], settings: Settings) -> int:
    """Print every service's state; 1 when one that is there does not answer."""
    parser = argparse.ArgumentParser(prog="hrxmp-run status", description="What live runs do.")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args(argv)
    answers = ask(endpoints(settings), settings.curve_dir)
    if args.output == "json":
        sys.stdout.write(json.dumps([msgspec.to_builtins(answer) for answer in answers]) + "\n")
    else:
        _print(answers)
    return 0 if all(answer.status for answer in answers) else 1


def endpoints(settings: Settings) -> list[tuple[str, Any]]:
    """(endpoint, what it answers with) of each service that is named or whose socket is there."""
    named = [(settings.pool, FromPool), (settings.aggregator, FromAggregator)]
    if found := [(endpoint, kind) for endpoint, kind in named if endpoint]:
        return found
    folders = sorted(parent_folder(settings).glob("hrxmp-*"))
    kinds = {"pool": FromPool, "trace": FromAggregator}
    sockets = [(folder / name, kind) for folder in folders for name, kind in kinds.items()]
    return [(f"ipc://{path}", kind) for path, kind in sockets if _is_socket(path)]


def ask(services: list[tuple[str, Any]], curve_dir: str = "") -> list[Answer]:
    """The state of all services, asked at once; waits at most a second."""
    context = wire.context()
    begin = mono_ns()
    links = [_Question(context, endpoint, kind, curve_dir) for endpoint, kind in services]
    try:
        while any(link.answer is None for link in links) and mono_ns() - begin < _PATIENCE_NS:
            for link in links:
                link.look(begin)
        return [link.answer or link.silence() for link in links]
    finally:
        for link in links:
            link.close()
        context.term()


class _Question:
    """One socket with a request on its way."""

    def __init__(self, context: Any, endpoint: str, kind: Any, curve_dir: str) -> None:
        self.answer: Answer | None = None
        self._endpoint = endpoint
        self._sent = False
        self._link = wire.Link[Any](
            wire.dealer(context, endpoint, curve_dir, immediate=True),
            kind,
            new_identity("-", "status"),
            HybridLogicalClock(),
        )

    def look(self, begin_ns: int) -> None:
        """Ask as soon as there is a connection; take the answer."""
        self._sent = self._sent or self._link.send(StatusRequest())
        if self.answer is None:
            self._link.poll(_POLL_MS)
        while self.answer is None and (message := self._link.receive()) is not None:
            if isinstance(message.body, StatusReply):
                took = (mono_ns() - begin_ns) / 1e6
                self.answer = Answer(
                    endpoint=self._endpoint, answer_ms=round(took, 1), status=message.body
                )

    def silence(self) -> Answer:
        """What stands for a service that has not answered."""
        return Answer(endpoint=self._endpoint, answer_ms=_PATIENCE_NS / 1e6, status=None)

    def close(self) -> None:
        """Give the socket back; nothing is left to send."""
        self._link.close()


def _is_socket(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:  # another user's folder
        return False


def _print(answers: list[Answer]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not answers:
        console.print("no run of yours is live")
        return
    services = Table("service", "pid", "up", "runs", "pending", "oldest", "answered in")
    jobs = Table("kernel", "key", "state", "age", "worker", "phase", "waited for by")
    for answer in answers:
        services.add_row(*_service_row(answer))
        for row in _job_rows(answer.status):
            jobs.add_row(*row)
    console.print(services)
    if jobs.row_count:
        console.print(jobs)


def _service_row(answer: Answer) -> list[str]:
    status = answer.status
    if status is None:
        return [answer.endpoint, "", "", "", "", "", f"no answer in {answer.answer_ms:.0f} ms"]
    return [
        status.role, str(status.pid), _seconds(status.uptime_ms), "\n".join(_run_texts(status)),
        str(status.pending), _seconds(status.oldest_ms), f"{answer.answer_ms:.1f} ms",
    ]  # fmt: skip


def _run_texts(status: StatusReply) -> Iterator[str]:
    """Each run with what it has cost so far, as far as the service counts that."""
    for run in status.runs:
        counts = status.by_run.get(run, {})
        said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        yield f"{run}: {said}" if said else run


def _job_rows(status: StatusReply | None) -> Iterator[list[str]]:
    """Compile jobs, the oldest first; who waits is named by run and execution."""
    if status is None:
        return
    for job in sorted(status.jobs, key=_youth):
        waiters = [
            f"{run} execution {exec_id}" if exec_id is not None else f"{run} (prefetch)"
            for run, exec_id, _request in job.requests
        ]
        yield [
            job.kernel, job.key[:16], job.state, _seconds(job.age_ms), job.worker, job.phase,
            "\n".join(waiters),
        ]  # fmt: skip


def _youth(job: StatusJob) -> int:
    return -job.age_ms


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.1f} s"
