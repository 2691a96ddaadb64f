"""Taking keywords out of a schema, although references may lead into them."""

from __future__ import annotations

from typing import Any

from grammar_host.schema.walk import escape, local_pointer, reference_to, subschemas

ASIDE = "x-aside"
"""A keyword that means nothing, which keeps what references lead to."""


class Removal:
    """Removes keywords from a document in place.

    What a reference leads into is kept where it means nothing, and `finish` redirects the
    references.
    """

    def __init__(self, document: Any) -> None:
        """Notes where the references of the document lead."""
        self._referring = [schema for _, schema in subschemas(document) if "$ref" in schema]
        self._moved: set[str] = set()
        self._targets = {""}  # and everything above them
        for schema in self._referring:
            pointer = local_pointer(schema["$ref"]) or ""
            while pointer not in self._targets:
                self._targets.add(pointer)
                pointer = pointer.rpartition("/")[0]

    def remove(self, pointer: str, schema: dict[str, Any], keyword: str) -> Any:
        """Removes a keyword of the schema that was at `pointer` in the beginning.

        Returns:
            The keyword's value.
        """
        value = schema.pop(keyword)
        below = f"{pointer}/{escape(keyword)}"
        if below in self._targets:
            schema.setdefault(ASIDE, {})[keyword] = value
            self._moved.add(below)
        return value

    def finish(self) -> None:
        """Redirects the references into what has been removed."""
        for schema in self._referring:
            pointer = local_pointer(schema.get("$ref")) or ""
            redirected = self._redirected(pointer)
            if redirected != pointer:
                schema["$ref"] = reference_to(redirected)

    def _redirected(self, pointer: str) -> str:
        before = after = ""
        for token in pointer.split("/")[1:]:
            before += f"/{token}"
            after += f"/{ASIDE}/{token}" if before in self._moved else f"/{token}"
        return after


def caller_pointer(pointer: str) -> str:
    """The pointer of the same place before the removals."""
    return pointer.replace(f"/{ASIDE}/", "/")
