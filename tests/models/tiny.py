"""Models of a few numbers, written to disk, to be changed in one place at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from localllm.backends.program import Op, Program
from localllm.gguf import GGUFFile
from localllm.models import build_program
from tests.gguf import build

KeyValue: TypeAlias = int | float | bool | str | Sequence[int]
Shapes: TypeAlias = dict[str, tuple[int, ...]]

WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB, LAYERS, CONTEXT = 8, 2, 1, 4, 12, 10, 2, 64


def base_keys() -> dict[str, KeyValue]:
    return {
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-6,
        "rope.freq_base": 1000.0,
    }


def base_tensors(layers: int = LAYERS) -> Shapes:
    shapes: Shapes = {
        "token_embd.weight": (VOCAB, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (VOCAB, WIDTH),
    }
    for layer in range(layers):
        for name, shape in layer_tensors().items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return shapes


def layer_tensors() -> Shapes:
    return {
        "attn_norm": (WIDTH,),
        "attn_q": (HEADS * HEAD_DIM, WIDTH),
        "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_output": (WIDTH, HEADS * HEAD_DIM),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (HIDDEN, WIDTH),
        "ffn_up": (HIDDEN, WIDTH),
        "ffn_down": (WIDTH, HIDDEN),
    }


@dataclass
class TinyModel:
    """`keys` without the architecture's prefix. `values` are those of tensors that are not 0.5."""

    architecture: str = "llama"
    keys: dict[str, KeyValue] = field(default_factory=base_keys)
    tensors: Shapes = field(default_factory=base_tensors)
    values: dict[str, Sequence[float]] = field(default_factory=dict)

    def add_to_layers(self, **shapes: tuple[int, ...]) -> None:
        for layer in range(int(str(self.keys["block_count"]))):
            for name, shape in shapes.items():
                self.tensors[f"blk.{layer}.{name}.weight"] = shape

    def drop_from_layers(self, *names: str) -> None:
        for name in list(self.tensors):
            if name.startswith("blk.") and name.split(".")[2] in names:
                del self.tensors[name]

    def write(self, folder: Path) -> Path:
        keys = [build.key("general.architecture", build.STRING, build.text(self.architecture))]
        keys += [_key(f"{self.architecture}.{name}", value) for name, value in self.keys.items()]
        infos, data = [], b""
        for name, shape in self.tensors.items():
            data += b"\0" * (-len(data) % 32)
            infos.append(build.TensorInfo(name, shape[::-1], 0, len(data)))
            values = self.values.get(name, [0.5] * math.prod(shape))
            data += np.array(values, np.float32).tobytes()
        path = folder / "tiny.gguf"
        path.write_bytes(build.gguf(keys, infos, data))
        return path

    def build(self, folder: Path, max_context: int = CONTEXT) -> Program:
        with GGUFFile.open(self.write(folder)) as file:
            return build_program(file, max_context)


def ops_of(program: Program, kind: type[Op]) -> list[Op]:
    return [op for op in program.ops if isinstance(op, kind)]


def _key(name: str, value: KeyValue) -> bytes:
    match value:
        case bool():
            return build.key(name, build.BOOL, build.number(build.BOOL, value))
        case int():
            return build.key(name, build.I64, build.number(build.I64, value))
        case float():
            return build.key(name, build.F64, build.number(build.F64, value))
        case str():
            return build.key(name, build.STRING, build.text(value))
        case _:
            elements = [build.number(build.I32, element) for element in value]
            return build.key(name, build.ARRAY, build.array(build.I32, elements))
