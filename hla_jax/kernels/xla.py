"""The primitive in XLA: chunked matmuls, and a backward pass that keeps the inputs alone.

Two forms: a loop in place for the CPU, batched products elsewhere.
"""

from functools import partial

from hla_jax.kernels import _batched, _loop

FORWARD = {
    "cpu": _loop.forward,
    "default": partial(_batched.forward, starts=_batched.serial_starts),
}
BACKWARD = {"cpu": _loop.backward, "default": _batched.backward}
