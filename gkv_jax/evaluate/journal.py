"""Results on disk while a run goes on, so that the next run continues it."""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import gkv_jax
import pallas_kernels
from gkv_jax.models.protocol import Decoder, Params

_SOURCES = ("cache", "models", "evaluate", "decode.py", "prefill.py", "rope.py")
_PRESENTATION = ("report.py", "cache.py", "plot_kept.py")  # of evaluate: not part of any figure


class Journal:
    """Finished measurements: one JSON line each, ``{"key": ..., "values": ...}``.

    Without a path nothing is written, and it holds what this process has measured.
    """

    def __init__(self, path: Path | None, circumstances: str) -> None:
        """Open or make the file.

        Args:
          path: the file; its folder is made if need be.
          circumstances: measurements made under others do not count; see ``circumstances``.
        """
        self._path, self._circumstances = path, circumstances
        self._values: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._read(path.read_text(encoding="utf-8").splitlines())
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")  # behind a line that a killed run left unfinished

    def __len__(self) -> int:
        return len(self._values)

    def find(self, key: str) -> dict[str, Any] | None:
        """The values that were recorded under ``key``, or None."""
        return self._values.get(self._full(key))

    def record(self, key: str, values: dict[str, Any]) -> None:
        """Keep ``values`` (anything that JSON can say) under ``key``."""
        self._values[self._full(key)] = values
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": self._full(key), "values": values}) + "\n")

    def _full(self, key: str) -> str:
        return f"{key} {self._circumstances}"

    def _read(self, lines: Iterable[str]) -> None:
        for line in filter(None, lines):
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the last line of a killed run
            self._values[entry["key"]] = entry["values"]


def circumstances(model: Decoder, params: Params, tokenizer: Any, *settings: Any) -> str:
    """Hexadecimal digest of what every measurement depends on.

    The weights, the tokenizer, the versions of JAX and NumPy, the code that computes, and ``settings``
    (anything whose ``repr`` says what it is).
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(*parts: Any) -> None:
        digest.update("\n".join(map(repr, parts)).encode())

    add(model, *settings)
    for leaf in jax.tree.leaves(params):
        # A sum tells one checkpoint from another at the cost of one pass over the weights.
        add(leaf.shape, str(leaf.dtype), float(np.abs(np.asarray(leaf, np.float32)).sum()))
    add(sorted(tokenizer.get_vocab().items()), tokenizer.chat_template)
    add([(name, importlib.metadata.version(name)) for name in ("jax", "jaxlib", "numpy")])
    for source in _sources():
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _sources() -> list[Path]:
    package = Path(gkv_jax.__file__).parent
    roots = [*(package / name for name in _SOURCES), Path(pallas_kernels.__file__).parent]
    found = [
        path
        for root in roots
        for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])
        if path.exists()
    ]
    hidden = [package / "evaluate" / name for name in _PRESENTATION]
    return [path for path in found if path not in hidden]
