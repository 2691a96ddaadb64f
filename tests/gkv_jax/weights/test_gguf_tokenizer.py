"""The tokenizer that GGUF metadata describe."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from gkv_jax.errors import UserError
from gkv_jax.weights.gguf_tokenizer import save_tokenizer, tokenizer_from_metadata
from gkv_jax.weights.huggingface import read_tokenizer

from .conftest import gguf_tokens

TEXTS = [
    "",
    "hello  12",
    "  a\n\n\tb   ",
    "x = 3.14 -1e10",
    "naïve 日本語 😀 e\u0301 ½ ٣",
    "<|im_start|>user\nhe<|im_end|>\n",
    "<think>no</think>",
    "\u00a0\u3000\r\n",
]


def metadata(**changes: Any) -> dict[str, Any]:
    tokens, types, merges = gguf_tokens()
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "add_bos_token": False,
        **changes,
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
    return named | {
        "tokenizer.chat_template": "{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
        "llama.context_length": 128,
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(pre: str, text: str) -> None:
    tokenizer = tokenizer_from_metadata(metadata(pre=pre))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ", "12"]),  # " 12" is one piece, so the spaces are apart
        ("smollm", ["a", "ĠĠ", "1", "2"]),  # digits are split off first
        ("llama-bpe", ["a", "Ġ", "Ġ", "12"]),
    ],
)
def test_pre_tokenizers_differ_before_digits(pre: str, tokens: list[str]) -> None:
    assert tokenizer_from_metadata(metadata(pre=pre)).tokenize("a  12") == tokens


def test_llama3_takes_a_whole_piece_before_merging() -> None:
    tokens, types, merges = gguf_tokens()
    tokens[280] = "world"  # no merges lead there
    changed = {"tokens": tokens, "token_type": types, "merges": merges}
    assert tokenizer_from_metadata(metadata(pre="llama-bpe", **changed)).encode("world") == [280]
    assert len(tokenizer_from_metadata(metadata(pre="smollm", **changed)).encode("world")) == 5


def test_control_and_user_defined_tokens_stay_whole() -> None:
    tokenizer = tokenizer_from_metadata(metadata())
    ids = tokenizer.encode("<|im_start|>he<think><|im_end|>")
    assert ids == [256, 259, 258, 257]
    # what the model wrote itself is text; control tokens are not
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<think>"
    assert len(tokenizer) == 300


@pytest.mark.parametrize(
    ("pre", "add", "first"),
    [
        ("smollm", None, False),
        ("smollm", False, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_beginning_of_sequence(pre: str, add: bool | None, first: bool) -> None:
    tokenizer = tokenizer_from_metadata(metadata(pre=pre, add_bos_token=add))
    assert tokenizer.encode("he") == ([256] if first else []) + [259]
    assert tokenizer.encode("he", add_special_tokens=False) == [259]


def test_saved_and_read_again(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_metadata(metadata(add_bos_token=True))
    names = save_tokenizer(tokenizer, tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(names)
    for again in (read_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        for text in TEXTS:
            assert again.encode(text) == tokenizer.encode(text)
        assert (again.bos_token_id, again.eos_token_id) == (256, 257)
        assert again.model_max_length == 128
        chat = [{"role": "user", "content": "hi"}]
        assert again.apply_chat_template(chat, tokenize=False) == "[hi]"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"model": "llama"}, "add_space_prefix"),
        ({"model": "llama", "add_space_prefix": False}, r"no tokenizer\.ggml\.scores"),
        ({"pre": "tekken"}, "'tekken'.*served: gpt2 with"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"merges": ["a b c"]}, "inconsistent"),
        ({"token_type": [1]}, "inconsistent"),
        ({"add_eos_token": True}, "add_eos_token"),
    ],
)
def test_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        tokenizer_from_metadata(metadata(**changes))


# --- SentencePiece ------------------------------------------------------------------------------

PIECES = [
    "he", "ll", "llo", "hello", "lo", "▁h", "▁he", "▁▁", "▁▁▁", "ab", "ba", "aba", "bab", "aa",
    "aaa", "wo", "wor", "▁wor", "ld", "▁world", "é",
]  # fmt: skip
SPELLED = [*"▁helowrdab"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """As Gemma's: control tokens, user-defined ones, bytes, pieces by falling score, characters."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\n\n", "  \t"]
    types = [3, 3, 3, 2, 4, 4, 4]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)] + PIECES + SPELLED
    types += [6] * 256 + [1] * (len(PIECES) + len(SPELLED))
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 263 + [-float(rank) for rank in range(len(PIECES) + len(SPELLED))],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
        "add_bos_token": True,
        "add_space_prefix": False,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def joined(text: str) -> list[str]:
    """SentencePiece as llama.cpp does it: the best join of two neighbours, again and again."""
    rank = {piece: at for at, piece in enumerate(PIECES + SPELLED)}
    pieces = list(text.replace(" ", "▁"))
    while True:
        joins = [
            (rank[a + b], at)
            for at, (a, b) in enumerate(itertools.pairwise(pieces))
            if a + b in rank
        ]
        if not joins:
            break
        _, at = min(joins)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        token
        for piece in pieces
        for token in ([piece] if piece in rank else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


def test_sentencepiece_joins_by_score() -> None:
    tokenizer = tokenizer_from_metadata(sentencepiece_metadata())
    rng = np.random.default_rng(0)
    texts = ["hello world", "héllo", "日本 aba", "   hello"]
    texts += ["".join(rng.choice([*" helowrdab"], 30)) for _ in range(200)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids[0] == 2
        assert tokenizer.convert_ids_to_tokens(ids[1:]) == joined(text)
        assert tokenizer.decode(ids[1:]) == text
    assert "▁world" in tokenizer.tokenize("hello world")


def test_sentencepiece_keeps_added_tokens_whole(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_metadata(sentencepiece_metadata())
    save_tokenizer(tokenizer, tmp_path)
    for each in (tokenizer, read_tokenizer(tmp_path)):
        ids = each.encode("he<mask>\n\nhe  \t<eos>")
        assert each.convert_ids_to_tokens(ids) == [
            "<bos>", "he", "<mask>", "\n\n", "he", "  \t", "<eos>",
        ]  # fmt: skip
        assert each.decode(ids, skip_special_tokens=True) == "he<mask>\n\nhe  \t"


def test_inconsistent_scores() -> None:
    with pytest.raises(UserError, match="inconsistent"):
        tokenizer_from_metadata(sentencepiece_metadata(scores=[0.0]))
