"""Between text and tokens: /tokenize, /detokenize, /tokenizer_info and /apply-template."""

from __future__ import annotations

from fastapi import APIRouter

from localllm.errors import RequestError
from localllm.server.chat_prompt import encode_chat
from localllm.server.dependencies import ERRORS, ModelDep, ServiceDep
from localllm.server.protocol.answers import Prompt, Text, TokenizerInfo, Tokens
from localllm.server.protocol.chat import ChatRequest
from localllm.server.protocol.completions import DetokenizeRequest, TokenizeRequest
from localllm.server.text import check_ids, special_tokens

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


@router.get("/tokenizer_info")
async def tokenizer_info(service: ServiceDep, model: ModelDep) -> TokenizerInfo:
    """What a client has to know to prepare prompts by itself."""
    return TokenizerInfo(
        **special_tokens(model.tokenizer),
        vocab_size=model.tokenizer.vocab_size,
        model_max_length=service.context(),
        add_bos_token=model.tokenizer.add_bos,
        chat_template=model.template.source,
    )


@router.post("/apply-template")
async def apply_template(body: ChatRequest, service: ServiceDep, model: ModelDep) -> Prompt:
    """The prompt that a conversation becomes, as the model gets it."""
    ids = await service.off_loop(encode_chat, model.template, body)
    text = await service.off_loop(model.tokenizer.decode, ids, skip_special=False)
    return Prompt(prompt=text, count=len(ids))
