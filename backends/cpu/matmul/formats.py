"""The table of weight formats that have kernels."""

from __future__ import annotations

from localllm.backends.cpu.matmul.floats import BF16, F16, F32
from localllm.backends.cpu.matmul.k_quants import Q4K, Q5K, Q6K
from localllm.backends.cpu.matmul.layout import Layout
from localllm.backends.cpu.matmul.legacy import Q40, Q41, Q50, Q51, Q80
from localllm.backends.cpu.matmul.low_bits import Q2K, Q3K
from localllm.backends.cpu.matmul.tables import IQ4NL, IQ4XS, MXFP4

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        F32(),
        F16(),
        BF16(),
        Q40(),
        Q41(),
        Q50(),
        Q51(),
        Q80(),
        Q2K(),
        Q3K(),
        Q4K(),
        Q5K(),
        Q6K(),
        IQ4NL(),
        IQ4XS(),
        MXFP4(),
    )
}
