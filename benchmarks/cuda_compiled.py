"""Compile the CUDA kernels for GPUs that are not present: registers, spills, shared memory, instructions.

    make cuda-aot
    PYTHONPATH=.venv/cuda-aot python -m benchmarks.cuda_compiled

Every case of `CASES` is compiled by NVRTC to machine code for each architecture. Columns:

    tile             rows and columns of a block's tile, which fits into the GPU's shared memory, and warps
    registers        of a thread; 255 is the most
    spilled bytes    stored to and loaded from local memory, by the text of the program
    shared KiB       shared memory of a block
    clocks a pair    instructions of the loop over tiles, in clocks of the four schedulers of a multiprocessor,
                     divided by the pairs of a row and a key in a tile. Each inner loop counts once, the loop over
                     products as often as it runs; what seldom runs is included: new references, the edge of the keys

Needs NVRTC and nvdisasm, but no GPU.
"""

import dataclasses
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from benchmarks.measure import Row, check_names, write
from dape_jax import command_line
from dape_jax.command_line import flag
from dape_jax.errors import InputError
from dape_jax.kernels.cuda import compiler, nvrtc
from dape_jax.kernels.cuda.tiling import Tiling, tilings
from dape_jax.kernels.tables import convolution_sizes
from dape_jax.model.processors import DapeConfig
from dape_jax.provenance import make_results_directory

ARCHITECTURES = {"sm_80": "8.0", "sm_90a": "9.0", "sm_100a": "10.0", "sm_120": "12.0"}
# Heads, head dim, C and W; C = 0 is a bias without convolutions.
CASES = [(12, 64, 32, 3), (12, 64, 32, 1), (12, 64, 32, 5), (12, 64, 32, 7), (12, 64, 64, 3), (12, 128, 32, 3)]
CASES += [(16, 64, 32, 3), (20, 64, 32, 3), (32, 64, 32, 3), (32, 80, 32, 3), (32, 128, 32, 3), (8, 96, 16, 3)]
CASES += [(12, 64, 0, 1)]
PATTERNS = {
    "registers": r"Used (\d+) registers",
    "spilled_stores": r"(\d+) bytes spill stores",
    "spilled_loads": r"(\d+) bytes spill loads",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    architectures: tuple[str, ...] = flag((*ARCHITECTURES,), f"Architectures: {', '.join(ARCHITECTURES)}.")
    output: str = flag("results/cuda_compiled", "Directory of the JSON.")

    def __post_init__(self):
        check_names("architectures", self.architectures, ARCHITECTURES)


def nvdisasm() -> str:
    """Return the path of NVIDIA's disassembler.

    Raises:
        InputError: there is none.
    """
    for folder in sys.path:
        for path in Path(folder).glob("nvidia/*/bin/nvdisasm"):
            path.chmod(0o755)
            return str(path)
    raise InputError("nvdisasm was not found: make cuda-aot, and PYTHONPATH=.venv/cuda-aot")


def clocks_a_pair(tiling: Tiling, code: bytes) -> float:
    """Return the clocks that issuing the instructions of a tile takes, for each pair."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        listing = subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True).stdout
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    loops = []
    for at, instruction in enumerate(instructions):
        target = re.search(r"BRA.*?(\.L_x_\d+)", instruction)
        if target and target[1] in labels and labels[target[1]] < at:
            loops.append((labels[target[1]], at))
    begin, end = max(loops, key=lambda loop: loop[1] - loop[0])
    inner = [x for x in loops if begin < x[0] and x[1] < end and any("HMMA" in y for y in instructions[x[0] : x[1]])]
    products = min(inner, key=lambda loop: loop[0])  # the first with matmuls
    trips = tiling.slots // 4 * (tiling.columns // 16) / tiling.warps
    count = end - begin + (trips - 1) * (products[1] - products[0])
    return count * tiling.warps / 4 / (tiling.rows * tiling.columns)


def measure(architecture: str, case: tuple[int, int, int, int]) -> list[Row]:
    """Return a row for each kernel."""
    heads, head_dim, channels, width = case
    sizes = convolution_sizes(DapeConfig(width, channels) if channels else None)
    row = {"architecture": architecture, "heads": heads, "head_dim": head_dim, "channels": channels, "width": width}
    row |= {"kernel": "both", "tile": "-"}
    try:
        limit = nvrtc.SHARED_BYTES[ARCHITECTURES[architecture]]
        found = tilings((heads, heads, head_dim), "bfloat16", sizes, row_stride=1, limit=limit)
    except NotImplementedError as error:
        return [row | {"reason": str(error)}]
    rows = []
    for tiling in found:
        defines = tiling.defines() | {"SHARED_BYTES": tiling.shared_bytes}
        options = architecture, defines, ("--ptxas-options=-v",)
        code, log = nvrtc.compile_source(compiler.SOURCES, tiling.kernel, *options)
        numbers = {name: int(re.findall(pattern, log)[0]) for name, pattern in PATTERNS.items()}
        tile = {"kernel": tiling.kernel, "tile": f"{tiling.rows} x {tiling.columns}, {tiling.warps} warps"}
        figures = {"shared_kib": tiling.shared_bytes / 1024, "clocks": clocks_a_pair(tiling, code)}
        rows.append(row | tile | numbers | figures)
    return rows


def main(settings: Settings) -> None:
    """Compile all cases and write the report."""
    make_results_directory(Path(settings.output))
    rows = []
    for architecture in settings.architectures:
        for case in tqdm(CASES, architecture, unit="case"):
            rows += measure(architecture, case)
    labels = {"GPU": "architecture", "H": "heads", "K": "head_dim", "C": "channels", "W": "width", "kernel": "kernel"}
    figures = {"registers": ("registers", ""), "stored": ("spilled_stores", ","), "loaded": ("spilled_loads", ",")}
    figures |= {"shared KiB": ("shared_kib", ".1f"), "clocks a pair": ("clocks", ".2f")}
    caption = "The CUDA kernels, bfloat16, compiled by NVRTC."
    write("cuda_compiled", settings, caption, rows, labels | {"tile": "tile"}, figures)


if __name__ == "__main__":
    command_line.run(main, Settings)
