"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter

from localllm.errors import RequestError
from localllm.server.dependencies import ERRORS, ModelDep, ServiceDep
from localllm.server.protocol.answers import Text, Tokens
from localllm.server.protocol.completions import DetokenizeRequest, TokenizeRequest
from localllm.server.text import check_ids

router = APIRouter(tags=["tokens"], responses=ERRORS)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: ServiceDep, model: ModelDep) -> Tokens:
    """Token ids of a text."""
    text = body.prompt if body.content is None else body.content
    if text is None:
        raise RequestError("content: this field (or prompt) is required", param="content")
    ids = await service.off_loop(
        model.tokenizer.encode,
        text,
        add_special=body.adds_special,
        parse_special=body.parse_special,
    )
    return Tokens(tokens=ids, count=len(ids), max_model_len=service.context())


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: ServiceDep, model: ModelDep) -> Text:
    """The text of token ids, special tokens included."""
    ids = check_ids(model.tokenizer, body.tokens, "tokens")
    text = await service.off_loop(model.tokenizer.decode, ids, skip_special=False)
    return Text(content=text, prompt=text)
