"""Which tokens end a generation, which are shown, and which swallow the spaces beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from localllm.text.vocabulary import TokenType, Vocabulary

# Files seldom list every token that ends a turn, so llama.cpp finds them by their text.
END_OF_GENERATION = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "[e~[",
    # What follows a completed infilling: padding, the next repository or the next file.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
)

# `</s>` ends a generation where it or `<s>` is a control token. Elsewhere it is the HTML tag
# (Gemma) or an ordinary word (Qwen).
_BEGIN_AND_END = ("<s>", "</s>")

# The channel markup of gpt-oss is part of the text that its answers are parsed from.
_SHOWN_CONTROLS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_TURN_GOES_ON = "<|end|>"
_TURN_ENDERS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def end_of_generation_ids(ids: Mapping[str, int], vocabulary: Vocabulary) -> set[int]:
    """Ids of tokens that end a generation by their text; marks them as control tokens."""
    ends = {ids[text] for text in END_OF_GENERATION if text in ids}
    if _turn_goes_on_after_end(ids):
        ends.discard(ids[_TURN_GOES_ON])
    pair = [ids[text] for text in _BEGIN_AND_END if text in ids]
    if len(pair) == 2 and any(vocabulary.types[index] == TokenType.CONTROL for index in pair):
        ends.add(pair[1])
    for index in ends:
        vocabulary.types[index] = TokenType.CONTROL
    return ends


def shown_control_ids(ids: Mapping[str, int]) -> frozenset[int]:
    """Control tokens that are nevertheless part of the text."""
    shown = {ids[text] for text in _SHOWN_CONTROLS if text in ids}
    if _turn_goes_on_after_end(ids):
        shown.add(ids[_TURN_GOES_ON])
    return frozenset(shown)


def _turn_goes_on_after_end(ids: Mapping[str, int]) -> bool:
    """Whether `<|end|>` closes a message within a turn, as in gpt-oss."""
    return _TURN_GOES_ON in ids and any(enders <= ids.keys() for enders in _TURN_ENDERS)


def stripping_tokens(
    ids: Mapping[str, int], special: set[int], model_name: str, architecture: str, pre: str
) -> tuple[frozenset[int], frozenset[int]]:
    """Ids of special tokens that swallow the whitespace before them, and of those after them.

    Files do not say; these are the models that are known to.
    """
    name = model_name.lower()
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")
    ):
        return _ids_of(ids, "<mask>"), frozenset()
    if "phi-3" in name or "phi3" in name:
        return frozenset(), frozenset(special) - _ids_of(ids, "<unk>", "<s>", "<|endoftext|>")
    if "modern-bert" in name:
        return _ids_of(ids, "[MASK]"), frozenset()
    return frozenset(), frozenset()


def _ids_of(ids: Mapping[str, int], *texts: str) -> frozenset[int]:
    return frozenset(ids[text] for text in texts if text in ids)


_PIPES = re.compile("[|\uff5c]")
_BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_HTML_TAG = re.compile(r"</?([a-z0-9]+)>")
_HTML = frozenset(
    (
        *("a", "b", "bbox", "blockquote", "body", "caption", "code", "div", "em", "footer", "h1"),
        *("h2", "h3", "h4", "h5", "h6", "html", "i", "iframe", "img", "li", "ol", "p", "pre"),
        *("span", "strong", "sub", "sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr"),
        *("u", "ul"),
    )
)


def is_control_like(text: str) -> bool:
    """Whether a user-defined token looks as those do that mark roles and turns."""
    return text in END_OF_GENERATION or text in _BEGIN_AND_END or bool(_PIPES.search(text))


def is_markup(text: str) -> bool:
    """Whether a user-defined token looks as `<think>` and `[multimodal]` do, but is no HTML."""
    tag = _HTML_TAG.fullmatch(text)
    return bool(_BRACKETED.fullmatch(text)) and not (tag and tag[1] in _HTML)
