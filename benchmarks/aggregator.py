# ruff: noqa: E402 - run from a checkout, not installed
"""The aggregator against rsyslog: records per CPU-second, side by side in one run; and latency.

    python benchmarks/aggregator.py [--records N] [--producers 2] [--repeats 3] [--profile]

Producers send finished batches of 300-byte records (lines for rsyslog) as fast as they are taken,
so that they are not what is measured. CPU time is the daemon's own, from the kernel, user and
system. rsyslog (Debian's package) runs as a plain process with a private configuration: imptcp on
a unix socket, queue in memory, to a file. Both write every record to a file on the same disk;
ours in one order over all sources, each acknowledged when it is written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hrxmp import wire
from hrxmp.aggregator.sessions import LARGEST_WINDOW
from hrxmp.clock import HybridLogicalClock, mono_ns, wall_ns
from hrxmp.delivery import BATCH_ITEMS
from hrxmp.identity import new_identity
from hrxmp.messages import Ack, FromAggregator, Goodbye, Heartbeat, Hello, Records, Welcome
from hrxmp.records import OPENING, Annotation
from tests.process.aggregator_process import AggregatorProcess, tracer

SIZE = 300
RSYSLOG = """
module(load="imptcp")
main_queue(queue.type="LinkedList" queue.size="500000" queue.dequeuebatchsize="4096")
template(name="raw" type="string" string="%rawmsg%\\n")
input(type="imptcp" path="{socket}" ruleset="out")
ruleset(name="out") {{ action(type="omfile" file="{output}" template="raw"
  flushOnTXEnd="off" ioBufferSize="256k") }}
"""


def payload(source: str) -> bytes:
    """A record as it travels, of SIZE bytes with its opening and newline."""
    head = b'"event":"annotation","run":"bench","source":"%s","label":"' % source.encode()
    return head + b"x" * (SIZE - len(OPENING) - len(head) - 3) + b'"}'


def send_batches(endpoint: str, source: str, count: int) -> None:
    """A producer for the aggregator: the protocol of `delivery`, without making records."""
    context = wire.context()
    clock = HybridLogicalClock()
    link = wire.Link[FromAggregator](
        wire.dealer(context, endpoint, immediate=True), FromAggregator,
        new_identity("bench", source), clock,
    )  # fmt: skip
    while not link.send(Hello(role="trace", pid=os.getpid(), boot_id="", package_version="")):
        link.poll(10)
    line, sent, acked, welcomed, done = payload(source), 0, 0, False, False
    window = LARGEST_WINDOW // SIZE
    while not done:
        while welcomed and sent < count and sent - acked < window:
            wall, size = wall_ns(), min(BATCH_ITEMS, count - sent)
            items = [(wall, counter, line) for counter in range(size)]
            clock.merge((wall, size), wall)
            link.send(Records(first_seq=sent, items=items, mark=clock.tick(wall_ns())))
            sent += size
            if sent == count:
                link.send(Goodbye(reason="done", last_seq=count - 1))
        link.poll(100)
        while (message := link.receive()) is not None:
            match message.body:
                case Welcome():
                    welcomed = True
                case Ack():
                    acked = max(acked, message.body.next_seq)
                    done = acked >= count
                case Heartbeat(state="ask"):
                    link.send(Records(first_seq=sent, items=[], mark=clock.tick(wall_ns())))
    link.close()
    context.term()


def send_lines(path: str, count: int) -> None:
    """A producer for rsyslog: lines in large writes."""
    line = b"x" * (SIZE - 1) + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as out:
        out.connect(path)
        block = line * 1000
        for _ in range(count // 1000):
            out.sendall(block)


def start(role: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A producer process."""
    return subprocess.Popen([sys.executable, __file__, role, *arguments], cwd=ROOT)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ours(folder: Path, producers: int, count: int, profile: str = "") -> tuple[float, float]:
    """(wall seconds, CPU seconds) for all records through the aggregator."""
    output, endpoint = folder / "ours", f"ipc://{folder}/trace"
    flags = ["--output", str(output), *(["--profile", profile] if profile else [])]
    running = AggregatorProcess(endpoint, sys.stderr.fileno(), *flags)
    before, begin = cpu_seconds(running.process.pid), time.monotonic()
    sources = [start("batches", endpoint, f"s{n}", str(count)) for n in range(producers)]
    codes = [one.wait() for one in sources]
    wall = time.monotonic() - begin
    cpu = cpu_seconds(running.process.pid) - before
    running.finish()
    expect(output, producers * count, codes)
    return wall, cpu


def rsyslog(folder: Path, producers: int, count: int) -> tuple[float, float]:
    """(wall seconds, CPU seconds) for all lines through rsyslog."""
    output, path = folder / "theirs", folder / "rsyslog.socket"
    path.unlink(missing_ok=True)
    configuration = folder / "rsyslog.conf"
    configuration.write_text(RSYSLOG.format(socket=path, output=output))
    command = ["rsyslogd", "-n", "-f", str(configuration), "-i", str(folder / "pid"), "-C"]
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(path.exists)
        before, begin = cpu_seconds(daemon.pid), time.monotonic()
        sources = [start("lines", str(path), str(count)) for _ in range(producers)]
        codes = [one.wait() for one in sources]
        total = producers * count * SIZE
        wait_for(lambda: output.exists() and output.stat().st_size >= total - (512 << 10))
        wall, cpu = time.monotonic() - begin, cpu_seconds(daemon.pid) - before
    finally:
        daemon.terminate()  # it writes its last buffer now
        daemon.wait(20)
    expect(output, producers * count, codes)
    return wall, cpu


def expect(output: Path, count: int, codes: list[int]) -> None:
    """Everything must have arrived, or the figure means nothing."""
    size = output.stat().st_size
    output.unlink()
    if any(codes) or size != count * SIZE:
        sys.exit(f"{output.name}: {size} bytes instead of {count * SIZE}; producers ended {codes}")


def wait_for(condition, timeout_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    """Poll; a benchmark may."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("timed out")
        time.sleep(0.01)


def latency(folder: Path, records: int) -> list[float]:
    """Milliseconds from emit to the line in a pipe, with a second, idle source that holds back."""
    read_end, write_end = os.pipe()
    endpoint = f"ipc://{folder}/latency"
    running = AggregatorProcess(endpoint, write_end)
    os.close(write_end)
    idle, busy = tracer(endpoint, "idle"), tracer(endpoint, "busy")
    delays = []
    with os.fdopen(read_end, "rb") as pipe:
        for _ in range(records):
            begin = mono_ns()
            busy.emit(Annotation, label="now")
            pipe.readline()
            delays.append((mono_ns() - begin) / 1e6)
            time.sleep(0.005)
        busy.close()
        idle.close()
        running.finish()
    return sorted(delays)


def main() -> int:
    """The comparison."""
    if len(sys.argv) > 1 and sys.argv[1] in ("batches", "lines"):
        role, *rest = sys.argv[1:]
        count = int(rest.pop())
        send_batches(*rest, count) if role == "batches" else send_lines(*rest, count)
        return 0
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("--records", type=int, default=1_000_000, help="of each producer")
    line.add_argument("--producers", type=int, default=2)
    line.add_argument("--repeats", type=int, default=3)
    options = line.parse_args()
    total = options.records * options.producers
    rates: dict[str, list[float]] = {"hrxmp-aggregator": [], "rsyslog": []}
    with tempfile.TemporaryDirectory(prefix="hrxmp-bench-", dir="/var/tmp") as name:
        for _ in range(options.repeats):
            for title, function in (("hrxmp-aggregator", ours), ("rsyslog", rsyslog)):
                if title == "rsyslog" and not shutil.which("rsyslogd"):
                    continue
                wall, cpu = function(Path(name), options.producers, options.records)
                rates[title].append(total / cpu)
                print(
                    f"{title:18s} {total / wall:10.0f} records/s {cpu / total * 1e6:6.2f} us CPU"
                    f" a record {total / cpu:10.0f} records per CPU-second",
                    flush=True,
                )
        delays = latency(Path(name), 300)
    print(f"latency p50 {delays[150]:.1f} ms, p99 {delays[297]:.1f} ms")
    if rates["rsyslog"]:
        ratio = statistics.median(rates["hrxmp-aggregator"]) / statistics.median(rates["rsyslog"])
        print(f"records per CPU-second, ours / rsyslog (medians): {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
