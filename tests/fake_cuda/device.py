"""A CUDA device of fake tensors for a torch without CUDA: with shapes, dtypes and devices, without numbers.

Call `load` before the first import of torch, which keeps the hooks that it finds.
"""

import contextlib
import ctypes
import subprocess
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

SOURCE = Path(__file__).with_name("guard.cpp")


def build(folder):
    """Compile the device guard against the installed torch; return the library's path."""
    library, torch = Path(folder) / "guard.so", _torch()
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    link = [f"-L{torch}/lib", f"-Wl,--no-as-needed,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu"]
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", *include, str(SOURCE), "-o", str(library), *link]
    subprocess.run(command, check=True, timeout=120)
    return library


def _torch():
    return Path(find_spec("torch").origin).parent


def load(library):
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch
    from torch._subclasses import fake_tensor

    from dpshard.kernels.triton import dispatch

    fake_tensor.init_gpu_context = lambda *_: None
    torch.cuda.get_device_name = lambda *_: "fake"
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda *_: None
    state = torch.zeros(16, dtype=torch.uint8)
    torch.cuda.get_rng_state = lambda *_: state
    torch.cuda.set_rng_state = lambda *_: None
    _simulate_copies(torch)
    for name in ("_is_installed", "_runs", "_multiplies", "_adds_rows", "_adds_digests"):
        setattr(dispatch, name, lambda *_: True)


def _simulate_copies(torch):
    from dpshard.records.offload import copies, spill

    class Copied(copies.Gpu):
        def current(self):
            return stream

        def stream(self):
            return stream

        def pinned(self, nbytes):
            return torch.empty(nbytes, dtype=torch.uint8)

        def copy(self, target, source, stream):
            target.copy_(source, non_blocking=True)

    stream = mock.Mock()
    spill.Gpu, spill.needs_the_cpu = Copied, lambda device: False


@contextlib.contextmanager
def autocast(enabled):
    """torch.autocast("cuda", bfloat16), which refuses a torch without CUDA."""
    import torch

    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", enabled)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


def move(module):
    """Give a module parameters and buffers on the device; shared ones stay shared."""
    import torch

    moved = {}

    def empty(x):
        if id(x) not in moved:
            y = torch.empty(x.shape, dtype=x.dtype, device="cuda")
            y = torch.nn.Parameter(y, requires_grad=x.requires_grad) if isinstance(x, torch.nn.Parameter) else y
            moved[id(x)] = x, y  # keeps x alive, and its id with it
        return moved[id(x)][1]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            tensors.update({name: empty(x) for name, x in tensors.items() if x is not None})
    return module
