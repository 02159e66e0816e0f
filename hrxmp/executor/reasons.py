"""Why a kernel is not in memory: the store's answer, the nearest known key, and storms.

The executor's main thread asks on misses only; nothing here runs when every kernel is warm. Known
keys are those that this process has used and those in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

import msgspec

from hrxmp import records
from hrxmp.kernels.entry import StoreEntry
from hrxmp.kernels.keys import Difference, KeyComponents, nearest
from hrxmp.kernels.store import Store
from hrxmp.trace import Tracer


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """`why` is `stored`, `first_use`, `differs` (from key `near`, in `differs`), or what was wrong
    with the store's entry."""

    why: str
    near: str = ""
    differs: tuple[Difference, ...] = ()

    def text(self) -> str:
        """The reason as people read it."""
        changes = ", ".join(f"{d.component} {d.before} -> {d.after}" for d in self.differs)
        nearest_key = f"nearest known key {self.near[:16]} differs in {changes}"
        if self.why == "differs":
            return nearest_key
        return self.why.replace("_", " ") + (f"; {nearest_key}" if self.near else "")


class Storms:
    """Notices many keys that differ from a known one in the same single component.

    A storm is told once, when it is over (or the run is), with its exact count.
    """

    def __init__(self, keys: int, window_ns: int) -> None:
        self.window_ns = window_ns
        self._keys = keys
        self._times: dict[tuple[str, str], list[int]] = {}

    def note(self, kernel: str, component: str, now_ns: int) -> list[tuple[str, str, int]]:
        """Count one; the storms that are over by now: (kernel, component, count)."""
        over = self.over(now_ns)
        self._times.setdefault((kernel, component), []).append(now_ns)
        return over

    def over(self, now_ns: int | None = None) -> list[tuple[str, str, int]]:
        """Storms with nothing new for a window; all of them when no time is given."""
        found = []
        for (kernel, component), times in list(self._times.items()):
            if now_ns is not None and now_ns - times[-1] <= self.window_ns:
                continue
            del self._times[kernel, component]
            if len(times) > self._keys:
                found.append((kernel, component, len(times)))
        return found


class Reasons:
    """Looks kernels up in the store and explains misses."""

    def __init__(
        self,
        store: Store,
        storms: Storms,
        tracer: Tracer | None,
        warn: Callable[[str], None],
    ) -> None:
        self.warn = warn
        self._store = store
        self._storms = storms
        self._tracer = tracer
        self._used: dict[str, KeyComponents] = {}

    @property
    def stores(self) -> bool:
        """Whether there is a store to write to."""
        return self._store.folder is not None

    def look_up(self, key: str, components: KeyComponents) -> tuple[StoreEntry | None, Reason]:
        """The stored entry, or None and why."""
        found = self._store.get(key, components)
        if isinstance(found, StoreEntry):
            return found, Reason(why="stored")
        close = nearest(components, [*self._used.values(), *self._store.components_index()])
        near, differs = (close[0].digest(), close[1]) if close and close[1] else ("", ())
        if not found.expected:
            return None, Reason(why=found.reason, near=near, differs=differs)
        self._note_storm(components, differs)
        return None, Reason(why="differs" if near else "first_use", near=near, differs=differs)

    def remember(self, key: str, components: KeyComponents) -> None:
        """This process has asked for the key."""
        self._used[key] = components

    def refuse(self, key: str) -> None:
        """The driver refuses the stored binary: take it out."""
        self._store.remove(key)

    def finish(self) -> None:
        """The run is over: tell the storms that were still going on."""
        self._tell(self._storms.over())

    def _note_storm(self, components: KeyComponents, differs: tuple[Difference, ...]) -> None:
        if len(differs) == 1:
            component = differs[0].component
            self._tell(self._storms.note(components.entry_point, component, monotonic_ns()))

    def _tell(self, storms: list[tuple[str, str, int]]) -> None:
        for kernel, component, count in storms:
            if self._tracer is not None:
                self._tracer.emit(
                    records.Storm, kernel=kernel, component=component, count=count,
                    window_ns=self._storms.window_ns,
                )  # fmt: skip
