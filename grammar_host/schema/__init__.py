"""The JSON Schema front end: from what callers write to what engines enforce.

`read_schema` checks a schema (draft, references, satisfiability) and brings it into a canonical
form; `versions` lists schemas that an engine may be offered instead of it, the exact ones first.
What a version leaves out, the completion gate (`grammar_host.gate`) checks.
"""

from grammar_host.schema.census import INEXACT, inexact_keywords
from grammar_host.schema.reading import Schema, read_schema, validator_for
from grammar_host.schema.versions import Version, versions

__all__ = [
    "INEXACT",
    "Schema",
    "Version",
    "inexact_keywords",
    "read_schema",
    "validator_for",
    "versions",
]
