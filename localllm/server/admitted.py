"""Routes that ask the engine for something: through the gate, with a ticket."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from localllm.server.auth import Tenant
from localllm.server.gate import Gate
from localllm.server.generation import TokenUsage
from localllm.server.metrics import Metrics
from localllm.server.service import Service
from localllm.server.ticket import Patience, Ticket


class Admission:
    """Hands out tickets. One per application."""

    def __init__(self, service: Service, gate: Gate, metrics: Metrics, patience: Patience) -> None:
        self._service = service
        self._gate = gate
        self._metrics = metrics
        self._patience = patience

    def admit(self, tenant: Tenant, api: str) -> Ticket:
        """UnavailableError (429 or 503) when the request would not be worked on."""
        self._metrics.arrival(tenant.traffic_class, api)
        self._service.model()
        self._gate.enter(tenant)
        return Ticket(self._service.engine, tenant, self._metrics, self._patience)

    def dismiss(self, ticket: Ticket, usage: TokenUsage | None, answered: bool) -> None:
        """`usage` is None for a request that did not come as far."""
        self._gate.leave(ticket.tenant)
        ticket.close(answered)
        if usage is not None:
            self._metrics.answer(usage)


class AdmittedRoute(APIRoute):
    """Admits a request before its body is read, and holds the ticket until the last byte."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # which refuses it
            return
        admission: Admission = scope["app"].state.admission
        ticket = admission.admit(scope["state"]["tenant"], self.name)
        scope["state"]["ticket"] = ticket
        status, answered = 0, False

        async def watch(message: Message) -> None:
            nonlocal status, answered
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                answered = status < 400

        try:
            await super().handle(scope, receive, watch)
        finally:
            admission.dismiss(ticket, scope["state"].get("usage"), answered)


async def _ticket(request: Request) -> Ticket:
    ticket: Ticket = request.state.ticket
    return ticket


TicketDep = Annotated[Ticket, Depends(_ticket)]
"""For endpoints of an AdmittedRoute."""
