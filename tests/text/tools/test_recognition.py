"""Which format of tool calls and of thinking each published chat template speaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.text import reasoning
from localllm.text.chat_template import CHATML
from localllm.text.reasoning import Thinking, state_after
from localllm.text.tools import table
from tests.helpers import chat_templates
from tests.text.vocabularies import published

# Template, its format of tool calls, what opens its thinking.
EXPECTED: dict[str, tuple[str | None, str | None]] = {
    "Apertus-8B-Instruct": ("apertus", "<|inner_prefix|>"),
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", "Here are my reasoning steps:\n"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "<think>"),
    "ByteDance-Seed-OSS": ("seed-oss", "<seed:think>"),
    "Cohere2MoE": ("command-r", "<|START_THINKING|>"),
    "GLM-4.6": ("glm-4", "<think>"),
    "GigaChat3-10B-A1.8B": ("gigachat-3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat-3.1", None),
    "HuggingFaceTB-SmolLM3-3B": (None, "<think>"),
    "Kimi-K2-Instruct": ("kimi-k2", None),
    "Kimi-K2-Thinking": ("kimi-k2", "<think>"),
    "LFM2-8B-A1B": ("lfm2", None),
    "LFM2.5-8B-A1B": ("lfm2", "<think>"),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M1": ("minimax-m1", None),
    "MiniMax-M2": ("minimax-m2", "<think>"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral-call-id", None),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "<think>"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "<think>"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "<think>"),
    "Qwen3-Coder": ("qwen3-coder", None),
    "Reka-Edge": ("hermes", "<think>"),
    "Spark2.5": ("glm-4", "<think>"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek-r1", "<think>"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek-r1", "<think>"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek-v3.1", "<think>"),
    "deepseek-ai-DeepSeek-V4": ("deepseek-dsml", "<think>"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek-dsml", "<think>"),
    "fireworks-ai-llama-3-firefunction-v2": ("firefunction", None),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": ("gemma-4", "<|channel>thought\n"),
    "google-gemma-4-31B-it-interleaved": ("gemma-4", "<|channel>thought\n"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite-3", "<think>"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-4.1": ("hermes", None),
    "inclusionai-ling-3.0-flash": ("glm-4", "<think>"),
    "llama-cpp-deepseek-r1": ("deepseek-r1", "<think>"),
    "llama-cpp-rwkv-world": (None, "<think>"),
    "meetkai-functionary-medium-v3.1": ("functionary-v3.1", None),
    "meetkai-functionary-medium-v3.2": ("functionary-v3.2", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama-3", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama-3", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama-3", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral-args", "[THINK]"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral-list", None),
    "moonshotai-Kimi-K2": ("kimi-k2", None),
    "muse-glimmer": ("muse", None),
    "openai-gpt-oss-120b": ("harmony", None),
    "openbmb-MiniCPM5-1B": ("minicpm", "<think>"),
    "poolside-Laguna-S-2.1": ("glm-4", "<think>"),
    "poolside-Laguna-XS-2.1": ("glm-4", "<think>"),
    "unsloth-Apriel-1.5": ("apriel", "<thinking>"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral-args", None),
}


@pytest.mark.parametrize("path", chat_templates(), ids=lambda path: path.stem)
def test_published_template(path: Path) -> None:
    source = path.read_text()
    format, thinking = table.recognise(source), reasoning.recognise(source)
    expected = EXPECTED[path.stem]
    assert (format.name if format else None, thinking.opens if thinking else None) == expected


def test_a_template_without_either() -> None:
    assert table.recognise(CHATML) is None
    assert reasoning.recognise(CHATML) is None


def test_names_are_unique() -> None:
    names = [format.name for format in table.FORMATS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        ("Qwen-Qwen3-0.6B", {}, Thinking.POSSIBLE),
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, Thinking.OVER),
        ("llama-cpp-rwkv-world", {"enable_thinking": True}, Thinking.OPEN),
        ("deepseek-ai-DeepSeek-V3.1", {"enable_thinking": True}, Thinking.OPEN),
        ("deepseek-ai-DeepSeek-V3.1", {}, Thinking.OVER),
        ("google-gemma-4-31B-it", {"enable_thinking": True}, Thinking.POSSIBLE),
        ("google-gemma-4-31B-it", {}, Thinking.OVER),
    ],
)
def test_where_a_prompt_leaves_the_model(
    template: str, arguments: dict[str, Any], expected: Thinking
) -> None:
    (path,) = chat_templates(template)
    subject = published(path)
    marks = reasoning.recognise(subject.source)
    assert marks is not None
    prompt = subject.render([{"role": "user", "content": "Hi"}], **arguments)
    assert state_after(prompt, marks) == expected
