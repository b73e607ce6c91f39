"""The bodies of POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from localllm.server.protocol.base import MAX_TOKEN_IDS, RequestBody
from localllm.server.protocol.chat import TEMPLATE_NOT_HONOURED, Messages, TemplateFields


class TokenizeRequest(TemplateFields):
    """A text in either dialect: `content` with `add_special` (off unless asked for, as in
    llama.cpp), or `prompt` with `add_special_tokens` (on unless asked not to, as in vLLM).

    Or `messages`, which become a prompt as in a chat.
    """

    not_honoured: ClassVar = TEMPLATE_NOT_HONOURED | {"return_token_strs": (False,)}

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool = True

    @property
    def adds_special(self) -> bool:
        asked = self.add_special if self.add_special_tokens is None else self.add_special_tokens
        return self.content is None if asked is None else asked


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_TOKEN_IDS)]
