"""Choosing the instruction set."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from llvmlite import binding as llvm
from numba import config

from localllm.backends.cpu import target
from localllm.errors import LocalLLMError

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has not chosen yet."""
    monkeypatch.setattr(target, "_current", None)
    return monkeypatch


def has(cpu: pytest.MonkeyPatch, features: Iterable[str]) -> None:
    cpu.setattr(target, "cpu_features", lambda: frozenset(features))


@pytest.mark.parametrize(
    ("features", "best"),
    [
        ((), "scalar"),
        (("avx2", "fma"), "scalar"),
        (_AVX2, "avx2"),
        ((*_AVX2, "avx512f"), "avx2"),
        ((*_AVX2, "avxvnni"), "vnni"),
        ((*_AVX2, "avx512vl", "avx512vnni"), "vnni"),
        ((*_AVX2, *_AVX512), "avx512"),
        (("neon",), "scalar"),
        (("neon", "dotprod"), "dotprod"),
        (("neon", "dotprod", "i8mm"), "i8mm"),
    ],
)
def test_auto_is_the_best_that_the_cpu_has(
    cpu: pytest.MonkeyPatch, features: tuple[str, ...], best: str
) -> None:
    has(cpu, features)
    assert target.resolve("auto") == best
    assert target.current() == best


def test_what_the_cpu_lacks_is_named(cpu: pytest.MonkeyPatch) -> None:
    has(cpu, ("avx2", "fma"))
    with pytest.raises(LocalLLMError, match=r"isa avx2 needs f16c, which this CPU lacks"):
        target.use("avx2")
    has(cpu, _AVX2)
    with pytest.raises(LocalLLMError, match="isa vnni needs avxvnni"):
        target.use("vnni")
    with pytest.raises(LocalLLMError, match="unknown isa 'mmx'"):
        target.use("mmx")


def test_a_process_keeps_its_choice(cpu: pytest.MonkeyPatch) -> None:
    has(cpu, _AVX2)
    assert target.use("scalar") == "scalar"
    assert target.use("scalar") == "scalar"
    with pytest.raises(LocalLLMError, match="already use isa scalar"):
        target.use("auto")


def test_features_follow_what_numba_compiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx2,-fma, +f16c")
    assert target.cpu_features() == {"avx2", "f16c"}


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("cortex-a72", {"neon"}),
        ("neoverse-n1", {"neon", "dotprod"}),
        ("apple-m1", {"neon", "dotprod"}),
        ("neoverse-v1", {"neon", "dotprod", "i8mm"}),
        ("apple-m2", {"neon", "dotprod", "i8mm"}),
    ],
)
def test_an_arm_processors_dot_products_are_known_by_its_name(
    name: str, features: set[str]
) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        llvm.Target.from_triple("aarch64-linux-gnu")
    except RuntimeError as error:
        pytest.skip(f"llvmlite here was built without Arm: {error}")
    assert target.arm_features("aarch64-linux-gnu", name) == features
