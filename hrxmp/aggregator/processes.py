"""Notices that a source's process is gone: by handle on this host, by silence from others.

Part of the aggregator. What a dead process had sent is still in the socket's queues, so its
session ends only after they were seen empty.
"""

from __future__ import annotations

import os
import select

from hrxmp.aggregator.sessions import Session, Sessions

GRACE_NS = 100_000_000
SILENT_NS = 30_000_000_000
"""A source on another host that is silent for so long is given up."""
CHECK_NS = 50_000_000


class Processes:
    """Process handles of all sessions whose pid means something here."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self._handles: dict[int, int] = {}
        self._gone: dict[int, int] = {}
        self._checked_ns = 0

    def check(self, now: int, drained: bool) -> None:
        """End the sessions of processes that are gone, once nothing of theirs is in the queues."""
        if now - self._checked_ns < CHECK_NS:
            return
        self._checked_ns = now
        current = list(self.sessions.by_key.values())
        self._watch({one.pid for one in current if self._here(one)}, now)
        for session in current:
            if self._here(session):
                died = self._gone.get(session.pid)
                if died is not None and drained and now - died >= GRACE_NS:
                    self.sessions.end(session, f"process {session.pid} ended", now)
            elif drained and now - session.lane.heard_ns > SILENT_NS:
                self.sessions.end(session, "silent", now)

    def _here(self, session: Session) -> bool:
        return bool(session.host) and session.host == self.sessions.host

    def _watch(self, pids: set[int], now: int) -> None:
        for pid in [pid for pid in self._handles if pid not in pids]:
            os.close(self._handles.pop(pid))
        for pid in [pid for pid in self._gone if pid not in pids]:
            del self._gone[pid]
        for pid in pids - self._handles.keys() - self._gone.keys():
            try:
                self._handles[pid] = os.pidfd_open(pid)
            except OSError:
                self._gone[pid] = now
        poller = select.poll()
        for handle in self._handles.values():
            poller.register(handle, select.POLLIN)
        ended = {handle for handle, _events in poller.poll(0)}
        for pid in [pid for pid, handle in self._handles.items() if handle in ended]:
            os.close(self._handles.pop(pid))
            self._gone[pid] = now
