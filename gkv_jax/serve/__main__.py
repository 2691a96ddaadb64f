"""``python -m gkv_jax.serve``: load a model and answer OpenAI's clients."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gkv_jax.compat import CommandLineError
from gkv_jax.drafts.widths import Verify
from gkv_jax.engine import Loop, Quantization
from gkv_jax.errors import UserError
from gkv_jax.serve.settings import LogFormat, LogLevel, ToolFormat, load_settings
from grammar_host import GrammarError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Option(help="A registry name, a folder, a .gguf file or a Hugging Face id."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 is all.  [127.0.0.1]")
    ] = None,
    port: Annotated[int | None, typer.Option(help="TCP port; 0 takes a free one.  [8000]")] = None,
    slots: Annotated[
        int | None, typer.Option(help="Requests decoded at once; more of them queue.  [8]")
    ] = None,
    sinks: Annotated[
        int | None, typer.Option(help="First tokens of a text that stay in the cache.  [4]")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Most recent tokens in the cache.  [1020]")
    ] = None,
    kept: Annotated[
        int | None,
        typer.Option(help="Tokens of a long prompt that SnapKV selects to stay.  [0: no SnapKV]"),
    ] = None,
    max_drafts: Annotated[
        int | None,
        typer.Option(help="Draft tokens that a step may verify; 0: no drafts.  [7]"),
    ] = None,
    quantize: Annotated[
        Quantization | None,
        typer.Option(help="Round the weights when they are loaded.  [not]"),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="A smaller model of the same tokenizer that drafts, named as --model."),
    ] = None,
    verify: Annotated[
        Verify | None,
        typer.Option(help="Verify drafts where it has been seen to pay, or always.  [faster]"),
    ] = None,
    reasoning: Annotated[
        str | None,
        typer.Option(
            help="What is told apart from answers: the text between <think> tags if the chat template "
            "knows them, 'off', or two other tags with a blank between them.  [auto]"
        ),
    ] = None,
    tool_format: Annotated[
        ToolFormat | None,
        typer.Option(help="How the model writes calls of tools.  [auto: as its chat template]"),
    ] = None,
    loop: Annotated[
        Loop | None,
        typer.Option(help="Decode in one device program, or drive steps from the host.  [device]"),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(help="What clients call the model.  [its name, or the last part of its path]"),
    ] = None,
    keys_file: Annotated[
        str | None,
        typer.Option(help="File with one API key per line; GKV_API_KEYS is read, too.  [no keys]"),
    ] = None,
    compilation_cache: Annotated[
        str | None,
        typer.Option(help="Folder for compiled programs; '' for none.  [in the user's cache]"),
    ] = None,
    drain_seconds: Annotated[
        int | None,
        typer.Option(help="How long running requests may go on after SIGTERM.  [10]"),
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Log lines for people, or as JSON.  [text]")
    ] = None,
    log_level: Annotated[
        LogLevel | None, typer.Option(help="The least that is logged.  [info]")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with these settings and more; flags override it."),
    ] = None,
) -> None:
    """Serve a model with OpenAI's chat completions API: guided by JSON Schemas, from a KV cache
    that never grows.

    \b
    python -m gkv_jax.serve --model smollm2-135m-instruct
    python -m gkv_jax.serve --config configs/serve/default.toml --port 9000

    Clients use http://HOST:PORT/v1 as base URL, and a key if there is a file of keys or GKV_API_KEYS
    is set. SIGTERM or Ctrl-C ends the server once running requests are done, a second one at once. Exit
    code 2: something has to be said differently; one line on stderr tells what.
    """
    cache = {"sinks": sinks, "window": window, "kept": kept, "max_drafts": max_drafts}
    flags: dict[str, Any] = {"model": model, "host": host, "port": port, "slots": slots}
    flags |= {"loop": loop, "quantize": quantize, "draft": draft, "verify": verify, "cache": cache}
    flags |= {"model_name": model_name, "compilation_cache": compilation_cache}
    flags |= {"drain_seconds": drain_seconds, "auth": {"keys_file": keys_file}}
    flags |= {"chat": {"reasoning": reasoning, "tool_format": tool_format}}
    flags |= {"log": {"format": log_format, "level": log_level}}
    settings = load_settings(config, flags)

    # Imported here, so that --help and mistakes in flags are answered at once.
    from gkv_jax.serve.process import run

    run(settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    command = typer.main.get_command(app)
    try:
        command.main(arguments, prog_name="python -m gkv_jax.serve", standalone_mode=False)
    except CommandLineError as error:
        return _fail(f"{error.format_message().rstrip('.')}; see --help")
    except (UserError, GrammarError) as error:
        return _fail(str(error))
    return 0


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
