"""The server as a process, and the engine alone in another, with the same settings."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import openai

from benchmarks.serve_load.workload import SCHEMAS, Task
from gkv_jax import Guide, Sampling, UserError
from gkv_jax.serve.generation import warm_up
from gkv_jax.serve.process import load_engine, use_compilation_cache
from gkv_jax.serve.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that takes requests."""

    url: str
    model: str
    pid: int

    @property
    def memory(self) -> int | None:
        """Bytes of memory that it holds; None where the system does not tell."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    def gauge(self, name: str) -> float:
        """A figure of /metrics without labels."""
        with openai.OpenAI(base_url=self.url.removesuffix("/v1"), api_key="none") as client:
            text = client.get("/metrics", cast_to=str)
        return next(float(x.split()[1]) for x in text.splitlines() if x.startswith(f"{name} "))

    def wait_until_idle(self, seconds: float) -> bool:
        """Whether all slots are free and nobody waits, soon."""
        deadline = time.monotonic() + seconds
        while self.gauge("gkv_active_slots") or self.gauge("gkv_queue_length"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


@contextlib.contextmanager
def server(config: Path) -> Iterator[Server]:
    """A server of its own with these settings and a free port.

    Raises:
      UserError: it does not start, or does not end when it is told to.
    """
    command = [sys.executable, "-m", "gkv_jax.serve", "--config", str(config), "--port", "0"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            announced = process.stdout.readline().split()
            if not announced:
                log.seek(0)
                raise UserError(f"the server did not start: {log.read()[-2000:]}")
            yield Server(announced[-1], announced[1], process.pid)
            process.terminate()
            if (code := process.wait(60)) != 0:
                raise UserError(f"the server ended with exit code {code}")
        finally:
            process.kill()


def tokens_per_second_alone(config: Path, tasks: Sequence[Task]) -> float:
    """Tokens per second of ``Engine.generate`` with the same settings, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.serve_load.processes", str(config)]
    asked = json.dumps([dataclasses.asdict(task) for task in tasks])
    run = subprocess.run(
        command, cwd=ROOT, input=asked, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(run.stdout.split()[-1])


def main() -> None:
    """Answer the tasks on standard input; print tokens per second."""
    settings = load_settings(Path(sys.argv[1]), {})
    tasks = [Task(**fields) for fields in json.load(sys.stdin)]
    use_compilation_cache(settings.compilation_cache)
    with load_engine(settings) as engine:
        warm_up(engine, settings.limits)
        guides = [
            None if task.schema is None else Guide.json_schema(SCHEMAS[task.schema], strict=True)
            for task in tasks
        ]
        samplings = [Sampling(max_tokens=t.max_tokens, temperature=1.0, seed=t.seed) for t in tasks]
        began = time.perf_counter()
        results = engine.generate([t.messages for t in tasks], guide=guides, sampling=samplings)
        seconds = time.perf_counter() - began
    for result in results:
        if result.error is not None:
            raise result.error
    print(sum(len(result.tokens) for result in results) / seconds)


if __name__ == "__main__":
    main()
