"""What holds for all tests: generated examples are the same each time, and may be slow.

`pytest --hypothesis-profile explore` looks for new ones instead, as does `python -m tests.fuzz`.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", _UNHURRIED, derandomize=True)
settings.register_profile("explore", _UNHURRIED)
settings.load_profile("repeatable")
