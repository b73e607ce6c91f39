"""Sizes and bounds of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.backends.base import BLOCK_TOKENS
from localllm.config import LEAST_CTX_SIZE, EngineConfig, parse_size
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


@pytest.mark.parametrize("name", ["threads", "max_num_seqs", "max_num_batched_tokens"])
def test_counts_below_one_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} must be at least 1, not 0") as caught:
        EngineConfig(model=Path("m.gguf"), **{name: 0})  # type: ignore[arg-type]
    assert caught.value.param == name


@pytest.mark.parametrize("size", [-1, 0, 1, LEAST_CTX_SIZE - 1])
def test_a_context_smaller_than_a_block_is_refused(size: int) -> None:
    with pytest.raises(RequestError, match=f"ctx_size must be at least 16, not {size}") as caught:
        EngineConfig(model=Path("m.gguf"), ctx_size=size)
    assert caught.value.param == "ctx_size"
    assert EngineConfig(model=Path("m.gguf"), ctx_size=LEAST_CTX_SIZE).ctx_size == BLOCK_TOKENS
