"""``python -m benchmarks.picture``: draw docs/run.svg, the README's picture of a run, from a real run.

What the grammar forced, and the model only had to verify, stands out.
"""

import io
import json
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gkv_jax import CacheSpec, Engine, Guide, Sampling

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Invent a person who lives in Lisbon and describe them as JSON."
CACHE = CacheSpec(sinks=4, window=60)
COLUMNS = 92


def main() -> None:
    """Generate, and write the picture."""
    schema = json.loads((ROOT / "examples" / "person.json").read_text("utf-8"))
    chat = [{"role": "user", "content": PROMPT}]
    text, forced = Text(), 0
    with Engine.from_pretrained("smollm2-135m-instruct", cache=CACHE.with_drafts()) as engine:
        engine.warm_up()
        request = engine.prepare(
            chat, Guide.json_schema(schema), Sampling(max_tokens=200), trace=True
        )
        engine.submit(request)
        for piece in request.pieces():
            for token in piece.trace:
                if token.source == "forced":
                    forced += 1
                    text.append(token.text, "bold cyan")
                elif token.legal is not None and not token.text.startswith("<|"):
                    text.append(token.text)
        result = request.result()
    json.loads(result.text)
    stats = result.stats
    read = stats["prompt_tokens"] + stats["tokens"]
    facts = (
        f"{stats['tokens']} tokens, {forced} of them forced by the grammar (bold) · "
        f"{read} tokens read and written through a cache of {CACHE.sinks} sinks + {CACHE.window}"
    )
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for part in (Text(f"> {PROMPT}", "green"), text, Text(facts, "dim")):
        console.print(Padding(part, (0, 1, 1, 1)))
    console.save_svg(str(ROOT / "docs" / "run.svg"), title="gkv_jax")
    print(result.text, facts, sep="\n")


if __name__ == "__main__":
    main()
