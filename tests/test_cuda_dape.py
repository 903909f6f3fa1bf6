"""CUDA kernels on PyTorch's tensors: values and gradients of `modeling_dape`'s own code. They run in an emulator."""

import ast
import contextlib
import ctypes
import logging
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from test_gpu_kernel import cuda_aot  # noqa: F401  # a fixture
from test_kernels import HAS_COMPILER

from dape_jax.kernels.cuda import emulator, tiling
from dape_jax.pretrained import cuda_dape, export, modeling_dape

pytestmark = [pytest.mark.hf, pytest.mark.extra]
torch.set_num_threads(1)


def launch_emulated(tiling, grid, tensors, ints, scale) -> None:
    """Run a kernel as `cuda_dape.launch`, on a CPU, where 16-bit numbers are stored in 32 bits."""
    assert all(x.is_contiguous() for x in tensors)
    stored = [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in tensors]
    pointers = (ctypes.c_void_p * len(stored))(*(x.data_ptr() for x in stored))
    c_ints, c_grid = (ctypes.c_int * len(ints))(*ints), (ctypes.c_int * 3)(*grid)
    defines = tiling.defines() | ({} if tiling.dtype == "float32" else {"ROUND": 1})
    library = emulator.library(tiling.kernel, tuple(defines.items()))
    library.run(pointers, c_ints, ctypes.c_float(scale), c_grid, 0)
    for x, y in zip(tensors, stored, strict=True):
        x.copy_(y)


@pytest.fixture
def emulated(monkeypatch) -> None:
    monkeypatch.setattr(cuda_dape, "launch", launch_emulated)
    monkeypatch.setattr(cuda_dape, "capability", lambda device: "9.0")
    monkeypatch.setattr(cuda_dape, "why_not_on", lambda device, dtype: None)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_GPU)])
def device(request, monkeypatch) -> str:
    """Return a device that runs the kernels: a CPU with the emulator, or a GPU."""
    if request.param == "cpu":
        request.getfixturevalue("emulated")
    monkeypatch.setenv("DAPE_CUDA_KERNELS", "1")
    return request.param


def make_layer(bias: str | None, heads: int, groups: int, rows: int, keys: int, head_dim: int, **processor):
    """Return q, k, v, and the modules."""
    torch.manual_seed(0)
    options = {
        "bias": None if bias is None else modeling_dape.make_bias({"name": bias}, heads, head_dim),
        "processor": modeling_dape.Dape(heads, bias is not None, **processor) if processor else None,
    }
    q, k, v = (torch.randn(2, n, h, head_dim) for n, h in ((rows, heads), (keys, groups), (keys, groups)))
    return (q, k, v), options


CAUSAL = {"kernel_width": 4, "channels": 5, "alignment": "causal"}
CASES = {
    "kerple": (("kerple", 3, 3, 50, 50, 8), {"kernel_width": 3, "channels": 5}, None),
    # The second block of rows begins to see at a column at which a tile begins.
    "causal": (("alibi", 4, 2, 40, 60, 16), CAUSAL, 21),
    "no-bias": ((None, 4, 1, 37, 40, 16), {"kernel_width": 5, "channels": 17}, None),
    "plain": (("kerple", 4, 2, 37, 40, 16), {}, None),
    "of-bias": (("t5", 18, 18, 37, 40, 16), {"kernel_width": 3, "channels": 17, "inputs": "bias"}, None),
    "not-residual": (("t5", 4, 1, 37, 37, 16), {"kernel_width": 1, "channels": 5, "residual": False}, 8),
}


@HAS_COMPILER
@pytest.mark.parametrize(("case", "is_small"), [*((case, False) for case in CASES), ("kerple", True), ("causal", True)])
def test_values_and_gradients_are_those_of_pytorch(case, is_small, emulated, monkeypatch):
    """Compare in float32; if `is_small`, in chunks of few keys and in blocks of few rows."""
    sizes, processor, window = CASES[case]
    if is_small:
        monkeypatch.setattr(tiling, "LEAST_TILES", {"forward": 1, "backward": 1})
        monkeypatch.setattr(cuda_dape, "BLOCK_BYTES", 1)
    arrays, options = make_layer(*sizes, **processor)
    named = dict(zip("qkv", arrays, strict=True)) | dict(torch.nn.ModuleDict(options).named_parameters())
    weight, results = torch.randn_like(arrays[0]), []
    for block_size in (None, 64):
        is_emulated = modeling_dape.why_not_cuda(*arrays, **options, block_size=block_size) is None
        assert is_emulated == (block_size is None)
        for x in named.values():
            x.requires_grad_().grad = None
        out = modeling_dape.attend(*arrays, **options, window=window, block_size=block_size)
        (out * weight).sum().backward()
        assert ("Attention" in str(out.grad_fn.next_functions)) == is_emulated
        results.append({"out": out.detach()} | {name: x.grad for name, x in named.items()})
    found, expected = results
    for name, x in expected.items():
        if name == "processor.output_bias_H":  # it shifts whole rows
            assert found[name] is None
            assert x.abs().max() < 1e-4
            continue
        size = x.abs().max().item()
        assert size > 0.1
        torch.testing.assert_close(found[name], x, rtol=0, atol=1e-5 * size, msg=lambda text, name=name: name + text)


@HAS_COMPILER
@pytest.mark.parametrize(("dtype", "small"), [(torch.bfloat16, 2.0**-40), (torch.float16, 2.0**-8)])
def test_sixteen_bits(dtype, small, device):
    """Under autocast too. A small loss loses no more: gradients are scaled inside."""
    arrays, options = make_layer(*CASES["kerple"][0], **CASES["kerple"][1])
    parameters = [*torch.nn.ModuleDict(options).to(device).parameters()][:-1]  # without the bias of Conv2
    arrays = [x.to(device) for x in arrays]
    weight, results = torch.randn_like(arrays[0]), []
    for kind, block_size, scale in ((torch.float32, 64, 1), (dtype, None, 1), (dtype, None, small)):
        inputs = [x.to(dtype).to(kind).requires_grad_() for x in arrays]
        why_not = modeling_dape.why_not_cuda(*inputs, **options, block_size=block_size)
        assert (why_not is None) == (block_size is None), why_not
        with torch.autocast(device, torch.bfloat16):
            out = modeling_dape.attend(*inputs, **options, block_size=block_size)
        assert out.dtype == kind
        gradients = torch.autograd.grad((out.float() * weight * scale).sum(), [*inputs, *parameters])
        assert [x.dtype for x in gradients] == [kind] * 3 + [torch.float32] * len(parameters)
        results.append([out.detach().float(), *(x.float() / scale for x in gradients)])
    for x, y, z in zip(*results, strict=True):
        # The sum of a row's gradients is 0 up to the rounding of its output; gradients of the bias add these errors.
        limit = 8 * torch.finfo(dtype).eps * x.norm()
        assert 0 < (y - x).norm() < limit
        assert (z - x).norm() < limit


def test_calls_that_pytorch_computes(emulated, monkeypatch, caplog):
    """A log line says why, once."""
    small = {"kernel_width": 3, "channels": 5}
    arrays, options = make_layer("kerple", 4, 2, 20, 30, 8, **small)
    why_not = modeling_dape.why_not_cuda
    assert why_not(*arrays, **options) is None
    assert why_not(*arrays, torch.arange(20)[None], **options) == "pos_BT is given"
    assert why_not(*arrays, **options, cap=3.0) == "cap is given"
    assert why_not(*arrays, **options, block_size=4) == "block_size is given"
    assert why_not(arrays[0][:, -1:], *arrays[1:], **options) == "fewer than 16 rows"
    assert why_not(arrays[0].half(), *arrays[1:], **options) == "the dtypes of q, k and v differ"
    _, with_fire = make_layer("fire", 4, 2, 20, 30, 8, **small)
    assert why_not(*arrays, **with_fire) == "Fire is not a function of the distance"

    class Position(modeling_dape.Kerple):
        is_of_distance = False  # as a bias of one's own is by default

    class Other(modeling_dape.Dape):
        pass

    assert not modeling_dape.Bias.is_of_distance
    assert why_not(*arrays, bias=Position(4)) == "Position is not a function of the distance"
    for processor in (Other(4, True), modeling_dape.Dape(4, False)):
        assert why_not(*arrays, bias=options["bias"], processor=processor) == "the processor is not Dape for this bias"
    large, options_of_large = make_layer("kerple", 64, 64, 20, 20, 64, kernel_width=3, channels=64)
    assert "exceeds the registers" in why_not(*large, **options_of_large)
    monkeypatch.undo()
    assert why_not(*arrays, **options) == "the tensors are on cpu"
    modeling_dape.log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            modeling_dape.attend(*arrays, **options)
    assert [record.message for record in caplog.records] == ["attention: PyTorch, the tensors are on cpu"]


def test_devices_that_the_kernels_need(monkeypatch):
    def ask(dtype=torch.bfloat16, version="13.0", found="9.0"):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(cuda_dape, "capability", lambda device: found)
        return cuda_dape.why_not_on(torch.device("cuda"), dtype)

    monkeypatch.setattr(cuda_dape, "nvrtc", lambda: None)
    monkeypatch.setattr(cuda_dape, "driver", lambda: None)
    for value in ("", "0"):
        monkeypatch.setenv("DAPE_CUDA_KERNELS", value)
        assert "DAPE_CUDA_KERNELS=1 is not set" in ask()
    monkeypatch.setenv("DAPE_CUDA_KERNELS", "1")
    assert ask() is ask(torch.float16, found="12.0") is None
    assert ask(torch.float32) == "the dtype is float32, not bfloat16 or float16"
    assert ask(found="7.5") == ask(version=None) == "the GPU is not NVIDIA's with compute capability 8.0 or more"
    monkeypatch.setattr(cuda_dape, "nvrtc", Mock(side_effect=OSError("NVRTC was not found")))
    assert ask() == "NVRTC was not found"


def test_the_arguments_of_a_launch(monkeypatch):
    """A driver that records what it is given: sizes, and a pointer to each argument of the kernel."""
    calls: dict[str, tuple] = {}
    kinds = [ctypes.c_void_p] * 2 + [ctypes.c_int] * 2 + [ctypes.c_float]

    class Driver:
        def __getattr__(self, name):
            return lambda *args: calls.update({name: args}) or 0

        def cuLaunchKernel(self, *args):
            *sizes, pointers, extra = args
            found = [kind.from_address(address).value for kind, address in zip(kinds, pointers, strict=True)]
            calls["cuLaunchKernel"] = (*sizes, found, extra)
            return 0

    q = torch.zeros(1, 32, 12, 64, dtype=torch.bfloat16)
    processor = modeling_dape.Dape(12, True)
    monkeypatch.setattr(cuda_dape, "capability", lambda device: "9.0")
    monkeypatch.setattr(cuda_dape, "driver", lambda: Driver())
    monkeypatch.setattr(cuda_dape, "cached_code", lambda sources, *args: str(args).encode())
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=2**40 + 7))
    tiling, _ = cuda_dape.tilings_of(q, q, processor)
    cuda_dape.function_of.cache_clear()
    cuda_dape.launch(tiling, (3, 1, 2), [q, processor.output_WCH], [5, -6], 0.25)
    code = calls["cuModuleLoadData"][1].decode()
    assert code.startswith("('forward', 'sm_90', ")
    assert f"'SHARED_BYTES': {tiling.shared_bytes}" in code
    assert calls["cuModuleGetFunction"][2] == b"dape_forward"
    function, *sizes, stream, found, extra = calls["cuLaunchKernel"]
    assert function is calls["cuFuncSetAttribute"][0]
    assert sizes == [3, 1, 2, 32 * tiling.warps, 1, 1, tiling.shared_bytes]
    assert (stream.value, extra) == (2**40 + 7, None)
    assert found == [q.data_ptr(), processor.output_WCH.data_ptr(), 5, -6, 0.25]


COMPILE = """
import sys, torch
import dape_jax.pretrained.cuda_dape as c
from dape_jax.pretrained.modeling_dape import Dape
c.capability = lambda device: "9.0"
q = torch.zeros(1, 32, 4, 16, dtype=torch.float16)
for t in c.tilings_of(q, q, Dape(4, True, channels=16)):
    code = c.cached_code(c.SOURCES, t.kernel, "sm_90", t.defines() | {"SHARED_BYTES": t.shared_bytes})
    print(code[:4] == b"\x7fELF" and f"dape_{t.kernel}".encode() in code)
"""


@pytest.mark.slow
def test_machine_code(cuda_aot, tmp_path):  # noqa: F811
    environment = cuda_aot | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.stdout == "True\nTrue\n", done.stderr[-2000:]
    assert len([*tmp_path.glob("dape_jax/*.cubin")]) == 2


def test_the_exported_files_import_torch_only(tmp_path):
    export.write_code(str(tmp_path))  # as in docs/pretrained.md
    names = {"modeling_dape.py", "cuda_dape.py", "cuda_kernels.py"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        tree = ast.parse((tmp_path / name).read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        found = [x.module for x in imports if isinstance(x, ast.ImportFrom) and x.level == 0]
        found += [alias.name for x in imports if isinstance(x, ast.Import) for alias in x.names]
        assert {x.partition(".")[0] for x in found} <= {*sys.stdlib_module_names, "torch", "transformers"}
