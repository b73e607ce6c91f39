"""The tensors of a file, checked as a model asks for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from localllm.errors import GGUFError
from localllm.gguf import GGUFFile

_LAYER = re.compile(r"blk\.([0-9]{1,9})\.")


class Tensors:
    """Presence and shapes. Every refusal is a GGUFError that names the tensor."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in file.tensors.items()
        }

    def has(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor that has to be there, with so many dimensions, none empty."""
        if name not in self.shapes:
            raise GGUFError(f"{self._file.path.name}: tensor {name!r} is missing")
        shape = self.shapes[name]
        if len(shape) != dimensions or 0 in shape:
            self._refuse_shape(name, f"{dimensions} dimensions")
        return shape

    def need(self, name: str, *shape: int) -> str:
        """The name itself, once the tensor is known to have this shape."""
        if self.shape(name, len(shape)) != shape:
            self._refuse_shape(name, _show(shape))
        return name

    def optional(self, name: str, *shape: int) -> str | None:
        return self.need(name, *shape) if name in self.shapes else None

    def divisors(self, name: str, length: int) -> npt.NDArray[np.float64]:
        """A vector to divide by: finite and nowhere zero."""
        self.need(name, length)
        values = self._file.tensors[name].dequantize().astype(np.float64)
        if not (np.isfinite(values).all() and values.all()):
            raise GGUFError(f"{self._file.path.name}: tensor {name!r} holds no valid divisors")
        return values

    def refuse_unused(self, used: Iterable[str], layers: int, spare_layers: int) -> None:
        """A layer's tensor that nothing reads means that the answers would be wrong.

        The `spare_layers` after the first `layers` may be there without being computed.
        """
        for name in sorted(self.shapes.keys() - set(used)):
            match = _LAYER.match(name)
            if match and not layers <= int(match[1]) < layers + spare_layers:
                raise GGUFError(
                    f"{self._file.path.name}: tensor {name!r} has no place in architecture "
                    f"{self._file.architecture!r}"
                )

    def _refuse_shape(self, name: str, expected: str) -> None:
        raise GGUFError(
            f"{self._file.path.name}: tensor {name!r} has shape {_show(self.shapes[name])}, "
            f"expected {expected}"
        )


def _show(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
