"""Rotary position embedding as a configuration states it: base, width and frequency scaling."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models.fields import REQUIRED, Fields


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE frequency scaling of Llama 3.1 and later.

    Frequencies with a wavelength above ``original_max_position_embeddings / low_freq_factor`` are
    divided by ``factor``, those below ``original_max_position_embeddings / high_freq_factor`` are
    kept, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _above_zero(self, "factor", "low_freq_factor", "original_max_position_embeddings")
        if not self.low_freq_factor < self.high_freq_factor:
            raise UserError(
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor "
                f"({self.high_freq_factor})"
            )

    def share_kept(self, inv_freq: np.ndarray) -> np.ndarray:
        """1 where a frequency is kept, 0 where it is divided: long wavelengths are, short ones not."""
        turns = self.original_max_position_embeddings * inv_freq / (2 * math.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return np.clip(share, 0.0, 1.0)


@dataclass(frozen=True)
class LinearScaling:
    """RoPE position interpolation: every frequency is divided by ``factor``."""

    factor: float

    def __post_init__(self) -> None:
        _above_zero(self, "factor")


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolation by parts, and a temperature for attention.

    Over ``original_max_position_embeddings``, channel pairs that turn ``beta_fast`` times or more
    keep their frequency, those that turn ``beta_slow`` times or less have it divided by ``factor``,
    with a linear ramp between the two pairs (at whole indices if ``truncate``).
    ``attention_factor`` stands before the cosines and sines of queries and of keys alike, so its
    square scales their product; ``yarn_attention_factor`` gives the paper's value.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _above_zero(
            self,
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
        )


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """``0.1 ln(factor) + 1``, the paper's; with both ``mscale`` and ``mscale_all_dim``, DeepSeek's."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of a head, half-split ("rotate half") layout.

    ``theta`` is the base: pair i of d rotary channels turns by ``theta ** (-2i / d)`` radians per
    position, before ``scaling``. ``partial_rotary_factor`` is the share of the head's channels, from
    the first on, that turn; the others pass through.
    """

    theta: float
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None = None
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 1.0 < self.theta < math.inf:
            raise UserError(f"rope_theta must be above 1, not {self.theta}")
        if not 0.0 < self.partial_rotary_factor <= 1.0:
            raise UserError(
                f"partial_rotary_factor must be above 0 and at most 1, "
                f"not {self.partial_rotary_factor}"
            )

    def rotary_dim(self, head_dim: int) -> int:
        """Channels that turn, of a head of ``head_dim``."""
        return int(head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hf(cls, config: Fields, max_position_embeddings: int) -> "RopeConfig":
        """Read a ``config.json`` of transformers 4 or 5.

        ``max_position_embeddings`` is what YaRN falls back on, as in transformers.
        Raises UserError, naming the field, for a scaling or an option that is not served.
        """
        return cls.from_options(
            rope_options(config),
            max_position_embeddings,
            theta=config.number("rope_theta", 10000.0),
            partial_rotary_factor=config.number("partial_rotary_factor", 1.0),
            original=config.integer("original_max_position_embeddings", None),
        )

    @classmethod
    def from_options(
        cls,
        options: Fields,
        max_position_embeddings: int,
        *,
        theta: float = 10000.0,
        partial_rotary_factor: float = 1.0,
        original: int | None = None,
    ) -> "RopeConfig":
        """Read ``rope_parameters`` or ``rope_scaling``, all of whose options must be served.

        The keyword arguments are what stands beside them: base and share go after what ``options``
        say, ``original`` (positions before scaling) before.
        """
        config = cls(
            options.number("rope_theta", theta),
            _scaling_from_hf(options, original, max_position_embeddings),
            options.number("partial_rotary_factor", partial_rotary_factor),
        )
        options.finish()
        return config

    @classmethod
    def from_gguf(
        cls, metadata: Fields, context_length: int, rope_factors: np.ndarray | None
    ) -> "RopeConfig":
        """Read GGUF metadata; YaRN as llama.cpp computes it.

        ``rope_factors`` is the tensor ``rope_freqs.weight``, if the file has one.
        Raises UserError, naming the key, for a scaling that is not served.
        """
        theta = metadata.number("rope.freq_base", 10000.0)
        metadata.inert("rope.scaling.finetuned")  # whether the model was trained with it
        metadata.serve_only("rope.scaling.type", None, "none", "linear", "yarn")
        kind = metadata.get("rope.scaling.type", "none")
        if kind == "none":
            return cls(theta, None if rope_factors is None else llama3_scaling(rope_factors, theta))
        if rope_factors is not None:
            raise UserError(
                f"{metadata.where}rope.scaling.type {kind} together with rope_freqs.weight is not "
                "served; load the model from its Hugging Face folder"
            )
        factor = metadata.number("rope.scaling.factor", REQUIRED)
        if kind == "linear":
            return cls(theta, LinearScaling(factor))
        # llama.cpp's attention factor is a multiple of the paper's, not in its place.
        multiple = metadata.number("rope.scaling.attn_factor", 1.0)
        return cls(
            theta,
            YarnScaling(
                factor,
                metadata.integer("rope.scaling.original_context_length", context_length),
                multiple * yarn_attention_factor(factor),
                metadata.number("rope.scaling.yarn_beta_fast", 32.0),
                metadata.number("rope.scaling.yarn_beta_slow", 1.0),
            ),
        )


def llama3_scaling(factors: np.ndarray, theta: float) -> Llama3Scaling:
    """The scaling whose divisors per frequency are ``factors``, float32 ``[D/2]``.

    GGUF keeps only the divisors. Every published Llama 3 model has low_freq_factor 1,
    high_freq_factor 4 and 8192 original positions, so only the factor is unknown, and the divisors
    tell whether that holds. Raises UserError when it does not.
    """
    factors = factors.reshape(-1)
    pairs = max(factors.size, 1)
    scaling = Llama3Scaling(float(max(factors.max(initial=1.0), 1.0)), 1.0, 4.0, 8192)
    kept = scaling.share_kept(theta ** -(np.arange(factors.size, dtype=np.float64) / pairs))
    expected = 1.0 / ((1.0 - kept) / scaling.factor + kept)
    if not np.allclose(factors, expected, rtol=1e-4, atol=0.0):
        raise UserError(
            "GGUF: rope_freqs.weight is not the scaling of Llama 3; "
            "load the model from its Hugging Face folder"
        )
    return scaling


def rope_options(config: Fields, default: Mapping[str, Any] | None = None) -> Fields:
    """``rope_parameters`` (transformers 5) or ``rope_scaling`` (4), or else ``default``.

    Raises UserError where the file has both and they differ.
    """
    names = ("rope_parameters", "rope_scaling")
    found = {name: options for name in names if (options := config.mapping(name, {}))}
    if len(found) == 2 and found[names[0]] != found[names[1]]:
        raise UserError(
            f"{config.where}{names[0]} and {names[1]} differ; remove the one that is not meant"
        )
    name, options = next(iter(found.items()), (names[0], default or {}))
    return Fields(options, f"{config.where}{name}.")


def _scaling_from_hf(
    options: Fields, original: int | None, max_position_embeddings: int
) -> Llama3Scaling | LinearScaling | YarnScaling | None:
    for key in ("type", "rope_type"):
        options.serve_only(key, None, "default", "linear", "llama3", "yarn")
    kind = options.get("type", options.get("rope_type", "default"))  # the older spelling goes first
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(options.number("factor"))
    key = "original_max_position_embeddings"
    if original is None:
        original = options.integer(key, max_position_embeddings if kind == "yarn" else REQUIRED)
    else:
        options.inert(key)
    if kind == "llama3":
        low, high = (options.number(f"{end}_freq_factor") for end in ("low", "high"))
        return Llama3Scaling(options.number("factor"), low, high, original)
    options.inert("finetuned")  # of the first YaRN models: whether they were trained with it
    factor = options.nullable(options.number, "factor", REQUIRED)
    factor = max_position_embeddings / max(original, 1) if factor is None else factor
    mscales = [options.number(name, None) for name in ("mscale", "mscale_all_dim")]
    attention_factor = options.number("attention_factor", None)
    return YarnScaling(
        factor,
        original,
        yarn_attention_factor(factor, *mscales) if attention_factor is None else attention_factor,
        options.number("beta_fast", 32.0),
        options.number("beta_slow", 1.0),
        options.flag("truncate", True),
    )


def _above_zero(values: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(values, name) < math.inf:
            raise UserError(f"{name} of the rotary scaling must be above 0")
