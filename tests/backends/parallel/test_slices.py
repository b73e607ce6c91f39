"""Parts of tensors: the values that they should have, and no more bytes than that."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.parallel.layout import Intervals, length
from localllm.backends.parallel.slices import Slice, sliced
from localllm.gguf import Tensor, TensorType
from tests.backends.cpu.programs import make_tensor

KINDS = (TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0, TensorType.Q4_0)


def tensor(kind: TensorType, *shape: int) -> Tensor:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return make_tensor("w", kind, values)


def cut(whole: Tensor, axis: int, parts: Intervals) -> Tensor:
    return sliced({"w": whole}, {"own": Slice("w", axis, parts)})["own"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "axis", "parts"),
    [
        ((10, 64), -2, ((3, 7),)),
        ((10, 64), -2, ((0, 2), (8, 10), (0, 1))),
        ((10, 128), -1, ((32, 96),)),
        ((10, 128), -1, ((96, 128), (0, 32))),
        ((3, 8, 64), -2, ((2, 5),)),
        ((3, 8, 96), -1, ((64, 96),)),
        ((96,), -1, ((32, 64), (32, 64))),
        ((6, 32), -2, ((1, 2), (4, 6))),
    ],
)
def test_values(kind: TensorType, shape: tuple[int, ...], axis: int, parts: Intervals) -> None:
    whole = tensor(kind, *shape)
    part = cut(whole, axis, parts)
    columns = [at for start, end in parts for at in range(start, end)]
    expected = np.take(whole.dequantize(), columns, axis)
    assert (part.name, part.type, part.shape) == ("own", kind, expected.shape)
    assert np.array_equal(part.dequantize(), expected)
    assert part.raw().shape == (part.rows, part.n_bytes // part.rows)
    assert part.n_bytes * shape[axis] == whole.n_bytes * length(parts)
    part.drop_pages()


def test_a_slice_without_parts_is_the_tensor_by_another_name() -> None:
    whole = tensor(TensorType.Q8_0, 4, 64)
    (part,) = sliced({"w": whole}, {"own": Slice("w")}).values()
    assert part.name == "own"
    assert np.shares_memory(part.raw(), whole.raw())


def test_rows_are_not_copied() -> None:
    whole = tensor(TensorType.Q8_0, 8, 64)
    assert np.shares_memory(cut(whole, -2, ((2, 5),)).raw(), whole.raw())


def test_blocks_are_not_cut() -> None:
    with pytest.raises(ValueError, match="borders of Q8_0's blocks of 32"):
        cut(tensor(TensorType.Q8_0, 4, 64), -1, ((0, 16),))


def test_what_the_file_lacks_is_left_for_loading_to_name() -> None:
    assert sliced({}, {"own": Slice("w")}) == {}
