"""States as `jax.export` writes them."""

from typing import TypeVar

from jax import export

Kind = TypeVar("Kind")


def exported(kind: type[Kind]) -> type[Kind]:
    """Lets functions that take or return this NamedTuple be serialized by `jax.export`."""
    export.register_namedtuple_serialization(kind, serialized_name=f"hla_jax.{kind.__name__}")
    return kind
