"""A random Llama with a tokenizer of bytes, made on the spot: what a real model is, but for its sense.

Whatever takes a model by name takes ``tiny-random``: it loads offline in milliseconds, and its programs
compile in seconds. Greedy texts are printable ASCII and do not end by themselves.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gkv_jax.weights.entries import RandomSource

STOP = "<stop>"
"""The stop token; it follows the 256 bytes."""
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
"""One token for each role of a chat; a message is its role's token and its text."""

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_SPREAD = 2.0
"""Standard deviation of the logits."""


def byte_tokenizer(
    roles: Sequence[str] = ROLES,
    reply: str = "<assistant>",
    characters: Sequence[str] | None = None,
) -> Any:
    """A transformers tokenizer: token b is byte b, then ``STOP`` and the roles.

    Args:
      roles: special tokens that may begin a message.
      reply: the one that begins the model's.
      characters: what byte-level BPE writes for the bytes, in another order of the tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {each: token for token, each in enumerate(characters or _characters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([STOP, *roles])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=STOP,
        extra_special_tokens=list(roles),
        chat_template=_CHAT_TEMPLATE.replace("<assistant>", reply),
    )


def config_json(source: RandomSource, vocab_size: int) -> dict[str, Any]:
    """The ``config.json`` that such a model would have."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "num_hidden_layers": source.num_layers,
        "num_attention_heads": source.num_heads,
        "num_key_value_heads": source.num_kv_heads,
        "head_dim": source.head_dim,
        "max_position_embeddings": source.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,  # a tied random model repeats its last token
        "bos_token_id": None,
        "eos_token_id": 256,
    }


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """The checkpoint's tensor of that name, float32, ``[out, in]`` or ``[features]``."""
    # By name, so that no tensor depends on the order in which they are read.
    rng = np.random.default_rng([seed, *name.encode()])
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    deviation = 1.0 if "embed" in name else shape[1] ** -0.5
    tensor = rng.normal(0, deviation, shape).astype(np.float32)
    if name == "lm_head.weight":
        token = np.arange(shape[0])[:, None]
        printable = (token >= ord(" ")) & (token <= ord("~"))
        # A logit of 0 is never the largest of so many: the text is legible, and does not end.
        tensor = np.where(printable, _SPREAD * tensor, np.float32(0))
    return tensor


def _characters_of_bytes() -> list[str]:
    """What byte-level BPE writes for each byte: itself where it is printable, else a letter above."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
