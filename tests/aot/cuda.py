"""Compiles for NVIDIA GPUs that are not there: the real XLA:GPU compiler, Triton and ptxas.

The compiler is JAX's CUDA plugin, which `make aot-cuda` puts into a folder of its own: beside JAX it
would make every program look for a GPU. So this module is two things. Imported, it is the client,
`compile_cases`. Run as a program, it is the worker that has the plugin on its path; one serves many
cases, as its start takes longer than most of them. It measures no speed, and programs that call back
into Python do not compile here: their callbacks need a live client of a GPU.
"""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.compile_matrix import jobs
from benchmarks.compile_matrix.cases import TARGETS, Case

FOLDER = Path(sys.prefix) / "cuda"
"""Where `make aot-cuda` puts the plugin, ptxas and libdevice."""

_TOOLKIT = FOLDER / "nvidia" / "cu13"
_SECONDS_PER_CASE = 300


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA wants to know of a GPU: figures that CUDA's `deviceQuery` prints.

    Attributes:
      capability: compute capability, major and minor.
      suffix: "a" where XLA compiles for the features that only this generation has (`sm_90a`).
      cores: streaming multiprocessors.
      lanes: float32 lanes a multiprocessor.
      clock: GHz.
      memory: bytes of device memory.
      l2: bytes.
      shared_per_core, shared_per_block: bytes of shared memory; a block must ask for that much.
    """

    name: str
    capability: tuple[int, int]
    suffix: str
    cores: int
    lanes: int
    clock: float
    memory: int
    l2: int
    shared_per_core: int
    shared_per_block: int

    def config(self, bandwidth: float) -> str:
        """The text of a `stream_executor.GpuTargetConfigProto`."""
        major, minor = self.capability
        extension = "ACCELERATED_FEATURES" if self.suffix else "NONE"
        return f"""
          platform_name: "CUDA"
          device_description_str: "{self.name}"
          dnn_version_info {{ major: 9 minor: 10 }}
          gpu_device_info {{
            cuda_compute_capability {{
              major: {major} minor: {minor} feature_extension: {extension}
            }}
            core_count: {self.cores}
            fpus_per_core: {self.lanes}
            clock_rate_ghz: {self.clock}
            memory_bandwidth: {bandwidth:.0f}
            device_memory_size: {self.memory}
            l2_cache_size: {self.l2}
            shared_memory_per_core: {self.shared_per_core}
            shared_memory_per_block: 49152
            shared_memory_per_block_optin: {self.shared_per_block}
            registers_per_core_limit: 65536
            registers_per_block_limit: 65536
            threads_per_warp: 32
            threads_per_block_limit: 1024
            threads_per_core_limit: 2048
            thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          }}"""


GPUS: dict[str, Gpu] = {
    "A100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), "", 108, 64, 1.41, 85_100_068_864, 40 << 20,
        shared_per_core=167936, shared_per_block=166912,
    ),
    "H100": Gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), "a", 132, 128, 1.98, 84_942_979_072, 50 << 20,
        shared_per_core=233472, shared_per_block=232448,
    ),
    "H200": Gpu(
        "NVIDIA H200", (9, 0), "a", 132, 128, 1.98, 151_397_597_184, 50 << 20,
        shared_per_core=233472, shared_per_block=232448,
    ),
    "B200": Gpu(
        "NVIDIA B200", (10, 0), "a", 148, 128, 1.965, 191_514_411_008, 132_644_864,
        shared_per_core=233472, shared_per_block=232448,
    ),
}  # fmt: skip


def missing() -> str | None:
    """Why this environment cannot compile for GPUs, or None."""
    found = {
        each.metadata["Name"]: each.version
        for each in distributions(path=[str(FOLDER)])
        if each.metadata["Name"] in ("jax-cuda13-plugin", "jax-cuda13-pjrt")
    }
    if len(found) < 2:
        return "the CUDA compiler is not installed: run `make aot-cuda`, on Linux x86_64"
    if set(found.values()) != {jax.__version__}:
        return f"the CUDA compiler is for JAX {set(found.values())}, this is {jax.__version__}"
    return None


def compile_cases(cases: Iterable[Case]) -> Iterator[tuple[Case, jobs.Result]]:
    """Every case and what became of it; one that fails or crashes does not stop the others."""
    yield from jobs.run("tests.aot.cuda", cases, path=[FOLDER])


# From here on: the worker.


def _compile_case(dump: Path, case: Case) -> jobs.Result:
    for old in dump.iterdir():
        old.unlink()
    program = case.program()
    devices = _devices(case.target)
    if program.place is None:
        operands = _abstract(program.operands, SingleDeviceSharding(devices[0]))
    else:
        operands = program.place(devices)
    jitted = jax.jit(program.function, donate_argnums=program.donate)
    compiled = jitted.lower(*operands).compile()
    text = compiled.as_text() or ""
    return jobs.describe(
        program,
        compiled,
        _cost(compiled),
        custom_calls=tuple(sorted(set(re.findall(r'custom_call_target="([^"]+)"', text)))),
        functions=tuple(_functions(dump)),
    )


def _abstract(tree: Any, sharding: SingleDeviceSharding) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


@functools.cache
def _devices(target: str) -> Sequence[Any]:
    config = GPUS[target].config(TARGETS[target].bandwidth)
    return topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=config
    ).devices


def _cost(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Flops and bytes of the compiled program; the plugin gives no analysis without a GPU.

    It is XLA's own analysis, in the build of the CPU client: what it counts depends on the program
    only. Its time estimate is that of no GPU, so it is left out. A call of a Triton kernel counts as
    -1 of everything, so there is nothing to be said of programs with one.
    """
    from jax._src.lib import xla_client

    if "__gpu$xla.gpu.triton" in (compiled.as_text() or ""):
        return {}
    (module,) = compiled.runtime_executable().hlo_modules()
    cost = xla_client._xla.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return {key: cost[key] for key in ("flops", "bytes accessed") if key in cost}


_LAUNCH = re.compile(r"(\S+) grid: \[.*shared_memory: (\d+) bytes")


def _functions(dump: Path) -> Iterator[jobs.Function]:
    """The functions of the program that was compiled last, from the PTX that XLA left in `dump`."""
    launches = "".join(path.read_text() for path in dump.glob("*.thunk_sequence.txt"))
    dynamic = {name: int(size) for name, size in _LAUNCH.findall(launches)}
    for path in sorted(dump.glob("*.ptx")):
        if path.stat().st_size > 16:  # there is one for the constants, which may be empty
            yield from ptxas(path, dynamic)


_REPORT = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def ptxas(path: Path, dynamic: dict[str, int]) -> Iterator[jobs.Function]:
    """Assembles a file of PTX for the architecture that it names.

    `dynamic` holds the shared memory that a launch adds, by function.
    """
    target = re.search(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
    if target is None:
        return
    command = [_TOOLKIT / "bin" / "ptxas", "--verbose", f"-arch={target[1]}", path]
    run = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"ptxas: {run.stderr.strip()}")
    yield from read_report(run.stderr, dynamic)


def read_report(report: str, dynamic: dict[str, int]) -> Iterator[jobs.Function]:
    """The functions in what `ptxas --verbose` prints."""
    for match in _REPORT.finditer(report):
        static = re.search(r"(\d+) bytes smem", match["rest"])
        yield jobs.Function(
            name=match["name"],
            registers=int(match["registers"]),
            spill_stores=int(match["stores"]),
            spill_loads=int(match["loads"]),
            shared_bytes=(int(static[1]) if static else 0) + dynamic.get(match["name"], 0),
        )


def _main() -> None:
    with jobs.private_output() as pipe, tempfile.TemporaryDirectory() as dump:
        # Read when the plugin is loaded, which the first case does. The second makes XLA take the
        # folder's own ptxas and libdevice, whatever CUDA the machine has.
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_gpu_cuda_data_dir={_TOOLKIT}"
        jobs.serve(functools.partial(_compile_case, Path(dump)), pipe, _SECONDS_PER_CASE)


if __name__ == "__main__":
    _main()
