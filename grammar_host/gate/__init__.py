"""The completion gate: no document that violates its schema is ever completed.

Where an engine's grammar only over-approximates a JSON Schema, the gate follows the document as it
is written and validates every object, array and, where it matters, string at the token that would
close it. That token is not legal while the part is invalid, so the model can still write what is
missing; if nothing else is legal either, the request has reached a dead end, and the gate says
which keyword of the schema is to blame. Keys are never repeated within an object.
"""

from grammar_host.gate.closers import Closers
from grammar_host.gate.matcher import GatedMatcher, with_gate
from grammar_host.gate.rules import Rules
from grammar_host.gate.tags import GatedTagMatcher, Tags, with_tag_gate

__all__ = [
    "Closers",
    "GatedMatcher",
    "GatedTagMatcher",
    "Rules",
    "Tags",
    "with_gate",
    "with_tag_gate",
]
