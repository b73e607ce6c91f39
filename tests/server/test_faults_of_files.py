"""Faults of the list in `test_faults.py` that are about model files and memory, as a client or who
starts the server meets them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from gguf import GGUFReader

from localllm.server.served_model import ServedModel
from tests.helpers import FIXTURES, ROOT
from tests.server.fakes import FakeEngine
from tests.server.real import HANG, RealServer, real_server

ARCHITECTURES = FIXTURES / "architectures"
TINY = ARCHITECTURES / "llama-format-q4_1.gguf"
WINDOWED = ARCHITECTURES / "gemma3-dense-00002-of-00002.gguf"  # keeps 32 positions in some layers
COMPLETIONS = "/v1/completions"
BLOCK = 16


@pytest.fixture(scope="module")
def windowed() -> Iterator[RealServer]:
    with real_server(WINDOWED) as running:
        yield running


def refusal(*arguments: str) -> str:
    """What `localllm serve` says where it does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "localllm", "serve", *arguments, "--port", "0"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=HANG,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def complete(server: RealServer, prompt: list[int], max_tokens: int) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=HANG)


def test_fault_15_a_second_turn_is_cached_with_sliding_windows(windowed: RealServer) -> None:
    first = [1 + i % 90 for i in range(100)]
    told = complete(windowed, first, 8).raise_for_status().json()
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    second = [*first, *range(20, 60)]
    told = complete(windowed, second, 8).raise_for_status().json()
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 100 // BLOCK * BLOCK


def test_fault_19_short_of_memory_all_are_answered_in_turn() -> None:
    with real_server(TINY, "--ctx-size", "256") as roomy:
        bytes_in_all = roomy.health()["kv_cache_bytes"]
        prompts = [[1 + (i + j) % 90 for j in range(40)] for i in range(8)]
        expected = [complete(roomy, prompt, 150).json()["choices"] for prompt in prompts]
    little = str(bytes_in_all // 8)
    with real_server(TINY, "--ctx-size", "256", "--kv-cache-memory", little) as server:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda prompt: complete(server, prompt, 150), prompts))
        assert [answer.json()["choices"] for answer in answers] == expected
        report = server.health()
        assert report["status"] == "ok"
        assert report["preemptions"] > 0, "there was room for all, so nothing was tested"


def test_fault_19_a_load_that_cannot_fit_is_refused_with_numbers() -> None:
    said = refusal(str(TINY), "--kv-cache-memory", "1TB")
    assert re.search(r"A KV cache of 1,000,000 MB does not fit: [\d,]+ MB of [\d,]+ MB", said)


def test_fault_21_a_corrupt_file_is_refused_by_the_place(tmp_path: Path) -> None:
    content = TINY.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[:-1000])
    last = max(GGUFReader(TINY).tensors, key=lambda tensor: tensor.data_offset)
    assert last.name in refusal(str(cut))
    wild = tmp_path / "wild.gguf"
    key = b"general.architecture"
    at = content.index(key) + len(key) + 4
    wild.write_bytes(content[:at] + b"\xff" * 8 + content[at + 8 :])
    assert key.decode() in refusal(str(wild))


def test_fault_22_any_shard_opens_the_set(windowed: RealServer) -> None:
    assert windowed.health()["architecture"] == "gemma3"


def test_fault_22_a_missing_shard_is_named(tmp_path: Path) -> None:
    alone = tmp_path / WINDOWED.name
    os.link(WINDOWED, alone)
    assert "gemma3-dense-00001-of-00002.gguf" in refusal(str(alone))


def test_fault_23_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    content = TINY.read_bytes()
    known = b"default"
    key = b"tokenizer.ggml.pre"
    at = content.index(known, content.index(key))
    strange = tmp_path / "strange.gguf"
    strange.write_bytes(content[:at] + b"novelty" + content[at + len(known) :])
    said = refusal(str(strange))
    assert key.decode() in said
    assert "'novelty' is not known" in said


@pytest.mark.anyio
async def test_fault_23_every_end_of_generation_stops(
    client: httpx.AsyncClient, engine: FakeEngine, gpt2: ServedModel
) -> None:
    """One BOS: `test_tokenizer.py` and `test_chat_template.py` try every vocabulary."""
    await client.post(COMPLETIONS, json={"prompt": "x"})
    await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert [submit.eos_ids for submit in engine.submitted] == [gpt2.tokenizer.eog_ids] * 2
