"""Draw attention maps before the softmax, as in the paper's appendix K: scores, bias, and what DAPE adds to them.

`attention_maps.py` is the command line. In: a trained run and one document. Out, in --output: one figure per layer
(`layer-00.png`) and `index.html`, which shows all of them. The axes show the text of at most `MAX_TICKS` tokens.

A figure has one row per head and one column per map, each a function of (query, key):

    scores   A = Q K^T / sqrt(K)
    bias     B; left out without a bias (NoPE, RoPE)
    added    processor(A, B) - A - B, the paper's f(A, B) (minus B with residual=False); left out without a processor
    probs    softmax(processor(A, B))

Masked pairs stay blank. Up to 512 tokens, one cell is one pair. Beyond, a cell is the mean of the visible pairs among
n x n pairs, n = ceil(length / 512).

Query rows are independent, so maps are computed for one layer and a few rows at a time: memory is linear in the length.
"""

import codecs
import dataclasses
import functools
import html
import json
from string import Template

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jaxtyping import Array, Float, Int
from matplotlib import colormaps
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure

from dape_jax.config import resolved
from dape_jax.data.conventions import saved_conventions
from dape_jax.data.store import joined
from dape_jax.data.tokenizers import Tokenizer, saved_tokenizer
from dape_jax.errors import InputError, require
from dape_jax.evaluation import report
from dape_jax.evaluation.trained import TrainedModel, corpora_of, read_trained, restore
from dape_jax.files import write_atomically
from dape_jax.model.attention import Blockwise, score
from dape_jax.model.processors import Plain, add_bias
from dape_jax.model.scores import Scores, masked_softmax
from dape_jax.model.transformer import LayerKind, Params, Places, TransformerConfig, model_structure
from dape_jax.progress import Progress
from dape_jax.provenance import make_results_directory, provenance
from dape_jax.storage import read_errors, to_path
from dape_jax.tools.options import MapsFlags

MAX_CELLS = 512  # along one side of a map
MAP_ROWS = 64  # rows of queries whose maps are computed together
MAX_TICKS = 32  # tokens whose text is on the axes
HEADINGS = {"scores": "scores A", "bias": "bias B", "added": "added by the processor", "probs": "probabilities"}
PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font-family: sans-serif; } img { max-width: 100%; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
</style>
<h1>$title</h1>
<pre>$facts</pre>
$figures
""")


def attention_maps(given: MapsFlags) -> epath.Path:
    """Draw the maps of every layer and head of a trained model, and return the path of the page.

    An earlier page of this name is replaced.

    Raises:
        InputError: the input is invalid; raised before any device is used.
    """
    length, workdir = given.length, to_path(given.workdir, "--workdir")
    text = None if given.text is None else to_path(given.text, "--text")
    require(length >= 2, "length", length, "must be at least 2 tokens")
    trained = read_trained(workdir, given.step, {})
    trained.run.model.check_length("length", length)
    default = trained.workdir / "attention_maps" / f"step-{trained.step}-length-{length}"
    tokens_T, source = read_tokens(trained, length, text)
    names = token_names(saved_tokenizer(workdir), tokens_T)
    output = make_results_directory(to_path(given.output, "--output") if given.output else default)

    blockwise = Blockwise(trained.run.evaluation.block_size, num_buckets=4)
    config = dataclasses.replace(trained.run.model, attention=blockwise)
    _, params = restore(trained)  # no mesh is set: one sequence is not split over devices
    cell_size, files = -(-length // MAX_CELLS), []
    model = nnx.merge(model_structure(config)[0], params)
    x_BTD = model.embeddings(jnp.asarray(tokens_T)[None], jnp.arange(length))
    for layer in Progress(range(config.num_layers), unit="layer", desc=trained.name):
        x_BTD, cells = jax.device_get(layer_maps(config, params, layer, x_BTD, cell_size=cell_size))
        title = f"{trained.name}, step {trained.step}\nlayer {layer}, {length} tokens"
        if cell_size > 1:
            title += f", mean of {cell_size} x {cell_size} pairs per cell"
        files.append(f"layer-{layer:02}.png")
        figure = draw(cells, cell_size * len(cells["scores"][0]), title, names)
        write_atomically(output / files[-1], report.image_of(figure, "png"))

    model = resolved(trained.run)["model"]
    facts = {field: model[field] for field in ("rotary", "bias", "processor", "window")} | provenance("flax")
    heading = html.escape(f"{trained.name}, step {trained.step}: attention maps at {length} tokens")
    images = "\n".join(f'<p><a href="{file}"><img src="{file}" alt="{file}, at full size"></a>' for file in files)
    lines = html.escape("\n".join([*(f"{name}: {json.dumps(value)}" for name, value in facts.items()), *source]))
    write_atomically(output / "index.html", PAGE.substitute(title=heading, facts=lines, figures=images).encode())
    return output / "index.html"


def read_tokens(
    trained: TrainedModel, length: int, text: epath.Path | None
) -> tuple[Int[np.ndarray, "T"], tuple[str, str]]:
    """Return the tokens to read, after the BOS token of an imported model; for the page, their source and beginning.

    Raises:
        InputError: the file cannot be read, or there are too few tokens.
    """
    tokenizer = saved_tokenizer(trained.workdir)
    if text is not None:
        with read_errors("--text", str(text)):
            tokens = tokenizer.encode(text.read_bytes().removeprefix(codecs.BOM_UTF8))
        require(tokens.size >= length, "text", str(text), f"has {tokens.size} tokens; must have --length={length}")
        source = str(text)
    else:
        try:
            store = joined(corpora_of(trained, None).stores("validation"))
        except InputError as error:
            raise InputError(f"{error}; attention maps read another text with --text") from error
        sizes = np.diff(store.offsets) - 1  # without the end-of-document token
        allowed = f"must be at most {sizes.max()}, the longest validation document; or choose a longer --text"
        require(bool((sizes >= length).any()), "length", length, allowed)
        document = int(np.argmax(sizes >= length))
        tokens = store.document(document)
        source = f"validation document {document} of {', '.join(trained.run.data.weights)}"
    first = saved_conventions(trained.workdir).bos_id(tokenizer)
    tokens_T = np.concatenate([[] if first is None else [first], tokens])[:length].astype(np.int32)
    return tokens_T, (source, tokenizer.decode(tokens_T[:400]).decode("utf-8", errors="replace"))


# ---- maps


@functools.partial(jax.jit, static_argnames=("config", "cell_size"))
def layer_maps(
    config: TransformerConfig, params: Params, layer: int | Int[Array, ""], x_BTD: Float[Array, "1 T D"], cell_size: int
) -> tuple[Float[Array, "1 T D"], dict[str, Float[Array, "H cells cells"]]]:
    """Return the output of one layer for one sequence, and the mean of each map over the visible pairs of every cell.

    A cell without a visible pair is NaN. Memory is linear in T if attention is `Blockwise`: the maps of `MAP_ROWS`
    query rows are held at once.
    """
    model, pos_T = nnx.merge(model_structure(config)[0], params), jnp.arange(x_BTD.shape[1])
    block = model.block(layer)
    attention = block.attention
    bias = model.shared_bias if attention.bias is None else attention.bias
    q_BTHK, k_BSGK, _ = attention.project(block.branch_input(block.attention_norm, x_BTD), pos_T, layer)

    def cells_of(first: Int[Array, ""]) -> dict[str, Float[Array, "H cells"]]:
        """Return one row of cells."""
        rows_T = first + jnp.arange(cell_size)
        q_pos_T = jnp.minimum(rows_T, len(pos_T) - 1)  # the last position repeated, not used

        def score_of(kind: LayerKind) -> Scores:
            options = {"bias": bias, "window": kind.mask.window, "cap": config.score_cap}
            return score(q_BTHK[:, q_pos_T], k_BSGK, q_pos_T, pos_T, **options)

        scores_BHTS, bias_BHTS, mask_TS = attention.of_kind(score_of, layer)
        processed_BHTS = attention.processor(scores_BHTS, bias_BHTS, mask_TS)
        maps = {"scores": scores_BHTS}
        if bias_BHTS is not None:
            maps["bias"] = bias_BHTS
        if not isinstance(attention.processor, Plain):
            maps["added"] = processed_BHTS - add_bias(scores_BHTS, bias_BHTS)
        maps["probs"] = masked_softmax(processed_BHTS, mask_TS)
        visible_TS = mask_TS & (rows_T < len(pos_T))[:, None]

        def sums(x_HTS: Float[Array, "H T S"]) -> Float[Array, "H cells"]:
            sums_HS = jnp.where(visible_TS[None], x_HTS, 0).sum(1)
            return jnp.pad(sums_HS, ((0, 0), (0, -len(pos_T) % cell_size))).reshape(len(x_HTS), -1, cell_size).sum(2)

        num_pairs = sums(jnp.ones_like(visible_TS, jnp.float32)[None])
        return {name: sums(x_BHTS[0]) / num_pairs for name, x_BHTS in maps.items()}

    cells = jax.lax.map(cells_of, jnp.arange(0, len(pos_T), cell_size), batch_size=-(-MAP_ROWS // cell_size))
    output_BTD, _ = block(x_BTD, Places(pos_T), bias, layer=layer)
    return output_BTD, {name: jnp.swapaxes(x, 0, 1) for name, x in cells.items()}


# ---- figures


def token_names(tokenizer: Tokenizer, tokens_T: Int[np.ndarray, "T"]) -> list[str]:
    """Return the text of each token for the axes: spaces are visible, and unusual characters are escaped."""

    def visible(c: str) -> str:  # matplotlib's font has Latin, Greek and Cyrillic letters, and warns of others
        is_known = c.isprintable() and c < "\u0500"
        return "\u00b7" if c == " " else c if is_known else c.encode("unicode_escape").decode()

    texts = [tokenizer.decode(token[None]).decode("utf-8", "backslashreplace") for token in tokens_T]
    return ["".join(map(visible, text)) or "(end)" for text in texts]


def draw(cells: dict[str, Float[np.ndarray, "H cells cells"]], extent: int, title: str, names: list[str]) -> Figure:
    """Draw one layer: a row per head, a column per map.

    Args:
        cells: the maps.
        extent: number of positions along one side.
        title: title of the figure.
        names: text of each token. At most `MAX_TICKS` are on the axes; if not all, with their positions.
    """
    step = -(-len(names) // MAX_TICKS)
    ticked = range(0, len(names), step)
    labels = names if step == 1 else [f"{names[position]} {position}" for position in ticked]
    num_heads = len(cells["scores"])
    side = min(3.6, max(1.8, 29 / num_heads))  # inches per map; smaller with many heads, to limit the file's size
    width, height = 1.25 * len(cells) * side + 1, num_heads * side + 1.2
    figure = Figure((width, height))
    # In inches, for any number of heads and maps: matplotlib's own margins are fractions of the figure.
    margins = {"top": 1 - 0.85 / height, "bottom": 0.6 / height, "left": 0.9 / width, "right": 1 - 0.1 / width}
    panels = figure.subplots(num_heads, len(cells), squeeze=False, gridspec_kw=margins)
    figure.suptitle(title, fontsize=11, parse_math=False)
    for column, name in enumerate(name for name in HEADINGS if name in cells):
        panels[0, column].set_title(HEADINGS[name], fontsize=10)
        panels[-1, column].set_xlabel("key")
        for head, axes in enumerate(panels[:, column]):
            norm, colours = norm_and_colours(name, cells[name][head])
            image = axes.imshow(cells[name][head], norm=norm, cmap=colours, extent=(0, extent, extent, 0))
            figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=7)
            centers = np.asarray(ticked) + 0.5
            axes.set_xticks(centers, labels, rotation=90, fontsize=6, parse_math=False)
            axes.set_yticks(centers, labels, fontsize=6, parse_math=False)
            axes.label_outer()
    for head, axes in enumerate(panels[:, 0]):
        axes.set_ylabel(f"head {head}\nquery")
    return figure


def norm_and_colours(name: str, x: Float[np.ndarray, "cells cells"]) -> tuple[Normalize, Colormap]:
    """Return a diverging scale about 0 that clips outliers; for probabilities, four powers of ten."""
    if name == "probs":
        highest = float(np.nanmax(x))
        norm, colours = LogNorm(highest / 1e4, highest, clip=True), colormaps["viridis"]
    else:
        limit = float(np.nanpercentile(np.abs(x), 99.5)) or 1.0
        norm, colours = Normalize(-limit, limit), colormaps["RdBu_r"]
    return norm, colours.with_extremes(bad="0.93")
