"""How good is a cache? Measures on trained weights (random ones hide every failure).

    from gkv_jax.evaluate import Plan, cache_quality

    quality = cache_quality(model, params, tokenizer, Plan(policies=("window", "snapkv")), prose)
    quality.score("snapkv", 256, "needle", 1000)

``python -m gkv_jax.evaluate.cache`` does this for a model by name and writes tables and plots.
"""

from gkv_jax.evaluate.perplexity import perplexity, streaming_nll
from gkv_jax.evaluate.plan import Plan
from gkv_jax.evaluate.plot_kept import plot_kept
from gkv_jax.evaluate.quality import CacheQuality, cache_quality

__all__ = ["CacheQuality", "Plan", "cache_quality", "perplexity", "plot_kept", "streaming_nll"]
