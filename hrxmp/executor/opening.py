"""What an executor process does first: drivers load while it imports everything else.

Imported before anything heavy. It opens no device itself: which one it will be is the session's.
"""

from __future__ import annotations

from hrxmp.kernels.loader import prepare_loader
from hrxmp.kernels.store import Store
from hrxmp.settings import Settings


def prepare(settings: Settings, store: Store, *, opens: bool = False) -> None:
    """Prepare this process's OpenCL loader, once. `opens`: it will open a device for certain."""
    prepare_loader(
        vendors=settings.vendors,
        scratch=settings.runtime_dir or None,
        cuda_cache=store.driver_cache(),
        opens=settings.device if opens else None,
    )
