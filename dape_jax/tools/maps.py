"""Draw attention maps before the softmax, as in the paper's appendix K: scores, bias, and what DAPE adds to them.

`attention_maps.py` is the command line. In: a trained run and one document. Out, in --output: one figure per layer
(`layer-00.png`), `index.html`, which shows all of them, and `attention_maps.json` with statistics of every map. With
`MAX_NAMED_TOKENS` tokens or fewer, the axes show the text of each token.

A figure has one row per head and one column per map, each a function of (query, key):

    scores   A = Q K^T / sqrt(K)
    bias     B; left out without a bias (NoPE, RoPE)
    added    processor(A, B) - A - B, the paper's f(A, B) (minus B with residual=False); left out without a processor
    probs    softmax(processor(A, B))

Masked pairs stay blank. Up to 512 tokens, one cell is one pair. Beyond, a cell is the mean of the visible pairs among
n x n pairs, n = ceil(length / 512). Statistics are over all visible pairs, pooled or not.

Query rows are independent, so maps are computed for one layer and one block of rows at a time: memory is linear in the
length.
"""

import dataclasses
import functools
import html
import json
from string import Template
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from matplotlib import colormaps
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure

from dape_jax.config import resolved
from dape_jax.data.tokenizers import Tokenizer, saved_tokenizer
from dape_jax.errors import InputError, printable, require
from dape_jax.evaluation import figures, report
from dape_jax.evaluation.trained import TrainedModel, read_trained, restore, validation_corpus
from dape_jax.files import write_atomically, write_json
from dape_jax.model.attention import Blockwise, score
from dape_jax.model.biases import Bias
from dape_jax.model.contextual import ContextualBias
from dape_jax.model.processors import Plain, add_bias
from dape_jax.model.scores import masked_softmax
from dape_jax.model.transformer import Block, Places, SelfAttention, model_structure
from dape_jax.progress import Progress
from dape_jax.provenance import make_results_directory, provenance

MAX_CELLS = 512  # along one side of a map
MAX_NAMED_TOKENS = 32  # tokens whose text is on the axes
HEADINGS = {"scores": "scores A", "bias": "bias B", "added": "added by the processor", "probs": "probabilities"}
PAGE = Template("""<!doctype html>
<meta charset="utf-8">
<title>$title</title>
<style>body { font-family: sans-serif; } img { max-width: 100%; } pre { white-space: pre-wrap; }</style>
<h1>$title</h1>
<pre>$facts</pre>
<p>Statistics of every map: <a href="attention_maps.json">attention_maps.json</a>
$figures
""")


def attention_maps(
    workdir: epath.PathLike,
    *,
    length: int,
    text: epath.PathLike | None = None,
    step: str = "newest",
    output: epath.PathLike | None = None,
) -> epath.Path:
    """Draw the maps of every layer and head of a trained model; `attention_maps.Flags` describes the arguments.

    Returns:
        The path of the page.

    Raises:
        InputError: the input is invalid, or the output has a page; raised before any device is used.
    """
    require(length >= 2, "length", length, "must be at least 2 tokens")
    trained = read_trained(workdir, step, {})
    maps = trained.workdir / "attention_maps" / f"step-{trained.step}-length-{length}"
    output = maps if output is None else epath.Path(output)
    page = output / "index.html"
    require(not page.exists(), "output", str(output), "contains an index.html; delete it or choose another --output")
    tokens_T, source = read_tokens(trained, length, text)
    names = token_names(saved_tokenizer(workdir), tokens_T) if length <= MAX_NAMED_TOKENS else None
    make_results_directory(output)

    block_size = trained.run.evaluation.block_size
    config = dataclasses.replace(trained.run.model, attention=Blockwise(block_size, num_buckets=4))
    graphdef, _ = model_structure(config)
    _, params = restore(trained)  # no mesh is set: one sequence is not split over devices

    @jax.jit
    def maps_of_layer(params, x_BTD, layer):
        model = nnx.merge(graphdef, params)
        block = jax.tree.map(lambda stacked: stacked[layer], model.layers)
        return layer_maps(block, x_BTD, model.shared_bias, block_size=block_size)

    cell_size, layers = -(-length // MAX_CELLS), []
    x_BTD = jax.device_get(params["embedding_VD"][tokens_T][None])
    for layer in Progress(range(config.num_layers), unit="layer", desc=trained.name):
        x_BTD, cells, stats = jax.device_get(maps_of_layer(params, x_BTD, layer))
        allowed = f"the model has diverged: the output of layer {layer} is not finite"
        require(bool(np.isfinite(x_BTD).all()), "workdir", str(workdir), allowed)
        cells = {map_name: cells[map_name] for map_name in HEADINGS if map_name in cells}  # jit sorts by name
        title = f"{trained.name}, step {trained.step}\nlayer {layer}, {length} tokens"
        if cell_size > 1:
            title += f", mean of {cell_size} x {cell_size} pairs per cell"
        figure, file = draw(cells, cell_size * len(cells["scores"][0]), title, names), f"layer-{layer:02}.png"
        write_atomically(output / file, report.png_of(figure))
        heads = [
            {map_name: {key: float(values[head]) for key, values in stats[map_name].items()} for map_name in cells}
            for head in range(config.num_heads)
        ]
        layers.append({"figure": file, "heads": heads})

    model = resolved(trained.run)["model"]
    content = {
        "run": trained.name,
        "workdir": str(workdir),
        "step": trained.step,
        "train_length": trained.run.train.train_length,
        "length": length,
        "cell_size": cell_size,
        "text": source,
        "model": {field: model[field] for field in ("rotary", "bias", "processor", "window")},
        "layers": layers,
    } | provenance("flax", "matplotlib")
    write_json(output / "attention_maps.json", report.json_values(content))
    facts = "\n".join([content["command"], json.dumps(content["model"]), *source.values()])
    heading = html.escape(f"{trained.name}, step {trained.step}: attention maps at {length} tokens")
    images = "\n".join(f'<p><img src="{each["figure"]}" alt="{each["figure"]}">' for each in layers)
    text_of_page = PAGE.substitute(title=heading, facts=html.escape(facts), figures=images)
    write_atomically(page, text_of_page.encode())  # last, so that a page implies that all files exist
    return page


def read_tokens(
    trained: TrainedModel, length: int, text: epath.PathLike | None
) -> tuple[Int[np.ndarray, "T"], dict[str, str]]:
    """Return the tokens to read, and their source and beginning for the record.

    Raises:
        InputError: the file cannot be read, or there are too few tokens.
    """
    tokenizer = saved_tokenizer(trained.workdir)
    if text is not None:
        try:
            tokens = tokenizer.encode(epath.Path(text).read_bytes())
        except OSError as error:
            raise InputError(f"text = {str(text)!r}: cannot be read: {error}") from error
        require(tokens.size >= length, "text", str(text), f"has {tokens.size} tokens; must have --length={length}")
        source = str(text)
    else:
        try:
            store = validation_corpus(trained, None).validation
        except InputError as error:
            raise InputError(f"{error}; attention maps read another text with --text") from error
        sizes = np.diff(store.offsets) - 1  # without the end-of-document token
        allowed = f"must be at most {sizes.max()}, the longest validation document; or choose a longer --text"
        require(bool((sizes >= length).any()), "length", length, allowed)
        document = int(np.argmax(sizes >= length))
        tokens = store.document(document)
        source = f"validation document {document} of data.path = {trained.run.data.path!r}"
    tokens_T = tokens[:length].astype(np.int32)
    beginning = tokenizer.decode(tokens_T[:400]).decode("utf-8", errors="replace")
    return tokens_T, {"source": source, "beginning": beginning}


def layer_maps(
    block: Block,
    x_BTD: Float[Array, "1 T D"],
    shared_bias: Bias | ContextualBias | None,
    *,
    block_size: int,
    max_cells: int = MAX_CELLS,
) -> tuple[Float[Array, "1 T D"], dict[str, Float[Array, "H cells cells"]], dict[str, dict[str, Float[Array, "H"]]]]:
    """Return the output, maps and statistics of one layer for one sequence.

    Memory is linear in T if the attention of `block` is `Blockwise`: maps of `block_size` query rows are held at once.

    Returns:
        The output of the layer; the cells of each map, NaN where no pair is visible; and the mean, std, min and max of
        each map over all visible pairs.
    """
    pos_S = jnp.arange(x_BTD.shape[1])
    length, attention = pos_S.size, block.attention
    bias = shared_bias if attention.bias is None else attention.bias
    q_BTHK, k_BSGK, _ = attention.project(block.attention_norm(x_BTD).astype(block.dtype), pos_S)
    num_blocks = -(-length // block_size)
    padding = num_blocks * block_size - length  # rows after the last one, which are masked below
    q_blocks = jnp.pad(q_BTHK[0], ((0, padding), (0, 0), (0, 0))).reshape(num_blocks, 1, block_size, *q_BTHK.shape[2:])
    pos_blocks = jnp.arange(num_blocks * block_size).reshape(num_blocks, block_size)
    cell_size = -(-length // max_cells)
    num_cells = -(-length // cell_size)
    maps_of = functools.partial(row_maps, attention, bias, k_BSGK=k_BSGK, k_pos_S=pos_S)

    def pool(cells: Float[Array, "_ cells cells"], x: Float[Array, "_ T S"], pos_T: Int[Array, "T"]) -> Array:
        """Add a block of rows to the sums of their cells."""
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, num_cells * cell_size - length)))
        return cells.at[:, pos_T // cell_size].add(padded.reshape(*x.shape[:2], num_cells, cell_size).sum(-1))

    def add_block(carry, q_and_pos):
        (sums, counts), (q_BTHK, pos_T) = carry, q_and_pos
        maps, mask_TS = maps_of(q_BTHK, pos_T)
        mask_TS &= (pos_T < length)[:, None]
        counts = pool(counts, mask_TS[None].astype(counts.dtype), pos_T)
        sums = {name: pool(sums[name], jnp.where(mask_TS[None], x, 0), pos_T) for name, x in maps.items()}
        return (sums, counts), {name: _block_statistics(x, mask_TS) for name, x in maps.items()}

    maps, _ = jax.eval_shape(maps_of, q_blocks[0], pos_blocks[0])
    zeros = {name: jnp.zeros((x.shape[0], num_cells, num_cells), x.dtype) for name, x in maps.items()}
    (sums, counts), of_blocks = jax.lax.scan(
        add_block, (zeros, jnp.zeros((1, num_cells, num_cells))), (q_blocks, pos_blocks)
    )
    cells = {name: x / counts for name, x in sums.items()}  # 0 / 0, which is NaN, where no pair is visible
    x_BTD, _ = block(x_BTD, Places(pos_S), shared_bias)
    return x_BTD, cells, {name: _combine(blocks) for name, blocks in of_blocks.items()}


def row_maps(
    attention: SelfAttention,
    bias: Bias | ContextualBias | None,
    q_BTHK: Float[Array, "1 T H K"],
    q_pos_T: Int[Array, "T"],
    *,
    k_BSGK: Float[Array, "1 S G K"],
    k_pos_S: Int[Array, "S"],
) -> tuple[dict[str, Float[Array, "H T S"]], Bool[Array, "T S"]]:
    """Return the maps of a block of rows (see the module's docstring) and the mask of visible pairs."""
    scores_BHTS, bias_BHTS, mask_TS = score(q_BTHK, k_BSGK, q_pos_T, k_pos_S, bias=bias, window=attention.mask.window)
    processed_BHTS = attention.processor(scores_BHTS, bias_BHTS, mask_TS)
    maps = {"scores": scores_BHTS}
    if bias_BHTS is not None:
        maps["bias"] = bias_BHTS
    if not isinstance(attention.processor, Plain):
        maps["added"] = processed_BHTS - add_bias(scores_BHTS, bias_BHTS)
    maps["probs"] = masked_softmax(processed_BHTS, mask_TS)
    return {name: x_BHTS[0] for name, x_BHTS in maps.items()}, mask_TS


def _block_statistics(x_HTS: Float[Array, "H T S"], mask_TS: Bool[Array, "T S"]) -> dict[str, Float[Array, "_"]]:
    """Return statistics of a block of rows; variances about a block's own mean add up without cancellation."""
    pairs: dict[str, Any] = {"axis": (1, 2), "where": mask_TS[None]}
    return {
        "count": mask_TS.sum(dtype=x_HTS.dtype)[None],
        "mean": x_HTS.mean(**pairs),
        "var": x_HTS.var(**pairs),
        "min": x_HTS.min(initial=jnp.inf, **pairs),
        "max": x_HTS.max(initial=-jnp.inf, **pairs),
    }


def _combine(blocks: dict[str, Float[Array, "blocks _"]]) -> dict[str, Float[Array, "H"]]:
    """Return the statistics of a map from those of its blocks."""
    share = blocks["count"] / blocks["count"].sum()
    mean = (share * blocks["mean"]).sum(0)
    var = (share * (blocks["var"] + (blocks["mean"] - mean[None]) ** 2)).sum(0)
    return {"mean": mean, "std": jnp.sqrt(var), "min": blocks["min"].min(0), "max": blocks["max"].max(0)}


def token_names(tokenizer: Tokenizer, tokens_T: Int[np.ndarray, "T"]) -> list[str]:
    """Return the text of each token for the axes: spaces are visible, and unusual characters are escaped."""
    names = []
    for token in tokens_T:
        text = printable(tokenizer.decode(token[None]).decode("utf-8", "backslashreplace")).replace(" ", "\u00b7")
        # matplotlib's font has Latin, Greek and Cyrillic letters, and warns of others.
        known = "".join(c if c < "\u0500" else c.encode("unicode_escape").decode() for c in text)
        names.append(figures.label(known) or "(end)")
    return names


def draw(
    cells: dict[str, Float[np.ndarray, "H cells cells"]], extent: int, title: str, names: list[str] | None = None
) -> Figure:
    """Draw one layer: a row per head, a column per map.

    Args:
        cells: the maps.
        extent: number of positions along one side.
        title: title of the figure.
        names: text of each token, for the axes, or None to show positions.
    """
    num_heads = len(cells["scores"])
    side = min(3.6, max(1.8, 29 / num_heads))  # inches per map; smaller with many heads, to limit the file's size
    width, height = 1.25 * len(cells) * side + 1, num_heads * side + 1.2
    figure = Figure((width, height))
    # In inches, for any number of heads and maps: matplotlib's own margins are fractions of the figure.
    margins = {"top": 1 - 0.85 / height, "bottom": 0.6 / height, "left": 0.9 / width, "right": 1 - 0.1 / width}
    panels = figure.subplots(num_heads, len(cells), squeeze=False, gridspec_kw=margins)
    figure.suptitle(title, fontsize=11, parse_math=False)
    for column, (name, heads) in enumerate(cells.items()):
        panels[0, column].set_title(HEADINGS[name], fontsize=10)
        panels[-1, column].set_xlabel("key")
        for head, axes in enumerate(panels[:, column]):
            norm, colours = _colours(name, heads[head])
            image = axes.imshow(heads[head], norm=norm, cmap=colours, extent=(0, extent, extent, 0))
            figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=7)
            axes.tick_params(labelsize=8)
            if names is not None:
                centers = np.arange(len(names)) + 0.5
                axes.set_xticks(centers, names, rotation=90, fontsize=5, parse_math=False)
                axes.set_yticks(centers, names, fontsize=5, parse_math=False)
            axes.label_outer()
    for head, axes in enumerate(panels[:, 0]):
        axes.set_ylabel(f"head {head}\nquery")
    return figure


def _colours(name: str, x: Float[np.ndarray, "cells cells"]) -> tuple[Normalize, Colormap]:
    """Return a diverging scale about 0 that clips outliers; for probabilities, four powers of ten."""
    if name == "probs":
        highest = float(np.nanmax(x))
        norm, colours = LogNorm(highest / 1e4, highest, clip=True), colormaps["viridis"]
    else:
        limit = float(np.nanpercentile(np.abs(x), 99.5)) or 1.0
        norm, colours = Normalize(-limit, limit), colormaps["RdBu_r"]
    return norm, colours.with_extremes(bad="0.93")
