"""gkv_jax: output that always parses, from a KV cache that never grows, in one compiled JAX loop.

    from gkv_jax import CacheSpec, Engine, Guide, Sampling

    engine = Engine.from_pretrained("smollm2-135m-instruct", cache=CacheSpec(sinks=4, window=252))
    (result,) = engine.generate("Describe a person.", guide=Guide.json_schema(schema))

Importing this package imports jax and numpy; everything heavier waits until it is used.
"""

from gkv_jax.cache import CacheSpec
from gkv_jax.draft_model import DraftModel
from gkv_jax.drafts import DraftSource, ScriptedDrafts
from gkv_jax.engine import Engine
from gkv_jax.errors import UserError
from gkv_jax.request import Piece, Result, TokenLogprobs
from gkv_jax.sampling import Sampling
from grammar_host import DeadEndError, GrammarError, Guide

__version__ = "0.1.0"

__all__ = [
    "CacheSpec",
    "DeadEndError",
    "DraftModel",
    "DraftSource",
    "Engine",
    "GrammarError",
    "Guide",
    "Piece",
    "Result",
    "Sampling",
    "ScriptedDrafts",
    "TokenLogprobs",
    "UserError",
]
