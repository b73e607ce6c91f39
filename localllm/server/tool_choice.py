"""What a request says about tools: which there are, and which may or have to be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from localllm.errors import RequestError
from localllm.text.tools.schema import Tool, check_enforceable, tools_of

_FIELD = "tool_choice"


@dataclass(frozen=True)
class ToolChoice:
    """`definitions` are what the template shows, `callable` what may be called."""

    definitions: Sequence[Mapping[str, Any]] = ()
    callable: tuple[Tool, ...] = ()
    required: bool = False
    single: bool = False
    forbidden: bool = False  # there are tools, but none is to be called

    @classmethod
    def of(
        cls,
        definitions: Sequence[Mapping[str, Any]] | None,
        choice: str | Mapping[str, Any] | None,
        parallel: bool | None,
    ) -> Self:
        """RequestError where they do not fit together."""
        if not definitions:
            if choice in (None, "none", "auto"):
                return cls()
            raise _wrong("there are no tools to choose from")
        tools = tools_of(definitions)
        chosen = cls(definitions, tools, single=parallel is False)._by(choice)
        for tool in chosen.callable:
            if chosen.required or tool.strict:
                check_enforceable(tool)
        return chosen

    def _by(self, choice: str | Mapping[str, Any] | None) -> Self:
        match choice:
            case None | "auto":
                return self
            case "none":
                return type(self)(forbidden=True)
            case "required" | "any":
                return replace(self, required=True)
            case {"type": "function"}:
                return self._named([choice], required=True, single=True)
            case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(some)}}:
                return self._named(some, required=mode == "required", single=self.single)
            case {"type": "allowed_tools", "mode": mode, "tools": list(some)}:
                return self._named(some, required=mode == "required", single=self.single)
        raise _wrong("must be none, auto, required, or name a function")

    def _named(self, references: Sequence[Any], *, required: bool, single: bool) -> Self:
        names = [_name_in(reference) for reference in references]
        known = {tool.name: tool for tool in self.callable}
        for name in names:
            if name not in known:
                raise _wrong(f"there is no tool named {name!r}")
        if not names:
            raise _wrong("there are no tools to choose from")
        chosen = tuple(known[name] for name in dict.fromkeys(names))
        return replace(self, callable=chosen, required=required, single=single)


def _name_in(reference: Any) -> str:
    if isinstance(reference, Mapping):
        function = reference.get("function", reference)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise _wrong("each function needs a name")


def _wrong(what: str) -> RequestError:
    return RequestError(f"{_FIELD}: {what}", param=_FIELD)
