"""Chaos: a run under tracing while a seeded script breaks things. `python -m tests.chaos`.

Each round is one `hrxmp-run --trace` over a workload that checks its own tokens and numbers and
compiles something new each turn. Between turns one fault is injected; after it the workload must
get on within a bound. At the end of a round the trace must reconcile and nothing may be left:
no process, no socket, no descriptor, no temporary file. `make chaos` prints the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from hrxmp.aggregator import reader
from hrxmp.aggregator.check import check
from tests.model_files import write_tiny

ROOT = Path(__file__).resolve().parents[1]
LOOP = ROOT / "tests" / "process" / "programs" / "chaos_loop.py"
STUCK_S = 150.0
PER_ROUND = 20
RESTARTS = 4
"""The launcher gives a service up after five deaths in a row; a round stays below."""


class StuckError(Exception):
    """The workload did not get on after a fault."""


class Round:
    """One run with its folder, and the faults that can be done to it."""

    def __init__(self, folder: Path, model: Path, chance: random.Random, first: int) -> None:
        self.folder = folder
        self.chance = chance
        disk = folder / "disk"
        self.store = (disk if os.path.ismount(disk) else folder) / "store"
        self.runtime = folder / "run"
        self.runtime.mkdir(exist_ok=True)
        self.injected: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._restarts: Counter[str] = Counter()
        self.trace_file = folder / f"chaos-{first}.txt"
        self._trace = self.trace_file.open("w+b")
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HRXMP_")},
            "HRXMP_RUNTIME_DIR": str(self.runtime),
            "HRXMP_WORKER_IDLE_S": "2",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "hrxmp", "run", "--trace", "--cache", str(self.store)]
        self.process = subprocess.Popen(
            [*command, str(LOOP), str(model), str(first)],
            cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._trace, bufsize=0,
        )  # fmt: skip
        assert self.process.stdout is not None
        self._lines = _lines(self.process.stdout.fileno())

    # -- the workload -------------------------------------------------------------------------

    def turns(self, count: int) -> None:
        """Wait for so many turns. StuckError when one takes too long."""
        for _ in range(count):
            start = time.monotonic()
            line = next(self._lines, "")
            if not line.startswith("turn "):
                raise StuckError(f"no turn in {STUCK_S:g} s: {line!r} {self.alive()} {self.tail()}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)

    def finish(self) -> dict[str, object]:
        """Let the workload end; what it says at its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        last = ""
        for line in self._lines:
            last = line
            if line.startswith("{"):
                break
        code = self.process.wait(STUCK_S)
        if code or not last.startswith("{"):
            raise StuckError(f"exit code {code}, last line {last!r}; {self.tail()}")
        found: dict[str, object] = json.loads(last)
        return found

    def alive(self) -> str:
        """Role, id and state of each process of the run, and where the trace was kept."""
        states = []
        for pid in _family(str(self.folder)):
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                states.append(f"{_role(pid)} {pid} {state}")
        return f"{states} {shutil.copy(self.trace_file, tempfile.gettempdir())}"

    def tail(self) -> str:
        """The end of what went to standard error and is no record."""
        self._trace.flush()
        text = Path(self._trace.name).read_text(errors="replace").splitlines()
        return " | ".join([line for line in text if '{"hrxmp"' not in line][-5:])

    def problems(self) -> list[str]:
        """What is wrong with the trace, and what was left behind."""
        self._trace.seek(0)
        report = check(reader.read(self._trace.read().splitlines(keepends=True)))
        found = [f"{problem.kind}: {problem.text}" for problem in report.problems]
        found += [f"left behind: {path}" for path in self.runtime.iterdir()]
        found += [f"left behind: {path}" for path in self.store.glob(".tmp-*")]
        found += [f"still lives: {pid}" for pid in _family(str(self.folder))]
        return found

    def close(self) -> None:
        """End whatever is left of the round."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._trace.close()

    # -- faults -------------------------------------------------------------------------------

    def inject(self) -> str:
        """Do one fault that is possible now; its name."""
        faults = list(FAULTS)
        self.chance.shuffle(faults)
        for fault in faults:
            if fault(self):
                name = fault.__name__.strip("_")
                self.injected[name] += 1
                return name
        return ""

    def pids(self, role: str) -> list[int]:
        """This run's processes of a role."""
        return [pid for pid in _family(str(self.folder)) if _role(pid) == role]

    def signal(self, role: str, number: int) -> int:
        """Send a signal to one process of a role; its pid, or 0."""
        pids = self.pids(role)
        if not pids:
            return 0
        pid = self.chance.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def may_restart(self, role: str) -> bool:
        self._restarts[role] += 1
        return self._restarts[role] <= RESTARTS

    def entry(self) -> Path | None:
        entries = sorted(self.store.glob("*.hrxk"))
        return self.chance.choice(entries) if entries else None


def kill_worker(r: Round) -> bool:
    return bool(r.signal("worker", signal.SIGKILL))


def abort_worker(r: Round) -> bool:
    return bool(r.signal("worker", signal.SIGABRT))


def kill_pool(r: Round) -> bool:
    return r.may_restart("workers") and bool(r.signal("workers", signal.SIGKILL))


def kill_aggregator(r: Round) -> bool:
    return r.may_restart("aggregator") and bool(r.signal("aggregator", signal.SIGKILL))


def _pause(r: Round, role: str) -> bool:
    pid = r.signal(role, signal.SIGSTOP)
    if pid:
        time.sleep(r.chance.uniform(0.05, 0.8))  # how long it stands still is the fault itself
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return bool(pid)


def pause_worker(r: Round) -> bool:
    return _pause(r, "worker")


def pause_pool(r: Round) -> bool:
    return _pause(r, "workers")


def pause_aggregator(r: Round) -> bool:
    return _pause(r, "aggregator")


def pause_executor(r: Round) -> bool:
    return _pause(r, "executor")


def flip_a_bit(r: Round) -> bool:
    if (entry := r.entry()) is None:
        return False
    wrong = bytearray(entry.read_bytes())
    wrong[r.chance.randrange(len(wrong))] ^= 1 << r.chance.randrange(8)
    entry.write_bytes(bytes(wrong))
    return True


def cut_an_entry(r: Round) -> bool:
    if (entry := r.entry()) is None:
        return False
    os.truncate(entry, r.chance.randrange(entry.stat().st_size))
    return True


def open_an_entry_to_all(r: Round) -> bool:
    if (entry := r.entry()) is None:
        return False
    entry.chmod(0o666)
    return True


def plant_a_pipe(r: Round) -> bool:
    if (entry := r.entry()) is None:
        return False
    entry.unlink()
    os.mkfifo(entry, 0o600)
    return True


def delete_the_store(r: Round) -> bool:
    shutil.rmtree(r.store, ignore_errors=True)
    return True


def open_the_store_to_all(r: Round) -> bool:
    """Refused while it lasts; mended before the next fault."""
    if not r.store.exists():
        return False
    r.store.chmod(0o777)
    r.turns(1)
    with contextlib.suppress(FileNotFoundError):
        r.store.chmod(0o700)
    return True


def fill_the_disk(r: Round) -> bool:
    """Where the store lies on a small disk of its own: no byte is left for a turn."""
    if not os.path.ismount(r.store.parent):
        return False
    ballast = r.store.parent / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
    r.turns(1)
    ballast.unlink()
    return True


FAULTS: list[Callable[[Round], bool]] = [
    kill_worker, abort_worker, kill_pool, kill_aggregator, pause_worker, pause_pool,
    pause_aggregator, pause_executor, flip_a_bit, cut_an_entry, open_an_entry_to_all,
    plant_a_pipe, delete_the_store, open_the_store_to_all, fill_the_disk,
]  # fmt: skip


def _lines(fd: int) -> Iterator[str]:
    """Lines from a pipe; ends when none comes in time."""
    pending = b""
    while select.select([fd], [], [], STUCK_S)[0]:
        piece = os.read(fd, 65536)
        if not piece:
            return
        *lines, pending = (pending + piece).split(b"\n")
        yield from (line.decode() for line in lines)


def _family(folder: str) -> list[int]:
    """Live processes that belong to a run in `folder`: it stands in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"HRXMP_RUNTIME_DIR={folder}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _role(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"hrxmp" in words:
            return words[words.index(b"hrxmp") + 1].decode()
    return ""


def chaos(faults: int, seed: int, say: Callable[[str], None]) -> dict[str, object]:
    """Inject `faults` faults; the figures. Raises StuckError or AssertionError."""
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="hrxmp-t-"))
    totals: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    injected: Counter[str] = Counter()
    tokens: list[object] = []
    slowest, first = 0.0, 1000
    mounted = _mount_small_disk(folder / "disk")
    try:
        model = write_tiny(folder / "tiny.gguf")
        while injected.total() < faults:
            turn = Round(folder, model, chance, first)
            try:
                _play(turn, min(PER_ROUND, faults - injected.total()), say)
                found = turn.finish()
                problems = turn.problems()
            finally:
                turn.close()
            if problems:
                kept = shutil.copy(turn.trace_file, tempfile.gettempdir())
                raise AssertionError(f"seed {seed}, trace in {kept}: {problems[:10]}")
            assert found["descriptors"] <= 2, found  # type: ignore[operator]
            tokens.append(found["tokens"])
            assert tokens[0] == found["tokens"], tokens
            injected += turn.injected
            failures += Counter(found["failures"])  # type: ignore[arg-type]
            totals.update(turns=found["turns"], rounds=1)  # type: ignore[arg-type]
            slowest = max(slowest, turn.slowest_s)
            first += 200
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder / "disk")], check=True)
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "faults": injected.total(), "by_kind": dict(injected), **totals,
        "typed_failures": dict(failures), "slowest_turn_s": round(slowest, 2), "seed": seed,
    }  # fmt: skip


def _mount_small_disk(folder: Path) -> bool:
    """A tmpfs for the store, where this user may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "none", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _play(turn: Round, faults: int, say: Callable[[str], None]) -> None:
    turn.turns(1)
    for _ in range(faults):
        name = turn.inject()
        start = time.monotonic()
        turn.turns(2)  # the first may have been under way already
        say(f"{name}: on after {time.monotonic() - start:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="0: a new one, printed")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    seed = args.seed or random.SystemRandom().randrange(1, 1 << 31)
    start = time.monotonic()
    say = (lambda _text: None) if args.quiet else (lambda text: print(text, file=sys.stderr))
    figures = chaos(args.faults, seed, say)
    print(json.dumps({**figures, "seconds": round(time.monotonic() - start, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
