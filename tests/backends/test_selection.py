from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.backends import selection
from localllm.config import EngineConfig
from localllm.errors import RequestError


def select(**options: Any) -> selection.Selection:
    chosen = selection.select(EngineConfig(model=Path("x.gguf"), threads=1, **options))
    chosen.backend.close()
    return chosen


def pretend(monkeypatch: pytest.MonkeyPatch, *, nvidia: bool, apple: bool, torch: bool) -> None:
    monkeypatch.setattr(selection, "_has_nvidia_gpu", lambda: nvidia)
    monkeypatch.setattr(selection, "_has_apple_gpu", lambda: apple)
    monkeypatch.setattr(selection, "_has_torch", lambda: torch)


def test_auto_says_why_it_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, nvidia=False, apple=False, torch=True)
    chosen = select()
    assert chosen.backend.name == "cpu"
    assert chosen.why.startswith("no NVIDIA or Apple GPU was found")


@pytest.mark.parametrize(("nvidia", "apple", "name"), [(1, 0, "NVIDIA"), (0, 1, "Apple")])
def test_a_gpu_that_torch_is_missing_for_is_told(
    monkeypatch: pytest.MonkeyPatch, nvidia: bool, apple: bool, name: str
) -> None:
    pretend(monkeypatch, nvidia=nvidia, apple=apple, torch=False)
    chosen = select()
    assert chosen.backend.name == "cpu"
    assert f"the {name} GPU of this machine is not used" in chosen.why
    assert "pip install localllm[torch]" in chosen.why


def test_cuda_goes_before_mps_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_trouble_with", lambda _: None)
    for nvidia, apple, device in ((True, True, "cuda"), (False, True, "mps")):
        pretend(monkeypatch, nvidia=nvidia, apple=apple, torch=True)
        assert selection._best_device("auto")[0] == device


@pytest.mark.parametrize("triton", [True, False])
def test_cuda_has_its_own_kernels_where_triton_is(
    monkeypatch: pytest.MonkeyPatch, triton: bool
) -> None:
    made: list[tuple[object, ...]] = []

    class Backend:
        def __init__(self, *args: object, **_: object) -> None:
            made.append(args)

        def close(self) -> None:
            pass

    modules = ("localllm.backends.cuda.backend", "localllm.backends.torch_common.backend")
    for module, name in zip(modules, ("CudaBackend", "TorchBackend"), strict=True):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: Backend}))
    pretend(monkeypatch, nvidia=True, apple=False, torch=True)
    monkeypatch.setattr(selection, "_trouble_with", lambda _: None)
    monkeypatch.setattr(selection, "_has_triton", lambda: triton)
    chosen = select(fast=triton)
    assert made == [("bfloat16", "cuda", True, "auto") if triton else ("cuda", "bfloat16", 1)]
    assert ("Triton is not installed" in chosen.why) != triton
    select(device="cuda", dtype="float16", kv_cache_dtype="q8_0")
    assert ("float16" in made[1], "cuda" in made[1]) == (True, True)


def test_fast_is_refused_with_the_reason_where_auto_takes_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, nvidia=False, apple=False, torch=True)
    with pytest.raises(RequestError, match="no NVIDIA or Apple GPU was found"):
        select(fast=True)


@pytest.mark.parametrize("options", [{"backend": "torch"}, {"device": "cuda"}, {"device": "mps"}])
def test_without_torch_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    pretend(monkeypatch, nvidia=False, apple=False, torch=False)
    with pytest.raises(RequestError, match=r"pip install localllm\[torch\]"):
        select(**options)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"device": "tpu"}, "device"),
        ({"backend": "abacus"}, "backend"),
        ({"backend": "torch", "dtype": "int3"}, "dtype"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"backend": "cpu", "device": "cuda"}, "device"),
        ({"backend": "cpu", "fast": True}, "fast"),
        ({"backend": "torch", "device": "cpu", "fast": True}, "fast"),
        ({"backend": "torch", "kv_cache_dtype": "q2_k"}, "kv_cache_dtype"),
        ({"device": "cpu", "kv_cache_dtype": "q8_0"}, "kv_cache_dtype"),
        ({"backend": "cpu", "kv_cache_dtype": "q8_0"}, "kv_cache_dtype"),
        ({"backend": "reference", "kv_cache_dtype": "q8_0"}, "kv_cache_dtype"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, str], param: str) -> None:
    with pytest.raises(RequestError) as error:
        select(**options)
    assert error.value.param == param


@pytest.mark.torch
@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_an_error(device: str) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RequestError, match=f"there is no device {device}: torch"):
        select(backend="torch", device=device)
