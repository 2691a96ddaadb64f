"""Train a small Llama with Flax NNX, and evaluate its live weights, guided and free, as it learns.

    python examples/train_eval_nnx.py --folder runs/nnx

The model is one of gkv_jax's own families, made trainable. Every --every steps its weights go to an
engine, which lets it answer documents that it has never seen: once ruled by their JSON Schema, once
free. Guided output is valid from the first step; free output learns to be. Checkpoints are written
by Orbax in the background: kill the program, start it again, and it goes on where it was.
``curves.png`` in the folder shows how it went.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import extraction as task
import jax
import jax.numpy as jnp
import optax
import typer
from flax import nnx

from gkv_jax import CacheSpec, Engine
from gkv_jax.evaluate import guided
from gkv_jax.flax import trainable
from gkv_jax.models.config import ModelConfig
from gkv_jax.models.llama import Llama
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.weights.training import TrainingCheckpoints


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


def make_model(size: Size, tokenizer: Any) -> tuple[Llama, Any]:
    """A Llama, and random parameters for it."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=2 * size.width,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=size.heads // 2,
        head_dim=size.width // size.heads,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(theta=10_000.0),
        bos_token_id=None,
        eos_token_ids=(tokenizer.eos_token_id,),
    )
    model = Llama(config)
    params: dict[str, Any] = {"layers": [{} for _ in range(size.layers)]}
    for index, leaf in enumerate(model.parameters()):
        where = params if leaf.layer is None else params["layers"][leaf.layer]
        if len(leaf.shape) == 1:  # the scale of a norm
            where[leaf.name] = jnp.ones(leaf.tree_shape)
        else:
            fan_in = leaf.shape[1]  # checkpoints store [out, in]
            key = jax.random.fold_in(jax.random.key(0), index)
            where[leaf.name] = fan_in**-0.5 * jax.random.normal(key, leaf.tree_shape)
    return model, params


def loss(model: nnx.Module, tokens: jax.Array, learned: jax.Array) -> jax.Array:
    """Mean cross-entropy of the tokens to be learned, each from those before it."""
    logits = model(tokens[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(each, where=learned[:, 1:])


@nnx.jit
def train_step(
    model: nnx.Module, optimizer: nnx.Optimizer, tokens: jax.Array, learned: jax.Array
) -> jax.Array:
    value, gradients = nnx.value_and_grad(loss)(model, tokens, learned)
    optimizer.update(model, gradients)
    return value


def arrays(module: nnx.Module) -> dict[str, Any]:
    """The state of a module or optimiser as nested dicts, for Orbax."""
    return nnx.to_pure_dict(nnx.state(module))


def main(
    folder: Annotated[Path, typer.Option(help="of checkpoints, figures and the picture")],
    steps: Annotated[int, typer.Option(help="of training, in total")] = 500,
    every: Annotated[int, typer.Option(help="steps between evaluations")] = 50,
    documents: Annotated[int, typer.Option(help="to evaluate with")] = 64,
    size: Annotated[Literal["small", "tiny"], typer.Option(help="of model and batches")] = "small",
) -> None:
    """Train a small Llama to extract facts, and evaluate it guided and free as it learns."""
    shape = SIZES[size]
    tokenizer = task.make_tokenizer(folder / "tokenizer", shape.vocabulary)
    decoder, params = make_model(shape, tokenizer)
    model = trainable(decoder, params)
    optimizer = nnx.Optimizer(model, optax.adamw(task.learning_rate()), wrt=nnx.Param)
    dataset = task.documents(documents)
    engine = Engine(decoder, params, tokenizer, cache=CacheSpec.full(192), slots=shape.slots)
    del params  # or the first weights would stay on the device
    with engine, TrainingCheckpoints(folder / "checkpoints") as checkpoints:
        step = 0
        if (saved := checkpoints.restore(arrays(model), arrays(optimizer))) is not None:
            step = saved.step
            nnx.update(model, saved.params)
            nnx.update(optimizer, saved.opt_state)
            print(f"goes on from step {step}")
        history = task.History(folder, step)
        while True:
            if (step % every == 0 or step == steps) and step not in history:
                engine.update_params(model.params())
                history.add(step, guided(engine, dataset, sampling=task.ANSWER))
                if step not in checkpoints.steps:
                    # In the background: training goes on while it is written.
                    checkpoints.save(step, arrays(model), arrays(optimizer))
            if step >= steps:
                break
            train_step(model, optimizer, *task.batch(tokenizer, step, shape.batch))
            step += 1


if __name__ == "__main__":
    typer.run(main)
