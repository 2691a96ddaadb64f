"""Wider vocabularies than a fetched tokenizer has, for heads of the size of other models'."""

import json
from typing import Any

import numpy as np


def grown_tokenizer(tokenizer: Any, size: int, seed: int = 0) -> Any:
    """A byte-level BPE tokenizer with further merges, until it has ``size`` tokens.

    The new tokens are pieces of words put together: as in a trained vocabulary of that size, most
    tokens are legal inside a string, and few where a document has structure.

    Raises:
      ValueError: no pairs are left to merge.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab: dict[str, int] = state["model"]["vocab"]
    merges = state["model"]["merges"]
    words = [token for token in vocab if token.removeprefix("Ġ").isalpha() and token.isascii()]
    for added in state["added_tokens"]:  # or they would be given new ids, after all others
        vocab.setdefault(added["content"], added["id"])
    ends = [token for token in words if not token.startswith("Ġ")]
    rng = np.random.default_rng(seed)
    for _ in range(8 * size):
        if len(vocab) >= size:
            break
        first, second = words[rng.integers(len(words))], ends[rng.integers(len(ends))]
        if first + second not in vocab:
            vocab[first + second] = len(vocab)
            merges.append([first, second])
    if len(vocab) != size:
        raise ValueError(f"size: {size} tokens asked for, {len(vocab)} made")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
    )
