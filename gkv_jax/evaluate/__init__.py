"""How good is a cache? Measures on trained weights (random ones hide every failure)."""

from gkv_jax.evaluate.perplexity import perplexity, streaming_nll

__all__ = ["perplexity", "streaming_nll"]
