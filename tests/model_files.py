"""Model files for tests: tiny random ones, written on the spot, and smollm2-135m by name."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from hrxmp.errors import ModelError
from hrxmp.models import files

ROOT = Path(__file__).parent.parent
ORACLE = ROOT / "tests" / "data" / "smollm2-135m-f32.json"


@cache
def maker() -> ModuleType:
    """The generator script in benchmarks, as a module."""
    spec = importlib.util.spec_from_file_location(
        "make_llama_1b", ROOT / "benchmarks" / "make_llama_1b.py"
    )
    if spec is None or spec.loader is None:
        raise RuntimeError("benchmarks/make_llama_1b.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_tiny(path: Path, mix: str = "q4_k_m", *, tokenizer: str = "bytes", seed: int = 0) -> Path:
    """A llama of two layers, about 1 MB, random weights of the given mix."""
    maker().write_model(path, maker().TINY, mix, seed=seed, tokenizer=tokenizer)
    return path


@cache
def smollm2() -> Path:
    """smollm2-135m, fetched once into the user's cache; skips the test where that is impossible."""
    try:
        return files.resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"smollm2-135m cannot be fetched here: {error.message}")
