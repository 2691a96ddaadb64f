"""``python -m benchmarks.picture``: draw docs/run.svg, the README's picture of a run, from a real run.

Where the grammar left the model few choices, or none, the text stands out.
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
FEW = 100
"""Legal tokens, of 49 152."""


def main() -> None:
    """Generate, and write the picture."""
    schema = json.loads((ROOT / "examples" / "person.json").read_text("utf-8"))
    chat = [{"role": "user", "content": PROMPT}]
    text, forced, narrow = Text(), 0, 0
    with Engine.from_pretrained("smollm2-135m-instruct", cache=CACHE.with_drafts()) as engine:
        engine.warm_up()
        request = engine.prepare(
            chat,
            Guide.json_schema(schema, max_whitespace=0),
            Sampling(max_tokens=200),
            trace=True,
        )
        engine.submit(request)
        for piece in request.pieces():
            for token in piece.trace:
                if token.text.startswith("<|"):
                    continue
                few = token.legal is not None and token.legal < FEW
                forced += token.source == "forced"
                narrow += few
                text.append(token.text, "bold cyan" if few else "")
        result = request.result()
    json.loads(result.text)
    stats = result.stats
    read = stats["prompt_tokens"] + stats["tokens"]
    facts = (
        f"{stats['tokens']} tokens; in {narrow} places (bold) the grammar allowed fewer than {FEW} "
        f"of 49,152 tokens, {forced} it forced · "
        f"{read} tokens read and written through a cache of {CACHE.sinks} sinks + {CACHE.window}"
    )
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for part in (Text(f"> {PROMPT}", "green"), text, Text(facts, "dim")):
        console.print(Padding(part, (0, 1, 1, 1)))
    console.save_svg(str(ROOT / "docs" / "run.svg"), title="gkv_jax")
    print(result.text, facts, sep="\n")


if __name__ == "__main__":
    main()
