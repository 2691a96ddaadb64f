"""The sizes of everything: those of a real model, and tiny ones for a dry run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes by what they are for. ``B``, ``V``, ``C``, ``D``, ``Dm`` as everywhere in this project.

    Attributes:
      interpret: run the Triton kernels through XLA, for machines without a GPU.
      check_dtypes: of logits and heads in the checks.
      check_vocabularies: V of the checks; one of them with a tail in its last word.
      check_hidden: Dm of the head's checks.
      check_capacity: slots of the attention's checks.
      check_dims: D of the attention's checks; one of them no power of two.
      vocabulary: V of the timings.
      batches: B of the timings.
      hidden: Dm of the head's timings.
      head_batches: B of the head's timings.
      heads, kv_heads: Hq and Hk of the attention's timings.
      dims, capacities: D and C of the attention's timings.
      copy_bytes: of the array whose copy is the yardstick.
      rotate_bytes: arrays are taken in turns until they fill this much, more than any L2 cache.
      least_calls: of one program.
      round_seconds: device time of one round of a measurement.
      rounds: rounds, of which the median counts.
      layers, ffn: of the random model.
      window: of its cache.
      decode_batches: B of the decode loop.
      steps: decode steps of a run.
    """

    interpret: bool
    check_dtypes: tuple[str, ...]
    check_vocabularies: tuple[int, ...]
    check_hidden: int
    check_capacity: int
    check_dims: tuple[int, ...]
    vocabulary: int
    batches: tuple[int, ...]
    hidden: int
    head_batches: tuple[int, ...]
    heads: int
    kv_heads: int
    dims: tuple[int, ...]
    capacities: tuple[int, ...]
    copy_bytes: int
    rotate_bytes: int
    least_calls: int
    round_seconds: float
    rounds: int
    layers: int
    ffn: int
    window: int
    steps: int
    decode_batches: tuple[int, ...] = (1, 8)


FULL = Scale(
    interpret=False,
    check_dtypes=("float32", "bfloat16", "float16"),
    check_vocabularies=(128_256, 5003),
    check_hidden=256,
    check_capacity=700,
    check_dims=(64, 128, 80),
    vocabulary=128_256,
    batches=(64, 8, 1),
    hidden=2048,
    head_batches=(1, 8),
    heads=32,
    kv_heads=8,
    dims=(64, 128),
    capacities=(4096, 1024),
    copy_bytes=1 << 30,
    rotate_bytes=256 << 20,
    least_calls=4,
    round_seconds=0.04,
    rounds=5,
    layers=16,
    ffn=8192,
    window=1020,
    steps=128,
)
"""The head and the model of Llama-3.2-1B."""

TINY = Scale(
    interpret=True,
    check_dtypes=("bfloat16",),
    check_vocabularies=(203,),
    check_hidden=32,
    check_capacity=40,
    check_dims=(16,),
    vocabulary=1000,
    batches=(2, 1),
    hidden=32,
    head_batches=(1, 2),
    heads=4,
    kv_heads=2,
    dims=(16,),
    capacities=(64,),
    copy_bytes=1 << 20,
    rotate_bytes=1,
    least_calls=2,
    round_seconds=0.001,
    rounds=2,
    layers=1,
    ffn=64,
    window=28,
    steps=8,
    decode_batches=(2,),
)
