"""The engine that tests share, of one size everywhere: its loops take longer to compile than most tests.

JAX finds a compiled program again wherever model, spec and slots are the same.
"""

import functools

from gkv_jax import CacheSpec, Engine
from gkv_jax.models.llama import Llama
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config

CONFIG = text_config()
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
TOKENIZER = byte_tokenizer()
SPEC = CacheSpec(sinks=4, window=20, max_drafts=3, prefill_chunk=64)

make_engine = functools.partial(
    Engine,
    MODEL,
    PARAMS,
    TOKENIZER,
    cache=SPEC,
    slots=4,
    verify="always",  # by the clock, nobody could say what is drafted
)
