"""What a pool answers when somebody asks how it is.

Runs in the pool process's loop; it reads the broker and the crew and changes neither.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping

from hrxmp.messages import StatusReply
from hrxmp.workers.broker import Broker
from hrxmp.workers.crew import Crew


def status(
    token: int,
    now: int,
    begin: int,
    broker: Broker,
    crew: Crew,
    *,
    runs: Iterable[str],
    totals: Mapping[str, int],
) -> StatusReply:
    """The pool's state at `now`; it began at `begin`, both monotonic ns."""
    jobs = tuple(broker.book.status(now, crew.phases()))
    states = {name: worker.state for name, worker in broker.workers.items()}
    return StatusReply(
        token=token,
        role="pool",
        pid=os.getpid(),
        uptime_ms=(now - begin) // 1_000_000,
        pending=len(jobs),
        oldest_ms=max((job.age_ms for job in jobs), default=0),
        jobs=jobs,
        workers=tuple(crew.status(states)),
        runs=tuple(sorted(set(runs))),
        totals={**broker.book.totals, **totals},
        by_run=broker.book.by_run,
    )


def dropped(*links: Mapping[str, int]) -> dict[str, int]:
    """Messages that the links refused, by reason."""
    counts = sum((Counter(link) for link in links), Counter[str]())
    return {f"dropped_{name}": count for name, count in counts.items()}
