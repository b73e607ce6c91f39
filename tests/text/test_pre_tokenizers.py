from __future__ import annotations

import pytest

from localllm.errors import TokenizerError
from localllm.text.bpe import BYTE_OF, build_pre_tokenizer
from localllm.text.pre_tokenizers import PRE_TOKENIZERS, find_pre_tokenizer

TEXTS = (
    "Hello, World! it's 1234567 o'clock\n\n\tfoo_bar  camelCase HTTPServer\r\n",
    "\u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u0417\u0434\u0440\u0430",
    "   leading, trailing   ",
    "caf\u00e9 e\u0301 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \U0001f999\u200d \u00b2\u00bd",
    "\n \n\n",
)

ONE_OF_EACH = {rules: name for name, rules in PRE_TOKENIZERS.items()}.values()


def words(name: str, text: str) -> list[str]:
    """What the rules cut `text` into, in its own characters."""
    rules = find_pre_tokenizer(name)
    pieces = [piece for piece, _ in build_pre_tokenizer(rules).pre_tokenize_str(text)]
    if not rules.byte_level:
        return pieces
    return [bytes(BYTE_OF[c] for c in piece).decode("utf-8", "replace") for piece in pieces]


def test_all_names_are_known() -> None:
    assert len(PRE_TOKENIZERS) > 90
    assert {"default", "llama-bpe", "qwen2", "gpt-2", "tekken", "kimi-k2"} <= PRE_TOKENIZERS.keys()


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_nothing_is_lost(name: str) -> None:
    for text in TEXTS:
        assert "".join(words(name, text)) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "it's 12  x", ["it", "'s", " 12", " ", " x"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "I'LL 12345", ["I", "'LL", " ", "123", "45"]),
        ("qwen2", "x=1234\n\n y", ["x", "=", "1", "2", "3", "4", "\n\n", " y"]),
        ("ufakzeka", "it's", ["it", "'s"]),
        ("ufakzeka", "it'ss", ["it", "'ss"]),
        ("qwen2", "it'ss", ["it", "'s", "s"]),
        ("qwen35", "e\u0301x", ["e\u0301x"]),
        ("deepseek-v3", "12345 \u4f60a", ["123", "45", " ", "\u4f60", "a"]),
        ("deepseek-llm", "ab12\n", ["ab", "12", "\n"]),
        ("falcon", "12345 x!", ["123", "45", " x", "!"]),
        ("tekken", "camelCase HTTPx", ["camel", "Case", " HTTPx"]),
        ("gpt-4o", "aB'll 1234", ["a", "B'll", " ", "123", "4"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("afmoe", "1234567", ["1", "234", "567"]),
        ("superbpe", "1234567 a", ["1", "234", "567", " a"]),
        ("kimi-k2", "x\u4f60\u597dy 1234", ["x", "\u4f60\u597d", "y", " ", "123", "4"]),
        ("bailingmoe", "a \n\nbc", ["a", " \n\n", "bc"]),
        ("jais-2", "a" + " " * 9 + "b", ["a", " " * 8, " b"]),
        ("minicpm5", "123456", ["123", "456"]),
        ("laguna", "a\nb", ["a", "\n", "b"]),
        ("viking", "ab 12,", ["ab", " ", "1", "2", ","]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
        ("default", "12345 x", ["123", "45", " x"]),
    ],
)
def test_cuts(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_long_run_takes_no_quadratic_time(name: str) -> None:
    for text in ("1" * 20_000, " " * 20_000):
        assert "".join(words(name, text)) == text


def test_an_unknown_name_is_not_guessed() -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.pre.*'gpt-9'"):
        find_pre_tokenizer("gpt-9")
