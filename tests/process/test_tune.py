"""`hrxmp-run tune` on real runs: winners are kept, used by every run, left aside, removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hrxmp import records
from hrxmp.aggregator.check import check
from hrxmp.kernels.tuned import VERSION
from tests.model_files import write_tiny
from tests.process.run_process import DEVICES, Finished, hrxmp_run, usable_forms

GENERATE = ("-p", "abcdefghijklmnopqrstuvwxyz", "-n", "4", "--temp", "0", "--ids", "--ignore-eos")


class Tuned:
    """A store beside which `tune` has left its table."""

    def __init__(self, folder: Path, model: Path, device: str) -> None:
        self.model, self.device, self.store = model, device, folder / "store"
        self.done = self.tune("flash_attn")

    def tune(self, kernel: str) -> Finished:
        flags = ("-ub", "64", "-r", "3", "-k", kernel, "-o", "json")
        return self.run("--trace", "tune", "-m", self.model, *flags)

    def run(self, *args: str | Path, **environ: str) -> Finished:
        return hrxmp_run(*args, cache=self.store, device=self.device, environ=environ)

    def generate(self, *options: str, **environ: str) -> Finished:
        return self.run("--trace", *options, "generate", "-m", self.model, *GENERATE, **environ)

    @property
    def file(self) -> Path:
        (found,) = self.store.glob("tuned-*.json")
        return found


@pytest.fixture(scope="module", params=list(DEVICES))
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    if request.param not in usable_forms():
        pytest.skip(f"no {request.param} device works here")
    folder = tmp_path_factory.mktemp("tune")
    return Tuned(folder, write_tiny(folder / "tiny.gguf"), DEVICES[request.param])


def products(run: Finished) -> dict[str, dict[str, int | str]]:
    """Parameters by key of the kernels that a run asked for and that leave something open."""
    asked = run.records(records.CompileRequested)
    return {r.key: dict(r.params) for r in asked if "TOKENS" in r.params}


def test_every_option_is_tried_and_winners_are_kept(tuned: Tuned) -> None:
    assert tuned.done.code == 0, tuned.done.stderr[-2000:]
    (attention,) = checked(tuned.done)
    assert check(tuned.done.trace).problems == []
    assert len(products(tuned.done)) >= attention["candidates"]
    (product,) = checked(tuned.tune("q6_k"))  # another kernel: what is known of the first one stays
    content = json.loads(tuned.file.read_text())
    assert content["version"] == VERSION
    won = {item["subject"]: item["best"] for item in (attention, product) if item["gain"]}
    assert {item["subject"]: item["choice"] for item in content["winners"]} == won


def checked(done: Finished) -> list[dict[str, Any]]:
    """What a run of tune found, after a look at it."""
    found: list[dict[str, Any]] = json.loads(done.stdout)
    for item in found:
        assert item["candidates"] > 2 and item["rejected"] == []
        assert (item["best"] != item["default"]) == (item["gain"] > 0)
        assert not item["gain"] or item["gain"] > 0.02
    return found


def test_runs_use_the_winners_and_off_does_not(tuned: Tuned) -> None:
    """A table of our own making, so that what wins on this machine does not matter."""
    kept = tuned.file.read_bytes()
    content = json.loads(kept)
    (attention,) = json.loads(tuned.done.stdout)
    default, other = attention["default"], {"TILE": 4, "TOKENS": 16}
    assert default != other
    content["winners"] = [
        {"kernel": attention["kernel"], "subject": attention["subject"],
         "default": default, "choice": other, "gain": 0.5}
    ]  # fmt: skip
    plain = tuned.generate(HRXMP_TUNED="off")
    sources = {r.kernel: r.source_digest for r in plain.records(records.CompileRequested)}
    content["sources"] = {"flash_attn_tile": sources["flash_attn_tile"]}
    tuned.file.write_text(json.dumps(content))
    try:
        with_it, flag = tuned.generate(), tuned.generate("--tuned", "off")
        warmed = tuned.run("--trace", "warm", "-m", tuned.model, "-ub", "64", "-o", "json")
        listed = json.loads(tuned.run("tune", "--list", "-o", "json").stdout)
    finally:
        tuned.file.write_bytes(kept)
    assert with_it.code == plain.code == flag.code == 0, with_it.said
    assert with_it.stdout == plain.stdout == flag.stdout
    assert products(plain) == products(flag) != products(with_it)
    (changed,) = [products(with_it)[key] for key in products(with_it).keys() - products(plain)]
    assert {name: changed[name] for name in other} == other
    assert products(with_it).keys() <= products(warmed).keys()
    assert [item["best"] for item in listed] == [other]


def test_a_table_of_other_kernels_is_said_and_ignored(tuned: Tuned) -> None:
    kept = tuned.file.read_bytes()
    try:
        tuned.file.write_text("{")
        done = tuned.generate()
    finally:
        tuned.file.write_bytes(kept)
    assert done.code == 0 and any(
        "tuned choices" in line and "corrupt" in line for line in done.said
    )
    assert products(done) == products(tuned.generate(HRXMP_TUNED="0"))


def test_tuned_choices_can_be_listed_and_removed(tuned: Tuned) -> None:
    name, kept = tuned.file.name, tuned.file.read_bytes()
    table = tuned.run("tune", "--list")
    assert table.code == 0 and table.stdout.startswith(("kernel", "nothing"))  # as it was found
    assert max(len(line) for line in table.stdout.splitlines()) <= 80
    cleared = tuned.run("tune", "--clear")
    assert "nothing" in tuned.run("tune", "--list").stdout
    assert cleared.code == 0 and not list(tuned.store.glob("tuned-*.json"))
    assert "none" in tuned.run("tune", "--clear").stdout
    (tuned.store / name).write_bytes(kept)


def test_what_tune_needs_is_said(tuned: Tuned) -> None:
    assert "needs a model" in tuned.run("tune").stderr
    done = hrxmp_run("tune", "-m", tuned.model, cache="off", device=tuned.device)
    assert done.code == 2 and "kernel store" in done.stderr
