"""A GPU without values: torch's meta device, watched as strictly as Metal's would have to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localllm.backends.torch_common.target import Target

DEVICE = torch.device("meta")
_COPIES = ("aten::_to_copy", "aten::copy_")


class ElsewhereTarget(Target):
    """A device that, like Apple's, computes no float64."""

    @property
    def precise(self) -> torch.device:
        return torch.device("cpu")


class Elsewhere(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that reach the device, down to those that are not made of others.

    What is copied from there to the CPU arrives as zeros. Fails where an operation mixes devices
    or meets float64.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: set[str] = set()

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function._can_decompose():
            with self:
                return function.decompose(*args, **kwargs)
        name: str = function.name()  # type: ignore[no-untyped-call]
        given = list(_tensors((args, kwargs)))
        if any(t.device == DEVICE for t in given):
            if _goes_to_the_cpu(name, args, kwargs):
                return _zeros_like(name, args, kwargs)
            here = [t for t in given if t.device != DEVICE and t.dim()]
            assert not here or name in _COPIES, f"{name} mixes devices"
        out = function(*args, **kwargs)
        there = [t for t in (*_tensors(out), *given) if t.device == DEVICE]
        if there:
            self.operations.add(name)
            assert all(t.dtype != torch.float64 for t in there), f"{name} in float64"
        return out


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _goes_to_the_cpu(name: str, args: Any, kwargs: Any) -> bool:
    if name == "aten::copy_":
        return bool(args[0].device != DEVICE)
    device = kwargs.get("device")
    return name == "aten::_to_copy" and device is not None and torch.device(device) != DEVICE


def _zeros_like(name: str, args: Any, kwargs: Any) -> Tensor:
    if name == "aten::copy_":
        return args[0].zero_()  # type: ignore[no-any-return]
    return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)


class ShadersElsewhere:
    """A `ShaderLibrary` that computes nothing."""

    def __init__(self) -> None:
        self.launches: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def launch(weights: Tensor, x: Tensor, out: Tensor, *numbers: int, **grid: Any) -> None:
            assert {weights.device, x.device, out.device} == {DEVICE}
            assert (weights.dtype, x.dtype, out.dtype) == (torch.uint8, *[torch.float32] * 2)
            assert all(isinstance(number, int) for number in numbers)
            assert set(grid) == {"threads", "group_size"}
            self.launches.append(name)

        return launch
