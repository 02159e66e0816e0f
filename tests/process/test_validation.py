"""Every fact of the validation, on each CPU runtime, and once on the real model."""

from __future__ import annotations

import pytest

from tests.model_files import smollm2, write_tiny
from tests.process.run_process import DEVICES, usable_forms
from tests.validate import SECTIONS, Validation


@pytest.fixture(scope="module", params=list(DEVICES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Validation:
    if request.param not in usable_forms():
        pytest.skip(f"no {request.param} device works here")
    folder = tmp_path_factory.mktemp("validation")
    return Validation(folder, write_tiny(folder / "tiny.gguf"), DEVICES[request.param])


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Validation:
    return Validation(tmp_path_factory.mktemp("validation"), smollm2())


@pytest.mark.parametrize("section", SECTIONS)
def test_everything_holds(tiny: Validation, section: str) -> None:
    wrong = [fact for fact in SECTIONS[section](tiny) if not fact.ok]
    assert wrong == []


@pytest.mark.model
@pytest.mark.parametrize(
    "section",
    [
        "asynchronous and synchronous JIT",
        "counts by execution",
        "records reconciled",
        "waits and late ends",
    ],
)
def test_everything_holds_on_the_real_model(real: Validation, section: str) -> None:
    wrong = [fact for fact in SECTIONS[section](real) if not fact.ok]
    assert wrong == []
