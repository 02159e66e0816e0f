"""Whole models on each device: random ones of every weight type against a numpy forward pass, and
smollm2-135m against llama.cpp's exact float32 tokens and logits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hrxmp.clock import mono_ns
from hrxmp.dtypes import DType
from hrxmp.errors import ModelError, UsageError
from hrxmp.executor.engine import Executor
from hrxmp.executor.session import Link, Session
from hrxmp.identity import new_run_id
from hrxmp.kernels.device import Device
from hrxmp.models.generator import LlamaModel, generate
from hrxmp.models.gguf_file import GgufFile
from hrxmp.models.sampling import Sampler, SamplingParams
from hrxmp.settings import Settings
from tests.model_files import ORACLE, maker, smollm2, write_tiny
from tests.reference_llama import ReferenceLlama

TYPES = ["f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"]
MIXES = ["q4_k_m", "ud-q4_k_xl"]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def executor(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """An executor with synchronous JIT and a store of its own."""
    settings = Settings(
        async_jit=False, device=device.spec, cache=str(tmp_path_factory.mktemp("store"))
    )
    session = Session(settings, Link(run_id=new_run_id(), run_begin_ns=mono_ns()))
    yield session.executor
    session.close("ok")


@pytest.fixture(scope="module")
def real(executor: Executor) -> LlamaModel:
    return LlamaModel.load(executor, smollm2(), context=2048)


def off_by(found: np.ndarray | None, expected: np.ndarray) -> float:
    """Relative error in norm."""
    assert found is not None and found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("mix", TYPES + MIXES)
def test_every_weight_type_gives_the_references_logits(
    executor: Executor, tmp_path: Path, mix: str
) -> None:
    path = write_tiny(tmp_path / "m.gguf", mix, seed=3)
    reference = ReferenceLlama(path)
    model = LlamaModel.load(executor, path, ubatch=24)
    tokens = np.random.default_rng(1).integers(0, model.config.n_vocab, 61).tolist()
    assert off_by(model.prefill(tokens), reference.forward(tokens)[-1]) < 1e-4
    for token in (5, 600, 1279):
        assert off_by(model.decode(token), reference.forward([token])[-1]) < 1e-4
    assert model.length == 64


def test_a_cache_in_half_precision_is_as_exact_as_half_precision(
    executor: Executor, tmp_path: Path
) -> None:
    path = write_tiny(tmp_path / "m.gguf", "f32")
    reference = ReferenceLlama(path, kv_dtype=np.float16)
    model = LlamaModel.load(executor, path, kv_dtype=DType.F16)
    tokens = list(range(30))
    assert off_by(model.prefill(tokens), reference.forward(tokens)[-1]) < 1e-4
    assert off_by(model.decode(7), reference.forward([7])[-1]) < 1e-4


def test_without_rope_factors_and_with_a_head_of_its_own(
    executor: Executor, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    shape = msgspec.structs.replace(maker().TINY, tied=False, factors=False)
    maker().write_model(path, shape, "q4_k_m")
    reference = ReferenceLlama(path)
    model = LlamaModel.load(executor, path)
    assert not model.config.tied and not model.config.rope_factors
    assert off_by(model.prefill([1, 2, 3]), reference.forward([1, 2, 3])[-1]) < 1e-4


def test_micro_batches_do_not_change_the_result(executor: Executor, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "q8_0")
    tokens = list(range(100, 177))
    expected = ReferenceLlama(path).forward(tokens)[-1]
    for ubatch in (1, 2, 8, 33, 77, 512):
        model = LlamaModel.load(executor, path, ubatch=ubatch)
        assert off_by(model.prefill(tokens), expected) < 1e-4


def test_going_back_in_the_sequence_forgets_what_came_after(
    executor: Executor, tmp_path: Path
) -> None:
    model = LlamaModel.load(executor, write_tiny(tmp_path / "m.gguf"))
    model.prefill([1, 2, 3, 4])
    first = model.decode(5)
    model.prefill([9, 9, 9])
    model.length = 4
    assert np.array_equal(model.decode(5), first)


def test_decode_compiles_and_lowers_nothing_as_the_context_grows(
    executor: Executor, tmp_path: Path
) -> None:
    model = LlamaModel.load(executor, write_tiny(tmp_path / "m.gguf"))
    model.prefill([1, 2, 3])
    model.decode(4)
    builds, requests = executor.stats.program_builds, executor.totals.requests
    with executor.no_compiles():
        for token in range(100):
            model.decode(token)
    assert executor.stats.program_builds == builds
    assert executor.totals.requests == requests


def test_prompts_that_cannot_be_run(executor: Executor, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    model = LlamaModel.load(executor, path, context=8)
    with pytest.raises(UsageError, match="empty"):
        model.prefill([])
    with pytest.raises(UsageError, match="0 to 1279"):
        model.prefill([1280])
    with pytest.raises(ModelError, match="9 tokens after 0 are more than the context of 8"):
        model.prefill([1] * 9)
    assert len(list(generate(model, [1] * 6, Sampler(GREEDY)))) == 3  # the last one is not stored
    with pytest.raises(ModelError, match="trained with a context of 4096"):
        LlamaModel.load(executor, path, context=4097)


def test_generation_stops_before_an_end_token(executor: Executor, tmp_path: Path) -> None:
    model = LlamaModel.load(executor, write_tiny(tmp_path / "m.gguf"))
    free = list(generate(model, [1, 2, 3], Sampler(GREEDY), count=6))
    model.length = 0
    ends = frozenset(free[3:4])
    cut = free[: free.index(free[3])]
    assert list(generate(model, [1, 2, 3], Sampler(GREEDY), count=6, ends=ends)) == cut


@pytest.mark.parametrize("case", json.loads(ORACLE.read_text()), ids=lambda case: case["prompt"])
def test_the_oracles_48_greedy_tokens(real: LlamaModel, case: dict) -> None:
    real.length = 0
    logits = real.prefill(case["tokens"])
    assert logits is not None
    assert np.linalg.norm(logits) == pytest.approx(case["logits_norm"], rel=1e-3)
    for token, value in case["first_top8"]:
        assert logits[token] == pytest.approx(value, rel=1e-3)
    real.length = 0
    assert list(generate(real, case["tokens"], Sampler(GREEDY), count=48)) == case["greedy"]


def test_first_logits_are_within_a_thousandth_of_exact(real: LlamaModel) -> None:
    reference = ReferenceLlama(smollm2())
    for case in json.loads(ORACLE.read_text())[:3]:
        reference.reset()
        real.length = 0
        assert off_by(real.prefill(case["tokens"]), reference.forward(case["tokens"])[-1]) < 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layers": 3}, r"has no tensor 'blk\.2\.attn_norm\.weight'"),
        ({"n_layers": 1}, "has 9 tensors that the llama architecture does not use"),
        ({"n_ff": 768}, r"'blk\.0\.ffn_gate\.weight' with shape \(512, 256\)"),
        ({"n_heads": 8}, "with shape"),
        ({"n_kv_heads": 3}, "expected a multiple"),
        ({"n_vocab": 1281}, "1280 embedding rows, 1280 tokens and llama.vocab_size 1281"),
        ({"rms_eps": 0.0}, "rms epsilon"),
        ({"head_dim": 65}, "rotates 65 of 65"),
    ],
)
def test_metadata_that_does_not_fit_the_tensors(
    executor: Executor, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    script = maker()
    claimed = msgspec.structs.replace(script.TINY, **change)
    path = tmp_path / "m.gguf"
    script.write_model(path, script.TINY, "q8_0", tokenizer="bytes", claimed=claimed)
    with pytest.raises(ModelError, match=message):
        LlamaModel.load(executor, path)


def test_another_architecture_is_refused_with_what_is_supported(
    executor: Executor, tmp_path: Path
) -> None:
    content = write_tiny(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "n.gguf").write_bytes(content.replace(b"\x05\0\0\0\0\0\0\0llama",
                                                      b"\x05\0\0\0\0\0\0\0gemma"))  # fmt: skip
    file = GgufFile.open(tmp_path / "n.gguf")
    with pytest.raises(ModelError, match="architecture 'gemma'; supported are: llama"):
        LlamaModel.load(executor, file)
