"""Between text and tokens: /tokenize, /detokenize, /tokenizer_info and /apply-template."""

from __future__ import annotations

from fastapi import APIRouter

from localllm.errors import RequestError
from localllm.server.chat_prompt import encode_chat
from localllm.server.dependencies import ERRORS, LaneDep, ModelDep, ServiceDep
from localllm.server.protocol.answers import Prompt, Text, TokenizerInfo, Tokens
from localllm.server.protocol.chat import ChatRequest
from localllm.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from localllm.server.text import check_ids, special_tokens
from localllm.text.bound import TextBound

router = APIRouter(tags=["tokens"], responses=ERRORS)


@router.post("/tokenize")
async def tokenize(
    body: TokenizeRequest, service: ServiceDep, model: ModelDep, lane: LaneDep
) -> Tokens:
    """Token ids of a text, or of the prompt that a conversation becomes."""
    body.refuse_not_honoured()
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(
            "content: this field, or prompt, or messages is required, and only one of them",
            param="content",
        )
    bound = TextBound(service.context(), given[0], whole=True)
    if body.messages is not None:
        ids = await lane.run(encode_chat, model.template, body.messages, body, bound)
    else:
        ids = await lane.run(
            model.tokenizer.encode,
            body.content or body.prompt or "",
            add_special=body.adds_special,
            parse_special=body.parse_special,
            bound=bound,
        )
    return Tokens(tokens=ids, count=len(ids), max_model_len=service.context())


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, model: ModelDep, lane: LaneDep) -> Text:
    """The text of token ids, special tokens included."""
    ids = await lane.run(check_ids, model.tokenizer, body.tokens, "tokens")
    text = await lane.run(model.tokenizer.decode, ids, skip_special=False)
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
async def apply_template(
    body: ChatRequest, service: ServiceDep, model: ModelDep, lane: LaneDep
) -> Prompt:
    """The prompt that a conversation becomes, as the model gets it."""
    body.refuse_not_honoured()
    bound = TextBound(service.context(), "messages", whole=True)
    ids = await lane.run(encode_chat, model.template, body.messages, body, bound)
    text = await lane.run(model.tokenizer.decode, ids, skip_special=False)
    return Prompt(prompt=text, count=len(ids))
