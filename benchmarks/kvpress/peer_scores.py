"""Scores and kept tokens by kvpress: a script for an interpreter that has it, and nothing of ours.

``python peer_scores.py INPUT.npz OUTPUT.npz``. Every score is computed by kvpress's own presses, which ask
an attention layer for its queries: here the layer's hidden states are the queries themselves and its
projection is the identity. H2O's peer reads the probabilities of transformers' eager attention.
"""

import importlib.metadata
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kvpress
import numpy as np
import torch
from kvpress.utils import compute_n_kept
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def presses(budget: int, tokens: int) -> dict[str, kvpress.ScorerPress]:
    """kvpress's policies under our names, each to keep ``budget`` of ``tokens``."""
    ratio = 1 - budget / tokens
    return {
        "window": kvpress.StreamingLLMPress(ratio, n_sink=4),
        "snapkv": kvpress.SnapKVPress(ratio, window_size=64, kernel_size=5),
        "h2o": kvpress.ObservedAttentionPress(ratio),
        "tova": kvpress.TOVAPress(ratio),
        "keydiff": kvpress.KeyDiffPress(ratio),
        "expected_attention": kvpress.ExpectedAttentionPress(ratio, n_sink=4, epsilon=0.02),
    }


def rotary(inv_freq: np.ndarray) -> Rotary:
    """Rotary angles as transformers' layers give them, but exact ones: made in float64."""

    def angles(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = positions[..., None].double() * torch.from_numpy(inv_freq)
        angle = torch.cat([half, half], dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    return angles


def attention_layer(query_heads: int, kv_heads: int, dim: int, rotary_emb: Rotary) -> Any:
    """What the presses ask of an attention layer whose input is its queries."""
    return SimpleNamespace(
        config=SimpleNamespace(num_attention_heads=query_heads, num_key_value_heads=kv_heads),
        head_dim=dim,
        num_key_value_groups=query_heads // kv_heads,
        q_proj=nn.Identity(),
        rotary_emb=rotary_emb,
        training=False,
    )


def scores_of_layer(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, budget: int
) -> dict[str, torch.Tensor]:
    """Scores ``[Hk,N]`` by policy; ``q`` is not rotated, ``k`` is: ``[1,H,N,D]``."""
    tokens = q.shape[2]
    position_embeddings = module.rotary_emb(q, torch.arange(tokens)[None])
    rotated, _ = apply_rotary_pos_emb(q, k, *position_embeddings)
    causal = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    _, attentions = eager_attention_forward(
        module, rotated, k, v, causal, scaling=module.head_dim**-0.5
    )
    hidden_states = q.transpose(1, 2).reshape(1, tokens, -1)
    kwargs = {"position_embeddings": position_embeddings}
    return {
        name: press.score(
            module, hidden_states, k, v, attentions if name == "h2o" else None, kwargs
        )[0]
        for name, press in presses(budget, tokens).items()
    }


@torch.no_grad()
def main(source: str, target: str) -> None:
    """From ``q [L,Hq,N,D]``, ``k``, ``v`` ``[L,Hk,N,D]``, ``inv_freq``, ``budgets`` to all scores."""
    given = np.load(source)
    layers, query_heads, tokens, dim = given["q"].shape
    module = attention_layer(query_heads, given["k"].shape[1], dim, rotary(given["inv_freq"]))
    packages = ("kvpress", "torch", "transformers")
    out: dict[str, Any] = {
        "versions": [f"{each} {importlib.metadata.version(each)}" for each in packages]
    }
    for budget in given["budgets"].tolist():
        kept: dict[str, list[torch.Tensor]] = {}
        scores: dict[str, list[torch.Tensor]] = {}
        for layer in range(layers):
            q, k, v = (torch.from_numpy(given[name][layer])[None] for name in "qkv")
            for name, score in scores_of_layer(module, q, k, v, budget).items():
                n_kept = compute_n_kept(tokens, presses(budget, tokens)[name].compression_ratio)
                scores.setdefault(name, []).append(score)
                kept.setdefault(name, []).append(score.topk(n_kept, dim=-1).indices)
        for name in kept:
            out[f"{name}/{budget}/scores"] = torch.stack(scores[name]).numpy()
            out[f"{name}/{budget}/kept"] = torch.stack(kept[name]).numpy()
    np.savez(target, **out)


if __name__ == "__main__":
    main(*sys.argv[1:])
