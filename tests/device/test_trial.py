"""Tuning on devices: options give the default's result, and a wrong one is seen and rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hrxmp.executor.engine import Executor
from hrxmp.executor.guard import Guard
from hrxmp.executor.jit import Jit
from hrxmp.executor.kernel_table import KernelTable
from hrxmp.executor.local_compiler import LocalCompiler
from hrxmp.executor.reasons import Reasons, Storms
from hrxmp.executor.trial import Trial
from hrxmp.kernels.choices import Choices
from hrxmp.kernels.device import Device
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.store import Store
from hrxmp.models.generator import LlamaModel
from hrxmp.workloads import tune
from tests.model_files import write_tiny

TOKENS = 21


@pytest.fixture
def executor(device: Device, tmp_path: Path) -> Executor:
    """One that compiles in this process, with a store of its own."""
    store = Store(tmp_path / "store")
    table = KernelTable(device)
    reasons = Reasons(store, Storms(16, 10**10), None, lambda _text: None)
    jit = Jit(table, LocalCompiler(device, store, None), reasons, Guard("off", 0), None)
    return Executor(device, jit, table, Guard("off", 0), None)


@pytest.fixture
def trial(executor: Executor, tmp_path: Path) -> Trial:
    """A small model's graph for some tokens, run once."""
    path = write_tiny(tmp_path / "tiny.gguf", "q4_0")
    model = LlamaModel.load(executor, path, context=TOKENS, ubatch=TOKENS)
    trial = executor.trial(model.graph(TOKENS))
    assert not executor.compile(trial.variants).failed
    ids = np.arange(TOKENS, dtype=np.int32)
    trial.run({"tokens": ids, "positions": ids})
    return trial


def first_open(trial: Trial) -> tuple[Choices, list[int]]:
    """The kernel with the fewest options; skips a device whose kernels leave nothing open."""
    found = sorted(trial.open().values(), key=lambda item: len(item[0].options))
    if not found:
        pytest.skip("no kernel of this device leaves anything open")
    return found[0]


def test_options_give_the_results_of_the_default(executor: Executor, trial: Trial) -> None:
    choices, places = first_open(trial)
    results = []
    for option in choices.options[:3]:
        (launch,) = trial.launches(choices.subject, option, places[:1])
        assert not executor.compile([launch.variant]).failed
        results.append(trial.result(places[0], launch))
        assert trial.time([trial.bind(places[0], launch)]) > 0
    for result in results[1:]:
        for wanted, given in zip(results[0], result, strict=True):
            assert np.abs(wanted).max() > 0
            assert tune.relative_error(wanted, given) < 1e-5


def test_a_wrong_option_is_rejected_however_fast(
    executor: Executor, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices, places = first_open(trial)
    choices = msgspec.structs.replace(choices, options=choices.options[:3])
    wrong = choices.options[1]
    made: Callable[..., list[Launch]] = trial.launches

    def launches(subject: str, choice: Any, at: list[int]) -> list[Launch]:
        found = made(subject, choice, at)
        return [zeroed(item) for item in found] if choice == wrong else found

    monkeypatch.setattr(trial, "launches", launches)
    found = tune._unknown(choices)
    size = tune.Size(tokens=TOKENS, trial=trial, places=places)
    tune._try(executor, choices, [size], 3, found)
    (said,) = found.rejected
    assert "wrong by" in said and tune._text(wrong) in said
    assert found.best != dict(wrong)


def zeroed(launch: Launch) -> Launch:
    """A launch that computes nothing: its number of rows is zero."""
    return msgspec.structs.replace(launch, args=(0, *launch.args[1:]))
