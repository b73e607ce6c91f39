"""The text side of a request, once before the first: what is made on first use is made by then."""

from __future__ import annotations

from contextlib import suppress

from localllm.errors import LocalLLMError
from localllm.server.chat_prompt import prepare_chat
from localllm.server.protocol.chat import ChatRequest
from localllm.server.protocol.completions import CompletionRequest
from localllm.server.served_model import ServedModel
from localllm.server.text import encode_prompts
from localllm.text.bound import TextBound

_TEXT = "Once"
_BOUND = TextBound(1 << 20, "messages", whole=False)


def rehearse(model: ServedModel) -> ServedModel:
    """Prepares a completion and a chat, and forgets them; returns the model."""
    completion = CompletionRequest.model_validate({"prompt": _TEXT})
    completion.sampling_params(model.tokenizer.vocab_size, 1)
    encode_prompts(model.tokenizer, completion.prompts, _BOUND)
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": _TEXT}]})
    params = chat.sampling_params(model.tokenizer.vocab_size, 1)
    with suppress(LocalLLMError):  # a template of its own mind; requests will hear of it
        prepare_chat(model.template, model.tokenizer, chat, params, _BOUND)
    return model
