"""Sizes of the tiles of the CUDA kernels, and the order of their operands.

In: shapes, and the shared memory of the GPU. Out: a `Tiling` of each kernel. Next: `compiler.py`.
"""

import dataclasses
import math
from typing import Any

# Rows and columns of a tile, and warps of a block: the first that fits.
TILES = {
    "forward": ((32, 64, 8), (32, 32, 8), (16, 32, 8), (16, 16, 4)),
    "backward": ((32, 32, 8), (16, 32, 8), (16, 16, 4)),
}
MULTIPROCESSORS = 132  # of an H100; with fewer blocks of rows than two for each, a block has a chunk of the keys
LEAST_TILES = {"forward": 4, "backward": 8}  # of a chunk
MAX_ACCUMULATORS = 160  # registers of a thread for the output
LOG2E = math.log2(math.e)
MAX_KNEE = 6e4  # in float16; the branch of LeakyReLU is decided long before
MAX_GRADIENT = 2.0**14  # bound of gradients in float16
BLOCK_BYTES = 512 * 2**20  # of P and dS in the backward pass


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes that a kernel is compiled for."""

    kernel: str  # "forward" or "backward"
    rows: int  # R, rows of a block
    columns: int  # L, columns of a tile
    warps: int  # warps of a block
    heads: int  # H
    groups: int  # G
    head_dim: int  # K, a multiple of 16
    channels: int  # C, a multiple of 16, or 0 without convolutions
    width: int  # W
    pad: int  # columns that a convolution reads to its left
    row_stride: int  # columns between neighbouring rows
    dtype: str  # of q, k and v: "bfloat16", "float16", or in the emulator "float32", without rounding

    @property
    def slots(self) -> int:
        """Return the number of slots of heads; see `tile.h`."""
        return 16 * -(-self.heads // 16)

    @property
    def ahead(self) -> int:
        """Return the number of columns that a convolution reads to its right."""
        return self.width - 1 - self.pad

    @property
    def accumulators(self) -> int:
        """Return the registers of a thread for the output: 16 rows of some heads."""
        return -(-self.heads * (self.rows // 16) // self.warps) * self.head_dim // 2

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of shared memory of a block: the struct `Shared` of the kernel."""
        R, L, H, C, S, W = self.rows, self.columns, self.heads, self.channels, self.slots, self.width
        reach, halo = self.row_stride * (R - 1), 2 * (W - 1)
        distances, fragments = reach + L + W - 1, W * (C // 8) * (S // 8)
        plane = R * ((L + halo) | 1) * 16
        tables = 2 * 2 * distances * (C or 16) + 4 * distances * S
        probs = 2 * H * R * (L + 8)
        shared = S // 8 * plane + probs + tables
        if self.kernel == "forward":
            sums = 4 * R * S * (2 + self.warps * 16 // R)
            return shared + 2 * H * R * (self.head_dim + 8) + 128 * max(1, 2 * fragments) + sums
        hidden, signs = 2 * R * (L * C + 8), 4 * R // 16 * (L + W - 1) * 32
        sums = 4 * (2 * R * S + (reach + L) * (C + S))
        return shared + S // 8 * plane + hidden + signs + 128 * max(1, 4 * fragments) + sums

    def chunks(self, blocks: int, num_keys: int) -> tuple[int, int]:
        """Return the number of chunks of the keys, and tiles in each: several if there are few blocks of rows."""
        tiles = -(-num_keys // self.columns)
        wanted = -(-3 * MULTIPROCESSORS // blocks) if blocks < 2 * MULTIPROCESSORS else 1
        size = min(max(LEAST_TILES[self.kernel], -(-tiles // wanted)), tiles)
        return -(-tiles // size), size

    def layers(self, chunks: int, tiles: int) -> int:
        """Return how many neighbouring chunks, of some tiles each, have distances in common."""
        return min(chunks, 1 + -(-self.row_stride * (self.rows - 1) // (tiles * self.columns)))

    def defines(self) -> dict[str, int]:
        """Return the macros of the source."""
        letters = {"R": self.rows, "L": self.columns, "NW": self.warps}
        letters |= {"H": self.heads, "G": self.groups, "K": self.head_dim}
        letters |= {"C": self.channels, "W": self.width, "PAD": self.pad, "STRIDE": self.row_stride}
        return letters | ({"FLOAT16": 1} if self.dtype == "float16" else {})


def tilings(
    heads: tuple[int, int, int], dtype: str, sizes: tuple[int, int, int], *, row_stride: int, limit: int
) -> tuple[Tiling, Tiling]:
    """Return the tilings of the forward and the backward kernel.

    Args:
        heads: H, G and K.
        dtype: of q, k and v.
        sizes: W, padding to the left, and C.
        row_stride: columns between neighbouring rows.
        limit: bytes of shared memory of a block.

    Raises:
        NotImplementedError: no tiling fits.
    """
    (H, G, K), (width, pad, channels) = heads, sizes
    sizes_of_all: dict[str, Any] = {"heads": H, "groups": G, "head_dim": multiple(K)}
    sizes_of_all |= {"channels": multiple(channels), "width": width, "pad": pad, "row_stride": row_stride}
    found = []
    for kernel, tiles in TILES.items():
        options = [Tiling(kernel, *tile, **sizes_of_all, dtype=dtype) for tile in tiles]
        options = [x for x in options if kernel == "backward" or x.accumulators <= MAX_ACCUMULATORS]
        if not options:
            raise NotImplementedError(f"H = {H} and K = {K}: the output of 16 rows exceeds the registers")
        fitting = [x for x in options if x.shared_bytes <= limit]
        if not fitting:
            need, name = options[-1].shared_bytes, f"H = {H}, K = {K}, C = {channels}, W = {width}"
            raise NotImplementedError(f"{name}: the {kernel} kernel needs {need} bytes of shared memory, not {limit}")
        found.append(fitting[0])
    return found[0], found[1]


def multiple(size: int, of: int = 16) -> int:
    """Return the smallest multiple of a number that is at least `size`."""
    return -(-size // of) * of


def in_register_order(x: Any) -> Any:
    """Order the last dim of an array as threads hold it: channel 8 n + 2 t + e at [t, n, e]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // 8, 4, 2).swapaxes(-2, -3).reshape(x.shape)


def fragments(x_WNM: Any) -> Any:
    """Order weights, outputs N by inputs M, as operands of matmuls; four registers of a thread are neighbours."""
    width, outputs, inputs = x_WNM.shape
    # [tap, output block, g, input block, half, t, pair] -> [.., input block, half, g, t, pair]
    x = x_WNM.reshape(width, outputs // 8, 8, inputs // 16, 2, 4, 2).swapaxes(2, 3).swapaxes(3, 4)
    return x.reshape(-1, 4, 32, 2).swapaxes(1, 2).reshape(-1)
