"""The vocabulary as bytes, from tokenizers of every common kind."""

import functools
import json
import pickle

import pytest
from tokenizers import Regex, Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from grammar_host import GrammarMatcher, Guide, TokenizerError, TokenizerInfo
from grammar_host.backends import SERVED_BACKENDS
from tests.grammar_host import vocabularies
from tests.grammar_host.common import accepts, bits, legal, mask, tokenizer_info
from tests.grammar_host.vocabularies import END_OF_TEXT, END_OF_TURN, PATTERN, TAG

TOKENIZERS = {
    "byte-level": vocabularies.byte_level,
    "Llama 3": functools.partial(vocabularies.byte_level, PATTERN),
    "with a blank first": functools.partial(vocabularies.byte_level, prefix_space=True),
    "sentencepiece": vocabularies.sentencepiece_bpe,
    "unigram": vocabularies.unigram,
    "characters": vocabularies.characters,
    "tiktoken, bytes": functools.partial(vocabularies.TikTokenTokenizer, "bytes"),
    "tiktoken, GPT-2's alphabet": functools.partial(vocabularies.TikTokenTokenizer, "gpt2"),
    "tiktoken, Latin-1": functools.partial(vocabularies.TikTokenTokenizer, "latin-1"),
    "SmolLM2": vocabularies.smollm2,
}
BLANK_FIRST = ("with a blank first", "sentencepiece", "unigram")
every_tokenizer = pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.model] if k == "SmolLM2" else []) for k in TOKENIZERS],
)
every_engine = pytest.mark.parametrize("engine", SERVED_BACKENDS)

TEXTS = [
    'The quick brown fox says: {"name": "value", "list": [1, 2.50, 345678]}',
    "A naïve café serves déjà vu with a smile every day.",
    "   three  blanks,\ta tab\n\n  and\r\nnewlines\r\n",
    "emoji 😀 👍🏽 👩\u200d👩\u200d👧",
    "日本語 中文 한국어, e\u0301 n\u0303",
    "control \x00\x01\x1f\x7f",
]


@functools.cache
def info_of(kind: str, extra: int = 0) -> TokenizerInfo:
    tokenizer = TOKENIZERS[kind]()
    return TokenizerInfo.from_transformers(tokenizer, len(tokenizer) + extra)


def matcher_of(info: TokenizerInfo, guide: Guide, engine: str = "xgrammar") -> GrammarMatcher:
    stops = frozenset(info.stop_token_ids)
    compiled = SERVED_BACKENDS[engine](info).compile(guide)
    return GrammarMatcher(compiled.new_matcher(stops), info.vocab_size, stops, info.segmenter)


def known(kind: str) -> list[str]:
    if kind == "characters":
        return TEXTS[:2]
    # SmolLM2's vocabulary lacks some control characters: the tokenizer drops them.
    return TEXTS[:-1] if kind == "SmolLM2" else TEXTS


@every_tokenizer
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(kind):
    tokenizer, info = TOKENIZERS[kind](), info_of(kind)
    for text in known(kind):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        added = kind == "sentencepiece" or (kind in BLANK_FIRST and not text.startswith(" "))
        blank = b" " if added else b""
        assert b"".join(info.vocabulary[t] for t in tokens) == blank + text.encode()
        assert info.encode(text) == tokens
    assert info.stop_token_ids == (tokenizer.eos_token_id,)
    assert info.vocab_size == len(tokenizer)


@every_engine
@every_tokenizer
def test_a_model_that_writes_the_tokens_of_a_document_is_accepted(engine, kind):
    tokenizer, info = TOKENIZERS[kind](), info_of(kind, 7)
    matcher = matcher_of(info, Guide.regex(r' ?\{"name": "[^"]*", "list": \[1, 2, 3\]\}'), engine)
    text = '{"name": "the café", "list": [1, 2, 3]}'
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert matcher.accept_token(token)
    assert matcher.accept_token(tokenizer.eos_token_id)


def test_a_tiktoken_encoding():
    encoding = vocabularies.tiktoken_encoding()
    end, turn = (encoding.encode_single_token(name) for name in (END_OF_TEXT, "<|im_end|>"))
    info = TokenizerInfo.from_tiktoken(encoding, 1000, stop_token_ids=[turn, 4000])
    assert info.vocab_size == 1000
    assert info.stop_token_ids == (end, turn)
    assert info.special_tokens == {end: END_OF_TEXT, turn: "<|im_end|>"}
    assert info.vocabulary[end - 3 :] == (b"",) * (1000 - end + 3)  # a gap, specials, padding
    for text in [*TEXTS, "<|im_end|> as text"]:
        tokens = info.encode(text)
        assert b"".join(info.vocabulary[token] for token in tokens) == text.encode()
    # Narrow logits: the special tokens are out of reach.
    narrow = TokenizerInfo.from_tiktoken(encoding, end - 3, stop_token_ids=[5])
    assert (narrow.stop_token_ids, dict(narrow.special_tokens)) == ((5,), {})
    with pytest.raises(TokenizerError, match="no stop token"):
        TokenizerInfo.from_tiktoken(encoding, end)
    with pytest.raises(TokenizerError, match=r"ordinary text needs token \d+, the logits have 300"):
        TokenizerInfo.from_tiktoken(encoding, 300, [5])
    with pytest.raises(TokenizerError, match="width of the logits"):
        TokenizerInfo.from_tiktoken(encoding, 0)


def test_plain_characters_are_not_taken_for_bytes():
    """ "ñ" as plain text is two bytes; read in GPT-2's alphabet or Latin-1 it would be one."""
    for alphabet in (None, "ñ", "ñéÃ©", "▁ñ"):
        tokenizer = vocabularies.characters(alphabet)
        info = TokenizerInfo.from_transformers(tokenizer, len(tokenizer))
        for character in alphabet or "éï日":
            token = tokenizer.convert_tokens_to_ids(character)
            if character != "▁":
                assert info.vocabulary[token] == character.encode()


def test_special_tokens_have_no_bytes_and_added_words_have_theirs():
    tokenizer = vocabularies.byte_level()
    info = TokenizerInfo.from_transformers(tokenizer, len(tokenizer))
    end, tag = (tokenizer.convert_tokens_to_ids(t.content) for t in (END_OF_TURN, TAG))
    assert info.vocabulary[end] == b""
    assert info.special_tokens == {end: "<|im_end|>", tokenizer.eos_token_id: END_OF_TEXT}
    assert info.vocabulary[tag] == "<tag-é>".encode()


@every_engine
def test_special_tokens_never_count_as_text(engine):
    tokenizer = vocabularies.byte_level()
    info = info_of("byte-level")
    end, tag = (tokenizer.convert_tokens_to_ids(t.content) for t in (END_OF_TURN, TAG))
    matcher = matcher_of(info, Guide.regex(r"(<\|im_end\|>|<tag-é>)*"), engine)
    assert {tag, *info.stop_token_ids} <= set(legal(matcher))
    assert end not in legal(matcher)
    assert not matcher.accept_token(end)
    assert matcher.accept_token(tag)
    # The same characters, as characters, are text.
    for byte in b"<|im_end|>":
        assert matcher.accept_token(info.vocabulary.index(bytes([byte])))
    assert matcher.is_completed()


@every_engine
def test_every_copy_of_a_token_is_legal(engine):
    vocabulary = [b"a", b"b", b"ab", b"", b"ab", b"a", b"c"]
    info = TokenizerInfo.from_vocabulary(vocabulary, [3])
    matcher = matcher_of(info, Guide.choice(["ab", "abab"]), engine)
    assert legal(matcher) == [0, 2, 4, 5]
    assert matcher.accept_token(4)
    assert legal(matcher) == [0, 2, 3, 4, 5]
    assert matcher.accept_token(5)
    assert legal(matcher) == [1]


@pytest.mark.parametrize("engine", ["xgrammar", "llguidance"])  # Outlines has no NUL
def test_nul_bytes_are_text(engine):
    info = tokenizer_info()
    assert info.vocabulary[0] == b"\0"
    nul = matcher_of(info, Guide.regex(r"a[\x00-\x01]b"), engine)
    assert nul.accept_token(ord("a"))
    assert legal(nul) == [0, 1]
    assert accepts(matcher_of(info, Guide.regex(r"a[\x00-\x01]b"), engine), b"a\0b")


def test_the_width_is_the_width_of_the_logits():
    tokenizer = vocabularies.byte_level()
    wide = TokenizerInfo.from_transformers(tokenizer, 1001)
    assert wide.vocab_size == 1001
    assert wide.vocabulary[len(tokenizer) :] == (b"",) * (1001 - len(tokenizer))
    assert bits(mask(matcher_of(wide, Guide.regex(".*")))).max() < len(tokenizer)
    # Narrow logits: the added tokens at the end cannot be written, nothing is out of range.
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    narrow = TokenizerInfo.from_transformers(tokenizer, end)
    assert narrow.vocab_size == end
    assert end not in narrow.special_tokens
    assert narrow.vocabulary == wide.vocabulary[:end]
    matcher = matcher_of(narrow, Guide.choice(["the <|im_end|> name"]))
    assert bits(mask(matcher)).max() < end
    # The tokenizer writes that text with a token that the logits do not have.
    assert matcher.forced_tokens() == []
    with pytest.raises(TokenizerError, match="ordinary text needs token"):
        TokenizerInfo.from_transformers(tokenizer, 200)
    with pytest.raises(TokenizerError, match="width of the logits"):
        TokenizerInfo.from_transformers(tokenizer, 0)


def test_stop_tokens_are_the_union():
    tokenizer = vocabularies.byte_level()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    width = len(tokenizer)
    info = TokenizerInfo.from_transformers(tokenizer, width, stop_token_ids=[end, width + 5])
    assert info.stop_token_ids == tuple(sorted([tokenizer.eos_token_id, end]))
    none = vocabularies.byte_level(eos_token=None)
    with pytest.raises(TokenizerError, match="no stop token"):
        TokenizerInfo.from_transformers(none, width)
    assert TokenizerInfo.from_transformers(none, width, [end]).stop_token_ids == (end,)


def test_tokenizers_that_change_the_text_are_refused():
    tokenizer = vocabularies.byte_level()
    for normalizer, lost in (
        (normalizers.Lowercase(), "it loses letter case"),
        (normalizers.Replace(" ", ""), "it loses blanks"),
        (normalizers.Replace(Regex("^ "), ""), "it loses blanks"),
        (normalizers.Replace("\n", " "), "became"),
        (normalizers.Replace("\r\n", "\n"), "CRLF"),
        (normalizers.Replace("\u200d", ""), "joined"),
        (normalizers.StripAccents(), "became"),
        (normalizers.Replace("5", "4"), "became"),
    ):
        tokenizer.backend_tokenizer.normalizer = normalizer
        with pytest.raises(TokenizerError, match="do not give the bytes of the text back") as error:
            TokenizerInfo.from_transformers(tokenizer, len(tokenizer))
        assert lost in str(error.value)
        assert "\n" not in str(error.value)
    # Unicode's composed forms are what the model was trained on; there is nothing to repair.
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    TokenizerInfo.from_transformers(tokenizer, len(tokenizer))


def test_word_piece_is_refused_with_the_reason():
    tokenizer = vocabularies.word_piece()
    with pytest.raises(TokenizerError, match="it loses letter case and blanks"):
        TokenizerInfo.from_transformers(tokenizer, len(tokenizer))


def changed(tokenizer: PreTrainedTokenizerFast, change) -> PreTrainedTokenizerFast:
    """The tokenizer with another vocabulary: what a bad conversion leaves."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {change(piece): index for piece, index in vocab.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
    )


def test_byte_fallback_needs_every_byte():
    tokenizer = vocabularies.sentencepiece_bpe()
    broken = changed(tokenizer, lambda piece: "gone" if piece == "<0x9F>" else piece)
    with pytest.raises(TokenizerError, match="there is no token <0x9F>"):
        TokenizerInfo.from_transformers(broken, len(broken))
    # Two of them swapped: no text of the samples tells, only the check of every byte does.
    swap = {"<0x1E>": "<0x1F>", "<0x1F>": "<0x1E>"}
    info = info_of("sentencepiece")
    assert info.vocabulary.index(b"\x1e") + 1 == info.vocabulary.index(b"\x1f")
    swapped = changed(tokenizer, lambda piece: swap.get(piece, piece))
    assert TokenizerInfo.from_transformers(swapped, len(swapped)).vocab_size == info.vocab_size
    vocab = swapped.get_vocab()
    swapped.get_vocab = lambda: vocab | {"<0x1E>": vocab["<0x1F>"], "<0x1F>": vocab["<0x1E>"]}
    with pytest.raises(TokenizerError, match="do not give the bytes"):
        TokenizerInfo.from_transformers(swapped, len(swapped))


def test_a_vocabulary_that_cannot_write_json_is_refused():
    tokenizer = changed(vocabularies.characters(), lambda piece: "gone" if piece == "{" else piece)
    assert tokenizer.unk_token_id in tokenizer.encode("{")
    with pytest.raises(TokenizerError, match="do not give the bytes"):
        TokenizerInfo.from_transformers(tokenizer, len(tokenizer))


def test_explicit_vocabularies():
    info = TokenizerInfo.from_vocabulary(
        [b"a", b"b", b"x"], [2, 2], special_tokens={1: "<b>", 9: "n"}
    )
    assert info.vocabulary == (b"a", b"", b"")
    assert info.stop_token_ids == (2,)
    assert info.special_tokens == {1: "<b>"}
    assert info.encode is None
    for stops in ([], [3], [-1]):
        with pytest.raises(TokenizerError, match="stop token"):
            TokenizerInfo.from_vocabulary([b"a", b"b", b"x"], stops)


def test_the_fingerprint_tells_contents_apart():
    same = [
        TokenizerInfo.from_vocabulary([b"ab", b"c", b""], [2], encode=encode).fingerprint
        for encode in (None, lambda text: [0])
    ]
    assert same[0] == same[1]
    others = {
        TokenizerInfo.from_vocabulary(vocabulary, stops, special_tokens=special).fingerprint
        for vocabulary, stops, special in (
            ([b"a", b"bc", b""], [2], {}),
            ([b"ab", b"c", b"", b""], [2], {}),
            ([b"ab", b"", b""], [1], {}),
            ([b"ab", b"c", b""], [2], {2: "</s>"}),
        )
    }
    assert len(others | {same[0]}) == 5
    assert tokenizer_info().fingerprint == tokenizer_info().fingerprint


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "tiktoken, bytes"])
def test_a_pickled_copy_has_everything_but_the_tokenizer(kind):
    info = info_of(kind)
    info.segmenter.stable_tokens((), b"name", b"")
    copy = pickle.loads(pickle.dumps(info))
    assert copy.fingerprint == info.fingerprint
    assert copy.vocabulary == info.vocabulary
    assert b"\0" in copy.vocabulary
    assert copy.special_tokens == info.special_tokens
    assert copy.stop_token_ids == info.stop_token_ids
    assert copy.encode is None
    with pytest.raises(TypeError):
        copy.special_tokens[0] = "read-only"
