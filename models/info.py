"""What a model file is, without loading it: for listings and for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from localllm.gguf import GGUFFile
from localllm.models.registry import ARCHITECTURES

# general.file_type: the recipe by which a file was quantized.
_FILE_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
}


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """`formats` are the bytes stored in each tensor format, largest first. A count that the file
    does not give in this form (or gives per layer) is None."""

    name: str
    architecture: str
    supported: bool
    parameters: int
    file_type: str
    formats: Mapping[str, int]
    size: int  # bytes of all shards
    context: int | None
    layers: int | None
    width: int | None
    heads: int | None
    kv_heads: int | None
    experts: int | None
    vocabulary: int | None

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        """Needs `general.architecture` alone, so that unsupported models can be described too."""
        formats: Counter[str] = Counter()
        for tensor in file.tensors.values():
            formats[tensor.type.name] += tensor.n_bytes
        ordered = dict(formats.most_common())
        architecture = file.architecture
        embedding = file.tensors.get("token_embd.weight")

        def count(key: str) -> int | None:
            value = file.metadata.get(f"{architecture}.{key}")
            return value if type(value) is int else None

        name = file.metadata.get("general.name")
        recipe = file.metadata.get("general.file_type")
        heads = count("attention.head_count")
        return cls(
            name=name if isinstance(name, str) and name else file.path.stem,
            architecture=architecture,
            supported=architecture in ARCHITECTURES,
            parameters=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
            file_type=(_FILE_TYPES.get(recipe, "") if type(recipe) is int else "")
            or next(iter(ordered), "unknown"),
            formats=ordered,
            size=sum(path.stat().st_size for path in file.shards),
            context=count("context_length"),
            layers=count("block_count"),
            width=count("embedding_length"),
            heads=heads,
            kv_heads=count("attention.head_count_kv") or heads,
            experts=count("expert_count"),
            vocabulary=embedding.shape[0] if embedding and len(embedding.shape) == 2 else None,
        )
