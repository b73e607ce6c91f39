"""What the HTTP process knows of the model: its words, its template, its name. No weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The format that holds most of the file's bytes."""
    n_bytes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        n_bytes[tensor.type.name] += tensor.n_bytes
    return n_bytes.most_common(1)[0][0] if n_bytes else "none"
