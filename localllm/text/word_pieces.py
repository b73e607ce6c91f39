"""WordPiece: BERT's longest-match vocabularies."""

from __future__ import annotations

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from localllm.errors import TokenizerError
from localllm.text.models import SPACE, library_ids, spaced_text_bytes
from localllm.text.vocabulary import TokenType, Vocabulary

_CONTINUATION = "##"


class WordPieceModel:
    """Files mark the tokens that begin a word (with U+2581), the library those that go on."""

    def __init__(
        self, vocabulary: Vocabulary, unknown_id: int | None, lowercase: bool, strip_accents: bool
    ) -> None:
        if unknown_id is None:
            raise TokenizerError("tokenizer.ggml.unknown_token_id: WordPiece needs one")
        unknown = vocabulary.tokens[unknown_id]
        ids = {unknown: unknown_id}
        for index, token in enumerate(vocabulary.tokens):
            if vocabulary.types[index] not in (TokenType.CONTROL, TokenType.UNKNOWN):
                first = token.startswith(SPACE)
                ids.setdefault(token[1:] if first else _CONTINUATION + token, index)
        self._tokenizer = Tokenizer(WordPiece(ids, unk_token=unknown))
        self._tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=True,
            strip_accents=strip_accents,
            lowercase=lowercase,
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str) -> list[int]:
        return library_ids(self._tokenizer, text)

    def text_bytes(self, token: str) -> bytes:
        return spaced_text_bytes(token)
