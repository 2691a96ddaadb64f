"""What differs between the versions of packages that we run with; everything else is the same in all."""

from typing import TYPE_CHECKING

import jax
import typer

if TYPE_CHECKING:
    from typer.exceptions import TyperException as CommandLineError
else:
    # Typer brings its own Click since 0.26, and names this class since 0.28. Colab has 0.25.
    CommandLineError = next(
        base for base in reversed(typer.BadParameter.__mro__) if hasattr(base, "format_message")
    )
    """What is wrong with a command line; ``format_message()`` says it."""


def current_mesh() -> jax.sharding.Mesh | None:
    """The mesh of ``jax.set_mesh`` in this thread, outside of ``jit``; None without one."""
    if hasattr(jax.sharding, "get_mesh"):
        mesh = jax.sharding.get_mesh()
    else:  # jax 0.7 keeps it to itself
        from jax._src.mesh import get_concrete_mesh

        mesh = get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh
