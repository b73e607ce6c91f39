"""What the HTTP process knows of the model: its words, its template, its name. No weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import GGUFError
from localllm.gguf import GGUFFile
from localllm.models import trained_context
from localllm.server.protocol.answers import Capabilities
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class ServedModel:
    """`details` is what /v1/models tells beyond OpenAI's fields."""

    id: str
    created: int
    tokenizer: Tokenizer
    template: ChatTemplate
    details: dict[str, Any]

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            chat=True,
            completion=True,
            tools=True,  # in a generic format where the template knows none
            reasoning=self.template.reasoning_format is not None,
            structured_outputs=True,
        )


def load_served_model(path: Path, alias: str | None = None) -> ServedModel:
    """Reads vocabulary, template and metadata; ModelError if the file is not usable."""
    with GGUFFile.open(path) as file:
        tokenizer = load_tokenizer(file)
        return ServedModel(
            id=alias or path.stem,
            created=int(path.stat().st_mtime),
            tokenizer=tokenizer,
            template=ChatTemplate.load(file, tokenizer),
            details=_details(file, tokenizer),
        )


def _details(file: GGUFFile, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "name": file.get_str("general.name", None),
        "architecture": file.architecture,
        "quantization": quantization(file),
        "n_params": parameter_count(file),
        "n_vocab": tokenizer.vocab_size,
        "n_ctx_train": trained_context(file),
        "size": tensor_bytes(file),
    }


def parameter_count(file: GGUFFile) -> int:
    return sum(math.prod(tensor.shape) for tensor in file.tensors.values())


def tensor_bytes(file: GGUFFile) -> int:
    return sum(tensor.n_bytes for tensor in file.tensors.values())


def quantization(file: GGUFFile) -> str:
    """llama.cpp's name of what the file was made as, such as "Q4_K_M"; where the file does not
    say, the format of most bytes in the layers (embeddings often have another)."""
    from gguf import LlamaFileType

    try:
        kind = LlamaFileType(file.get_int("general.file_type") & ~LlamaFileType.GUESSED)
    except (GGUFError, ValueError):
        return _commonest_format(file)
    return kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _commonest_format(file: GGUFFile) -> str:
    n_bytes: Counter[str] = Counter()
    for in_layers in (True, False):
        for name, tensor in file.tensors.items():
            if not in_layers or name.startswith("blk."):
                n_bytes[tensor.type.name] += tensor.n_bytes
        if n_bytes:
            return n_bytes.most_common(1)[0][0]
    return "none"
