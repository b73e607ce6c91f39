"""Raw text to token ids, as /v1/completions and /tokenize do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.errors import RequestError
from localllm.text.bound import TextBound
from localllm.text.tokenizer import Tokenizer


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int]], bound: TextBound
) -> list[list[int]]:
    """Special tokens in a raw prompt are meant; token ids are taken as they are, once checked."""
    encoded = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            encoded.append(tokenizer.encode(prompt, parse_special=True, bound=bound))
        else:
            where = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            encoded.append(check_ids(tokenizer, prompt, where))
    return encoded


def echo_texts(
    tokenizer: Tokenizer,
    given: Sequence[str | Sequence[int]],
    prompts: Sequence[Sequence[int]],
) -> list[str]:
    """What prompts read as in front of their completions."""
    return [_echo_text(tokenizer, one, ids) for one, ids in zip(given, prompts, strict=True)]


def _echo_text(tokenizer: Tokenizer, given: str | Sequence[int], ids: Sequence[int]) -> str:
    """As it was given, where it was a text of which nothing was cut off; else its tokens, without
    the one that begins every prompt."""
    if isinstance(given, str) and len(tokenizer.encode(given, parse_special=True)) == len(ids):
        return given
    begins = bool(ids) and ids[0] == tokenizer.bos_id
    return tokenizer.decode(ids[1:] if begins else ids, skip_special=False)


def check_ids(tokenizer: Tokenizer, ids: Sequence[int], param: str) -> list[int]:
    """The ids, if the vocabulary has all of them; else RequestError."""
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise RequestError(
                f"{param}: token id {token} is not in the vocabulary of {tokenizer.vocab_size}",
                param=param,
            )
    return list(ids)


def special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """Those with a meaning that every model has or lacks, as the vocabulary writes them."""
    ids = {
        "bos_token": tokenizer.bos_id,
        "eos_token": tokenizer.eos_id,
        "pad_token": tokenizer.pad_id,
        "unk_token": tokenizer.unk_id,
    }
    return {
        name: None if token is None else tokenizer.token_text(token) for name, token in ids.items()
    }
