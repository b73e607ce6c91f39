"""Ranks that are started by hand or by torchrun: what is read from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.backends import selection
from localllm.backends.base import MemoryInfo
from localllm.backends.parallel.memory import RankMemory, all_memory, check_parts_fit
from localllm.backends.parallel.ranks import Ranks
from localllm.backends.parallel.torchrun import Torchrun
from localllm.config import EngineConfig
from localllm.errors import InsufficientMemoryError, RequestError

VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def config(tensor: int = 2, stages: int = 2, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=Path("m.gguf"),
        backend="torch",
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        **options,
    )


def test_all_variables_make_a_rank() -> None:
    assert Torchrun.find(config(), VARIABLES) == Torchrun(3, 4, 1, 1, "node0", 29500)
    more = VARIABLES | {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert Torchrun.find(config(), more) == Torchrun(3, 4, 1, 2, "node0", 29500, has_store=True)


@pytest.mark.parametrize("missing", VARIABLES)
def test_without_one_of_them_localllm_starts_the_ranks(missing: str) -> None:
    rest = {name: value for name, value in VARIABLES.items() if name != missing}
    assert Torchrun.find(config(), rest) is None


def test_one_rank_alone_asks_nobody() -> None:
    alone = VARIABLES | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert Torchrun.find(config(1, 1), alone) is None


def test_ranks_that_were_told_no_sizes_are_refused() -> None:
    with pytest.raises(RequestError, match=r"torchrun started 4 ranks; .* is 1"):
        Torchrun.find(config(1, 1), VARIABLES)


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(RequestError, match=r"torchrun started 4 ranks; .* is 6"):
        Torchrun.find(config(3, 2), VARIABLES)


@pytest.mark.parametrize(
    ("name", "text", "least", "most"),
    [
        ("RANK", "first", 0, 3),
        ("RANK", "4", 0, 3),
        ("RANK", "-1", 0, 3),
        ("WORLD_SIZE", "0", 1, 65535),
        ("LOCAL_RANK", "", 0, 3),
        ("LOCAL_WORLD_SIZE", "5", 1, 4),
        ("MASTER_PORT", "http", 1, 65535),
        ("MASTER_PORT", "70000", 1, 65535),
    ],
)
def test_variables_that_make_no_sense_are_named(
    name: str, text: str, least: int, most: int
) -> None:
    words = f"the environment variable {name} is '{text}', not a number of {least} to {most}"
    with pytest.raises(RequestError, match=f"^{words}$"):
        Torchrun.find(config(), VARIABLES | {name: text})


@pytest.mark.torch
def test_too_few_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(selection, "_gpu_count", lambda: 3)
    monkeypatch.setattr(selection, "_trouble_with", lambda _: None)
    with pytest.raises(RequestError, match="4 ranks need as many NVIDIA GPUs: this machine has 3"):
        selection.select(config())


def test_what_only_gpus_do_is_refused_on_the_cpu() -> None:
    with pytest.raises(RequestError, match="fast is an option of the device cuda"):
        selection.select(config(device="cpu", fast=True))


def test_ranks_without_torch_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_has_torch", lambda: False)
    with pytest.raises(RequestError, match=r"pip install localllm\[torch\]"):
        selection.select(config(device="cpu"))


def test_who_is_who() -> None:
    ranks = Ranks(tensor=2, stages=3)
    assert [ranks.place(rank) for rank in range(ranks.count)] == [
        (stage, tensor) for stage in range(3) for tensor in range(2)
    ]
    assert [ranks.of_stage(stage) for stage in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert ranks.with_logits == 4
    assert str(ranks) == "6 ranks (tensor 2, pipeline 3)"


def test_ranks_of_one_machine_share_its_memory() -> None:
    machine = RankMemory(MemoryInfo(100, 80), "a")
    other = RankMemory(MemoryInfo(90, 30), "b")
    assert all_memory([machine, machine]) == MemoryInfo(100, 80)
    assert all_memory([machine, machine, other]) == MemoryInfo(150, 90)
    check_parts_fit([machine, machine, other], [40, 40, 30])
    with pytest.raises(InsufficientMemoryError, match="Rank 1 needs"):
        check_parts_fit([machine, machine, other], [40, 41, 30])


def test_devices_with_memory_of_their_own_share_nothing() -> None:
    small = RankMemory(MemoryInfo(100, 80, dedicated=True), None)
    large = RankMemory(MemoryInfo(200, 100, dedicated=True), None)
    assert all_memory([large, small]) == MemoryInfo(200, 160, dedicated=True)
