"""Compiling for machines that are not here, and reading what the compilers made.

A TPU's compiler is in libtpu, a GPU's in jax's CUDA plugin together with NVIDIA's ptxas; all of
them run on a CPU.
"""

import os
import re
import shutil
import site
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    SingleDeviceSharding,
    use_abstract_mesh,
)
from jax.stages import Lowered


class Target(NamedTuple):
    """A machine: as jax names its platform and its kind, and as the compiler names a small one."""

    platform: str
    kind: str
    cores: int
    topology: str


TARGETS = {
    "v5e": Target("tpu", "TPU v5 lite", 1, "v5e:2x2"),
    "v6e": Target("tpu", "TPU v6 lite", 1, "v6e:2x2"),
    "v5p": Target("tpu", "TPU v5", 2, "v5p:2x2x1"),
    "h200": Target("cuda", "NVIDIA H200", 132, "h200"),
}

# The properties of an H200 that XLA asks for. Limits of a thread, a block and a multiprocessor are
# those of compute capability 9.0 in the CUDA C++ Programming Guide; multiprocessors, lanes and L2
# those of the SXM5 card in the Hopper whitepaper; memory and its bandwidth from the H200 datasheet.
# The clock is what makes the datasheet's 67 TFLOP/s out of 132 x 128 lanes; cuDNN is not used here.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 }
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  device_memory_size: 141000000000  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  shared_memory_per_block: 49152
}
"""

# libtpu asks the machine it runs on for these, and one process at a time may load it.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# In Mosaic GPU's code: the constant that a launch is given.
DYNAMIC_SHARED_MEMORY = re.compile(r"dynamic_shared_memory_size %c(\d+)")


class Kernel(NamedTuple):
    """What one kernel takes: VMEM on a TPU; registers, spills and shared memory on a GPU.

    All but registers in bytes; `code` is PTX.
    """

    name: str
    vmem: int | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    code: str = ""


class Compiled(NamedTuple):
    """The kernels of a compiled function, and what else can be told of it.

    `temporary` is the device memory, in bytes, that it takes besides arguments and results;
    `in_place` counts the results of kernels that take the memory of an operand.
    """

    kernels: list[Kernel]
    temporary: int
    in_place: int


def lower_for(target: str, function: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Lowered:
    """Lowers a function for ShapeDtypeStructs as arguments. Needs none of the compilers."""
    platform, kind, cores, _ = TARGETS[target]
    device = AbstractDevice(kind, cores, platform="gpu" if platform == "cuda" else platform)
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        traced = jax.jit(function, donate_argnums=donate).trace(*args)
        return traced.lower(lowering_platforms=(platform,))


def compile_for(
    target: str, function: Callable, *args: Any, donate: tuple[int, ...] = ()
) -> Compiled:
    """Compiles a function for ShapeDtypeStructs as arguments."""
    sharding = SingleDeviceSharding(_device(target))
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    with _reports() as reports:
        lowered = lower_for(target, function, *args, donate=donate)
        if TARGETS[target].platform == "tpu":
            compiled = lowered.compile()
        else:
            here = str(Path(__file__).parent)  # where bin/ptxas is
            options = {"xla_dump_to": str(reports), "xla_gpu_cuda_data_dir": here}
            compiled = lowered.compile(options)
        module = compiled.as_text()
        kernels = [
            *_tpu_kernels(module),
            *_triton_kernels(reports),
            *_mosaic_kernels(reports),
        ]
    in_place = re.findall(r"{\d+}: \(\d+, {}\)", module)  # {result}: (operand, {})
    return Compiled(kernels, compiled.memory_analysis().temp_size_in_bytes, len(in_place))


@cache
def _device(target: str) -> jax.Device:
    jax.config.update("jax_platforms", "cpu")  # jax would look for the real machine
    platform, _, _, topology = TARGETS[target]
    if platform == "tpu":
        os.environ.update(TPU_ENVIRONMENT)
        return topologies.get_topology_desc(topology, platform).devices[0]
    os.environ["REAL_PTXAS"] = ptxas()
    options = dict(target_config=H200, topology="1x1x1")
    return topologies.get_topology_desc(topology, platform, **options).devices[0]


def ptxas() -> str:
    """Returns the program of NVIDIA's toolkit, or of the part of it that pip installs."""
    wheels = (Path(path).glob("nvidia/*/bin/ptxas") for path in site.getsitepackages())
    return shutil.which("ptxas", path="/usr/local/cuda/bin") or str(next(chain(*wheels)))


@contextmanager
def _reports() -> Iterator[Path]:
    """Provides the directory where a GPU's compilers leave their reports."""
    with TemporaryDirectory() as path:
        os.environ["KERNEL_REPORTS"] = os.environ["MOSAIC_GPU_DUMP_TO"] = path
        try:
            yield Path(path)
        finally:
            del os.environ["KERNEL_REPORTS"], os.environ["MOSAIC_GPU_DUMP_TO"]


def _tpu_kernels(module: str) -> Iterator[Kernel]:
    """Reads an optimised module: a kernel is a custom call, and beside it what it takes of VMEM."""
    for line in module.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            [used] = re.findall(r'"used_scoped_memory_configs":\[(.*?)\]', line)
            vmem = re.search(r'"memory_space":"1".*?"size":"(\d+)"', used)
            yield Kernel(_find(r"%(\w+)", line), vmem=int(vmem[1]) if vmem else 0)


def _triton_kernels(reports: Path) -> Iterator[Kernel]:
    """Reads how XLA launches our Triton kernels, and what `bin/ptxas` kept of each."""
    launches = "".join(path.read_text() for path in reports.glob("*thunk_sequence.txt"))
    for kept in reports.glob("*.ptxas-v"):
        report = kept.read_text()
        for name in re.findall(r"entry function '(hla_\w+)'", report):
            launch = re.search(rf" {name} grid.*shared_memory: (\d+)", launches)
            if launch:  # Mosaic's kernels launch themselves
                name = name.split("__")[0]  # the second of a name ends in __1
                yield _gpu_kernel(name, report, int(launch[1]), kept.with_suffix(".ptx"))


def _mosaic_kernels(reports: Path) -> Iterator[Kernel]:
    """Reads what Mosaic GPU keeps of each kernel, under its name and a number."""
    for report in reports.glob("*.ptxas"):
        passes = report.with_suffix(".mlir-passes.log")  # long: the code after each of them
        with passes.open() as lines:
            launch = next(filter(None, map(DYNAMIC_SHARED_MEMORY.search, lines)))
        name = report.stem.rsplit("_", 1)[0]
        yield _gpu_kernel(name, report.read_text(), int(launch[1]), report.with_suffix(".ptx"))


def _gpu_kernel(name: str, report: str, shared: int, code: Path) -> Kernel:
    registers = int(_find(r"Used (\d+) registers", report))
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    return Kernel(name, None, registers, spills, shared, code.read_text())


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern} in {text[:1000]}")
    return match[1]
