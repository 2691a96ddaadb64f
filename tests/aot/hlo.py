"""Reads a compiled program's HLO text, so that tests can state what it must not contain.

The text that `compiled.as_text()` gives for a TPU is the scheduled one: within a computation the
instructions stand in the order in which they are issued, and layouts and fusions are final.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property

import jax

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_INLINED = re.compile(r"(?:calls|to_apply)=%([\w.\-]+)")

# Their computations run as they are; those of fusions, reductions and sorts live in registers.
_CALLS = {"call", "async-start"}
# They name a buffer or a part of one and allocate nothing.
_ALIASES = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result, as HLO spells its dtype: f32, bf16, s32, pred, ..."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Instruction:
    """One line of HLO. A multi-output instruction has several arrays."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    rest: str  # operands and attributes

    def attribute(self, key: str) -> str | None:
        """The value of a plain attribute, such as `channel_id`, or the computation it names."""
        match = re.search(rf"\b{key}=%?\"?([\w.\-]+)", self.rest)
        return match and match[1]


@dataclass(frozen=True)
class Program:
    """A compiled module: its computations by name, each a list of instructions in text order."""

    text: str

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "Program":
        text = compiled.as_text()
        assert text is not None, "this backend shows no HLO"
        return cls(text)

    @property
    def is_scheduled(self) -> bool:
        """Whether text order is the order of execution."""
        return "is_scheduled=true" in self.text.splitlines()[0]

    @cached_property
    def computations(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        current: list[Instruction] = []
        for line in self.text.splitlines():
            if header := _COMPUTATION.match(line):
                current = found.setdefault(header[1], [])
            elif parts := _INSTRUCTION.match(line):
                name, result, opcode, rest = parts.groups()
                arrays = tuple(
                    Array(dtype, tuple(int(n) for n in dims.split(",") if n))
                    for dtype, dims in _ARRAY.findall(result)
                )
                current.append(Instruction(name, opcode, arrays, rest))
        return found

    @cached_property
    def buffers(self) -> list[Instruction]:
        """The instructions with a result of their own in memory: not in fusions, not aliases."""
        inlined = {
            name
            for body in self.computations.values()
            for instruction in body
            if instruction.opcode not in _CALLS
            for name in _INLINED.findall(instruction.rest)
        }
        return [
            instruction
            for name, body in self.computations.items()
            if name not in inlined
            for instruction in body
            if instruction.opcode not in _ALIASES
        ]

    def while_bodies(self) -> list[list[Instruction]]:
        """The bodies of the `while` loops, in text order (inner loops first)."""
        return [
            self.computations[body]
            for instructions in self.computations.values()
            for instruction in instructions
            if instruction.opcode == "while" and (body := instruction.attribute("body"))
        ]
