"""The vocabulary as bytes, from tokenizers of every common kind."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grammar_host import GrammarCompiler, Guide, TokenizerError, TokenizerInfo
from tests.grammar_host.common import bits, mask, tokenizer_info

SENTENCES = [
    'The quick brown fox says: {"name": "value", "list": [1, 2, 3]}',
    "A naïve café serves déjà vu with a smile 😀 every day.",
    "Numbers 123 and 456, two  spaces, a\ttab\nand a newline.",
] * 4
MORE_STOPS = AddedToken("<|im_end|>", special=True)
TAG = AddedToken("<tag é>", special=False)


def byte_level(**special) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([MORE_STOPS])
    tokenizer.add_tokens([TAG])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **({"eos_token": "<|endoftext|>"} | special)
    )


def byte_fallback() -> PreTrainedTokenizerFast:
    """Sentencepiece style: "▁" for blanks, a byte token for whatever has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *'abcdefghijklmnopqrstuvwxyz{}[]:,"0123456789', "▁t", "th", "▁th", "▁the", "he"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("h", "e"), ("▁th", "e")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def raw() -> PreTrainedTokenizerFast:
    """Plain characters, which cannot write everything."""
    characters = sorted({character for sentence in SENTENCES for character in sentence})
    characters += [c for c in map(chr, range(0x20, 0x7F)) if c not in characters]
    pieces = ["<unk>", "</s>", "name", *(c for c in characters if c != "😀")]
    tokenizer = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


TOKENIZERS = {"byte-level": byte_level, "byte-fallback": byte_fallback, "raw": raw}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(kind):
    tokenizer = TOKENIZERS[kind]()
    info = TokenizerInfo.from_transformers(tokenizer, len(tokenizer))
    samples = SENTENCES[:1] if kind == "raw" else [*SENTENCES[:3], "日本語 \x00\x7f 👍🏽"]
    for text in samples:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert (
            b"".join(info.vocabulary[t] for t in tokens)
            .decode()
            .removeprefix(" " if kind == "byte-fallback" else "")
            == text
        )
    assert info.stop_token_ids == (tokenizer.eos_token_id,)
    assert info.vocab_size == len(tokenizer)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_model_that_writes_the_tokens_of_a_document_is_accepted(kind):
    tokenizer = TOKENIZERS[kind]()
    info = TokenizerInfo.from_transformers(tokenizer, len(tokenizer) + 7)
    guide = Guide.regex(r' ?\{"name": "[^"]*", "list": \[1, 2, 3\]\}')
    matcher = GrammarCompiler(info, cache_limit_bytes=0).compile(guide).matcher()
    text = '{"name": "the café", "list": [1, 2, 3]}'
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert matcher.accept_token(token)
    assert matcher.accept_token(tokenizer.eos_token_id)


def test_plain_characters_are_not_taken_for_bytes():
    """ "é" as plain text is two bytes; read in GPT-2's alphabet it would be the byte E9."""
    tokenizer = raw()
    info = TokenizerInfo.from_transformers(tokenizer, len(tokenizer))
    assert info.vocabulary[tokenizer.convert_tokens_to_ids("é")] == "é".encode()


def test_special_tokens_have_no_bytes_and_added_words_have_theirs():
    tokenizer = byte_level()
    info = TokenizerInfo.from_transformers(tokenizer, len(tokenizer))
    end, tag = (tokenizer.convert_tokens_to_ids(t.content) for t in (MORE_STOPS, TAG))
    assert info.vocabulary[end] == b""
    assert info.special_tokens == {end: "<|im_end|>", tokenizer.eos_token_id: "<|endoftext|>"}
    assert info.vocabulary[tag] == "<tag é>".encode()


def test_the_width_is_the_width_of_the_logits():
    tokenizer = byte_level()
    wide = TokenizerInfo.from_transformers(tokenizer, 501)
    assert wide.vocab_size == 501
    assert wide.vocabulary[len(tokenizer) :] == (b"",) * (501 - len(tokenizer))
    row = mask(GrammarCompiler(wide, cache_limit_bytes=0).compile(Guide.regex(".*")).matcher())
    assert bits(row).max() < len(tokenizer)
    # Narrow logits: the added tokens at the end cannot be written, nothing is out of range.
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    narrow = TokenizerInfo.from_transformers(tokenizer, end)
    assert narrow.vocab_size == end
    assert end not in narrow.special_tokens
    assert narrow.vocabulary == wide.vocabulary[:end]
    matcher = GrammarCompiler(narrow, cache_limit_bytes=0).compile(Guide.json()).matcher()
    assert bits(mask(matcher)).max() < end
    with pytest.raises(TokenizerError, match="ordinary text needs token"):
        TokenizerInfo.from_transformers(tokenizer, 200)
    with pytest.raises(TokenizerError, match="width of the logits"):
        TokenizerInfo.from_transformers(tokenizer, 0)


def test_stop_tokens_are_the_union():
    tokenizer = byte_level()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    width = len(tokenizer)
    info = TokenizerInfo.from_transformers(tokenizer, width, stop_token_ids=[end, width + 5])
    assert info.stop_token_ids == tuple(sorted([tokenizer.eos_token_id, end]))
    none = byte_level(eos_token=None)
    with pytest.raises(TokenizerError, match="no stop token"):
        TokenizerInfo.from_transformers(none, width)
    assert TokenizerInfo.from_transformers(none, width, [end]).stop_token_ids == (end,)


def test_a_tokenizer_that_changes_the_text_is_refused():
    from tokenizers import normalizers

    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(TokenizerError, match="do not give the bytes of the text back"):
        TokenizerInfo.from_transformers(tokenizer, len(tokenizer))


def test_explicit_vocabularies():
    info = TokenizerInfo.from_vocabulary(
        [b"a", b"b", b"x"], [2, 2], special_tokens={1: "<b>", 9: "n"}
    )
    assert info.vocabulary == (b"a", b"", b"")
    assert info.stop_token_ids == (2,)
    assert info.special_tokens == {1: "<b>"}
    for stops in ([], [3], [-1]):
        with pytest.raises(TokenizerError, match="stop token"):
            TokenizerInfo.from_vocabulary([b"a", b"b", b"x"], stops)


def test_the_fingerprint_tells_contents_apart():
    same = [TokenizerInfo.from_vocabulary([b"ab", b"c", b""], [2]).fingerprint for _ in range(2)]
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
