"""The tokenizer inside a GGUF file, as a Hugging Face tokenizer.

Built with the ``tokenizers`` package from the vocabulary, merges or scores, and flags that llama.cpp
has in it.
GGUF names the pre-tokenizer instead of describing it, so the table below gives each name's meaning;
a name that is not in it is refused, because a wrong split changes tokens without any error.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gkv_jax.errors import UserError

# llama.cpp's token types.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
}

# Llama 3 takes a piece that is a token as that token, whatever its merges would give, and it begins
# sequences with its BOS token unless the file says otherwise.
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})

_INCONSISTENT = "GGUF: the tokenizer's tokens, token types, scores or merges are inconsistent"


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> Any:
    """A ``transformers.PreTrainedTokenizerFast`` from GGUF metadata.

    It adds a beginning-of-sequence token when ``tokenizer.ggml.add_bos_token`` says so, or else by
    llama.cpp's default, and carries the chat template. Raises UserError for a kind of tokenizer
    that is not served.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = _field(metadata, "tokens")
    special = {
        role: tokens[metadata[key]]
        for role, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if key in metadata
    }
    options: dict[str, Any] = {}
    context_length = f"{metadata.get('general.architecture', 'llama')}.context_length"
    if context_length in metadata:
        options["model_max_length"] = metadata[context_length]
    if "tokenizer.chat_template" in metadata:
        options["chat_template"] = metadata["tokenizer.chat_template"]
    return PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(metadata),
        clean_up_tokenization_spaces=False,
        **special,
        **options,
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> list[str]:
    """Write ``tokenizer.json`` and its companions into ``folder``; returns the file names."""
    before = {path.name for path in folder.iterdir()}
    tokenizer.save_pretrained(folder)
    return sorted({path.name for path in folder.iterdir()} - before)


def _tokenizer(metadata: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken

    kind = _field(metadata, "model")
    pre = None if kind == "llama" else _field(metadata, "pre")
    tokens, types = _field(metadata, "tokens"), _field(metadata, "token_type")
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise UserError(_INCONSISTENT)
    if kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types)
    elif kind == "gpt2" and pre in _PRE_TOKENIZERS:
        tokenizer = _byte_level_bpe(metadata, tokens, pre)
    else:
        raise UserError(
            f"GGUF: tokenizer {kind!r} with pre-tokenizer {pre!r} is not served (served: gpt2 with "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}; llama); load the model from its Hugging Face folder"
        )
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        raise UserError("GGUF: tokenizer.ggml.add_eos_token is not served; prompts do not end")
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _LLAMA3):
        tokenizer.post_processor = _prepend(tokens, metadata["tokenizer.ggml.bos_token_id"])
    return tokenizer


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], pre: str) -> Any:
    from tokenizers import Tokenizer, decoders, models

    merges = [tuple(merge.split(" ")) for merge in _field(metadata, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise UserError(_INCONSISTENT)
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Any:
    from gkv_jax.weights.gguf_sentencepiece import sentencepiece_bpe

    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise UserError(
            "GGUF: tokenizer.ggml.add_space_prefix is not served (Gemma has it false); load the model "
            "from its Hugging Face folder"
        )
    scores, unknown = _field(metadata, "scores"), tokens[_field(metadata, "unknown_token_id")]
    if len(scores) != len(tokens):
        raise UserError(_INCONSISTENT)
    return sentencepiece_bpe(tokens, scores, types, unknown)


def _prepend(tokens: list[str], bos: int) -> Any:
    from tokenizers import processors

    token = tokens[bos]
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, bos)],
    )


def _field(metadata: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise UserError(
            f"GGUF: the metadata has no {key}; load the model from its Hugging Face folder"
        )
    return metadata[key]
