"""What one graph execution cost: the counts that `graph-end` writes, zeros too."""

from __future__ import annotations

import msgspec


class GraphCounts(msgspec.Struct, kw_only=True):
    """Counts of one execution, or totals of many. `requests` is their sum by where it was served:
    compiles, joins, disk hits and quarantined keys."""

    requests: int = 0
    compiles: int = 0
    joins: int = 0
    disk_hits: int = 0
    memory_hits: int = 0
    driver_compiles: int = 0
    failures: int = 0
    waits: int = 0
    wait_ns: int = 0

    def add(self, other: GraphCounts) -> None:
        """Add another execution's counts to these totals."""
        for name in GraphCounts.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_dict(self) -> dict[str, int]:
        """The counts by name, in the order of the record's columns."""
        return msgspec.structs.asdict(self)

    @property
    def cold(self) -> bool:
        """Whether anything was requested or finished by the driver: not warm at level L0."""
        return bool(self.requests or self.driver_compiles)


class EngineStats(msgspec.Struct, kw_only=True):
    """What an executor built and what it could reuse."""

    executions: int = 0
    program_builds: int = 0
    program_hits: int = 0
    prepared_builds: int = 0
    prepared_hits: int = 0
