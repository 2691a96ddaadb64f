"""SentencePiece vocabularies of GGUF files, as byte-pair encoding of the ``tokenizers`` package.

llama.cpp stores pieces and scores, not merges: it joins the neighbours whose joined piece scores
highest, until no join is a piece (https://github.com/google/sentencepiece). Merges ranked by the
score of what they make do the same.
"""

from collections.abc import Sequence
from typing import Any

# llama.cpp's token types.
_NORMAL = 1
_SPACE = "▁"


def sentencepiece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    unknown: str,
    *,
    space_first: bool,
) -> Any:
    """A ``tokenizers.Tokenizer`` of these pieces, without added tokens.

    ``space_first`` puts a space before a text and after each added token in it, as Llama 2's does;
    decoding takes the first one away. Characters that are no piece become bytes, the pieces ``<0x..>``,
    or ``unknown`` where the vocabulary lacks these.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: index for index, token in enumerate(tokens)}
    joinable = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    merges = _merges(tokens, scores, vocab, joinable)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces: Any = normalizers.Replace(" ", _SPACE)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_first:
        spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(
    tokens: Sequence[str], scores: Sequence[float], vocab: dict[str, int], joinable: set[str]
) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, by falling score of the third."""
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        if token not in joinable:
            continue
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in joinable and second in joinable:
                ranked.append((-score, vocab[token], vocab[first], vocab[second], first, second))
    ranked.sort()
    return [(first, second) for *_, first, second in ranked]
