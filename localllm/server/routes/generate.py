"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from localllm.errors import RequestError
from localllm.server.admitted import AdmittedRoute, TicketDep
from localllm.server.chat_prompt import prepare_chat
from localllm.server.chunks import ChatWriter
from localllm.server.completion_chunks import CompletionWriter
from localllm.server.dependencies import EVENTS, GENERATION_ERRORS, LaneDep, ModelDep, ServiceDep
from localllm.server.disconnect import unless_gone
from localllm.server.event_stream import EventStream
from localllm.server.generation import Generation, Job, plan_job
from localllm.server.protocol.answers import ChatCompletion, Completion, dump
from localllm.server.protocol.chat import ChatRequest
from localllm.server.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    MAX_SEQUENCES,
    CompletionRequest,
)
from localllm.server.protocol.sampling import SamplingFields
from localllm.server.served_model import ServedModel
from localllm.server.text import echo_texts, encode_prompts
from localllm.server.ticket import Ticket
from localllm.text.bound import TextBound

logger = logging.getLogger("localllm.server")

router = APIRouter(tags=["generate"], responses=GENERATION_ERRORS, route_class=AdmittedRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=EVENTS)
async def chat_completions(
    body: ChatRequest,
    request: Request,
    service: ServiceDep,
    model: ModelDep,
    ticket: TicketDep,
    lane: LaneDep,
) -> Response:
    """Answers a conversation, whole or, with `stream`, as server-sent events."""
    body.refuse_not_honoured()
    params = await lane.run(body.sampling_params, model.tokenizer.vocab_size, body.token_limit)
    ticket.structured = params.grammar is not None
    bound = TextBound(service.context(), "messages", whole=body.truncate_prompt_tokens is not None)
    prompt = await lane.run(prepare_chat, model.template, model.tokenizer, body, params, bound)
    job = plan_job(
        prompt.ids,
        prompt.params,
        service.context(),
        "messages",
        body.truncate_prompt_tokens,
        prompt.output,
    )
    writer = ChatWriter(model.id, model.tokenizer, ticket.timings, bool(body.logprobs))
    return await _answer(writer, [job], body, request, ticket, model)


@router.post("/v1/completions", response_model=Completion, responses=EVENTS)
async def completions(
    body: CompletionRequest,
    request: Request,
    service: ServiceDep,
    model: ModelDep,
    ticket: TicketDep,
    lane: LaneDep,
) -> Response:
    """Continues each prompt of a batch, whole or, with `stream`, as server-sent events."""
    body.refuse_not_honoured()
    if len(body.prompts) * body.n_drawn > MAX_SEQUENCES:
        raise RequestError(f"n: more than {MAX_SEQUENCES} answers to one request", param="n")
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = await lane.run(body.sampling_params, model.tokenizer.vocab_size, limit)
    ticket.structured = params.grammar is not None
    bound = TextBound(service.context(), "prompt", whole=body.truncate_prompt_tokens is not None)
    prompts = await lane.run(encode_prompts, model.tokenizer, body.prompts, bound)
    jobs = [
        plan_job(prompt, params, service.context(), "prompt", body.truncate_prompt_tokens)
        for prompt in prompts
    ]
    echoes = None
    if body.echo:
        texts = [job.prompt for job in jobs]
        echoes = await lane.run(echo_texts, model.tokenizer, body.prompts, texts)
    writer = CompletionWriter(model.id, model.tokenizer, ticket.timings, body, jobs, echoes)
    return await _answer(writer, jobs, body, request, ticket, model)


async def _answer(
    writer: ChatWriter | CompletionWriter,
    jobs: Sequence[Job],
    body: SamplingFields,
    request: Request,
    ticket: Ticket,
    model: ServedModel,
) -> Response:
    generation = Generation(ticket, model.tokenizer, writer.id, jobs)
    request.state.usage = generation.usage  # for the log
    headers = body.ignored_header()
    for ignored in headers.values():
        logger.debug("%s: fields that nobody here knows: %s", request.state.request_id, ignored)
    if truncated := generation.usage.truncated_tokens:
        headers["x-localllm-truncated-tokens"] = str(truncated)
    if body.stream:
        return EventStream(writer.stream(generation, body.wants_usage_chunk), headers)
    answers = await unless_gone(request.receive, generation.answers())
    return JSONResponse(dump(writer.whole(answers, generation.usage)), headers=headers)
