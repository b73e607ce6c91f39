"""Loading a real file: what it becomes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localllm.engine.core import EngineCore
from localllm.engine.loader import load_engine
from localllm.errors import InsufficientMemoryError, RequestError
from tests.engine.fakes import run, tokens_of
from tests.engine.processes import config, long_request
from tests.helpers import architecture_cases

TINY = config()
BLOCK_BYTES = 65536  # of TINY on the reference backend


def load(**options: object) -> tuple[EngineCore, list[str]]:
    said: list[str] = []
    return load_engine(replace(TINY, **options), said.append), said  # type: ignore[arg-type]


def test_by_default_the_trained_context_for_all_sequences() -> None:
    core, said = load(ctx_size=None)
    assert core.ready.context == 256
    assert core.ready.kv_blocks == (16 * 256 // 16,)
    assert core.ready.kv_bytes == core.ready.kv_blocks[0] * BLOCK_BYTES
    assert core.ready.architecture == "llama"
    assert not said
    core.close()


def test_a_context_beyond_the_training_is_granted_and_said() -> None:
    core, said = load(ctx_size=300)
    assert core.ready.context == 300
    assert said == ["the context of 300 tokens is beyond the 256 of the training"]
    core.close()


def test_memory_that_is_asked_for_is_what_is_taken() -> None:
    core, _ = load(ctx_size=256, kv_cache_memory=20 * BLOCK_BYTES + 1)
    assert core.ready.kv_blocks == (20,)
    core.close()


def test_an_asked_for_context_has_to_fit() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"256 tokens needs 1\.05 MB"):
        load(ctx_size=256, kv_cache_memory=15 * BLOCK_BYTES)


def test_more_memory_than_there_is_is_refused_with_numbers() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"1,000,000,000 MB does not fit: .* MB of"):
        load(kv_cache_memory=10**15)


def test_more_ranks_than_a_model_has_parts_are_refused_before_one_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("localllm.engine.loader.select", lambda _config: pytest.fail("too late"))
    with pytest.raises(RequestError, match="tensor_parallel_size is 1000000, the largest"):
        load(backend="torch", device="cpu", tensor_parallel_size=10**6)
    with pytest.raises(RequestError, match="pipeline_parallel_size is 77, the model can be cut"):
        load(backend="torch", device="cpu", pipeline_parallel_size=77)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'abacus'"):
        load(backend="abacus")


def test_few_tokens_per_step_and_many_sequences() -> None:
    core, _ = load(ctx_size=256, max_num_batched_tokens=3, max_num_seqs=16)
    requests = [long_request(f"s{i}", max_tokens=5) for i in range(6)]
    answers = {tuple(tokens_of(news)) for news in run(core, *requests).values()}
    assert len(answers) == 1
    assert len(answers.pop()) == 5
    core.close()


def test_a_model_with_a_sliding_window_has_two_groups() -> None:
    (case,) = architecture_cases("gemma3-dense")
    core, _ = load(model=case.gguf, ctx_size=64)
    assert len(core.ready.kv_blocks) == 2
    news = run(core, long_request("a", max_tokens=50), long_request("b", max_tokens=50))
    assert tokens_of(news["a"]) == tokens_of(news["b"])
    assert len(tokens_of(news["a"])) == 50
    core.close()


def test_the_file_may_vanish_once_it_is_loaded(tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(TINY.model.read_bytes())
    core, _ = load(model=copy)
    copy.unlink()
    assert tokens_of(run(core, long_request("a", max_tokens=3))["a"])
    core.close()
