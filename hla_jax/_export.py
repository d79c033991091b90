"""States as `jax.export` writes them."""

from typing import TypeVar

from jax import export

Kind = TypeVar("Kind", bound=type)


def exported(kind: Kind) -> Kind:
    """Lets functions that take or return this NamedTuple be serialized by `jax.export`."""
    return export.register_namedtuple_serialization(
        kind, serialized_name=f"hla_jax.{kind.__name__}"
    )
