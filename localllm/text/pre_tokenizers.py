"""How each family of byte-pair vocabularies cuts text into words before it merges.

The regular expressions are those that the models were trained with, as far as they are known;
each cuts what the one before it left, and what it does not match stays as a piece of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localllm.errors import TokenizerError


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut, and what goes with it.

    `ignore_merges`: a word that is a token is not merged but taken whole.
    `byte_level`: merges work on bytes in GPT-2's printable alphabet, else on characters, with
    `<0xXX>` tokens for those that the vocabulary lacks.
    `escape_spaces`: a space is written U+2581 in tokens (only where not `byte_level`).
    `whole_newlines`: a run of newlines that is a token is taken whole.
    `add_bos`: prompts start with BOS unless the file says otherwise; `force_bos`: even then.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    byte_level: bool = True
    escape_spaces: bool = False
    whole_newlines: bool = False
    add_bos: bool = False
    force_bos: bool = False


_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
# Groups of three digits are counted from the right, in numbers of up to 300 digits: without an end
# to the looking ahead, a long number would take quadratic time.
_TRIPLES = "{0,100}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_LLAMA3 = _ENDING + "|" + _WORD + r"\p{N}{1,3}|" + _SYMBOLS + _LINES
_QWEN2 = _ENDING + "|" + _WORD + r"\p{N}|" + _SYMBOLS + _LINES
_QWEN35 = (
    _ENDING + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _LINES
)

# Words that begin with capitals or end in small letters, as in `camelCase`.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(ending: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}|"


_SYMBOLS_OR_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
_GPT4O = _cased_words(_ENDING + "?") + r"\p{N}{1,3}|" + _SYMBOLS_OR_PATH + _LINES
_TEKKEN = _cased_words("") + r"\p{N}|" + _SYMBOLS_OR_PATH + _LINES
_YOUTU = _cased_words(_ENDING + "?") + r"\p{N}|" + _SYMBOLS_OR_PATH + _LINES
_KIMI = (
    r"\p{Han}+|"
    + _cased_words(
        _ENDING + "?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    )
    + r"\p{N}{1,3}|"
    + _SYMBOLS
    + _LINES
)


# Letters that have case, as DeepSeek's first tokenizers list them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_KANJI_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATED_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3 = (
    _PUNCTUATED_WORD + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _LINES
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_WHOLE_LINES = r"[^\n]+|\n+"

_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_GPT2_WORDS = PreTokenizer((_GPT2,))
_GPT2_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_WORDS = PreTokenizer((_LLAMA3,))
_QWEN2_WORDS = PreTokenizer((_QWEN2,))
_GPT4O_WORDS = PreTokenizer((_GPT4O,))
_DEEPSEEK3_WORDS = PreTokenizer((r"\p{N}{1,3}", _KANJI_AND_KANA, _DEEPSEEK3))
_BAILING_WORDS = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
        r"\s*[\r\n]|" + _SPACES,
    )
)
_LINES_AS_WORDS = PreTokenizer((_WHOLE_LINES,), byte_level=False, escape_spaces=True)

_FAMILIES: dict[PreTokenizer, tuple[str, ...]] = {
    _DEFAULT: ("default",),
    _GPT2_WORDS: (
        *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de"),
        *("a.x-4.0", "mellum", "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe"),
        *("exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    ),
    _GPT2_DIGITS: (
        *("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        "mellum2",
    ),
    replace(_LLAMA3_WORDS, ignore_merges=True, add_bos=True): (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "jina-v5-nano"),
    ),
    _LLAMA3_WORDS: ("dbrx", "smaug-bpe", "chatglm-bpe"),
    replace(_LLAMA3_WORDS, ignore_merges=True): ("glm4", "glm5"),
    _QWEN2_WORDS: (
        *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"),
        *("solar-open", "grok-2"),
    ),
    PreTokenizer((_QWEN35,)): ("qwen35",),
    PreTokenizer((_QWEN2.removeprefix(_ENDING + "|"),)): ("ufakzeka",),
    PreTokenizer((_WHOLE_LINES, _QWEN2)): ("laguna",),
    _GPT4O_WORDS: ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    replace(_GPT4O_WORDS, ignore_merges=True): ("granite-embed-multi-97m",),
    PreTokenizer((rf"\d{{1,3}}(?=(?:\d{{3}}){_TRIPLES}\b)", _GPT4O)): ("tiny_aya", "cohere2moe"),
    PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True): ("tekken",),
    PreTokenizer((_KIMI,)): ("kimi-k2",),
    PreTokenizer(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|"
            "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
            "\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _KANJI_AND_KANA,
            _YOUTU,
        ),
        ignore_merges=True,
    ): ("youtu",),
    _DEEPSEEK3_WORDS: ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    PreTokenizer(
        (
            r"\p{N}{1,3}",
            _KANJI_AND_KANA,
            _PUNCTUATED_WORD
            + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|"
            + _SPACES,
            r"\p{N}",
        )
    ): ("spark2_5",),
    PreTokenizer(
        (
            rf"\p{{N}}{{1,3}}(?=(?:\p{{N}}{{3}}){_TRIPLES}(?!\p{{N}}))",
            "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
            "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
            "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
            _DEEPSEEK3,
        )
    ): ("afmoe",),
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ): ("deepseek-llm",),
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")): (
        "deepseek-coder",
    ),
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
    PreTokenizer((_BLOOM,)): ("poro-chat", "bloom", "gpt3-finnish"),
    PreTokenizer((_BLOOM, r"\p{N}")): ("viking",),
    PreTokenizer((r"\p{N}+", rf"(?=\d{{3}}(?:\d{{3}}){_TRIPLES}(?!\d))")): ("superbpe",),
    _BAILING_WORDS: ("bailingmoe", "bailingmoe2", "llada-moe"),
    PreTokenizer((_ENDING + "|" + _WORD + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _LINES,)): (
        "seed-coder",
    ),
    PreTokenizer(
        (
            _ENDING
            + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
            + r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|"
            + _SPACES,
        )
    ): ("exaone-moe",),
    PreTokenizer(
        (
            r"\p{N}{1,3}",
            _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|"),
        ),
        ignore_merges=True,
    ): ("minicpm5",),
    PreTokenizer(
        (
            _LLAMA3.removesuffix(_SPACES)
            + "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
            + r"|\s{1,2}(?!\S)|\s",
        )
    ): ("jais-2",),
    PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ): ("chameleon",),
    replace(_LINES_AS_WORDS, whole_newlines=True, force_bos=True): (
        "gemma4",
        "granite-embed-multi-311m",
    ),
    _LINES_AS_WORDS: ("sarvam-moe",),
    PreTokenizer((r"\S+",), byte_level=False): ("whitespace",),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: family for family, names in _FAMILIES.items() for name in names
}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The rules of a file's `tokenizer.ggml.pre`; TokenizerError for a name that is not known."""
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"tokenizer.ggml.pre: the pre-tokenizer {name!r} is not known; "
            "another would tokenize wrongly"
        )
    return PRE_TOKENIZERS[name]
