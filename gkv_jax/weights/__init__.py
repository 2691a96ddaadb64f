"""Weights and tokenizers: Hugging Face folders, GGUF files, and models by name."""

from gkv_jax.weights.parameters import Params, fill_params, to_hf_state_dict
from gkv_jax.weights.registry import LoadedModel, load_model

__all__ = ["LoadedModel", "Params", "fill_params", "load_model", "to_hf_state_dict"]
