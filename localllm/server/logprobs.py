"""OpenAI's two shapes of log-probabilities, and vLLM's for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from localllm.engine.messages import TokenLogprobs
from localllm.server.shown_tokens import ShownToken
from localllm.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON knows no infinity


def chat_logprobs(tokenizer: Tokenizer, shown: Iterable[ShownToken]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat. The token that ended the generation is left out: the others'
    bytes joined are those of the text."""
    content = [
        {
            **_entry(tokenizer, token.logprobs.token, token.logprobs.logprob),
            "top_logprobs": [_entry(tokenizer, *top) for top in token.logprobs.top],
        }
        for token in shown
        if not token.is_end
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, shown: Iterable[ShownToken], start: int = 0
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion whose text begins at character `start`."""
    shown = list(shown)
    return {
        "tokens": [token_text(tokenizer, token.logprobs.token) for token in shown],
        "token_logprobs": [_finite(token.logprobs.logprob) for token in shown],
        "top_logprobs": [_top_texts(tokenizer, token.logprobs) for token in shown],
        "text_offset": [start + token.offset for token in shown],
    }


def echo_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str
) -> dict[str, Any]:
    """The same for a prompt with the log-probabilities of all its tokens but the first; `text` is
    what it reads as."""
    return {
        "tokens": [token_text(tokenizer, token) for token in prompt],
        "token_logprobs": [None, *(_finite(one.logprob) for one in logprobs)],
        "top_logprobs": [None, *(_top_texts(tokenizer, one) for one in logprobs)],
        "text_offset": _offsets(tokenizer, prompt, text),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token among the most likely."""
    told: list[dict[str, Any] | None] = [None]
    for one in logprobs:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1)]
        entries = {
            str(token): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": token_text(tokenizer, token),
            }
            for token, logprob, rank in [*ranked, (one.token, one.logprob, one.rank)]
        }
        told.append(entries)
    return told


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Logprobs of a completion, one part after the other."""
    whole: dict[str, Any] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    for part in parts:
        for name, values in part.items():
            whole[name] += values
    return whole


def visible_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token adds to the text, control tokens as they are written."""
    return tokenizer.token_bytes(token) or tokenizer.token_text(token).encode()


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """OpenAI writes a part of a character as `bytes:` and its bytes."""
    data = visible_bytes(tokenizer, token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "logprob": _finite(logprob),
        "bytes": list(visible_bytes(tokenizer, token)),
    }


def _top_texts(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> dict[str, float]:
    """The token itself is always among them. Of tokens with one text the likeliest counts."""
    texts: dict[str, float] = {}
    for token, logprob in (*logprobs.top, (logprobs.token, logprobs.logprob)):
        texts.setdefault(token_text(tokenizer, token), _finite(logprob))
    return texts


def _offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """Where each token begins in `text`, which may lack what encoding has put in front."""
    pieces = [visible_bytes(tokenizer, token) for token in prompt]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ends = []
    length = 0
    for piece in pieces:
        length += len(decoder.decode(piece))
        ends.append(length)
    length += len(decoder.decode(b"", final=True))
    missing = length - len(text)
    return [min(max(0, start - missing), len(text)) for start in [0, *ends[:-1]]]


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
