"""Names of the cases that are compared with one another."""


def mask(who: str, batch: int, dtype: str, kind: str) -> str:
    return f"{who}, B={batch}, {dtype}, {kind} legal"


def sample(who: str, batch: int, mode: str) -> str:
    return f"{who}, B={batch}, float32, half legal, {mode}"


def decode(kernel: str, way: str, batch: int, kind: str) -> str:
    return f"{kernel}, {way}, B={batch}, {kind}"
