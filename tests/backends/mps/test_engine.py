"""The engine over the backend for Apple's GPUs, with its kernels compiled for the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from localllm.backends.mps.backend import MpsBackend  # noqa: E402
from localllm.backends.selection import Selection  # noqa: E402
from localllm.engine import loader  # noqa: E402
from localllm.engine.core import EngineCore  # noqa: E402
from localllm.engine.messages import Submit  # noqa: E402
from localllm.sampling_params import SamplingParams  # noqa: E402
from tests.backends.mps.compiled import compiled_shaders  # noqa: E402
from tests.engine.fakes import run, tokens_of  # noqa: E402
from tests.engine.processes import config  # noqa: E402

pytestmark = pytest.mark.torch

MAX_TOKENS = 36
# Of one block each, which grow to three or four.
PROMPTS = [np.random.default_rng(n).integers(3, 120, 12 + n).tolist() for n in range(3)]


def load(monkeypatch: pytest.MonkeyPatch, **options: Any) -> EngineCore:
    backend = MpsBackend("bfloat16", 1, device="cpu", shaders=compiled_shaders())
    monkeypatch.setattr(loader, "select", lambda _: Selection(backend, ""))
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 64, **options}
    return loader.load_engine(replace(config(ctx_size=80), **limits), lambda _: None)


def request(number: int) -> Submit:
    sampling = {"temperature": 0.0} if number == 0 else {"temperature": 1.0, "seed": number}
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return Submit(f"s{number}", tuple(PROMPTS[number]), params, frozenset())


def test_the_same_bytes_alone_in_company_chunked_and_preempted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [request(number) for number in range(len(PROMPTS))]
    core = load(monkeypatch, prefix_cache=False)
    alone = {r.sequence_id: tokens_of(run(core, r)[r.sequence_id]) for r in requests}
    block_bytes = core.ready.kv_bytes // core.ready.kv_blocks[0]
    core.close()
    assert all(len(tokens) == MAX_TOKENS for tokens in alone.values())
    core = load(monkeypatch, max_num_batched_tokens=9, kv_cache_memory=5 * block_bytes)
    together = {name: tokens_of(news) for name, news in run(core, *requests).items()}
    assert together == alone
    assert core.stats.preemptions > 0
    core.close()
