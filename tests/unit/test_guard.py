"""The guard's logic, and when a load is taken for a compile of the driver."""

from __future__ import annotations

from typing import Any

import pytest

from hrxmp.executor import kernel_table
from hrxmp.executor.guard import Guard
from hrxmp.executor.kernel_table import KernelTable
from hrxmp.kernels.keys import Variant

MS = 1_000_000
VARIANT = Variant(definition="unary", params=(("OP", "scale"),), local_size=(1,))


def test_nothing_is_guarded_until_it_is_warm() -> None:
    guard = Guard("error")
    assert guard.action == "off"
    guard.declare_warm()
    assert guard.action == "error"


def test_warm_after_counts_executions() -> None:
    guard = Guard("warn", warm_after=2)
    guard.execution_done(1)
    assert guard.action == "off"
    guard.execution_done(2)
    assert guard.action == "warn"


def test_no_compiles_holds_inside_only_whatever_the_mode() -> None:
    guard = Guard("off")
    with guard.no_compiles():
        assert guard.action == "error"
        with guard.no_compiles():
            assert guard.action == "error"
        assert guard.action == "error"
    assert guard.action == "off" and not guard.warm
    with pytest.raises(RuntimeError), guard.no_compiles():
        raise RuntimeError
    assert guard.action == "off"


class Driver:
    """Stands where `build` does: a load and a launch that take the times that a test says."""

    def __init__(self, clock: list[int], load: tuple[int, int], launch: tuple[int, int]) -> None:
        self.clock, self._load, self._launch = clock, load, launch
        self.kernel = None

    def load(self, *_args: Any) -> Driver:
        return self._spend(self._load)

    def dry_launch(self, *_args: Any) -> None:
        self._spend(self._launch)

    def _spend(self, times: tuple[int, int]) -> Driver:
        self.clock[0] += times[0]
        self.clock[1] += times[1]
        return self


@pytest.mark.parametrize(
    ("load", "launch", "compile_ns", "compiled"),
    [
        ((2, 2), (1, 1), 100, False),
        ((9, 9), (9, 9), 0, False),  # a small kernel, whatever its compile took
        ((60, 60), (1, 1), 100, True),  # PTX compiled again at load
        ((1, 1), (165, 165), 80, True),  # PoCL's work-group function at first launch
        ((300, 4), (200, 3), 100, False),  # waited for a busy machine
        ((30, 30), (1, 1), 1000, False),  # a large binary, far from its compile
        ((90, 90), (9, 9), 1000, False),  # Intel's, on a machine that is ten times slower
        ((260, 260), (1, 1), 10**6, True),  # no driver works so long on a finished binary
        ((12, 12), (1, 1), 0, False),  # not known what the compile took
        ((52, 52), (1, 1), 0, True),
    ],
)
def test_what_counts_as_a_compile_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
    load: tuple[int, int],
    launch: tuple[int, int],
    compile_ns: int,
    compiled: bool,
) -> None:
    """Wall and processor time in ms; the lesser counts."""
    clock = [0, 0]
    driver = Driver(clock, *(tuple(t * MS for t in times) for times in (load, launch)))  # type: ignore[arg-type]
    monkeypatch.setattr(kernel_table, "build", driver)
    monkeypatch.setattr(kernel_table, "_spent", lambda: (clock[0], clock[1]))
    report = KernelTable(None).load("key", VARIANT, b"", compile_ns * MS)  # type: ignore[arg-type]
    assert (report.load_ns, report.launch_ns) == (load[0] * MS, launch[0] * MS)
    assert report.driver_compiled is compiled
