"""Drafts: guesses of the next tokens, which one forward pass verifies together.

A draft is compared with the token that the model chooses at its position. If they are equal, the
forward pass has produced one more token; if not, the draft and those after it are dropped. So drafts
never change the output, only the number of forward passes, and a source may propose anything.
"""

from gkv_jax.drafts.backoff import Backoff
from gkv_jax.drafts.lookup import LookupDrafts
from gkv_jax.drafts.prediction import MAX_PREDICTION_TOKENS, PredictedDrafts
from gkv_jax.drafts.scripted import ScriptedDrafts
from gkv_jax.drafts.source import DraftSource

__all__ = [
    "MAX_PREDICTION_TOKENS",
    "Backoff",
    "DraftSource",
    "LookupDrafts",
    "PredictedDrafts",
    "ScriptedDrafts",
]
