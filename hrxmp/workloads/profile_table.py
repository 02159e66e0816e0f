"""The tables of `bench --profile`: time per kernel on the device, per step on the host."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hrxmp.executor.profile import Profile


def print_profile(profile: Profile, title: str, sample_ns: int) -> None:
    """Print both tables to stderr. `sample_ns`: host time between executions."""
    console = Console(stderr=True)
    console.print(_kernel_table(profile, title))
    console.print(_host_table(profile, sample_ns))


def _kernel_table(profile: Profile, title: str) -> Table:
    table = Table(title=f"{title}: device time per kernel", title_justify="left")
    table.add_column("kernel", overflow="fold")
    for name in ("calls", "total ms", "share", "us a call", "gap us", "GB/s", "GFLOP/s"):
        table.add_column(name, justify="right")
    whole = sum(row.total_ns for row in profile.kernels) or 1
    for row in profile.kernels:
        seconds = row.total_ns / 1e9 or 1e-9
        table.add_row(
            row.kernel,
            str(row.calls),
            f"{row.total_ns / 1e6:.2f}",
            f"{row.total_ns / whole:.1%}",
            f"{row.total_ns / row.calls / 1e3:.1f}",
            f"{row.gap_ns / row.calls / 1e3:.1f}",
            _rate(row.nbytes, seconds),
            _rate(row.flops, seconds),
        )
    return table


def _host_table(profile: Profile, sample_ns: int) -> Table:
    host = profile.host
    count = host.executions or 1
    table = Table(title=f"host time, us an execution, of {host.executions}", title_justify="left")
    for name in ("rebind", "enqueue", "wait", "between executions"):
        table.add_column(name, justify="right")
    steps = (host.rebind_ns, host.enqueue_ns, host.wait_ns, sample_ns)
    table.add_row(*(f"{ns / count / 1e3:.1f}" for ns in steps))
    return table


def _rate(amount: int, seconds: float) -> str:
    return f"{amount / seconds / 1e9:.1f}" if amount else "-"
