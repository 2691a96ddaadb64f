"""Train your own Flax Linen decoder, and evaluate its live weights, guided and free, as it learns.

    python examples/train_eval_linen.py --folder runs/linen

The model knows nothing of gkv_jax: a decoder with linen.MultiHeadDotProductAttention and a table of
positions, as one writes it. ``from_linen`` makes it generate. Every --every steps its weights go to
an engine, which lets it answer documents that it has never seen: once ruled by their JSON Schema,
once free. Guided output is valid from the first step; free output learns to be. Checkpoints are
written by Orbax in the background: kill the program, start it again, and it goes on where it was.
``curves.png`` in the folder shows how it went.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import extraction as task
import jax
import jax.numpy as jnp
import optax
import typer
from flax import linen as nn

from gkv_jax import CacheSpec, Engine
from gkv_jax.evaluate import guided
from gkv_jax.flax import from_linen
from gkv_jax.weights.training import TrainingCheckpoints

OPTIMIZER = optax.adamw(task.learning_rate())
POSITIONS = 192
"""Rows of the table: a sentence, and the longest answer."""


@dataclasses.dataclass(frozen=True)
class Size:
    """How large model and batches are."""

    width: int = 96
    layers: int = 2
    heads: int = 4
    vocabulary: int = 640
    batch: int = 32
    slots: int = 16


SIZES = {"small": Size(), "tiny": Size(width=32, layers=1, batch=4, slots=4)}


class Block(nn.Module):
    """Attention, then a perceptron, each beside the stream."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden)


class Reader(nn.Module):
    """Tokens int32 ``[B,N]`` to logits ``[B,N,V]``."""

    vocabulary: int
    width: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        embed = nn.Embed(self.vocabulary, self.width)
        x = embed(tokens) + nn.Embed(POSITIONS, self.width)(positions)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = Block(self.heads)(x, mask)
        return embed.attend(nn.LayerNorm()(x))


def loss(params: Any, tokens: jax.Array, learned: jax.Array, model: Reader) -> jax.Array:
    """Mean cross-entropy of the tokens to be learned, each from those before it."""
    logits = model.apply({"params": params}, tokens[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(each, where=learned[:, 1:])


@functools.partial(jax.jit, static_argnames="model")
def train_step(
    params: Any, opt_state: Any, tokens: jax.Array, learned: jax.Array, *, model: Reader
) -> tuple[Any, Any]:
    gradients = jax.grad(loss)(params, tokens, learned, model)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def main(
    folder: Annotated[Path, typer.Option(help="of checkpoints, figures and the picture")],
    steps: Annotated[int, typer.Option(help="of training, in total")] = 500,
    every: Annotated[int, typer.Option(help="steps between evaluations")] = 50,
    documents: Annotated[int, typer.Option(help="to evaluate with")] = 64,
    size: Annotated[Literal["small", "tiny"], typer.Option(help="of model and batches")] = "small",
) -> None:
    """Train a decoder of your own to extract facts, and evaluate it guided and free as it learns."""
    shape = SIZES[size]
    tokenizer = task.make_tokenizer(folder / "tokenizer", shape.vocabulary)
    model = Reader(len(tokenizer), shape.width, shape.layers, shape.heads)
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    opt_state = OPTIMIZER.init(params)
    dataset = task.documents(documents)
    decoder, variables = from_linen(model, {"params": params}, max_positions=POSITIONS)
    engine = Engine(
        decoder, variables, tokenizer, cache=CacheSpec.full(POSITIONS), slots=shape.slots
    )
    del variables  # or the first weights would stay on the device
    with engine, TrainingCheckpoints(folder / "checkpoints") as checkpoints:
        step = 0
        if (saved := checkpoints.restore(params, opt_state)) is not None:
            step, params, opt_state = saved
            print(f"goes on from step {step}")
        history = task.History(folder, step)
        while True:
            if (step % every == 0 or step == steps) and step not in history:
                engine.update_params(params)
                history.add(step, guided(engine, dataset, sampling=task.ANSWER))
                if step not in checkpoints.steps:
                    # In the background: training goes on while it is written.
                    checkpoints.save(step, params, opt_state)
            if step >= steps:
                break
            batch = task.batch(tokenizer, step, shape.batch)
            params, opt_state = train_step(params, opt_state, *batch, model=model)
            step += 1


if __name__ == "__main__":
    typer.run(main)
