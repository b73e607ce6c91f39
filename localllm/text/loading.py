"""Builds the tokenizer that a model file describes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from localllm.errors import TokenizerError
from localllm.gguf import GGUFFile
from localllm.text.models import TextModel
from localllm.text.pre_tokenizers import PreTokenizer, find_pre_tokenizer
from localllm.text.special_tokens import (
    end_of_generation_ids,
    shown_control_ids,
    stripping_tokens,
)
from localllm.text.tokenizer import SpecialIds, Tokenizer
from localllm.text.vocabulary import (
    TokenType,
    Vocabulary,
    read_token_id,
    read_vocabulary,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Defaults:
    """What a kind of vocabulary does where the file does not say."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False


_DEFAULTS = {
    "llama": _Defaults(bos=1, eos=2, unk=0, add_bos=True, add_space_prefix=True),
    "gpt2": _Defaults(),
    "gemma4": _Defaults(),
    "t5": _Defaults(eos=1, unk=2, pad=0, add_eos=True),
    "bert": _Defaults(bos=101, unk=100, pad=0, add_bos=True),
}
_SEPARATOR = 102  # BERT's, which closes each text


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """As `load_tokenizer`; a key that is missing or of another type is a GGUFError."""
    kind = file.get_str("tokenizer.ggml.model")
    if kind not in _DEFAULTS:
        raise TokenizerError(
            f"tokenizer.ggml.model: vocabularies of the kind {kind!r} are not supported "
            f"(known: {', '.join(_DEFAULTS)})"
        )
    vocabulary = read_vocabulary(file)
    defaults = _DEFAULTS[kind]
    spaced = file.get_bool("tokenizer.ggml.add_space_prefix", defaults.add_space_prefix)
    ids = _special_ids(file, vocabulary, kind, defaults)
    if kind in ("gpt2", "gemma4"):
        rules = _rules(file, kind)
        model: TextModel = _bpe(file, vocabulary, rules)
        ids = _with_bos_of(rules, file, ids)
        spaced = False
    elif kind == "bert":
        model = _word_pieces(file, vocabulary, ids)
        spaced = True
    else:
        model = _sentence_pieces(file, vocabulary, kind, ids, spaced)
    return Tokenizer(vocabulary, model, ids, spaced_start=spaced)


def _special_ids(
    file: GGUFFile, vocabulary: Vocabulary, kind: str, defaults: _Defaults
) -> SpecialIds:
    size = len(vocabulary)
    bos = read_token_id(file, "tokenizer.ggml.bos_token_id", size, defaults.bos)
    if kind == "bert":
        bos = read_token_id(file, "tokenizer.ggml.cls_token_id", size, bos)
    eos = read_token_id(file, "tokenizer.ggml.eos_token_id", size, defaults.eos)
    after = eos if file.get_bool("tokenizer.ggml.add_eos_token", defaults.add_eos) else None
    if kind == "bert":
        after = read_token_id(file, "tokenizer.ggml.seperator_token_id", size, _SEPARATOR)
    by_text = {token: index for index, token in enumerate(vocabulary.tokens)}
    ends = end_of_generation_ids(by_text, vocabulary)
    for named in (
        eos,
        read_token_id(file, "tokenizer.ggml.eot_token_id", size),
        read_token_id(file, "tokenizer.ggml.eom_token_id", size),
    ):
        if named is not None:
            ends.add(named)
    strips_left, strips_right = _stripping_tokens(file, vocabulary, by_text)
    return SpecialIds(
        bos=bos,
        eos=eos,
        unk=read_token_id(file, "tokenizer.ggml.unknown_token_id", size, defaults.unk),
        pad=_pad_id(file, size, defaults.pad),
        end_of_generation=frozenset(ends),
        before=bos if file.get_bool("tokenizer.ggml.add_bos_token", defaults.add_bos) else None,
        after=after,
        shown_controls=shown_control_ids(by_text),
        strips_left=strips_left,
        strips_right=strips_right,
    )


def _pad_id(file: GGUFFile, size: int, default: int | None) -> int | None:
    """Generation needs no padding, and published files do name a token that is not there."""
    try:
        return read_token_id(file, "tokenizer.ggml.padding_token_id", size, default)
    except TokenizerError as error:
        log.warning("%s; it is ignored", error)
        return None


def _stripping_tokens(
    file: GGUFFile, vocabulary: Vocabulary, by_text: dict[str, int]
) -> tuple[frozenset[int], frozenset[int]]:
    special = vocabulary.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    return stripping_tokens(
        by_text,
        set(special),
        model_name=file.get_str("general.name", ""),
        architecture=file.get_str("general.architecture", ""),
        pre=file.get_str("tokenizer.ggml.pre", ""),
    )


def _rules(file: GGUFFile, kind: str) -> PreTokenizer:
    if kind == "gemma4":
        return find_pre_tokenizer("gemma4")
    name = file.get_str("tokenizer.ggml.pre", "")
    if not name:
        log.warning(
            "tokenizer.ggml.pre is missing: using the default pre-tokenizer, which may tokenize "
            "worse than the model's own; converting the model anew adds the key"
        )
    return find_pre_tokenizer(name or "default")


def _bpe(file: GGUFFile, vocabulary: Vocabulary, rules: PreTokenizer) -> TextModel:
    from localllm.text.bpe import BPEModel

    return BPEModel(vocabulary, file.get_strings("tokenizer.ggml.merges"), rules)


def _with_bos_of(rules: PreTokenizer, file: GGUFFile, ids: SpecialIds) -> SpecialIds:
    add_bos = file.get_bool("tokenizer.ggml.add_bos_token", rules.add_bos) or rules.force_bos
    return replace(ids, before=ids.bos if add_bos else None)


def _word_pieces(file: GGUFFile, vocabulary: Vocabulary, ids: SpecialIds) -> TextModel:
    from localllm.text.word_pieces import WordPieceModel

    lowercase = file.get_bool("tokenizer.ggml.normalizer.lowercase", True)
    strip_accents = file.get_bool("tokenizer.ggml.normalizer.strip_accents", lowercase)
    return WordPieceModel(vocabulary, ids.unk, lowercase, strip_accents)


def _sentence_pieces(
    file: GGUFFile, vocabulary: Vocabulary, kind: str, ids: SpecialIds, spaced: bool
) -> TextModel:
    from localllm.text.sentence_pieces import Algorithm, SentencePieceModel, SpaceRules

    charsmap = file.get_array("tokenizer.ggml.precompiled_charsmap", None) if kind == "t5" else None
    if charsmap is not None and charsmap.itemsize != 1:
        raise TokenizerError("tokenizer.ggml.precompiled_charsmap: not an array of bytes")
    return SentencePieceModel(
        vocabulary,
        Algorithm.UNIGRAM if kind == "t5" else Algorithm.BPE,
        ids.unk,
        SpaceRules(
            add_prefix=spaced,
            remove_extra=file.get_bool("tokenizer.ggml.remove_extra_whitespaces", False),
        ),
        b"" if charsmap is None else charsmap.tobytes(),
    )
