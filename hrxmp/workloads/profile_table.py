"""The tables of `bench --profile`: time per kernel on the device, per step on the host."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from hrxmp.executor.profile import Profile


def print_profile(profile: Profile, title: str, sample_ns: int) -> None:
    """Print both tables to stderr. `sample_ns`: host time between executions."""
    console = Console(stderr=True)
    console.print(_kernel_table(profile, title))
    console.print(_host_table(profile, sample_ns))


def _kernel_table(profile: Profile, title: str) -> Table:
    table = _table(f"{title}: device time per kernel")
    table.add_column("kernel", overflow="fold")
    for name in ("calls", "total ms", "share", "us a call", "gap us", "GB/s", "GFLOP/s"):
        table.add_column(name, justify="right")
    whole = sum(row.total_ns for row in profile.kernels) or 1
    labels = short_labels([row.kernel for row in profile.kernels])
    for row, label in zip(profile.kernels, labels, strict=True):
        seconds = row.total_ns / 1e9 or 1e-9
        table.add_row(
            label,
            str(row.calls),
            f"{row.total_ns / 1e6:.2f}",
            f"{row.total_ns / whole:.1%}",
            f"{row.total_ns / row.calls / 1e3:.1f}",
            f"{row.gap_ns / row.calls / 1e3:.1f}",
            _rate(row.nbytes, seconds),
            _rate(row.flops, seconds),
        )
    return table


def short_labels(labels: Sequence[str]) -> list[str]:
    """Labels of variants (`Variant.label`) without the parameters that those of one name share."""
    split = [_parts(label) for label in labels]
    groups: dict[str, list[set[str]]] = {}
    for name, *parts in split:
        groups.setdefault(name, []).append(set(parts))
    shared = {name: set.intersection(*sets) for name, sets in groups.items()}
    return [
        " ".join([name, *(part for part in parts if part not in shared[name])])
        for name, *parts in split
    ]


def _parts(label: str) -> list[str]:
    """Name, parameters, local size."""
    name, _, rest = label.partition("(")
    params, _, local = rest.rpartition(")")
    return [name, *params.split(","), local.strip()]


def _host_table(profile: Profile, sample_ns: int) -> Table:
    host = profile.host
    count = host.executions or 1
    table = _table(f"host time, us an execution, of {host.executions}")
    for name in ("rebind", "enqueue", "wait", "between executions"):
        table.add_column(name, justify="right")
    steps = (host.rebind_ns, host.enqueue_ns, host.wait_ns, sample_ns)
    table.add_row(*(f"{ns / count / 1e3:.1f}" for ns in steps))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))


def _rate(amount: int, seconds: float) -> str:
    return f"{amount / seconds / 1e9:.1f}" if amount else "-"
