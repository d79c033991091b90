"""How the arrays of a model lie on a mesh of devices."""

import math
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


class Layout(NamedTuple):
    """Which axes of a mesh divide the arrays of a layer or of a model.

    On axes of type Auto, parameters carry what follows as NNX sharding metadata, and lie so once
    made: `nnx.jit(lambda: TransformerLM(..., layout=layout))()` makes each part where it is to be.
    An axis of a parameter stays whole where its devices do not divide it. On explicit axes,
    which parameters cannot lie on, only the operators of `hla_jax.nn.Recurrent` layers are divided.

    Attributes:
      mesh: the devices.
      batch: the mesh axis that divides rows of tokens (data parallelism).
      heads: the one that divides heads, the MLPs' width and the vocabulary (tensor parallelism).
        Operators with a state need their kv heads divided evenly.
      sequence: the one that divides tokens: the operators exchange states, see `sharded`; for the
        other mixers the compiler gathers what they need.
      parameters: the one, or several, that divide the features of each matrix of parameters, which
        is gathered when it is used (fully sharded data parallelism): usually those of batch and
        sequence.

    Example:
      >>> import jax, jax.numpy as jnp, hla_jax as hla
      >>> from flax import nnx
      >>> Auto = jax.sharding.AxisType.Auto
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tokens",), axis_types=(Auto,))
      >>> layout = hla.parallel.Layout(mesh, sequence="tokens")
      >>> layer = hla.nn.HLA2(num_heads=2, in_features=8, layout=layout, rngs=nnx.Rngs(0))
      >>> y, state = nnx.jit(lambda layer, x: layer(x))(layer, jnp.ones((1, 10, 8)))
      >>> y.shape
      (1, 10, 8)
    """

    mesh: Mesh
    batch: str | None = None
    heads: str | None = None
    sequence: str | None = None
    parameters: str | tuple[str, ...] | None = None


def check_layout(layout: Layout, in_features: int) -> None:
    """Raises ValueError if its axes are not the mesh's, come twice, or cannot divide parameters."""
    mesh, batch, heads, sequence, parameters = layout
    check_axes(mesh, batch=batch, heads=heads, sequence=sequence)
    over = _axes(parameters)
    for axis in over:
        if axis not in mesh.axis_names or axis == heads or over.count(axis) > 1:
            raise ValueError(
                f"parameters must be other axes of {mesh.axis_names} than heads={heads!r}, "
                f"got {parameters!r}"
            )
    if over and not is_auto(layout):
        raise ValueError(f"parameters must be None unless axes are Auto, got {mesh.axis_types}")
    devices = math.prod(mesh.shape[axis] for axis in over)
    if in_features % devices:
        raise ValueError(
            f"parameters must be axes whose {devices} devices divide in_features={in_features}, "
            f"got {parameters!r}"
        )


def check_axes(mesh: Mesh, **axes: str | None) -> None:
    """Raises ValueError if any is not an axis of the mesh, or two are the same."""
    for name, axis in axes.items():
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(f"{name} must be None or one of {mesh.axis_names}, got {axis!r}")
    given = [axis for axis in axes.values() if axis is not None]
    if len(set(given)) < len(given):
        raise ValueError(f"{', '.join(axes)} must be different axes, got {axes}")


def is_auto(layout: Layout) -> bool:
    """Whether the compiler may place arrays on the mesh."""
    return all(kind == AxisType.Auto for kind in layout.mesh.axis_types)


def divide(x: jax.Array, layout: Layout | None, *names: str | None) -> jax.Array:
    """Returns x, divided along each axis by the mesh axes that the layout has under its name.

    An axis whose length they do not divide lies whole: where the compiler was left to choose, XLA's
    gradient of an embedding came out wrong.
    """
    if layout is None or not is_auto(layout):
        return x
    spec = PartitionSpec(*_spec(layout, x.shape, names))
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))


def divide_parameter(
    parameter: nnx.Param[jax.Array], layout: Layout | None, *names: str | None
) -> nnx.Param[jax.Array]:
    """Returns a parameter that lies so and says so, by NNX's sharding metadata."""
    if layout is None or not is_auto(layout):
        return parameter
    spec = _spec(layout, parameter.shape, names)
    return nnx.Param(parameter[...], out_sharding=spec, mesh=layout.mesh)


def _spec(layout: Layout, shape: tuple[int, ...], names: tuple[str | None, ...]) -> tuple[Any, ...]:
    def over(length: int, name: str | None) -> Any:
        axes = _axes(name and getattr(layout, name))
        even = length % math.prod(layout.mesh.shape[axis] for axis in axes) == 0
        return (axes or None) if even else None

    return tuple(map(over, shape, names))


def _axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()
