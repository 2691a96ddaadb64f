"""``python -m gkv_jax.generate``: one prompt, one constraint, tokens as they come."""

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gkv_jax.compat import CommandLineError
from gkv_jax.drafts.drafter import Jump
from gkv_jax.engine import Quantization
from gkv_jax.errors import UserError

if TYPE_CHECKING:
    from gkv_jax.request import Request
    from grammar_host import Guide

_CONSTRAINT, _OPTIONS = "Constraint (at most one)", "How it is enforced"
_CACHE, _SAMPLING, _DRAFTS = "Cache", "Sampling", "Drafts"

T = TypeVar("T")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="What to say to the model.")],
    model: Annotated[
        str, typer.Option(help="Registry name, folder, .gguf file or Hugging Face id.")
    ] = "smollm2-135m-instruct",
    quantize: Annotated[
        Quantization | None, typer.Option(help="Round the weights when they are loaded.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    schema: Annotated[
        Path | None, typer.Option(help="File with a JSON Schema.", rich_help_panel=_CONSTRAINT)
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Any JSON object.", rich_help_panel=_CONSTRAINT)
    ] = False,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression.", rich_help_panel=_CONSTRAINT)
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="File with an EBNF grammar.", rich_help_panel=_CONSTRAINT)
    ] = None,
    lark: Annotated[
        Path | None, typer.Option(help="File with a Lark grammar.", rich_help_panel=_CONSTRAINT)
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="One of these; repeat the option.", rich_help_panel=_CONSTRAINT),
    ] = None,
    structural_tag: Annotated[
        Path | None,
        typer.Option(help="File with a structural tag (JSON).", rich_help_panel=_CONSTRAINT),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="Grammar engine: auto, llguidance, xgrammar, outlines.", rich_help_panel=_OPTIONS
        ),
    ] = "auto",
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Forbid properties that the schema does not mention.",
            rich_help_panel=_OPTIONS,
        ),
    ] = False,
    max_whitespace: Annotated[
        int | None,
        typer.Option(
            help="Most blanks between two JSON tokens; 0 is compact.", rich_help_panel=_OPTIONS
        ),
    ] = None,
    reasoning_end: Annotated[
        str | None,
        typer.Option(
            help="Free text first, up to this tag, for example </think>.", rich_help_panel=_OPTIONS
        ),
    ] = None,
    sinks: Annotated[
        int, typer.Option(help="First tokens that are never evicted.", rich_help_panel=_CACHE)
    ] = 4,
    window: Annotated[
        int, typer.Option(help="Most recent tokens that stay.", rich_help_panel=_CACHE)
    ] = 1020,
    kept: Annotated[
        int,
        typer.Option(
            help="Tokens that SnapKV (or --cache policy=...) selects beyond these.",
            rich_help_panel=_CACHE,
        ),
    ] = 0,
    full: Annotated[
        bool,
        typer.Option("--full", help="Evict nothing; end when full.", rich_help_panel=_CACHE),
    ] = False,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="Any field of CacheSpec, as in policy=h2o or dtype=int8; repeatable.",
            metavar="FIELD=VALUE",
            rich_help_panel=_CACHE,
        ),
    ] = None,
    kept_plot: Annotated[
        Path | None,
        typer.Option(help="Draw what the cache held at the end to a file.", rich_help_panel=_CACHE),
    ] = None,
    max_tokens: Annotated[int, typer.Option(rich_help_panel=_SAMPLING)] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.", rich_help_panel=_SAMPLING)] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.", rich_help_panel=_SAMPLING)] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps all.", rich_help_panel=_SAMPLING)] = 0.0,
    presence_penalty: Annotated[
        float,
        typer.Option(help="Off tokens that were written; -2 to 2.", rich_help_panel=_SAMPLING),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(help="The same, times how often they were.", rich_help_panel=_SAMPLING),
    ] = 0.0,
    seed: Annotated[int, typer.Option(rich_help_panel=_SAMPLING)] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text that ends the output; repeatable.", rich_help_panel=_SAMPLING),
    ] = None,
    jump: Annotated[
        Jump,
        typer.Option(
            help="What the grammar forces: drafts for the model to verify, the output, or nothing.",
            rich_help_panel=_DRAFTS,
        ),
    ] = "verify",
    lookup: Annotated[
        bool,
        typer.Option("--lookup", help="Draft what the text said before.", rich_help_panel=_DRAFTS),
    ] = False,
    prediction: Annotated[
        Path | None,
        typer.Option(help="File that the output may resemble.", rich_help_panel=_DRAFTS),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="A smaller model of the same tokenizer.", rich_help_panel=_DRAFTS),
    ] = None,
) -> None:
    """Generate text that obeys a constraint, with a KV cache of constant size.

    The text goes to standard output as it comes, a line of statistics to standard error.

    Example: python -m gkv_jax.generate --schema examples/person.json --prompt "Invent a person."
    """
    from rich.console import Console

    from gkv_jax import CacheSpec, Engine, Sampling
    from gkv_jax.evaluate.plot_kept import check_format
    from grammar_host.backends import check_backend_name

    guide = _guide(
        schema=schema,
        json=json,
        regex=regex,
        grammar=grammar,
        lark=lark,
        choice=choice,
        structural_tag=structural_tag,
    )
    guide = _with_options(guide, strict, max_whitespace, reasoning_end)
    check_backend_name(backend)
    if full and kept:
        raise UserError("--full and --kept exclude each other; a full cache keeps everything")
    policy = "full" if full else "snapkv" if kept else "window"
    sizes: dict[str, Any] = {"policy": policy, "sinks": sinks, "kept": kept, "window": window}
    options = _cache_options(cache or [])
    if full and "policy" in options:
        raise UserError("--full and --cache policy=... exclude each other; give one of them")
    for name in ("sinks", "kept", "window"):
        if name in options:
            raise UserError(f"--cache {name}=...: write --{name} instead")
    spec = CacheSpec(**(sizes | options))
    if "max_drafts" not in options:
        spec = spec.with_drafts()
    if kept_plot is not None:
        check_format(kept_plot)
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        jump=jump,
        lookup=lookup,
        prediction=None if prediction is None else _from_file(str, "prediction", prediction),
    )
    with Engine.from_pretrained(
        model, cache=spec, slots=1, quantize=quantize, draft=draft
    ) as engine:
        text_or_chat = prompt if raw else _conversation(prompt)
        request = engine.prepare(
            text_or_chat,
            guide=guide,
            sampling=sampling,
            backend=backend,
            report=kept_plot is not None,
        )
        # Compile what this prompt needs, so that the statistics are those of decoding.
        with Console(stderr=True).status("compiling"):  # seen on terminals only
            engine.warm_up(len(request.prompt))
            if kept_plot is not None:
                engine.generate(text_or_chat, sampling=Sampling(max_tokens=1), report=True)
        engine.submit(request)
        for piece in request.pieces():
            print(piece.text, end="", flush=True)
        print()
        _report(request)
    if kept_plot is not None and (report := request.result().report) is not None:
        from gkv_jax.evaluate import plot_kept

        plot_kept(report, kept_plot)


def _cache_options(options: list[str]) -> dict[str, Any]:
    """Fields of ``CacheSpec`` from ``FIELD=VALUE``: integers where they are, else strings."""
    from gkv_jax import CacheSpec

    known = [field.name for field in dataclasses.fields(CacheSpec)]
    values: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or name not in known:
            raise UserError(f"--cache {option}: write FIELD=VALUE with one of {', '.join(known)}")
        values[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return values


def _conversation(prompt: str) -> list[dict[str, str]]:
    if not prompt:
        raise UserError("--prompt is empty; give at least one character")
    return [{"role": "user", "content": prompt}]


def _guide(**options: Any) -> "Guide | None":
    """The one constraint asked for; file options are read here."""
    from grammar_host import Guide

    absent: tuple[Any, ...] = (
        None,
        False,
        [],
    )  # not "": an empty constraint is a mistake, not none
    given = {name: value for name, value in options.items() if value not in absent}
    if len(given) > 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{names} exclude each other; give one constraint")
    for name, value in given.items():
        match name:
            case "schema":
                return _from_file(Guide.json_schema, name, value)
            case "json":
                return Guide.json()
            case "regex":
                return Guide.regex(value)
            case "grammar":
                return _from_file(Guide.grammar, name, value)
            case "lark":
                return _from_file(Guide.lark, name, value)
            case "choice":
                return Guide.choice(value)
            case "structural_tag":
                return _from_file(Guide.structural_tag, name, value)
    return None


def _with_options(
    guide: "Guide | None", strict: bool, max_whitespace: int | None, reasoning_end: str | None
) -> "Guide | None":
    """The constraint with what was asked for beside it; options of no constraint are mistakes."""
    options: dict[str, Any] = {}
    if strict:
        options["strict"] = True
    if max_whitespace is not None:
        options["max_whitespace"] = max_whitespace
    if reasoning_end is not None:
        options["reasoning_end"] = reasoning_end
    if guide is None:
        if options:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
            raise UserError(f"{names}: there is no constraint; give one, for example --json")
        return None
    return dataclasses.replace(guide, **options)


def _from_file(make: "Callable[[str], T]", option: str, path: Path) -> "T":
    from grammar_host import GuideError

    try:
        return make(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = str(error.strerror)
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except GuideError as error:
        reason = error.reason
    raise UserError(f"--{option.replace('_', '-')} {path}: {reason}")


def _report(request: "Request") -> None:
    result = request.result()
    if result.error is not None:
        raise result.error
    stats = result.stats
    line = (
        f"[{result.finish_reason}] {stats['tokens']} tokens in {stats['seconds']:.2f} s"
        f" ({stats['tokens_per_second']:.1f} tokens/s)"
        f" · prompt {stats['prompt_tokens']} tokens · cache {stats['cache_bytes'] / 1e6:.1f} MB"
    )
    if stats["drafts"]:
        sources = ", ".join(
            f"{name} {tally['accepted']}/{tally['proposed']}"
            for name, tally in stats["drafts"].items()
        )
        line += f" · {stats['tokens_per_forward']:.2f} tokens per forward ({sources})"
    if stats["backend"]:
        line += (
            f" · {stats['backend']}{'' if stats['exact'] else ' + gate'}:"
            f" compiled in {stats['compile_ms']:.0f} ms,"
            f" {stats['grammar_us_per_token']:.0f} µs per token"
        )
    print(line, file=sys.stderr)


def main() -> int:
    """Run the command; the exit code. What cannot be served is one line on standard error."""
    from grammar_host import GrammarError, GuideError

    command = typer.main.get_command(app)
    try:
        command.main(prog_name="python -m gkv_jax.generate", standalone_mode=False)
    except CommandLineError as error:
        return _fail(2, f"{error.format_message().rstrip('.')}; see --help")
    except (UserError, GuideError) as error:
        return _fail(2, str(error))
    except (
        GrammarError,
        RuntimeError,
        OSError,
    ) as error:  # on the way: the device, the watchdog, the disk
        return _fail(1, f"{type(error).__name__}: {error}")
    return 0


def _fail(code: int, message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
