"""The tokenizer inside a GGUF file, as a Hugging Face tokenizer.

Built with the ``tokenizers`` package from the vocabulary, merges or scores, and flags that llama.cpp
has in it.
GGUF names the pre-tokenizer instead of describing it, so the table below gives each name's meaning;
a name that is not in it is refused, because a wrong split changes tokens without any error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gkv_jax.errors import UserError
from gkv_jax.models.fields import REQUIRED, Fields

# llama.cpp's token types.
_CONTROL, _USER_DEFINED = 3, 4


class _Pre(NamedTuple):
    """What a pre-tokenizer's name stands for.

    Attributes:
      pattern: of the pieces that are merged within; None for GPT-2's.
      digits: whether each digit is a piece of its own.
      whole: whether a piece that is a token is that token, whatever its merges would give.
      bos: whether sequences begin with the BOS token unless the file says otherwise.
      nfc: whether text is composed (Unicode NFC). llama.cpp leaves it; the models' own tokenizers don't.
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    bos: bool = False
    nfc: bool = False


_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_LLAMA3 = _Pre(rf"{_WORD}|\p{{N}}{{1,3}}{_OTHER}", whole=True, bos=True)

_PRE_TOKENIZERS = {
    "gpt-2": _Pre(),
    "smollm": _Pre(digits=True),
    "starcoder": _Pre(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Pre(rf"{_WORD}|\p{{N}}{_OTHER}", nfc=True),
    "tekken": _Pre(
        rf"{_CASED}|\p{{N}}{_OTHER}".replace(r"[\r\n]*", r"[\r\n/]*"), whole=True, bos=True
    ),
}

_INCONSISTENT = "GGUF: the tokenizer's tokens, token types, scores or merges are inconsistent"
_FROM_FOLDER = "load the model from its Hugging Face folder"


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> Any:
    """A ``transformers.PreTrainedTokenizerFast`` from GGUF metadata.

    It adds a beginning-of-sequence token when ``tokenizer.ggml.add_bos_token`` says so, or else by
    llama.cpp's default, and carries the chat template. Raises UserError for a kind of tokenizer
    that is not served.
    """
    from transformers import PreTrainedTokenizerFast

    fields = Fields(metadata, "GGUF: ")
    vocabulary = _Vocabulary.read(fields)
    special = {
        role: token
        for role, name in _ROLES.items()
        if (token := vocabulary.token_of(name)) is not None
    }
    context_length = f"{fields.text('general.architecture', 'llama')}.context_length"
    options = {
        "model_max_length": fields.integer(context_length, None),
        "chat_template": fields.text("tokenizer.chat_template", None),
    }
    try:
        tokenizer = _tokenizer(vocabulary)
    except UserError:
        raise
    except Exception as error:
        # The tokenizers package raises bare Exceptions: of a merge of what is no token, say.
        raise UserError(f"{_INCONSISTENT} ({' '.join(str(error).split())})") from error
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **special,
        **{name: value for name, value in options.items() if value is not None},
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> list[str]:
    """Write ``tokenizer.json`` and its companions into ``folder``; returns the file names."""
    before = {path.name for path in folder.iterdir()}
    tokenizer.save_pretrained(folder)
    return sorted({path.name for path in folder.iterdir()} - before)


_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file, of different texts, with a type each; and the fields beside them."""

    fields: Fields
    tokens: Sequence[str]
    types: Sequence[int]

    @classmethod
    def read(cls, fields: Fields) -> "_Vocabulary":
        tokens, types = (fields.sequence(_key(name)) for name in ("tokens", "token_type"))
        unlike = len(types) != len(tokens) or not all(isinstance(token, str) for token in tokens)
        if unlike or len(set(tokens)) != len(tokens):
            raise UserError(_INCONSISTENT)
        return cls(fields, tokens, types)

    def token_of(self, name: str, default: Any = None) -> Any:
        """The token whose index the field ``name`` holds; None where it may be absent, and is."""
        index = self.fields.integer(_key(name), default)
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise UserError(f"GGUF: {_key(name)} {index} is no token of {len(self.tokens)}")
        return self.tokens[index]

    def of_type(self, wanted: int) -> list[str]:
        """The tokens of this type, in order."""
        pairs = zip(self.tokens, self.types, strict=True)
        return [token for token, token_type in pairs if token_type == wanted]


def _tokenizer(vocabulary: _Vocabulary) -> Any:
    from tokenizers import AddedToken

    fields = vocabulary.fields
    kind = fields.text(_key("model"))
    pre = _Pre(bos=True)
    if kind == "llama":
        tokenizer = _sentencepiece(vocabulary)
    else:
        name = fields.text(_key("pre"), None)
        if kind != "gpt2" or name not in _PRE_TOKENIZERS:
            raise UserError(
                f"GGUF: tokenizer {kind!r} with pre-tokenizer {name!r} is not served (served: gpt2 "
                f"with {', '.join(sorted(_PRE_TOKENIZERS))}; llama); {_FROM_FOLDER}"
            )
        pre = _PRE_TOKENIZERS[name]
        tokenizer = _byte_level_bpe(vocabulary, pre)
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token in vocabulary.of_type(wanted)
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    if fields.flag(_key("add_eos_token")):
        raise UserError("GGUF: tokenizer.ggml.add_eos_token is not served; prompts do not end")
    if fields.flag(_key("add_bos_token"), pre.bos):
        tokenizer.post_processor = _prepend(vocabulary)
    return tokenizer


def _byte_level_bpe(vocabulary: _Vocabulary, pre: _Pre) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in vocabulary.fields.sequence(_key("merges"))]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.whole))
    splits: list[Any] = []
    if pre.digits:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        splits.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytewise])
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Any:
    from gkv_jax.weights.gguf_sentencepiece import sentencepiece_bpe

    fields, tokens = vocabulary.fields, vocabulary.tokens
    unknown = vocabulary.token_of("unknown_token_id", REQUIRED)
    space_first = fields.flag(_key("add_space_prefix"), True)
    roles = {vocabulary.token_of(name) for name in _ROLES.values()}
    others = [token for token in vocabulary.of_type(_CONTROL) if token not in roles]
    if space_first and others:
        # Whether a space also stands after each of them, the models' own tokenizers differ.
        raise UserError(
            "GGUF: tokenizer.ggml.add_space_prefix with control tokens such as "
            f"{others[0]!r} is not served; {_FROM_FOLDER}"
        )
    scores = fields.sequence(_key("scores"))
    if len(scores) != len(tokens):
        raise UserError(_INCONSISTENT)
    return sentencepiece_bpe(tokens, scores, vocabulary.types, unknown, space_first=space_first)


def _prepend(vocabulary: _Vocabulary) -> Any:
    from tokenizers import processors

    token = vocabulary.token_of("bos_token_id", REQUIRED)
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, vocabulary.fields.integer(_key("bos_token_id")))],
    )


def _key(name: str) -> str:
    return f"tokenizer.ggml.{name}"
