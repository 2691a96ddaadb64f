"""Verified, resumable downloads of one file from a package index.

The index is the user's own: pip resolves the requirement with the mirrors, certificates and
credentials of its configuration, and what it names is downloaded here, because pip itself cannot
resume. Where that is not possible, pip downloads.
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gkv_jax.errors import UserError

_CHUNK = 1 << 16  # what a broken connection can lose: less than this is not handed over
_ATTEMPTS = 4
_BACKOFF_S = 0.5
_TIMEOUT_S = 60.0

_log = logging.getLogger(__name__)


class DownloadError(UserError):
    """A download that failed; what has arrived is kept and the next one resumes from there."""


def sha256_of(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_wheel(requirement: str, sha256: str, size: int, target: Path) -> None:
    """Download the wheel of ``requirement`` (``name==version``) to ``target``, with a progress bar.

    An interrupted call leaves ``target`` with the suffix ``.partial``; the next one continues it.
    Raises DownloadError when the file cannot be had or is not the one with this ``sha256``.
    """
    try:
        download(wheel_url(requirement), sha256, size, target)
    except _WrongFileError:
        raise
    except DownloadError as error:
        _log.info("%s; trying pip download", error)
        _pip_download(requirement, sha256, target)


def wheel_url(requirement: str) -> str:
    """The URL of a requirement's wheel, as the user's pip resolves it.

    Raises DownloadError when pip is missing, too old to report, or finds nothing.
    """
    report = _pip(
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:",
        "--quiet", "--report", "-", requirement,
    )  # fmt: skip
    try:
        return str(json.loads(report)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError) as error:
        raise DownloadError(f"pip gave no address for {requirement}") from error


def download(url: str, sha256: str, size: int, target: Path) -> None:
    """Download ``url`` to ``target``: resumed, retried, verified, then renamed into place.

    ``size`` is in bytes. Raises DownloadError as :func:`download_wheel` does.
    """
    partial = target.with_name(target.name + ".partial")
    if not url.startswith(("http://", "https://")):
        raise DownloadError(f"{url.split(':')[0]} addresses are left to pip")
    resumed = partial.exists()
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_BACKOFF_S * 2**attempt)
        try:
            _append(url, size, partial)
        except OSError as error:  # the base of every exception of requests
            failure: object = error
            continue
        if partial.stat().st_size >= size:
            try:
                return _accept(partial, sha256, target)
            except _WrongFileError:
                if not resumed:
                    raise
                return download(url, sha256, size, target)  # the old beginning was the wrong part
        failure = "the connection was closed early"
    have = partial.stat().st_size if partial.exists() else 0
    raise DownloadError(
        f"downloading {target.name} stopped at {have} of {size} bytes ({_first_line(failure)}); "
        "run the command again to resume"
    )


class _WrongFileError(DownloadError):
    """Complete, but not the file that was asked for: no use in trying another way."""


def _append(url: str, size: int, partial: Path) -> None:
    """One request for what ``partial`` lacks of ``size`` bytes; keeps all that arrives."""
    import requests
    from tqdm import tqdm

    have = partial.stat().st_size if partial.exists() else 0
    if have >= size:
        return
    # identity: a length and a range of the file, not of a compressed transfer of it
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(
        url, headers=headers, stream=True, timeout=_TIMEOUT_S, verify=_certificates()
    ) as response:
        response.raise_for_status()
        if response.status_code != 206:
            have = 0  # the server ignores ranges and sends the whole file
        with (
            partial.open("ab" if have else "wb") as file,
            tqdm(total=size, initial=have, unit="B", unit_scale=True, desc=partial.stem) as bar,
        ):
            for chunk in response.iter_content(_CHUNK):
                file.write(chunk)
                bar.update(len(chunk))


def _accept(partial: Path, sha256: str, target: Path) -> None:
    found = sha256_of(partial)
    if found != sha256:
        partial.unlink()
        raise _WrongFileError(
            f"{target.name} has SHA-256 {found}, not {sha256}; the file was thrown away: "
            "check the package index that pip is configured for"
        )
    os.replace(partial, target)


def _certificates() -> str | bool:
    """What requests should verify with: pip's own setting, else the environment's, else certifi."""
    if os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"):
        return True  # requests reads these itself
    named = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if not named:
        try:
            named = _pip("config", "get", "global.cert").strip()
        except DownloadError:  # not set, the usual case
            return True
    return named if Path(named).exists() else True


def _pip_download(requirement: str, sha256: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="pip-") as folder:
        _pip(
            "download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", folder, requirement
        )  # fmt: skip
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise DownloadError(f"pip download {requirement} gave {len(wheels)} wheels, not one")
        partial = target.with_name(target.name + ".partial")
        shutil.move(wheels[0], partial)
        _accept(partial, sha256, target)


def _pip(*arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        reason = _first_line(errors[-1] if errors else run.stderr)
        raise DownloadError(
            f"pip {arguments[0]} failed ({reason}); check the network and pip's configuration "
            "(pip config list)"
        )
    return run.stdout


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
