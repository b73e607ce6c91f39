"""Reading one call: its name and its arguments, which are emitted as JSON as they come."""

from __future__ import annotations

from collections.abc import Mapping

from localllm.text.tools.call import NotACallError, OpenCall
from localllm.text.tools.formats import (
    Body,
    GemmaCall,
    JsonCall,
    KeyedCall,
    NamedCall,
    PythonCall,
    TaggedCall,
)
from localllm.text.tools.gemma_calls import gemma_call
from localllm.text.tools.json_calls import json_call, keyed_call, named_call
from localllm.text.tools.python_calls import python_call
from localllm.text.tools.reader import Read, Reader
from localllm.text.tools.schema import Tool
from localllm.text.tools.tagged_calls import tagged_call


def read_call(body: Body, reader: Reader, call: OpenCall, tools: Mapping[str, Tool]) -> Read[None]:
    """NotACallError before the name is known; after it nothing is an error."""
    match body:
        case JsonCall():
            yield from json_call(body, reader, call)
        case KeyedCall():
            yield from keyed_call(reader, call)
        case NamedCall():
            yield from named_call(body, reader, call)
        case TaggedCall():
            yield from tagged_call(body, reader, call, tools)
        case PythonCall():
            yield from python_call(reader, call)
        case GemmaCall():
            yield from gemma_call(reader, call)
    if not call.begun:
        raise NotACallError
