"""The worker that compiles for TPUs. Import it in no other process: it puts libtpu on the path."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.compile_matrix import jobs
from benchmarks.compile_matrix.cases import TARGETS, Case
from tests.aot import topology
from tests.aot.hlo import Program as Hlo

_SECONDS_PER_CASE = 300

_VMEM = re.compile(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
)


def compile_case(case: Case) -> jobs.Result:
    """Lowers and compiles; raises what the compiler raises."""
    program = case.program()
    devices = _devices(case.target)
    if program.place is None:
        operands = topology.abstract(program.operands, SingleDeviceSharding(devices[0]))
    else:
        operands = program.place(devices)
    jitted = jax.jit(program.function, donate_argnums=program.donate)
    compiled = jitted.lower(*operands).compile()
    hlo = Hlo.of(compiled)
    return jobs.describe(
        program,
        compiled,
        compiled.cost_analysis(),
        vmem_bytes=vmem_bytes(hlo.text),
        custom_calls=custom_calls(hlo),
    )


def custom_calls(hlo: Hlo) -> tuple[str, ...]:
    """The targets of a program's custom calls, each once."""
    calls = (i for body in hlo.computations.values() for i in body if i.opcode == "custom-call")
    return tuple(sorted({i.attribute("custom_call_target") or "" for i in calls}))


def vmem_bytes(text: str) -> int:
    """The most vector memory that a single operation of a scheduled TPU program uses."""
    return max((int(size) for size in _VMEM.findall(text)), default=0)


@functools.cache
def _devices(target: str) -> Sequence[Any]:
    chosen = TARGETS[target]
    return topologies.get_topology_desc(
        platform="tpu", topology_name=chosen.topology, chip_config_name=chosen.chip_config
    ).devices


if __name__ == "__main__":
    with jobs.private_output() as pipe:
        jobs.serve(compile_case, pipe, _SECONDS_PER_CASE)
