from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gguf import GGMLQuantizationType, quants  # noqa: E402

from localllm.backends.torch_common.dequantize import DEQUANTIZERS  # noqa: E402
from localllm.gguf import TensorType  # noqa: E402
from localllm.gguf.blocks import block_size, type_size  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", DEQUANTIZERS, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_values_are_gguf_pys_bit_for_bit(kind: TensorType) -> None:
    """Any bytes at all: infinite and missing scales too."""
    raw = np.random.default_rng(kind).integers(0, 256, (700, type_size(kind)), np.uint8)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, GGMLQuantizationType(kind)).reshape(-1, block_size(kind))
    found = DEQUANTIZERS[kind](torch.from_numpy(raw))
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.numpy(), expected)
