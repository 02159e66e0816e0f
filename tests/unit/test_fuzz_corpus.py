"""What the fuzzer started from, and whatever it found, tried again for ever."""

from __future__ import annotations

import pytest

from tests.fuzz import CORPUS, TARGETS, seeds


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_seeds_and_findings_are_taken_or_refused(target: str) -> None:
    """Each as it is, cut, and with a byte changed at every hundredth place."""
    run = TARGETS[target]
    findings = [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]
    for data in seeds(target) + findings:
        run(data)
        step = max(1, len(data) // 100)
        for at in range(0, len(data), step):
            run(data[:at])
            run(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
