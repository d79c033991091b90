"""What is compiled: which functions of which kernel modules, at which sizes, for which machines."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from kernels import targets

from hla_jax.kernels._layout import Cascade, CascadeResults

K, H = 4, 8  # heads of k and v, and of q: two query heads read each state of linear attention
# The states of the first level, and the power of the decay of the second.
OPERATORS = {"linear": ("", 1), "ahla": ("P", 1), "hla2": ("S", 2), "hla3": ("SP", 3)}
BF16, DTYPES = ("bfloat16",), ("bfloat16", "float32")
WIDTHS = (64, 128, 256)


class Case(NamedTuple):
    """A function at one size, D = E = width, and the names of the kernels that it consists of."""

    module: str
    target: str
    operator: str
    direction: str  # "forward" or "backward"
    dtype: str
    width: int
    T: int  # 1 is a decoding step
    B: int
    kernels: set[str]

    def __str__(self) -> str:
        return "-".join(map(str, self[:-1]))

    @property
    def backend(self) -> ModuleType:
        """The module itself."""
        return importlib.import_module(f"hla_jax.kernels.{self.module}")

    @property
    def options(self) -> dict[str, Any]:
        """What every function takes."""
        _, power = OPERATORS[self.operator]
        return dict(chunk_size=None, power=power, strict=False, precision=None)


def _cases(
    module: str,
    target: str,
    direction: str,
    operators: str,
    kernels: str,
    dtypes,
    widths,
    lengths,
    B=1,
) -> Iterator[Case]:
    for operator, dtype, width, T in product(operators.split(), dtypes, widths, lengths):
        names = set(kernels.split())
        yield Case(module, target, operator, direction, dtype, width, T, B, names)


_tpu = partial(_cases, "mosaic_tpu")
_gpu = partial(_cases, "mosaic_gpu", "h200")
_triton = partial(_cases, "triton", "h200")
_CASCADES = "ahla hla2 hla3"
_TPU_BACKWARD = "hla_starts hla_backward"
_GPU_BACKWARD = "hla_sweep hla_outputs hla_query_key_cotangents"
_CHUNKS = "hla_summary hla_sweep"
MOSAIC_GPU = [
    *_gpu("forward", "linear", "hla_forward", BF16, (64, 128), (2048,), 32),
    *_gpu("forward", "linear", "hla_sweep hla_outputs", BF16, (256,), (2048,), 32),
    *_gpu("forward", _CASCADES, "hla_forward", BF16, (64,), (2048,), 32),
    *_gpu("forward", "linear", "hla_sweep hla_outputs", BF16, WIDTHS, (32768,)),
    *_gpu("backward", "linear", _GPU_BACKWARD, BF16, WIDTHS, (2048, 32768)),
]
CASES = [
    *_tpu("v5e", "forward", "linear", "hla_forward", DTYPES, WIDTHS, (2048,)),
    *_tpu("v5e", "forward", "linear", "hla_forward", BF16, WIDTHS, (32768,)),
    *_tpu("v5e", "forward", _CASCADES, "hla_forward", DTYPES, (64, 128), (2048,)),
    *_tpu("v5e", "forward", f"linear {_CASCADES}", "hla_forward", BF16, (128,), (1,), 64),
    *_tpu("v5e", "backward", "linear", _TPU_BACKWARD, DTYPES, WIDTHS, (2048,)),
    *_tpu("v5e", "backward", "linear", _TPU_BACKWARD, BF16, WIDTHS, (32768,)),
    *_tpu("v5e", "backward", _CASCADES, _TPU_BACKWARD, DTYPES, (64, 128), (2048,)),
    *_tpu("v6e", "forward", "linear hla3", "hla_forward", BF16, (128, 256), (32768,)),
    *_tpu("v6e", "backward", "linear hla3", _TPU_BACKWARD, BF16, (128, 256), (32768,)),
    *_tpu("v5p", "forward", "linear hla3", "hla_forward", BF16, (128, 256), (32768,)),
    *_tpu("v5p", "backward", "linear hla3", _TPU_BACKWARD, BF16, (128, 256), (32768,)),
    *(MOSAIC_GPU if jax.__version_info__ >= (0, 11) else ()),
    *_triton("forward", "linear", "hla_forward", DTYPES, (64, 128), (2048,), 16),
    *_triton("forward", "linear", f"{_CHUNKS} hla_output", DTYPES, WIDTHS, (2048,)),
    *_triton("forward", "ahla hla2", "hla_forward", BF16, (64,), (2048,), 16),
    *_triton("forward", f"linear {_CASCADES}", "hla_step", BF16, (128,), (1,), 64),
    *_triton("backward", "linear", f"{_CHUNKS} hla_backward", DTYPES, WIDTHS, (2048,)),
    *_triton("backward", "linear", f"{_CHUNKS} hla_backward", BF16, (128,), (32768,)),
]


def operands(case: Case) -> Cascade:
    """Returns the types of a case's operands, with decay and row mass."""
    first, _ = OPERATORS[case.operator]
    q, k = _tokens(case, H, case.width), _tokens(case, K, case.width)
    row = _tokens(case, K)
    S = _states(case, K)[0] if "S" in first else None
    P, m = _states(case, K) if "P" in first else (None, None)
    return Cascade(q, k, k, row, row, S, P, m, *_states(case, H if first else K))


def _tokens(case: Case, heads: int, *width: int) -> jax.ShapeDtypeStruct:
    """Returns the type of vectors per token and head, or else of numbers."""
    dtype = case.dtype if width else "float32"
    return jax.ShapeDtypeStruct((case.B, case.T, heads, *width), dtype)


def _states(case: Case, heads: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    shape = (case.B, heads, case.width)
    matrix = jax.ShapeDtypeStruct((*shape, case.width), jnp.float32)
    return matrix, jax.ShapeDtypeStruct(shape, jnp.float32)


def lowered(case: Case) -> jax.stages.Lowered:
    """Lowers a case."""
    return targets.lower_for(case.target, *_call(case), donate=(1,) if case.T == 1 else ())


def compiled(case: Case) -> targets.Compiled:
    """Compiles a case."""
    return targets.compile_for(case.target, *_call(case), donate=(1,) if case.T == 1 else ())


def _call(case: Case) -> tuple[Callable, Any, Any]:
    """Returns a function and its arguments, of which the second are states going forward."""
    x = operands(case)
    if case.direction == "backward":
        outputs = _tokens(case, H, case.width), _tokens(case, H)
        return partial(case.backend.backward, **case.options), x, CascadeResults(*outputs, *x[5:])

    def forward(of_tokens, states):
        x = Cascade(*of_tokens, *states)
        return case.backend.forward(x, out_dtype=jnp.dtype(case.dtype), **case.options)

    return forward, x[:5], x[5:]


def allowed_bytes(case: Case) -> int:
    """Returns how much device memory a case may take besides its operands and results."""
    allowed = _tpu_bytes if case.module == "mosaic_tpu" else _gpu_bytes
    # Per-token decays and their sums, and other numbers of that kind.
    return 8 * case.B * case.T * (K + H) * 4 + allowed(case)


def _tpu_bytes(case: Case) -> int:
    """All arrays of tokens once more, in the order of axes of TPU kernels, padded to 128 numbers.

    For the backward pass also the states before each chunk of 128.
    """
    function, *args = _call(case)
    arrays = jax.tree.leaves((args, jax.eval_shape(function, *args)))
    size = sum(a.size * a.dtype.itemsize for a in arrays if a.ndim == 4 and a.shape[1] == case.T)
    if case.direction == "backward":
        states = sum(a.shape[1] for a in operands(case)[5:] if a is not None and a.ndim == 4)
        itemsize = jnp.dtype(case.dtype).itemsize
        size += case.B * states * (case.T // 128) * case.width**2 * itemsize
    return size * max(128, case.width) // case.width


def _gpu_bytes(case: Case) -> int:
    """The states before each chunk, unless one program walks through all chunks.

    For the backward pass also the cotangents of the states after it (in Triton one for each query
    head), and what each query head adds to the cotangents of k and v. A decoding step in Triton
    pads the query heads of a kv head to 16.
    """
    B, T, D, triton = case.B, case.T, case.width, case.module == "triton"
    if T == 1:
        return B * K * (2 * 16 + 2) * D * 4
    C = 32 if triton and case.dtype == "float32" else 64
    state = T // C * D * (D + 1) * (4 if triton else 2)
    if case.direction == "backward":
        return B * (K + (H if triton else K)) * state + B * T * H * 2 * D * 4
    return B * K * state if "hla_sweep" in case.kernels else 0
