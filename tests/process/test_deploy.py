"""The units under a real systemd: started, killed, hung, stopped; what the daemons notify.

The container is booted once. Each test has runs of its own, and all of them share one aggregator
and one pool.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hrxmp.aggregator import reader
from hrxmp.aggregator.check import check
from hrxmp.records import CompileEnd, GraphEnd, Lost, RunEnd
from tests.model_files import write_tiny
from tests.process.run_process import DEVICES, ROOT, usable_forms
from tests.process.service_machine import SOURCE, Machine, machine, usable

AGGREGATOR, POOL = "hrxmp-aggregator.service", "hrxmp-workers.service"
LOOP = f"{SOURCE}/tests/process/programs/service_loop.py"
TURN_S = 100.0
JOURNAL_LINES = 20_000

boots = pytest.mark.skipif(not usable(), reason="needs root, systemd-nspawn and namespaces")


class Run:
    """An instance of hrxmp-run@ whose workload tells its turns through a named pipe."""

    def __init__(self, services: Machine, name: str, first: int, **settings: str) -> None:
        self.services = services
        self.unit = f"hrxmp-run@{name}.service"
        state = services.tree / "var/lib/hrxmp"
        self._stop = state / f"{name}.stop"
        self.before = set(trace_of(services).runs())
        os.mkfifo(state / name)
        (state / name).chmod(0o666)
        # Opened for writing too: the pipe does not end with the workload.
        self._pipe = os.open(state / name, os.O_RDWR | os.O_NONBLOCK)
        device = next(iter(DEVICES[form] for form in DEVICES if form in usable_forms()))
        variables = {
            "HRXMP_DEVICE": device,
            "WARM": "--help",
            "COMMAND": f"{LOOP} {name} {name}.stop {first}",
        }
        lines = [f"{key}={shlex.quote(text)}\n" for key, text in (variables | settings).items()]
        (services.tree / f"etc/hrxmp/{name}.env").write_text("".join(lines))
        services.shell("systemctl", "start", self.unit, timeout_s=150)

    def turns(self, count: int) -> None:
        """Wait for so many turns from now on; each makes and runs a kernel."""
        seen = 0
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe, 65536)
        while seen < count:
            assert select.select([self._pipe], [], [], TURN_S)[0], self.services.journal(self.unit)
            text = os.read(self._pipe, 4096).decode()
            assert set(text.split()) == {"ok"}, text
            seen += text.count("\n")

    def finish(self) -> None:
        """Let the workload come to its end, and wait for the unit's."""
        self._stop.touch()
        self.services.settled(self.unit)

    def close(self) -> None:
        os.close(self._pipe)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    watchdog = "[Service]\nWatchdogSec=8\n"  # only who really hangs is late
    with machine(tmp_path_factory.mktemp("machine"), {AGGREGATOR: watchdog, POOL: watchdog}) as one:
        yield one


def trace_of(services: Machine) -> reader.Trace:
    """All that the aggregator has written so far, from all its files in their order."""
    folder = services.tree / "var/log/hrxmp/trace"
    for _ in range(20):
        with contextlib.suppress(FileNotFoundError):  # it was just being compressed
            names = [path.name for path in folder.iterdir() if not path.name.endswith(".part")]
            names.sort(key=lambda name: (name == "trace.jsonl", name))
            texts = [(folder / name).read_bytes() for name in names]
            whole = [
                gzip.decompress(text) if name.endswith(".gz") else text
                for name, text in zip(names, texts, strict=True)
            ]
            return reader.read(b"".join(whole).splitlines(keepends=True))
    raise TimeoutError("the files change all the time")


def pool_heard(services: Machine, runs: int) -> None:
    """Wait until the aggregator writes what the pool says of so many runs. A pool that dies while
    there is no aggregator takes its last records with it; `check` says of which compiles."""
    before = _pool_records(services)
    stop = time.monotonic() + TURN_S
    while len(_pool_records(services) - before) < runs:
        assert time.monotonic() < stop, services.journal(AGGREGATOR)


def _pool_records(services: Machine) -> Counter[str]:
    """The number of the pool's records by run."""
    lines = trace_of(services).lines
    return Counter(line.record.run_id for line in lines if line.record.source == "pool")


def check_runs(services: Machine, *statuses: str) -> None:
    """The trace is whole, run by run, and the last runs in it ended like this."""
    trace = trace_of(services)
    report = check(trace)
    assert report.ok and not trace.other, report.problems
    ended = []
    for run in trace.runs():
        records = [line.record for line in trace.of_run(run)]
        asked = sum(record.requests for record in records if isinstance(record, GraphEnd))
        ended += [(one.status, asked > 0) for one in records if isinstance(one, RunEnd)]
    assert ended[-len(statuses) :] == [(status, True) for status in statuses]


@boots
def test_killed_daemons_come_back_and_two_runs_get_on_with_a_whole_trace(services: Machine) -> None:
    one, two = Run(services, "one", 4000), Run(services, "two", 5000)
    before = {unit: int(services.show(unit, "NRestarts")) for unit in (AGGREGATOR, POOL)}
    for _ in range(2):
        for unit in (AGGREGATOR, POOL):
            services.shell("systemctl", "kill", "--kill-whom=main", "--signal=KILL", unit)
            one.turns(2)
            two.turns(2)
            pool_heard(services, 2)
    after = {unit: int(services.show(unit, "NRestarts")) for unit in (AGGREGATOR, POOL)}
    assert after == {unit: count + 2 for unit, count in before.items()}
    one.finish()
    two.finish()
    check_runs(services, "ok", "ok")


@boots
def test_restarted_daemons_lose_nothing(services: Machine) -> None:
    run = Run(services, "restarted", 5500)
    run.turns(2)
    for unit in (POOL, AGGREGATOR, POOL):
        services.shell("systemctl", "restart", unit)
        assert services.show(unit, "Result") == "success"
        run.turns(2)
        pool_heard(services, 1)
    run.finish()
    check_runs(services, "ok")
    records = [line.record for line in trace_of(services).lines]
    (last,) = {record.run_id for record in records if isinstance(record, RunEnd)} - run.before
    mine = [record for record in records if record.run_id == last]
    assert not [record for record in mine if isinstance(record, Lost)]
    assert {record.outcome for record in mine if isinstance(record, CompileEnd)} == {"ok"}


@boots
def test_a_daemon_that_hangs_is_noticed(services: Machine) -> None:
    run = Run(services, "hung", 6000)
    run.turns(1)
    for unit in (AGGREGATOR, POOL):
        before = services.show(unit, "MainPID")
        services.shell("systemctl", "kill", "--kill-whom=main", "--signal=STOP", unit)
        services.changed(unit, "MainPID", before)
        assert "Watchdog timeout" in services.journal(unit)
        run.turns(2)
        pool_heard(services, 1)
    run.finish()
    check_runs(services, "ok")


@boots
def test_a_compile_after_warm_up_fails_the_run_at_once_and_raises_the_alarm(
    services: Machine,
) -> None:
    run = Run(services, "strict", 8000, HRXMP_ON_COMPILE="error", HRXMP_WARM_AFTER="3")
    services.settled(run.unit)
    assert services.show(run.unit, "ExecMainStatus") == "3"
    assert services.show(run.unit, "Result") == "exit-code"
    assert services.show(run.unit, "NRestarts") == "0"
    services.changed(f"hrxmp-alarm@{run.unit}.service", "InactiveEnterTimestampMonotonic", "0")
    services.shell("journalctl", "--sync")
    alarms = services.shell("journalctl", "-q", "-o", "cat", "-p", "alert", "-t", "hrxmp-alarm")
    assert alarms == f"{run.unit} has failed: exit-code (exited 3)\n"
    check_runs(services, "failed: compile-forbidden")


@boots
def test_a_warmed_model_compiles_nothing_and_a_cold_one_is_refused(services: Machine) -> None:
    write_tiny(services.tree / "var/lib/hrxmp/models/tiny.gguf")
    model = "-m /var/lib/hrxmp/models/tiny.gguf -ub 64"
    command = f"generate {model} -p 'two words' -n 4 --temp 0 --ids --ignore-eos"
    strict = {"COMMAND": command, "HRXMP_ON_COMPILE": "error"}
    cold = Run(services, "model-cold", 0, **strict)
    services.settled(cold.unit)
    assert services.show(cold.unit, "ExecMainStatus") == "3"
    warmed = Run(services, "model-warmed", 0, WARM=f"warm {model}", **strict)
    services.settled(warmed.unit)
    assert services.show(warmed.unit, "Result") == "success", services.journal(warmed.unit)
    assert re.search(r"^\[\d+(, ?\d+){3}\]$", services.journal(warmed.unit), re.M)
    check_runs(services, "ok")
    trace = trace_of(services)
    last = [line.record for line in trace.of_run(trace.runs()[-1])]
    assert not [record for record in last if isinstance(record, CompileEnd)]


@boots
def test_a_warm_up_that_fails_is_a_start_that_fails(services: Machine) -> None:
    with pytest.raises(RuntimeError, match="failed because the control process exited"):
        Run(services, "cold", 8500, WARM="warm -m /no/such/model.gguf")
    services.shell("systemctl", "stop", "hrxmp-run@cold.service")
    assert "/no/such/model.gguf" in services.journal("hrxmp-run@cold.service")


@boots
def test_a_killed_run_is_started_again(services: Machine) -> None:
    run = Run(services, "killed", 8600)
    run.turns(2)
    services.shell("systemctl", "kill", "--kill-whom=main", "--signal=KILL", run.unit)
    run.turns(4)
    assert services.show(run.unit, "NRestarts") == "1"
    run.finish()


@boots
def test_a_restart_rotation_and_metrics_under_load(services: Machine) -> None:
    run = Run(services, "rotated", 7000)
    run.turns(2)
    options = "OPTIONS='--rotate-mb 0.002 --keep 0 --metrics /run/hrxmp/trace/metrics'\n"
    (services.tree / "etc/hrxmp/aggregator.env").write_text(options)
    services.shell("systemctl", "restart", AGGREGATOR)
    services.shell("systemctl", "start", "hrxmp-metrics.socket")
    run.turns(8)
    pool_heard(services, 1)
    run.finish()
    assert len(list((services.tree / "var/log/hrxmp/trace").glob("*.gz"))) > 1
    check_runs(services, "ok")
    get = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464').read().decode())"
    text = services.shell("/opt/hrxmp/bin/python", "-c", get)
    assert 'hrxmp_runs_ended_total{status="ok"} 1.0' in text
    (compiles,) = re.findall(r"hrxmp_compile_seconds_count (\d+)", text)
    assert int(compiles) >= 8


COLLECTOR = """
import http.server, sys, threading
class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        sys.stdout.buffer.write(body)
        sys.stdout.flush()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 4318), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""


@boots
def test_the_live_trace_reaches_a_collector_as_spans(services: Machine) -> None:
    pytest.importorskip("opentelemetry.sdk")
    command = services.inside("/opt/hrxmp/bin/python", "-c", COLLECTOR)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as collector:
        assert collector.stdin is not None and collector.stdout is not None
        try:
            services.shell("systemctl", "start", "hrxmp-forward.service")
            run = Run(services, "spans", 7500)
            run.turns(3)
            run.finish()
            seen = b""
            while not all(word in seen for word in (b"rms_norm", b"execution", b"wait")):
                assert select.select([collector.stdout], [], [], TURN_S)[0]
                seen += os.read(collector.stdout.fileno(), 65536)
        finally:
            services.shell("systemctl", "stop", "hrxmp-forward.service")
            collector.communicate()  # its standard input ends, and so does it
    assert services.show("hrxmp-forward.service", "Result") == "success"


@boots
@pytest.mark.parametrize("limited", [False, True])
def test_the_journal_takes_every_trace_line(services: Machine, limited: bool) -> None:
    """More than the journal's default limit lets through; `limited` is the control."""
    settings = services.tree / "etc/hrxmp/aggregator.env"
    drop_in = services.tree / f"etc/systemd/system/{AGGREGATOR}.d/limit.conf"
    settings.write_text("HRXMP_TRACE_OUTPUT=-\n")
    drop_in.write_text("[Service]\nLogRateLimitIntervalSec=30s\n" if limited else "")
    services.shell("systemctl", "daemon-reload")
    services.shell("systemctl", "restart", AGGREGATOR)
    run = f"journal-{limited}"
    program = ("/opt/hrxmp/bin/python", "-m", "tests.process.trace_producers", "stream")
    where = ("ipc:///run/hrxmp/trace/socket", run, "source", str(JOURNAL_LINES))
    services.shell("env", f"--chdir={SOURCE}", *program, *where, timeout_s=120)
    services.shell("journalctl", "--sync")
    said = services.shell("journalctl", "-q", "-o", "cat", "-u", AGGREGATOR, timeout_s=120)
    count = len(reader.read(said.encode().splitlines()).of_run(run))
    settings.unlink()
    drop_in.unlink()
    services.shell("systemctl", "daemon-reload")
    services.shell("systemctl", "restart", AGGREGATOR)
    assert (count < JOURNAL_LINES) if limited else (count == JOURNAL_LINES)


@boots
def test_the_target_stops_in_order_and_the_trace_says_so(services: Machine) -> None:
    run = Run(services, "last", 9000)
    run.turns(2)
    services.shell("systemctl", "stop", "hrxmp.target")
    for unit in (run.unit, POOL, AGGREGATOR):
        services.settled(unit)
    times = [
        int(services.show(unit, "InactiveEnterTimestampMonotonic"))
        for unit in (run.unit, POOL, AGGREGATOR)
    ]
    assert 0 < times[0] <= times[1] <= times[2]
    assert services.show(POOL, "Result") == services.show(AGGREGATOR, "Result") == "success"
    assert not [
        p for p in Path(f"/proc/{services.leader}/root/run/hrxmp").rglob("*") if p.is_socket()
    ]
    statuses = [
        line.record.status for line in trace_of(services).lines if isinstance(line.record, RunEnd)
    ]
    assert statuses[-1] == "signal 15"
    services.shell("systemctl", "start", "hrxmp.target")


@pytest.mark.parametrize("role", ["aggregator", "workers"])
def test_a_daemon_tells_when_it_is_ready_alive_and_stopping(tmp_path: Path, role: str) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "n"))
    manager.settimeout(60)
    environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "300000",
               "HRXMP_RUNTIME_DIR": str(tmp_path), "HRXMP_CACHE": "off"}  # fmt: skip
    command = [sys.executable, "-m", "hrxmp", role, "--bind", f"ipc://{tmp_path}/s", "--group"]
    daemon = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL)
    try:
        assert manager.recv(256).decode().split() == ["READY=1", f"MAINPID={daemon.pid}"]
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o660
        assert [manager.recv(256) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        daemon.send_signal(signal.SIGTERM)
        while (told := manager.recv(256)) == b"WATCHDOG=1":
            pass
        assert told == b"STOPPING=1"
        assert daemon.wait(60) == 0
    finally:
        daemon.kill()
        daemon.wait()
        manager.close()
