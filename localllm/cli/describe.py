"""What `localllm info` tells about a model file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from localllm.backends.program import KVGroup
from localllm.errors import ModelError
from localllm.gguf import GGUFFile
from localllm.models import build_program, trained_context
from localllm.server.served_model import parameter_count, quantization, tensor_bytes
from localllm.text.tokenizer import load_tokenizer

_KV_ELEMENT_BYTES = 2
_CHAT_TEMPLATE = "tokenizer.chat_template"


def describe(path: Path) -> Iterator[tuple[str, str]]:
    """Names and values, in reading order. What this version cannot use is said, not raised;
    ModelError when the file cannot be read at all."""
    with GGUFFile.open(path) as file:
        yield "file", str(path)
        if len(file.shards) > 1:
            yield "shards", str(len(file.shards))
        yield "name", file.get_str("general.name", path.stem)
        yield "architecture", file.architecture
        yield "parameters", _count(parameter_count(file))
        yield "quantization", quantization(file)
        yield "tensors", _tensors(file)
        yield from _model(file)
        yield "tokenizer", _tokenizer(file)
        yield "chat template", _template(file)


def _model(file: GGUFFile) -> Iterator[tuple[str, str]]:
    weights = size_text(tensor_bytes(file))
    try:
        context = trained_context(file)
        groups = build_program(file, context).kv_groups
    except ModelError as error:
        yield "not supported", str(error)
        yield "memory", f"about {weights} of weights"
        return
    yield "context", f"{context:,} tokens"
    per_token = sum(map(_kv_bytes_per_token, groups))
    full = sum(_kv_bytes_per_token(g) * min(context, g.window or context) for g in groups)
    yield (
        "memory",
        f"about {weights} of weights; of context {size_text(1024 * per_token)} for 1,024 tokens, "
        f"{size_text(full)} for {context:,}",
    )


def _kv_bytes_per_token(group: KVGroup) -> int:
    return _KV_ELEMENT_BYTES * sum(
        layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in group.layers
    )


def _tensors(file: GGUFFile) -> str:
    number: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        number[tensor.type.name] += 1
        n_bytes[tensor.type.name] += tensor.n_bytes
    kinds = (f"{number[kind]} {kind} ({size_text(size)})" for kind, size in n_bytes.most_common())
    return ", ".join(kinds) or "none"


def _tokenizer(file: GGUFFile) -> str:
    kind = file.get_str("tokenizer.ggml.model", None)
    pre = file.get_str("tokenizer.ggml.pre", None)
    try:
        size = load_tokenizer(file).vocab_size
    except ModelError as error:
        return f"{kind}: {error}"
    return f"{kind}{f' ({pre})' if pre else ''}, {size:,} tokens"


def _template(file: GGUFFile) -> str:
    source = file.get_str(_CHAT_TEMPLATE, None)
    if source is None:
        return "none in the file: ChatML is used"
    tools = "with" if "tools" in source else "without"
    return f"{len(source):,} characters, {tools} tools"


def _count(number: int) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"


def size_text(n_bytes: int) -> str:
    """Three digits or so, in binary units."""
    size, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or size >= 100 else 1
    return f"{size:.{digits}f} {units[0]}"
