"""The formats, and which of them a chat template speaks."""

from __future__ import annotations

from localllm.text.tools.formats import (
    AnyFormat,
    ChannelFormat,
    Channels,
    GemmaCall,
    JsonCall,
    KeyedCall,
    NamedCall,
    PythonCall,
    TaggedCall,
    ToolFormat,
)

HERMES = ToolFormat(
    name="hermes",  # Qwen 2.5 and 3, Granite 4, MiMo and many more
    signs=("<tool_call>",),
    begins="<tool_call>\n",
    body=JsonCall(),
    ends="\n</tool_call>",
    between="\n",
)

HARMONY = ChannelFormat(
    name="harmony",  # gpt-oss
    signs=("<|channel|>analysis", "<|start|>"),
    channels=Channels(
        starts="<|start|>assistant",
        message="<|message|>",
        ends=("<|end|>", "<|call|>", "<|return|>"),
        reasoning=r"<\|channel\|>\s*analysis",
        call=r"to=(?:functions\.)?([\w.\-]+)",
    ),
    thinking=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    call_header=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
    content_header="<|channel|>final<|message|>",
    ends="<|call|>",
)
_ATEM = ToolFormat(
    name="atem",
    signs=("<atem:function_calls>",),
    opens="<atem:function_calls>\n",
    body=TaggedCall(
        name=('<atem:invoke name="', '">\n'),
        key=('<atem:parameter name="', '">'),
        value=("", "</atem:parameter>\n"),
        end="</atem:invoke>",
    ),
    closes="\n</atem:function_calls>",
)
MUSE = ChannelFormat(
    name="muse",
    signs=("<atem:function_calls>", "<|eom|>"),
    channels=Channels(
        starts="<|start|>assistant",
        message="<|message|>",
        ends=("<|eom|>", "<|eot|>"),
        reasoning=r"to=self",
        call=r"(?!)",
    ),
    thinking=(" to=self<|message|>", "<|eom|><|start|>assistant"),
    call_header=(" to=", "<|message|>"),
    content_header=" to=user<|message|>",
    ends="",
    inner=_ATEM,
)
FUNCTIONARY_HEADERS = ChannelFormat(
    name="functionary-v3.2",
    signs=(">>>", "recipient==all"),
    channels=Channels(starts=">>>", message="\n", ends=(), call=r"^(?!all$)([\w.\-]+)"),
    call_header=("", "\n"),
    content_header="all\n",
    ends="",
    parallel=True,
)

_QWEN_TAGS = TaggedCall(
    name=("<function=", ">\n"),
    key=("<parameter=", ">"),
    value=("\n", "\n</parameter>\n"),
    end="</function>",
)
_DEEPSEEK_SECTION = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)

FORMATS: tuple[AnyFormat, ...] = (
    HARMONY,
    MUSE,
    FUNCTIONARY_HEADERS,
    ToolFormat(
        name="gemma-4",
        signs=("<|tool_call>call:",),
        begins="<|tool_call>",
        body=GemmaCall(),
        ends="<tool_call|>",
    ),
    ToolFormat(
        name="deepseek-dsml",
        signs=("\uff5cDSML\uff5c",),
        opens="<\uff5cDSML\uff5ctool_calls>\n",
        body=TaggedCall(
            name=('<\uff5cDSML\uff5cinvoke name="', '">\n'),
            key=('<\uff5cDSML\uff5cparameter name="', '" string="false">'),
            text_key='" string="true">',
            value=("", "</\uff5cDSML\uff5cparameter>\n"),
            end="</\uff5cDSML\uff5cinvoke>",
        ),
        between="\n",
        closes="\n</\uff5cDSML\uff5ctool_calls>",
    ),
    ToolFormat(
        name="minimax-m2",
        signs=("<minimax:tool_call>",),
        opens="<minimax:tool_call>\n",
        body=TaggedCall(
            name=('<invoke name="', '">\n'),
            key=('<parameter name="', '">'),
            value=("", "</parameter>\n"),
            end="</invoke>",
        ),
        between="\n",
        closes="\n</minimax:tool_call>",
    ),
    ToolFormat(
        name="seed-oss",
        signs=("<seed:tool_call>",),
        begins="<seed:tool_call>\n",
        body=TaggedCall(
            name=("<function=", ">\n"),
            key=("<parameter=", ">"),
            value=("", "</parameter>\n"),
            end="</function>",
        ),
        ends="\n</seed:tool_call>",
        between="\n",
    ),
    ToolFormat(
        name="glm-4",  # also Ling 3, Laguna and Spark
        signs=("<arg_key>", "<tool_call>"),
        begins="<tool_call>",
        body=TaggedCall(
            name=("", "\n"),
            key=("<arg_key>", "</arg_key>\n"),
            value=("<arg_value>", "</arg_value>\n"),
            end="</tool_call>",
            loose=True,
        ),
        between="\n",
    ),
    ToolFormat(
        name="qwen3-coder",
        signs=("<function=", "<parameter=", "<tool_call>"),
        begins="<tool_call>\n",
        body=_QWEN_TAGS,
        ends="\n</tool_call>",
        between="\n",
    ),
    ToolFormat(
        name="minicpm",
        signs=("<function name=", "<param name="),
        begins='<function name="',
        body=TaggedCall(
            name=("", '">'),
            key=('<param name="', '">'),
            value=("", "</param>"),
            end="</function>",
            cdata=True,
        ),
        between="\n",
    ),
    ToolFormat(
        name="kimi-k2",
        signs=("<|tool_call_argument_begin|>",),
        opens="<|tool_calls_section_begin|>",
        begins="<|tool_call_begin|>",
        body=NamedCall(
            before="functions.",
            number_pattern=":[0-9]+",
            number_in_id=True,
            after="<|tool_call_argument_begin|>",
        ),
        ends="<|tool_call_end|>",
        closes="<|tool_calls_section_end|>",
    ),
    ToolFormat(
        name="deepseek-r1",
        signs=("<\uff5ctool\u2581sep\uff5c>", "```json"),
        opens=_DEEPSEEK_SECTION[0],
        begins="<\uff5ctool\u2581call\u2581begin\uff5c>",
        body=NamedCall(before="function<\uff5ctool\u2581sep\uff5c>", after="\n```json\n"),
        ends="\n```<\uff5ctool\u2581call\u2581end\uff5c>",
        between="\n",
        closes=_DEEPSEEK_SECTION[1],
    ),
    ToolFormat(
        name="deepseek-v3.1",
        signs=("<\uff5ctool\u2581sep\uff5c>",),
        opens=_DEEPSEEK_SECTION[0],
        begins="<\uff5ctool\u2581call\u2581begin\uff5c>",
        body=NamedCall(after="<\uff5ctool\u2581sep\uff5c>"),
        ends="<\uff5ctool\u2581call\u2581end\uff5c>",
        closes=_DEEPSEEK_SECTION[1],
    ),
    ToolFormat(
        name="mistral-call-id",
        signs=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        begins="[TOOL_CALLS]",
        body=NamedCall(after="[ARGS]", number_pattern=r"\[CALL_ID\][a-zA-Z0-9]{9}"),
        id_length=9,
    ),
    ToolFormat(
        name="mistral-args",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        begins="[TOOL_CALLS]",
        body=NamedCall(after="[ARGS]"),
        id_length=9,
    ),
    ToolFormat(
        name="mistral-list",
        signs=("[TOOL_CALLS]",),
        opens="[TOOL_CALLS]",
        listed=True,
        body=JsonCall(id_key="id", id_pattern="[a-zA-Z0-9]{9}"),
        between=", ",
        id_length=9,
    ),
    ToolFormat(
        name="command-r",
        signs=("<|START_ACTION|>", "tool_call_id"),
        opens="<|START_ACTION|>",
        listed=True,
        begins="\n    ",
        body=JsonCall(
            name_key="tool_name",
            arguments_key="parameters",
            id_key="tool_call_id",
            id_pattern="[0-9]{1,4}",
            id_first=True,
        ),
        between=",",
        closes="<|END_ACTION|>",
    ),
    ToolFormat(
        name="apertus",
        signs=("<|tools_prefix|>",),
        opens="<|tools_prefix|>",
        listed=True,
        body=KeyedCall(),
        between=", ",
        closes="<|tools_suffix|>",
    ),
    ToolFormat(
        name="lfm2",
        signs=("List of tools: ", "<|im_start|>"),
        opens="<|tool_call_start|>",
        listed=True,
        body=PythonCall(),
        between=", ",
        closes="<|tool_call_end|>",
    ),
    ToolFormat(
        name="gigachat-3.1",
        signs=("<|function_call|>", "<|role_sep|>"),
        begins="<|function_call|>",
        body=JsonCall(),
        parallel=False,
    ),
    ToolFormat(
        name="gigachat-3",
        signs=("function call", "<|role_sep|>"),
        begins="<|message_sep|>\n\nfunction call<|role_sep|>\n",
        body=JsonCall(),
        parallel=False,
    ),
    ToolFormat(
        name="nemotron",
        signs=("<TOOLCALL>",),
        opens="<TOOLCALL>",
        listed=True,
        body=JsonCall(),
        between=", ",
        closes="</TOOLCALL>",
    ),
    ToolFormat(
        name="minimax-m1",
        signs=("<tool_calls>", "<beginning_of_sentence>"),
        opens="<tool_calls>\n",
        body=JsonCall(),
        between="\n",
        closes="\n</tool_calls>",
    ),
    ToolFormat(
        name="apriel",
        signs=("<tool_calls>[",),
        opens="<tool_calls>",
        listed=True,
        body=JsonCall(),
        between=", ",
        closes="</tool_calls>",
    ),
    ToolFormat(
        name="firefunction",
        signs=("functools[",),
        opens="functools",
        listed=True,
        body=JsonCall(),
        between=", ",
    ),
    ToolFormat(
        name="functionary-v3.1",
        signs=("<function=", "</function>"),
        begins="<function=",
        body=NamedCall(after=">"),
        ends="</function>",
    ),
    ToolFormat(
        name="phi-4-mini",
        signs=("<|tool_call|>", "<|/tool_call|>"),
        opens="<|tool_call|>",
        listed=True,
        body=JsonCall(),
        between=", ",
        closes="<|/tool_call|>",
    ),
    ToolFormat(
        name="granite-3",
        signs=("<|tool_call|>",),
        opens="<|tool_call|>",
        listed=True,
        body=JsonCall(),
        between=", ",
    ),
    HERMES,
    ToolFormat(
        name="llama-3",
        signs=("<|start_header_id|>", '"parameters": '),
        body=JsonCall(arguments_key="parameters"),
        parallel=False,
        known_names=True,
    ),
)


def recognise(template: str) -> AnyFormat | None:
    """The format in which models with this chat template call tools; None if it shows none.

    Of those whose signs it has, the first: the more special come before the more common.
    """
    for candidate in FORMATS:
        if all(sign in template for sign in candidate.signs):
            return candidate
    return None
