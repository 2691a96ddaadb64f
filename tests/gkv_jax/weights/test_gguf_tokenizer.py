"""The tokenizer that GGUF metadata describe."""

import contextlib
import itertools
import json
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from packaging.version import Version
from transformers import AutoTokenizer, Qwen2Tokenizer

from gkv_jax.errors import UserError
from gkv_jax.weights.gguf_tokenizer import save_tokenizer, tokenizer_from_metadata
from gkv_jax.weights.huggingface import read_tokenizer

from .conftest import JUNK, add_field, gguf_tokens

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


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "tekken"])
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
        ({"model": "llama"}, "unknown_token_id is missing"),
        (
            {"model": "llama", "unknown_token_id": 0, "add_space_prefix": False},
            r"tokenizer\.ggml\.scores is missing",
        ),
        ({"pre": "deepseek-llm"}, "'deepseek-llm'.*served: gpt2 with"),
        ({"pre": None}, "pre-tokenizer None .*served: gpt2 with"),
        ({"merges": ["h zz"]}, r"inconsistent \(.*zz"),
        ({"eos_token_id": 300}, "eos_token_id 300 is no token of 300"),
        ({"eos_token_id": -1}, "eos_token_id -1 is no token"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
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


LLAMA2 = {"add_space_prefix": True}


def test_a_space_before_the_text() -> None:
    """As Llama 2 and the first Mistrals have it: before a text, and after each token added to it."""
    plain = tokenizer_from_metadata(sentencepiece_metadata())
    tokenizer = tokenizer_from_metadata(sentencepiece_metadata(**LLAMA2))
    for text in ("hello world", " hello", "héllo", "日本 aba"):
        assert tokenizer.encode(text) == plain.encode(f" {text}")
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.tokenize("") == []
    assert tokenizer.tokenize("he<mask>he") == ["▁he", "<mask>", "▁he"]


def test_a_space_among_control_tokens_is_refused() -> None:
    fields = sentencepiece_metadata(**LLAMA2)
    fields["tokenizer.ggml.token_type"][4] = 3  # <mask>
    with pytest.raises(UserError, match="add_space_prefix with control tokens such as '<mask>'"):
        tokenizer_from_metadata(fields)


def test_inconsistent_scores() -> None:
    with pytest.raises(UserError, match="inconsistent"):
        tokenizer_from_metadata(sentencepiece_metadata(scores=[0.0]))


# --- Against transformers -----------------------------------------------------------------------

CORPUS = [
    "Hello world, it's the café at 12:30! I'LL see McDonald's iPhone, /usr/lib\n\n  and naïve",
    " 日本語 Ünïcödé ÀÉÎ x=3.14159\r\n don't DON'T they'Ve e\u0301 A\u030a",
]


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Metadata of byte-level BPE learned without any split, so that pieces decide what is merged."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokens": [*tokens, "<|b|>", "<|e|>"],
        "token_type": [1] * len(tokens) + [3, 3],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
        "add_bos_token": None,
    }


def write_metadata(path: Path, fields: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        add_field(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["llama-bpe", "tekken", "qwen2", "llama 2"])
def test_equals_transformers(kind: str, trained: dict[str, Any], tmp_path: Path) -> None:
    """Reading the same file; of Qwen, its own tokenizer, which composes characters, as files do not."""
    if kind in ("llama-bpe", "tekken") and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("transformers 5.15 splits these files' texts in another way than 5.24")
    if kind == "llama 2":
        fields = sentencepiece_metadata(**LLAMA2)
        letters = [*" helowrdab", "é", "日"]
    else:
        fields = metadata(pre=kind, **trained)
        letters = [*"abcXYZé日 Ü\n\r\t 12/.'sSlLtTdD e", "\u0301", "😀", "ǅ", "ʰ", "ª", "\u3000"]
    if kind == "qwen2":
        vocab = {token: index for index, token in enumerate(trained["tokens"])}
        merges = [tuple(merge.split(" ")) for merge in trained["merges"]]
        theirs = Qwen2Tokenizer(vocab=vocab, merges=merges)
    else:
        write_metadata(tmp_path / "tokenizer.gguf", fields)
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tokenizer.gguf")
    ours = tokenizer_from_metadata(fields)
    rng = np.random.default_rng(0)
    for text in [*CORPUS, *("".join(rng.choice(letters, 30)) for _ in range(300))]:
        if kind == "llama 2":  # their space is not put before another, nor after added tokens
            text = text.replace("\n", "").lstrip()
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        composed = unicodedata.normalize("NFC", text) if kind == "qwen2" else text
        assert ours.decode(ids) == composed or kind == "llama 2"
    first = {"qwen2": [], "llama 2": [2]}.get(kind, [trained["bos_token_id"]])
    encoded = ours.encode("e")
    assert encoded == [*first, *ours.encode("e", add_special_tokens=False)]


# --- Damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [metadata(), sentencepiece_metadata()], ids=["gpt2", "llama"])
def test_every_field_damaged_is_an_error_or_harmless(fields: dict[str, Any]) -> None:
    for key in fields:
        damaged = [{k: v for k, v in fields.items() if k != key}]
        damaged += [fields | {key: value} for value in (*JUNK, ["a b"] * 300, [1] * 300)]
        for each in damaged:
            with contextlib.suppress(UserError):
                tokenizer_from_metadata(each)
