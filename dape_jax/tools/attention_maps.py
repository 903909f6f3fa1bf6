"""Pictures of attention before the softmax, as in the paper's appendix K: the scores, the bias, what DAPE adds to them.

    python -m dape_jax.tools.attention_maps --workdir=runs/a --length=512

In: a trained run and the beginning of one text. Out, in --output: a picture for each layer, `layer-00.png` and so on;
`index.html`, a page that shows them all; `attention_maps.json`, statistics of every map.

A picture has a row for each head and a column for each map from (query, key) to a number:

    scores   A = Q K^T / sqrt(K)
    bias     B; left out where there is none (NoPE, RoPE)
    added    processor(A, B) - A - B, the paper's f(A, B) (less B where residual=False has left B out); left out where
             the processor is "none", which adds nothing
    probs    softmax(processor(A, B)), what the head makes of it: what is added to a whole row alike cancels here

Pairs that a query cannot see stay blank. Up to 512 tokens, one cell of a picture is one pair. Beyond, n x n pairs are
pooled into a cell, n = ceil(length / 512): the cell shows the mean of those that are visible, so that neither the
diagonal nor a last, smaller cell is diluted. The statistics in the JSON are of all visible pairs, pooled or not.

A query row is complete in itself, so the maps are computed for one layer and one block of rows at a time: exactly,
and in memory that grows with the length, not with its square.
"""

import dataclasses
import functools
import html
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from matplotlib import colormaps
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.config import resolved
from dape_jax.data.tokenizers import saved_tokenizer
from dape_jax.errors import InputError, require
from dape_jax.evaluation import report
from dape_jax.evaluation.trained import TrainedModel, read_trained, restore, validation_corpus
from dape_jax.model.attention import Blockwise, score
from dape_jax.model.biases import Bias
from dape_jax.model.contextual import ContextualBias
from dape_jax.model.processors import Plain, add_bias
from dape_jax.model.scores import masked_softmax
from dape_jax.model.transformer import Block, SelfAttention, model_structure
from dape_jax.provenance import provenance

JSON_FILE = "attention_maps.json"
MAX_CELLS = 512  # along a side of a picture
HEADINGS = {"scores": "scores A", "bias": "bias B", "added": "added by the processor", "probs": "probabilities"}


def attention_maps(
    workdir: Path, *, length: int, text: Path | None = None, step: str = "newest", output: Path | None = None
) -> Path:
    """Draw the maps of every layer and head of a trained run.

    Args:
        workdir: of the run.
        length: in tokens.
        text: a file whose first tokens the model reads; None for the beginning of the first document that the run
            held out and that is longer than that.
        step: "newest", "best" (the lowest validation loss) or a number.
        output: where the results go; None for WORKDIR/attention_maps/step-STEP-length-LENGTH.

    Returns:
        The page that shows them all.

    Raises:
        InputError: bad input, or an output with a page in it, before any device work.
    """
    require(length >= 2, "length", length, "2 tokens or more")
    trained = read_trained(workdir, step, {})
    if output is None:
        output = workdir / "attention_maps" / f"step-{trained.step}-length-{length}"
    page = output / "index.html"
    require(not page.exists(), "output", str(output), "has an index.html already; delete it, or name another --output")
    tokens_T, source = read_tokens(trained, length, text)
    report.make_directory(output)

    block_size = trained.run.evaluation.block_size
    config = dataclasses.replace(trained.run.model, attention=Blockwise(block_size, num_buckets=4))
    graphdef, _ = model_structure(config)
    _, params = restore(trained)  # no mesh is set: one sequence is too few to be split over devices

    @jax.jit
    def layer_of(params, x_BTD, layer):
        model = nnx.merge(graphdef, params)
        block = jax.tree.map(lambda stacked: stacked[layer], model.layers)
        return layer_maps(block, x_BTD, model.shared_bias, block_size=block_size)

    name = trained.workdir.absolute().name
    cell = _cell_size(length, MAX_CELLS)
    layers = []
    x_BTD = jax.device_get(params["embedding_VD"][tokens_T][None])
    for layer in tqdm(range(config.num_layers), unit="layer", desc=name):
        x_BTD, cells, stats = jax.device_get(layer_of(params, x_BTD, layer))
        cells = {map_name: cells[map_name] for map_name in HEADINGS if map_name in cells}  # jit sorts by name
        title = f"{name}, step {trained.step}\nlayer {layer}, {length} tokens"
        if cell > 1:
            title += f", a cell is the mean of {cell} x {cell} pairs"
        picture = f"layer-{layer:02}.png"
        draw(cells, stats, cell * len(cells["scores"][0]), title, output / picture)
        heads = [
            {map_name: {key: float(of[head]) for key, of in stats[map_name].items()} for map_name in cells}
            for head in range(config.num_heads)
        ]
        layers.append({"picture": picture, "heads": heads})

    model = resolved(trained.run)["model"]
    content = {
        "run": name,
        "workdir": str(workdir),
        "step": trained.step,
        "train_length": trained.run.train.train_length,
        "length": length,
        "pairs_along_a_cell": cell,
        "text": source,
        "model": {field: model[field] for field in ("rotary", "bias", "processor", "window")},
        "layers": layers,
    } | provenance("flax", "matplotlib")
    (output / JSON_FILE).write_text(json.dumps(content, indent=1) + "\n")
    page.write_text(html_page(content), encoding="utf-8")  # last: where there is a page, all is there
    return page


def read_tokens(trained: TrainedModel, length: int, text: Path | None) -> tuple[Int[np.ndarray, "T"], dict[str, str]]:
    """The tokens that the model reads, and for the record where they come from and how they begin.

    Raises:
        InputError: a file that cannot be read, or too few tokens.
    """
    tokenizer = saved_tokenizer(trained.workdir)
    if text is not None:
        try:
            tokens = tokenizer.encode(text.read_bytes())
        except OSError as error:
            raise InputError(f"text = {str(text)!r}: cannot be read: {error}") from error
        require(tokens.size >= length, "text", str(text), f"has {tokens.size} tokens, and --length={length}")
        source = str(text)
    else:
        try:
            store = validation_corpus(trained, None).validation
        except InputError as error:
            raise InputError(f"{error}; here, with --text") from error
        sizes = np.diff(store.offsets) - 1  # without the end_of_document, which nothing follows
        require(
            bool((sizes >= length).any()),
            "length",
            length,
            f"at most {sizes.max()}, the tokens of the longest held-out document; or give a longer --text",
        )
        document = int(np.argmax(sizes >= length))
        tokens = store.document(document)
        source = f"held-out document {document} of data.path = {trained.run.data.path!r}"
    tokens_T = tokens[:length].astype(np.int32)
    beginning = tokenizer.decode(tokens_T[:400]).decode("utf-8", errors="replace")
    return tokens_T, {"source": source, "beginning": beginning}


def _cell_size(length: int, max_cells: int) -> int:
    """Pairs along a side of a cell."""
    return -(-length // max_cells)


def layer_maps(
    block: Block,
    x_BTD: Float[Array, "1 T D"],
    shared_bias: Bias | ContextualBias | None,
    *,
    block_size: int,
    max_cells: int = MAX_CELLS,
) -> tuple[Float[Array, "1 T D"], dict[str, Float[Array, "H cells cells"]], dict[str, dict[str, Float[Array, "H"]]]]:
    """One layer's maps, for one sequence.

    Args:
        block: the layer. Memory is linear in T if its attention is `Blockwise`.
        x_BTD: what comes into it.
        shared_bias: the bias that all layers share, if they do.
        block_size: rows of which maps are held at once.
        max_cells: along a side of a pooled map; see the module.

    Returns:
        What comes out of the layer; each map's cells, NaN where no pair is visible; and the mean, std, min and max of
        each map over all visible pairs.
    """
    pos_S = jnp.arange(x_BTD.shape[1])
    length, attention = pos_S.size, block.attention
    bias = shared_bias if attention.bias is None else attention.bias
    q_BTHK, k_BSGK, _ = attention.project(block.attention_norm(x_BTD).astype(block.dtype), pos_S)
    num_blocks = -(-length // block_size)
    fill = num_blocks * block_size - length  # rows after the last one; they are counted nowhere
    q_blocks = jnp.pad(q_BTHK[0], ((0, fill), (0, 0), (0, 0))).reshape(num_blocks, 1, block_size, *q_BTHK.shape[2:])
    pos_blocks = jnp.arange(num_blocks * block_size).reshape(num_blocks, block_size)

    cell = _cell_size(length, max_cells)
    num_cells = -(-length // cell)
    maps_of = functools.partial(row_maps, attention, bias, k_BSGK=k_BSGK, k_pos_S=pos_S)

    def pool(cells: Float[Array, "_ cells cells"], x: Float[Array, "_ T S"], pos_T: Int[Array, "T"]) -> Array:
        """Add a block of rows to the sums of their cells."""
        filled = jnp.pad(x, ((0, 0), (0, 0), (0, num_cells * cell - length)))
        return cells.at[:, pos_T // cell].add(filled.reshape(*x.shape[:2], num_cells, cell).sum(-1))

    def add_block(carry, q_and_pos):
        (sums, counts), (q_BTHK, pos_T) = carry, q_and_pos
        maps, mask_TS = maps_of(q_BTHK, pos_T)
        mask_TS &= (pos_T < length)[:, None]
        counts = pool(counts, mask_TS[None].astype(counts.dtype), pos_T)
        sums = {name: pool(sums[name], jnp.where(mask_TS[None], x, 0), pos_T) for name, x in maps.items()}
        return (sums, counts), {name: _row_statistics(x, mask_TS) for name, x in maps.items()}

    maps, _ = jax.eval_shape(maps_of, q_blocks[0], pos_blocks[0])
    zeros = {name: jnp.zeros((x.shape[0], num_cells, num_cells), x.dtype) for name, x in maps.items()}
    (sums, counts), of_rows = jax.lax.scan(
        add_block, (zeros, jnp.zeros((1, num_cells, num_cells))), (q_blocks, pos_blocks)
    )
    cells = {name: x / counts for name, x in sums.items()}  # 0 / 0, which is NaN, where no pair is visible
    x_BTD, _ = block(x_BTD, pos_S, shared_bias)
    return x_BTD, cells, {name: _statistics(rows, length) for name, rows in of_rows.items()}


def row_maps(
    attention: SelfAttention,
    bias: Bias | ContextualBias | None,
    q_BTHK: Float[Array, "1 T H K"],
    q_pos_T: Int[Array, "T"],
    *,
    k_BSGK: Float[Array, "1 S G K"],
    k_pos_S: Int[Array, "S"],
) -> tuple[dict[str, Float[Array, "H T S"]], Bool[Array, "T S"]]:
    """The maps of a block of rows, as the module defines them, and which pairs are visible."""
    scores_BHTS, bias_BHTS, mask_TS = score(q_BTHK, k_BSGK, q_pos_T, k_pos_S, bias=bias, window=attention.mask.window)
    processed_BHTS = attention.processor(scores_BHTS, bias_BHTS, mask_TS)
    maps = {"scores": scores_BHTS}
    if bias_BHTS is not None:
        maps["bias"] = bias_BHTS
    if not isinstance(attention.processor, Plain):
        maps["added"] = processed_BHTS - add_bias(scores_BHTS, bias_BHTS)
    maps["probs"] = masked_softmax(processed_BHTS, mask_TS)
    return {name: x_BHTS[0] for name, x_BHTS in maps.items()}, mask_TS


def _row_statistics(x_HTS: Float[Array, "H T S"], mask_TS: Bool[Array, "T S"]) -> dict[str, Float[Array, "_ T"]]:
    """Of every row by itself: variances about a row's own mean add up without cancellation."""
    seen = mask_TS[None]
    return {
        "count": seen.sum(-1).astype(x_HTS.dtype),
        "mean": x_HTS.mean(-1, where=seen),
        "var": x_HTS.var(-1, where=seen),
        "min": x_HTS.min(-1, where=seen, initial=jnp.inf),
        "max": x_HTS.max(-1, where=seen, initial=-jnp.inf),
    }


def _statistics(of_rows: dict[str, Float[Array, "blocks _ T"]], length: int) -> dict[str, Float[Array, "H"]]:
    """Of the whole map, from those of its rows."""
    rows = {key: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length] for key, x in of_rows.items()}
    share = rows["count"] / rows["count"].sum()
    mean = (share * rows["mean"]).sum(-1)
    var = (share * (rows["var"] + (rows["mean"] - mean[:, None]) ** 2)).sum(-1)
    return {"mean": mean, "std": jnp.sqrt(var), "min": rows["min"].min(-1), "max": rows["max"].max(-1)}


def draw(
    cells: dict[str, Float[np.ndarray, "H cells cells"]],
    stats: dict[str, dict[str, Float[np.ndarray, "H"]]],
    extent: int,
    title: str,
    file: Path,
) -> None:
    """Draw a layer: a row for each head, a column for each map; its colours and statistics stand in the blank triangle.

    Args:
        cells: from `layer_maps`.
        stats: from there too.
        extent: positions along a side.
        title: of the picture.
        file: where it goes.
    """
    num_heads = len(cells["scores"])
    side = min(3.6, max(1.8, 29 / num_heads))  # of a panel, in inches; with many heads the file stays small
    small = 2.2 * side
    # A figure of its own, not pyplot's: it needs no display, and nobody has to close it.
    width, height = len(cells) * side + 1, num_heads * side + 1.35
    figure = Figure((width, height))
    panels = figure.subplots(num_heads, len(cells), squeeze=False)
    # Margins by hand: for many heads a layout engine takes longer than all the rest.
    figure.subplots_adjust(0.8 / width, 0.5 / height, 1 - 0.1 / width, 1 - 0.85 / height, wspace=0.06, hspace=0.06)
    figure.suptitle(title, y=1 - 0.1 / height, va="top", fontsize=11, parse_math=False)
    for column, (name, of_heads) in enumerate(cells.items()):
        panels[0, column].set_title(HEADINGS[name], fontsize=10)
        panels[-1, column].set_xlabel("key")
        for head, axes in enumerate(panels[:, column]):
            norm, colours = _colours(name, of_heads[head])
            image = axes.imshow(of_heads[head], norm=norm, cmap=colours, extent=(0, extent, extent, 0))
            bar = figure.colorbar(image, cax=axes.inset_axes((0.5, 0.92, 0.44, 0.04)), orientation="horizontal")
            bar.ax.tick_params(labelsize=small, length=2, pad=1)
            bar.minorticks_off()
            # + 0 writes -0 as 0
            low, high, mean, std = (f"{stats[name][key][head] + 0:.3g}" for key in ("min", "max", "mean", "std"))
            words = f"{low} .. {high}\nmean {mean}\nstd {std}"
            axes.text(0.94, 0.8, words, transform=axes.transAxes, ha="right", va="top", fontsize=small)
            axes.tick_params(labelsize=8)
            axes.label_outer()
    for head, axes in enumerate(panels[:, 0]):
        axes.set_ylabel(f"head {head}\nquery")
    figure.savefig(file, dpi=150)


def _colours(name: str, x: Float[np.ndarray, "cells cells"]) -> tuple[Normalize, Colormap]:
    """Two colours that meet at 0, few outliers past their ends; for probabilities, one over four powers of ten."""
    if name == "probs":
        highest = float(np.nanmax(x))
        norm, colours = LogNorm(highest / 1e4, highest, clip=True), colormaps["viridis"]
    else:
        limit = float(np.nanpercentile(np.abs(x), 99.5)) or 1.0
        norm, colours = Normalize(-limit, limit), colormaps["RdBu_r"]
    return norm, colours.with_extremes(bad="0.93")


def html_page(content: dict[str, Any]) -> str:
    """The page that shows all pictures, from what the JSON holds."""
    columns = content["layers"][0]["heads"][0]
    absent = {"bias": "no bias: the model has none", "added": "nothing added: the processor is none"}
    cell = content["pairs_along_a_cell"]
    facts = {
        "command": content["command"],
        **{field: json.dumps(value) for field, value in content["model"].items()},
        "columns": "; ".join([*columns.keys(), *(why for name, why in absent.items() if name not in columns)]),
        "a cell": "one pair" if cell == 1 else f"the mean of the visible ones of {cell} x {cell} pairs",
        "colours": "end where 99.5 % of the cells do; for probabilities at the largest cell and a ten-thousandth of it",
        "text": content["text"]["source"],
        "it begins": content["text"]["beginning"],
    }
    rows = "\n".join(f"<tr><th>{field}<td><pre>{html.escape(fact)}</pre>" for field, fact in facts.items())
    pictures = "\n".join(
        f'<h2>layer {layer}</h2>\n<a href="{maps["picture"]}"><img src="{maps["picture"]}" alt="layer {layer}"></a>'
        for layer, maps in enumerate(content["layers"])
    )
    title = html.escape(f"{content['run']}, step {content['step']}: attention maps at {content['length']} tokens")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 80em; margin: 2em auto; padding: 0 1em; }}
th {{ text-align: left; vertical-align: top; white-space: nowrap; padding-right: 1em; }}
pre {{ margin: 0; white-space: pre-wrap; }}
img {{ max-width: 100%; }}
</style>
<h1>{title}</h1>
<table>
{rows}
</table>
<p>Statistics of every map: <a href="{JSON_FILE}">{JSON_FILE}</a></p>
{pictures}
</html>
"""


def define_flags() -> None:
    """The flags; not at import, where they would meet those of other command lines."""
    flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)
    flags.DEFINE_integer("length", None, "Tokens that the model reads.", required=True)
    flags.DEFINE_string("text", None, "File that begins with them; a document that the run held out if unset.")
    flags.DEFINE_string("step", "newest", "Checkpoint: newest, best (lowest validation loss) or its number.")
    flags.DEFINE_string("output", None, "Where results go; WORKDIR/attention_maps/step-STEP-length-LENGTH if unset.")


def main(_: list[str]) -> None:
    """Flags, then one call."""
    given = flags.FLAGS.flag_values_dict()
    page = attention_maps(
        Path(given["workdir"]),
        length=given["length"],
        text=Path(given["text"]) if given["text"] else None,
        step=given["step"],
        output=Path(given["output"]) if given["output"] else None,
    )
    print(f"\npage: {page}")


if __name__ == "__main__":
    define_flags()
    command_line.run(main)
