"""``python -m benchmarks.drafts.trees``: would trees of drafts save more than chains of as many nodes?

A replay, without a clock, of what ``benchmarks.drafts`` has journaled without drafts. A chain is what this
engine verifies. A tree splits the same number of nodes between several continuations:

- of the text: those that followed the longest earlier occurrences of its end, in the order of length,
  then latest first. Tokens that the grammar forces belong to all of them. The first one is the chain's.
- of a draft model: its first, second and third choices, under the masks.

No source takes a rest here (``Backoff``), in chains or in trees.
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tqdm import tqdm

from benchmarks.common import print_table
from benchmarks.drafts.documents import guide_of
from benchmarks.drafts.ours import OFF, Served
from benchmarks.drafts.self_draft import layers_of, skipping
from benchmarks.peer import llama_for_causal_lm
from gkv_jax import GrammarError
from gkv_jax.drafts import LookupDrafts
from gkv_jax.drafts.source import MIN_MATCH
from gkv_jax.weights import load_model
from grammar_host.bitmask import allocate_token_bitmask
from grammar_host.matcher import GrammarMatcher

NODES = (3, 7, 15)
WIDTH = 3
"""Continuations of a text, or choices of a draft model, that a tree may hold."""

Nodes = set[tuple[int, ...]]
"""A tree: each node is the path to it."""


@dataclass(frozen=True)
class Output:
    """What was asked for, and the tokens of the answer, the stop token included if it came."""

    schema: dict[str, Any]
    prompt: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class Place:
    """What is known before a token of an output.

    Attributes:
      guesses: at most ``WIDTH`` continuations, the chain's first.
      forced: the first token that the grammar forces, if it forces any.
      mask: bool ``[V]``, tokens that are legal.
    """

    guesses: Sequence[Sequence[int]]
    forced: int | None
    mask: np.ndarray


Replayed = Sequence[tuple[Output, Sequence[Place]]]


def read_outputs(path: Path, stop: int) -> list[Output]:
    """The outputs without drafts of the last run in a journal; ``stop`` ends those that ended."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    # Keys end with the circumstances of the run.
    runs = [line["key"].split()[-1] for line in lines if line["key"].startswith("documents ")]
    documents: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    for line in lines:
        kind, *_, run = line["key"].split()
        if run == runs[-1]:
            if kind == "documents":
                documents = line["values"]
            elif kind == OFF:
                answers |= line["values"]
    outputs = []
    for name, each in answers.items():
        if each["error"] is None:
            schema, prompt = documents[name]
            tokens = [*each["tokens"], *[stop] * each["finished"]]
            outputs.append(Output(schema, prompt, tokens))
    return outputs


def replay(matcher: GrammarMatcher, output: Output, vocab_size: int) -> Iterator[Place]:
    """The places of an output. Raises ValueError if the grammar refuses a token."""
    lookup = LookupDrafts(output.prompt)
    row = allocate_token_bitmask(1, vocab_size)
    for at, token in enumerate(output.tokens):
        so_far = output.tokens[:at]
        forced = matcher.forced_tokens()
        matcher.fill_next_token_bitmask(row)
        mask = np.unpackbits(row[0].view(np.uint8), bitorder="little")[:vocab_size].astype(bool)
        guesses = _guesses(matcher, lookup, output.prompt, so_far)
        yield Place(guesses, forced[0] if forced else None, mask)
        if not matcher.accept_token(token):
            raise ValueError(f"token {at} is refused")


def _guesses(
    matcher: GrammarMatcher, lookup: LookupDrafts, prompt: Sequence[int], so_far: Sequence[int]
) -> list[list[int]]:
    """The chain that the engine would verify, and those from other occurrences."""
    limit = max(NODES)

    def complete(begin: Sequence[int]) -> list[int]:
        """What is legal of ``begin``, then forced tokens and lookup in turn."""
        guess: list[int] = []

        def add(tokens: Sequence[int]) -> None:
            for token in tokens[: limit - len(guess)]:
                if token in matcher.stop_token_ids or not matcher.accept_token(token):
                    return
                guess.append(token)

        add(begin)
        before = -1
        while before < len(guess) < limit:
            before = len(guess)
            add(matcher.forced_tokens())
            add(lookup.propose(so_far, guess, limit - len(guess)))
        matcher.rollback(len(guess))
        return guess

    guesses = [complete(())]
    trunk = matcher.forced_tokens()
    firsts = set(guesses[0][len(trunk) : len(trunk) + 1])
    if not firsts:
        return guesses
    for following in _followings([*prompt, *so_far, *trunk], limit):
        if following[0] not in firsts:
            firsts.add(following[0])
            guess = complete([*trunk, *following])
            if tuple(guess[: len(trunk) + 1]) == (*trunk, following[0]):
                guesses.append(guess)
            if len(guesses) == WIDTH:
                break
    return guesses


def _followings(text: Sequence[int], limit: int) -> Iterator[Sequence[int]]:
    """What followed earlier occurrences of the end of ``text``: of the longest first, then latest."""
    found: list[tuple[int, int]] = []
    for end in range(MIN_MATCH, len(text)):
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length >= MIN_MATCH:
            found.append((length, end))
    for _, end in sorted(found, reverse=True):
        yield text[end : end + limit]


def tree(guesses: Sequence[Sequence[int]], shares: Sequence[int]) -> Nodes:
    """The first ``shares[i]`` nodes of each guess; what one does not need, others get."""
    nodes: Nodes = set()
    rest = 0
    for guess, share in zip(guesses, shares, strict=False):
        rest = _grow(nodes, guess, rest + share)
    rest += sum(shares[len(guesses) :])
    for guess in guesses[: len(shares)]:
        rest = _grow(nodes, guess, rest)
    return nodes


def _grow(nodes: Nodes, guess: Sequence[int], count: int) -> int:
    """Add the guess, at most ``count`` nodes; returns how many are left."""
    for end in range(1, len(guess) + 1):
        if (path := tuple(guess[:end])) not in nodes:
            if count == 0:
                break
            nodes.add(path)
            count -= 1
    return count


def likeliest_tree(chances: Sequence[float], size: int) -> Nodes:
    """The ``size`` likeliest paths of choices 1, 2, ..., each of which is right with its chance."""
    nodes: Nodes = set()
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while len(nodes) <= size:
        chance, path = heapq.heappop(heap)
        nodes.add(path)
        for choice, factor in enumerate(chances, 1):
            heapq.heappush(heap, (chance * factor, (*path, choice)))
    return nodes - {()}


def depth(nodes: Nodes, truth: Sequence[int]) -> int:
    """How many tokens of ``truth`` the tree holds from its root on."""
    length = 0
    while length < len(truth) and tuple(truth[: length + 1]) in nodes:
        length += 1
    return length


def forwards(accepted: Sequence[int]) -> int:
    """Passes for a text where one at place ``i`` brings ``accepted[i] + 1`` tokens."""
    at = passes = 0
    while at < len(accepted):
        at += accepted[at] + 1
        passes += 1
    return passes


def shares_of(nodes: int, branches: int) -> list[tuple[int, ...]]:
    """Every way to give ``nodes`` to ``branches``, no later one more than an earlier one."""
    if branches == 1:
        return [(nodes,)]
    return [
        (*front, last)
        for last in range(1, nodes // branches + 1)
        for front in shares_of(nodes - last, branches - 1)
        if front[-1] >= last
    ]


def of_text(replayed: Replayed, nodes: int) -> dict[str, str]:
    """Tokens per forward of a chain and of the best trees.

    The oracle knows which branch is right, and gives it all nodes.
    """

    def rate(accepted: Callable[[Place, Sequence[int]], int]) -> float:
        passes = 0
        for output, places in replayed:
            ahead = [output.tokens[at : at + nodes] for at in range(len(places))]
            passes += forwards([*map(accepted, places, ahead)])
        return sum(len(output.tokens) for output, _ in replayed) / passes

    def split(shares: Sequence[int]) -> float:
        return rate(lambda place, following: depth(tree(place.guesses, shares), following))

    def bound(branches: int) -> float:
        return rate(
            lambda place, following: max(
                depth(tree([guess], [nodes]), following) for guess in place.guesses[:branches]
            )
        )

    result = {"chain": f"{split((nodes,)):.3f}"}
    for branches in range(2, WIDTH + 1):
        speed, shares = max((split(shares), shares) for shares in shares_of(nodes, branches))
        result[f"{branches} branches, best split"] = f"{speed:.3f} ({'+'.join(map(str, shares))})"
        result[f"{branches} branches, oracle"] = f"{bound(branches):.3f}"
    return result


def ranks(model: Any, output: Output, places: Sequence[Place]) -> list[int]:
    """Which choice of the draft model each token was, 1 for the first; 0 beyond ``WIDTH``.

    Where the grammar forces tokens there is one choice: the forced one.
    """
    import torch

    with torch.no_grad():
        tokens = torch.tensor([[*output.prompt, *output.tokens]])
        logits = model(tokens, logits_to_keep=len(output.tokens) + 1).logits[0, :-1].numpy()
    found = []
    for token, place, row in zip(output.tokens, places, logits, strict=True):
        if place.forced is not None:
            found.append(int(token == place.forced))
        else:
            rank = 1 + int((row[place.mask] > row[token]).sum())
            found.append(rank if rank <= WIDTH else 0)
    return found


def of_model(by_output: Sequence[Sequence[int]], nodes: int) -> dict[str, str]:
    """As ``of_text``, from the ranks of every output's tokens. The oracle corrects one draft a pass."""
    seen = Counter(rank for each in by_output for rank in each)

    def rate(accepted: Callable[[Sequence[int]], int]) -> float:
        passes = 0
        for each in by_output:
            passes += forwards([accepted(each[at : at + nodes]) for at in range(len(each))])
        return seen.total() / passes

    def corrected(following: Sequence[int]) -> int:
        wrong = 0
        for length, rank in enumerate(following):
            wrong += rank != 1
            if rank == 0 or wrong > 1:
                return length
        return len(following)

    chances = [seen[rank] / seen.total() for rank in range(1, WIDTH + 1)]
    best = likeliest_tree(chances, nodes)
    chain = likeliest_tree(chances[:1], nodes)
    return {
        "chain": f"{rate(lambda following: depth(chain, following)):.3f}",
        "likeliest tree": f"{rate(lambda following: depth(best, following)):.3f}",
        "oracle": f"{rate(corrected):.3f}",
    }


def print_rates(what: str, by_nodes: Sequence[dict[str, str]]) -> None:
    """A table with a column for each of ``NODES``."""
    columns = [what, *(f"{nodes} nodes" for nodes in NODES)]
    rows = [[name, *(each[name] for each in by_nodes)] for name in by_nodes[0]]
    print_table("tokens per forward", columns, rows)


def main(
    outputs: Annotated[Path, typer.Option(help="journal (drafts.jsonl) of benchmarks.drafts")],
    model: Annotated[str, typer.Option(help="that wrote them")] = "smollm2-135m-instruct",
    draft_models: Annotated[str, typer.Option(help="skip:K, comma-separated")] = "skip:15",
) -> None:
    """Tokens per forward of chains and trees of as many nodes."""
    loaded = load_model(model, dtype="float32")
    served = Served.of(loaded)
    stops = loaded.config.eos_token_ids
    replayed: list[tuple[Output, list[Place]]] = []
    refused = 0
    with served.engine(1, 128) as engine:
        for output in tqdm(read_outputs(outputs, stops[0]), desc="replay", disable=None):
            try:
                grammar = engine.compiler.compile(guide_of(output.schema))
                matcher = grammar.matcher(stop_token_ids=stops)
                replayed.append((output, [*replay(matcher, output, loaded.config.vocab_size)]))
            except (GrammarError, ValueError):
                refused += 1
    print(
        f"{len(replayed)} outputs, {sum(len(each.tokens) for each, _ in replayed)} tokens; "
        f"{refused} more that the grammar refuses"
    )
    print_rates("forced, lookup", [of_text(replayed, nodes) for nodes in NODES])
    for name in filter(None, draft_models.split(",")):
        kept = skipping(loaded.model, loaded.params, layers_of(name, served.model))
        peer = llama_for_causal_lm(*kept)
        by_output = [ranks(peer, *each) for each in tqdm(replayed, desc=name, disable=None)]
        print_rates(f"forced, {name}", [of_model(by_output, nodes) for nodes in NODES])
        free = Counter(
            rank
            for each, (_, places) in zip(by_output, replayed, strict=True)
            for rank, place in zip(each, places, strict=True)
            if place.forced is None
        )
        wrong = free.total() - free[1]
        print(
            f"{name}: of {free.total()} tokens that are not forced, {free[1] / free.total():.3f} are its "
            f"first choice; of the others {free[2] / wrong:.3f} the second, {free[3] / wrong:.3f} the third"
        )


if __name__ == "__main__":
    typer.run(main)
