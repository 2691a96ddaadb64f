"""How good is a cache, and how good is guided output? Measures on trained weights.

    from gkv_jax.evaluate import Document, Plan, cache_quality, guided

    quality = cache_quality(model, params, tokenizer, Plan(policies=("window", "snapkv")), prose)
    quality.score("snapkv", 256, "needle", 1000)

    print(guided(engine, [Document(prompt, schema, expected), ...]))

Random weights hide every failure of a cache. ``python -m gkv_jax.evaluate.cache`` measures one for a
model by name and writes tables and plots.
"""

from gkv_jax.evaluate.guided import Document, guided
from gkv_jax.evaluate.guided_result import GuidedEvaluation
from gkv_jax.evaluate.perplexity import perplexity, streaming_nll
from gkv_jax.evaluate.plan import Plan
from gkv_jax.evaluate.plot_kept import plot_kept
from gkv_jax.evaluate.quality import CacheQuality, cache_quality

__all__ = [
    "CacheQuality",
    "Document",
    "GuidedEvaluation",
    "Plan",
    "cache_quality",
    "guided",
    "perplexity",
    "plot_kept",
    "streaming_nll",
]
