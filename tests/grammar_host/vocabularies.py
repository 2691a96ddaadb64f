"""Small tokenizers of every common kind, trained on text that is made here."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterable
from typing import Any, Literal

import tiktoken
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from grammar_host import TokenizerInfo
from tests.grammar_host import common

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = AddedToken("<|im_end|>", special=True)
TAG = AddedToken("<tag-é>", special=False)
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
# The pre-tokenization of Llama 3: digits in threes, a blank or a quote in front of a word.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def corpus() -> tuple[str, ...]:
    """JSON documents and sentences, in several layouts and scripts; always the same."""
    rng = random.Random(0)
    words = "the quick brown fox name age tags value status pending done city Zürich café naïve"
    others = "日本語 中文 한국어 déjà vu 😀 👩‍👩‍👧 Ünïcödé"
    pool = [*words.split(), *others.split(), "is", "are", "isn't", "12", "345", "2024-05-17"]
    texts = []
    for number in range(150):
        some = [rng.choice(pool) for _ in range(8)]
        document = {
            "name": " ".join(some[:2]),
            "age": rng.randrange(100),
            "status": rng.choice(["pending", "done", "in progress"]),
            "tags": some[2:5],
            "address": {"city": some[5], "zip": str(rng.randrange(10**5)), "geo": rng.random()},
            "active": number % 2 == 0,
            "note": None,
        }
        texts.append(json.dumps(document, ensure_ascii=False, indent=rng.choice([None, 2])))
        texts.append(json.dumps(document, ensure_ascii=False, separators=(",", ":")))
        texts.append(" ".join(some) + ".\n\n\tAnd  then:\r\n")
    return tuple(texts)


@functools.cache
def _byte_level(pattern: str | None, prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    if pattern is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _fast(tokenizer: Tokenizer, **special: Any) -> PreTrainedTokenizerFast:
    # A copy: tests may change what they get.
    copy = Tokenizer.from_str(tokenizer.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=copy, **special)


def byte_level(
    pattern: str | None = None, *, prefix_space: bool = False, **special: Any
) -> PreTrainedTokenizerFast:
    """GPT-2's kind, with added tokens: `<|im_end|>` (special) and `<tag-é>` (not special)."""
    special = {"eos_token": END_OF_TEXT} | special
    fast = _fast(_byte_level(pattern, prefix_space), **special)
    fast.add_tokens([END_OF_TURN, TAG])
    return fast


@functools.cache
def _sentencepiece_bpe() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=500, limit_alphabet=80, show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    model = json.loads(trained.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].get)
    pieces = ["<unk>", "<s>", "</s>", *BYTE_PIECES, *learned]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    # Llama 2 segments the whole text at once: there is no pre-tokenization at blanks.
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


@functools.cache
def _unigram() -> Tokenizer:
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=500, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    trained.train_from_iterator(corpus(), trainer)
    learned = json.loads(trained.to_str())["model"]["vocab"][1:]
    pieces = [(piece, 0.0) for piece in ("<unk>", "<s>", "</s>", *BYTE_PIECES)]
    pieces += [(piece, score) for piece, score in learned if piece.isascii() or "▁" in piece]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return tokenizer


def _with_sentencepiece_decoder(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _fast(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def sentencepiece_bpe() -> PreTrainedTokenizerFast:
    """Llama 2's kind: "▁" for blanks and before the text, byte tokens for what has no piece."""
    return _with_sentencepiece_decoder(_sentencepiece_bpe())


def unigram() -> PreTrainedTokenizerFast:
    """The same with a unigram model: the most probable segmentation instead of merges."""
    return _with_sentencepiece_decoder(_unigram())


def word_piece() -> PreTrainedTokenizerFast:
    """BERT's kind: loses letter case and blanks."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator([*corpus(), "a list: - ."], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]")


def characters(alphabet: str | None = None) -> PreTrainedTokenizerFast:
    """Plain characters without any encoding, which cannot write everything (no emoji)."""
    known = {c for text in corpus() for c in text} - {"😀"} if alphabet is None else set(alphabet)
    pieces = ["<unk>", "</s>", "name", *sorted(known | set(map(chr, range(32, 127))))]
    tokenizer = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def smollm2() -> PreTrainedTokenizerFast:
    """A real one, of the model that `make model` fetches (tests that use it: marker `model`)."""
    from gkv_jax.weights.entries import find_model
    from gkv_jax.weights.huggingface import read_tokenizer
    from gkv_jax.weights.store import fetch_model

    return read_tokenizer(fetch_model(find_model("smollm2-135m-instruct")).folder)


@functools.cache
def _ranks() -> dict[bytes, int]:
    alphabet = {
        character: byte
        for byte, character in zip(range(256), _byte_level_characters(), strict=True)
    }
    vocab = _byte_level(PATTERN).get_vocab()
    learned = sorted((i, piece) for piece, i in vocab.items() if piece != END_OF_TEXT)
    merged = [bytes(alphabet[c] for c in piece) for _, piece in learned if len(piece) > 1]
    tokens = [bytes([byte]) for byte in range(256)] + merged
    return {token: rank for rank, token in enumerate(tokens)}


def _byte_level_characters() -> list[str]:
    """GPT-2's characters of the bytes 0 to 255."""
    rest = itertools.count(0x100)
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte) if byte in shown else chr(next(rest)) for byte in range(256)]


@functools.cache
def tiktoken_encoding() -> tiktoken.Encoding:
    """OpenAI's kind: ranks of byte strings; the ids have a gap before the special tokens."""
    ranks = _ranks()
    special = {END_OF_TEXT: len(ranks) + 3, "<|im_end|>": len(ranks) + 4}
    return tiktoken.Encoding(
        "small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


class TikTokenTokenizer(PreTrainedTokenizer):
    """What models bring along that wrap tiktoken in Python: the first Qwen, Kimi, GLM-4.

    `spelling` says how `get_vocab` names the tokens: as bytes, or in which alphabet.
    """

    def __init__(self, spelling: Literal["bytes", "gpt2", "latin-1"], **kwargs: Any) -> None:
        self._encoding = tiktoken_encoding()
        self._ranks = _ranks()
        self._tokens = {rank: token for token, rank in self._ranks.items()}
        self._spelling = spelling
        super().__init__(eos_token=END_OF_TEXT, **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._ranks)

    def get_vocab(self) -> dict[Any, int]:
        vocab: dict[Any, int] = {self._spell(token): rank for token, rank in self._ranks.items()}
        return vocab | self.added_tokens_encoder

    def _spell(self, token: bytes) -> bytes | str:
        if self._spelling == "bytes":
            return token
        if self._spelling == "latin-1":
            return token.decode("latin-1")
        alphabet = _byte_level_characters()
        return "".join(alphabet[byte] for byte in token)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [str(token) for token in self._encoding.encode_ordinary(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token)

    def _convert_id_to_token(self, index: int) -> str:
        return str(index)


def _info(tokenizer: PreTrainedTokenizerFast) -> TokenizerInfo:
    return TokenizerInfo.from_transformers(tokenizer, len(tokenizer) + 5)


INFOS: dict[str, Callable[[], TokenizerInfo]] = {
    "bytes": common.tokenizer_info,
    "byte-level": lambda: _info(byte_level()),
    "Llama 3": lambda: _info(byte_level(PATTERN)),
    "with a blank first": lambda: _info(byte_level(prefix_space=True)),
    "sentencepiece": lambda: _info(sentencepiece_bpe()),
    "unigram": lambda: _info(unigram()),
    "tiktoken": lambda: TokenizerInfo.from_tiktoken(tiktoken_encoding(), 900),
    "SmolLM2": lambda: TokenizerInfo.from_transformers(smollm2(), 49_152),
}
"""A `TokenizerInfo` of every kind, and of the plain bytes of `common`."""


@functools.cache
def tokenizer_info(name: str) -> TokenizerInfo:
    return INFOS[name]()


def written(info: TokenizerInfo, tokens: Iterable[int]) -> bytes:
    return b"".join(info.vocabulary[token] for token in tokens)


def canonical(info: TokenizerInfo, text: str) -> list[int]:
    """The tokenizer's segmentation of a text that stands behind a line break, as answers do.

    Empty if one token spans the line break and the beginning of the text.
    """
    encode = info.encode or functools.partial(common.tokenize, info=info)
    if info.encode is None or written(info, encode(text)) == text.encode():
        return list(encode(text))
    tokens = list(encode("\n" + text))
    while tokens and written(info, tokens) != text.encode():
        del tokens[0]
    return tokens
