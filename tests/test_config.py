"""Sizes and bounds of the configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localllm.backends.base import BLOCK_TOKENS
from localllm.config import (
    LEAST_CTX_SIZE,
    MOST_THREADS,
    EngineConfig,
    HttpConfig,
    config_hash,
    parse_size,
)
from localllm.errors import RequestError


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("48MB", 48_000_000),
        ("2GiB", 2 * 2**30),
        ("1.5G", 3 * 2**29),
        ("512k", 512 * 1024),
        (" 7 kb ", 7000),
        ("1tb", 10**12),
        ("1000000", 1_000_000),
        ("10B", 10),
        (4096, 4096),
    ],
)
def test_sizes(text: str | int, n_bytes: int) -> None:
    assert parse_size(text, "kv_cache_memory") == n_bytes


@pytest.mark.parametrize("text", ["", "MB", "lots", "-1", "1.2.3GB", "5 XB", "1e9", -5])
def test_what_is_no_size_is_refused_by_name(text: str | int) -> None:
    with pytest.raises(RequestError, match="is not a size such as 48MB") as caught:
        parse_size(text, "kv_cache_memory")
    assert caught.value.param == "kv_cache_memory"


@pytest.mark.parametrize(
    "name",
    [
        "threads",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tensor_parallel_size",
        "pipeline_parallel_size",
    ],
)
def test_counts_below_one_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} must be at least 1, not 0") as caught:
        EngineConfig(model=Path("m.gguf"), **{name: 0})  # type: ignore[arg-type]
    assert caught.value.param == name
    with pytest.raises(RequestError, match=f"{name} must be at least 1, not '2'"):
        EngineConfig(model=Path("m.gguf"), **{name: "2"})  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [-1, 0, 1, LEAST_CTX_SIZE - 1])
def test_a_context_smaller_than_a_block_is_refused(size: int) -> None:
    with pytest.raises(RequestError, match=f"ctx_size must be at least 16, not {size}") as caught:
        EngineConfig(model=Path("m.gguf"), ctx_size=size)
    assert caught.value.param == "ctx_size"
    assert EngineConfig(model=Path("m.gguf"), ctx_size=LEAST_CTX_SIZE).ctx_size == BLOCK_TOKENS


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_of_memory_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(RequestError, match="more than 0 and at most 1") as caught:
        EngineConfig(model=Path("m.gguf"), gpu_memory_utilization=share)
    assert caught.value.param == "gpu_memory_utilization"


def test_threads_without_measure_are_refused() -> None:
    most = max(MOST_THREADS, os.cpu_count() or 1)
    assert EngineConfig(model=Path("m.gguf"), threads=most).threads == most
    with pytest.raises(RequestError, match=f"threads must be at most {most}") as caught:
        EngineConfig(model=Path("m.gguf"), threads=10**6)
    assert caught.value.param == "threads"


@pytest.mark.parametrize(
    "options", [{"backend": "cpu"}, {"backend": "reference"}, {"device": "mps"}]
)
@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_of_what_computes_alone_are_refused(options: dict[str, str], name: str) -> None:
    with pytest.raises(RequestError, match="on one rank alone") as caught:
        EngineConfig(model=Path("m.gguf"), **options, **{name: 2})  # type: ignore[arg-type]
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["queue_timeout", "request_timeout", "max_body_size"])
def test_limits_of_nothing_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} must be more than 0, not 0") as caught:
        HttpConfig(**{name: 0})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_what_tells_engines_apart() -> None:
    one = EngineConfig(model=Path("/a/m.gguf"))
    assert config_hash(one) == config_hash(EngineConfig(model=Path("/b/m.gguf")))
    assert config_hash(one) != config_hash(EngineConfig(model=Path("/a/m.gguf"), threads=2))
    with pytest.raises(RequestError, match="max_queue must be 0 or more"):
        HttpConfig(max_queue=-1)
    with pytest.raises(RequestError, match="go together"):
        HttpConfig(ssl_keyfile=Path("key.pem"))
