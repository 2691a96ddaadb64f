"""``python -m gkv_jax.serve``: the engine behind OpenAI's chat completions API."""
