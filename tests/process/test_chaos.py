"""The short form of the chaos test; `make chaos` runs two hundred faults."""

from __future__ import annotations

import pytest

from tests.chaos import chaos


@pytest.mark.timeout(900)
def test_a_run_survives_what_a_seeded_script_does_to_it() -> None:
    figures = chaos(10, seed=12, say=lambda _text: None)
    assert figures["faults"] == 10
    assert figures["turns"] >= 20
