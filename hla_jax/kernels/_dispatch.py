"""Which kernel serves a request, and how it is differentiated: all the choosing there is.

Shapes, dtypes and options decide while tracing; the platform decides where the code is lowered, so
that compiling for another one works. What a platform does not tell (the generation of a GPU, and
whether fusing pays) is decided for the device that tracing knows of: that of the enclosing abstract
mesh, or else this process's own.
"""

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hla_jax.kernels import mosaic_tpu, xla
from hla_jax.kernels._batching import over_batch, unless_partitioned
from hla_jax.kernels._layout import (
    Cascade,
    CascadeResults,
    Operands,
    Results,
    as_cascade,
    as_cascade_results,
    as_operands,
    as_results,
    cast,
)

Branches = dict[str, Callable]  # by platform; "default" is any other

# GPUs with the matrix instructions that `mosaic_gpu` is written in; later ones have others.
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
SMALL_TPUS = ("TPU v2", "TPU v3", "TPU v4")  # with less VMEM than the kernels take
NONE_HERE = (
    "a CPU has no kernels, only an interpreter of the TPU's, inside "
    "jax.experimental.pallas.tpu.force_tpu_interpret_mode(); for another platform's, trace inside "
    "jax.sharding.use_abstract_mesh with its abstract device"
)


class Options(NamedTuple):
    """What is static."""

    implementation: str | None
    chunk_size: int | None
    power: int
    strict: bool
    precision: lax.PrecisionLike
    out_dtype: jnp.dtype | None = None  # of the outputs o; None is the state's

    def mathematical(self) -> dict[str, Any]:
        """What changes the result."""
        return dict(power=self.power, strict=self.strict, precision=self.precision)

    def of_kernels(self) -> dict[str, Any]:
        """What a kernel takes."""
        return dict(chunk_size=self.chunk_size, **self.mathematical())


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def linear(x: Operands, options: Options) -> Results:
    """Causal linear attention in O(T) time and memory, forward and backward."""
    dtype = options.out_dtype or x.P.dtype

    def in_xla(form: Callable, x: Operands) -> Results:
        y = form(x, **options.of_kernels())
        return y._replace(o=y.o.astype(dtype))

    def in_pallas(kernel: ModuleType, x: Operands) -> Results:
        y = kernel.forward(as_cascade(x), out_dtype=dtype, **options.of_kernels())
        return as_results(y)

    def types(x: Operands) -> Results:
        return as_results(_types_of_results(as_cascade(x), dtype))

    kernels = _each(in_pallas, _required(as_cascade(x), options))
    return _on_platform(options, _each(in_xla, xla.FORWARD), kernels, types, x)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _linear_cotangents(x: Operands, ct: Results, options: Options) -> Operands:
    def in_pallas(kernel: ModuleType, x: Operands, ct: Results) -> Operands:
        d = kernel.backward(as_cascade(x), as_cascade_results(ct), **options.of_kernels())
        return _typed_as(x, as_operands(d))

    kernels = _each(in_pallas, _required(as_cascade(x), options))
    return _on_platform(options, _cotangent_forms(options), kernels, lambda x, ct: x, x, ct)


@_linear_cotangents.defjvp
def _(options: Options, primals, tangents):
    # Kernels have no derivatives: a second one is that of the form in XLA.
    in_xla = partial(lax.platform_dependent, **_cotangent_forms(options))
    return jax.jvp(in_xla, primals, tangents)


def _cotangent_forms(options: Options) -> Branches:
    def in_xla(form: Callable, x: Operands, ct: Results) -> Operands:
        return _typed_as(x, form(x, cast(ct, x.P.dtype), **options.of_kernels()))

    return _each(in_xla, xla.BACKWARD)


linear.defvjp(
    lambda x, options: (linear(x, options), x),
    lambda options, x, ct: (_linear_cotangents(x, ct, options),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def fused(x: Cascade, options: Options, stages: Callable) -> CascadeResults:
    """A cascade in one kernel; `stages` computes the same in several.

    What passes between the levels is computed again in the backward pass, not kept: that saves 4 D
    to 4 (D + E) bytes per token and query head.
    """
    dtype = options.out_dtype or x.F.dtype

    def in_pallas(kernel: ModuleType, x: Cascade) -> CascadeResults:
        return kernel.forward(x, out_dtype=dtype, **options.of_kernels())

    in_stages = {"default": lambda x: stages(x, options)}
    kernels = _each(in_pallas, _find(x, options)[0])
    return _on_platform(options, in_stages, kernels, partial(_types_of_results, dtype=dtype), x)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _fused_cotangents(x: Cascade, ct: CascadeResults, options: Options, stages: Callable):
    def in_stages(x: Cascade, ct: CascadeResults) -> Cascade:
        return _cotangents_in_stages(x, ct, options, stages)

    def in_pallas(kernel: ModuleType, x: Cascade, ct: CascadeResults) -> Cascade:
        if kernel.FUSES_BACKWARD:
            return _typed_as(x, kernel.backward(x, ct, **options.of_kernels()))
        return in_stages(x, ct)

    kernels = _each(in_pallas, _find(x, options)[0])
    return _on_platform(options, {"default": in_stages}, kernels, lambda x, ct: x, x, ct)


@_fused_cotangents.defjvp
def _(options: Options, stages: Callable, primals, tangents):
    in_stages = partial(_cotangents_in_stages, options=options, stages=stages)
    return jax.jvp(in_stages, primals, tangents)


def _cotangents_in_stages(x: Cascade, ct: CascadeResults, options: Options, stages: Callable):
    return jax.vjp(lambda x: stages(x, options), x)[1](ct)[0]


fused.defvjp(
    lambda x, options, stages: (fused(x, options, stages), x),
    lambda options, stages, x, ct: (_fused_cotangents(x, ct, options, stages),),
)


def serves(x: Cascade, options: Options) -> bool:
    """Tells whether the device that this is traced for has a kernel for the request."""
    if options.implementation not in (None, "pallas"):
        return False
    if options.implementation is None and _platforms() == ("cpu",):
        return False
    return any(platform in _platforms() for platform in _find(x, options)[0])


def _required(x: Cascade, options: Options) -> dict[str, ModuleType]:
    """Returns the kernels for a request, by platform; asked for by name, there must be one."""
    kernels, reasons = _find(x, options)
    if options.implementation == "pallas" and not kernels:
        why = "; ".join(dict.fromkeys(reasons)) or NONE_HERE
        raise ValueError(
            f'implementation="pallas" cannot serve this request ({why}), "xla" computes the same'
        )
    return kernels


def _find(x: Cascade, options: Options) -> tuple[dict[str, ModuleType], list[str]]:
    """Returns the first kernel of each platform that serves a request, and why others do not."""
    if 0 in (x.q.size, x.v.size):
        return {}, ["the arrays are empty"]
    x = _of_one_batch_axis(x)
    kernels: dict[str, ModuleType] = {}
    reasons = []
    for platform, modules in _modules(options).items():
        for module in modules:
            reason = module.unsupported(x, **options.of_kernels())
            if reason is None:
                kernels[platform] = module
                break
            reasons.append(f"{module.__name__.rsplit('.')[-1]}: {reason}")
    return kernels, reasons


def _of_one_batch_axis(x: Cascade) -> Cascade:
    """Returns the types of the operands as kernels take them."""
    axes = x.token_axis

    def joined(a):
        return jax.ShapeDtypeStruct((math.prod(a.shape[:axes]), *a.shape[axes:]), a.dtype)

    return jax.tree.map(joined, x)


def _modules(options: Options) -> dict[str, tuple[ModuleType, ...]]:
    """Returns the kernels of each platform that this may be lowered for, the fastest first.

    Asked for by name, those of the device that tracing knows of; else a TPU's too, for programs
    that are compiled for another machine.
    """
    if options.implementation == "xla":
        return {}
    kind, by_name = _device().device_kind, options.implementation == "pallas"
    modules: dict[str, tuple[ModuleType, ...]] = {"tpu": (mosaic_tpu,)}
    if "cuda" in _platforms():
        from hla_jax.kernels import mosaic_gpu, triton

        hopper = any(name in kind for name in HOPPER)
        modules |= {"cuda": (mosaic_gpu, triton) if hopper else (triton,), "rocm": (triton,)}
    if kind.startswith(SMALL_TPUS):
        modules = {}
    if by_name and _platforms() == ("cpu",) and _interpreted():
        modules["cpu"] = (mosaic_tpu,)
    if by_name:
        modules = {platform: modules[platform] for platform in _platforms() if platform in modules}
    return modules


def _platforms() -> tuple[str, ...]:
    """Returns what the device that this is traced for may be called where code is lowered."""
    platform = _device().platform
    return ("cuda", "rocm") if platform in ("gpu", "cuda", "rocm") else (platform,)


def _device() -> Any:
    """Returns the device that this is traced for, as far as that is known."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]


def _interpreted() -> bool:
    """Tells whether `pltpu.force_tpu_interpret_mode` is on, which shows in a traced kernel."""
    nothing = jnp.zeros(())
    kernel = pl.pallas_call(lambda *_: None, out_shape=jax.typeof(nothing))
    return bool(jax.make_jaxpr(kernel)(nothing).eqns[0].params["interpret"])


def _on_platform(options: Options, forms: Branches, kernels: Branches, types: Callable, *args):
    """Runs the kernel for the platform that this is lowered for, or else the form in XLA.

    `types` computes arrays of the results' types.
    """
    branches: Branches = {} if options.implementation == "pallas" else dict(forms)
    otherwise = branches.get("default")
    for platform, kernel in kernels.items():
        if platform != "cpu":  # where the interpreter's callbacks bind it to where it was traced
            kernel = unless_partitioned(kernel, otherwise, types)
        branches[platform] = over_batch(kernel)
    return lax.platform_dependent(*args, **branches)


def _each(function: Callable, table: dict[str, Any]) -> Branches:
    return {platform: partial(function, entry) for platform, entry in table.items()}


def _types_of_results(x: Cascade, dtype: jnp.dtype) -> CascadeResults:
    o = jnp.zeros_like(x.q, dtype, (*x.q.shape[:-1], x.v.shape[-1]))
    z = None if x.f is None else jnp.zeros_like(x.q, x.F.dtype, x.q.shape[:-1])
    return CascadeResults(o, z, *x[5:])


def _typed_as(x, d):
    """Returns cotangents in the operands' dtypes."""
    return jax.tree.map(lambda d, x: d.astype(x.dtype), d, x)
