"""Memory, work and time of a matrix row, from a checkpoint's config alone: nothing is loaded or run.

Without a model the table has all public Qwen2.5 sizes. Bytes and operations are counted from the shapes
(`experiments/run/costs.py`); with --bandwidth, and --tflops beside it, also the least time a row can take:
for every part the longer of reading and computing. Launches, transfers and rounding up come on top.

    python -m experiments.plan --preset qwen2.5-14b --bandwidth 4800 --tflops 900
"""

from functools import partial
from pathlib import Path

import click

from experiments.report.blocks import Table
from experiments.report.plain import markdown_table
from experiments.run import costs
from experiments.run.exits import DONE, as_command
from experiments.run.options import PATH, FiniteRange, with_options
from minimodel.checkpoint import CONFIG
from minimodel.config import ModelConfig
from minimodel.config_file import read_config
from minimodel.errors import InputError, refuse
from minimodel.files import read_json_object
from minimodel.numerics import DTYPES

PREFIX = 3000
SAME = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "max_position_embeddings": 32768}  # fmt: skip
COLUMNS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
           "vocab_size", "tie_word_embeddings")  # fmt: skip
SHAPES = {  # from each model's config.json
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, 152064, False),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152064, False),
    "qwen2.5-72b": (8192, 29568, 80, 64, 8, 152064, False),
}
PRESETS = {name: read_config({**SAME, **dict(zip(COLUMNS, shape))}, name) for name, shape in SHAPES.items()}


def plan_line(
    config: ModelConfig, dtype: str, prefix: int, suffix: int, speed: tuple[float, float | None]
) -> dict[str, str]:
    """Returns the cells of one model and dtype by their header. speed: GB/s, 0 without --bandwidth, and TFLOP/s."""
    weights, caches = costs.weight_bytes(config, dtype), costs.row_cache_bytes(config, dtype, prefix, suffix)
    step, row = costs.steps_cost(config, dtype, prefix - 1, prefix, True), costs.row_cost(config, dtype, prefix, suffix)
    line = {
        "parameters": scaled(costs.parameters(config), ""),
        "weights": scaled(weights),
        "K/V per token, both copies": scaled(costs.cache_bytes(config, dtype, 1)),
        "K/V of a row": scaled(caches),
        "in all": scaled(weights + caches),
        "a step reads": scaled(costs.step_bytes(config, dtype, prefix)),
        "step FLOP": scaled(step.flops, ""),
        "a row reads": scaled(row.bytes),
        "row FLOP": scaled(row.flops, ""),
    }
    if speed[0]:  # a row's parts run one after another, each bound by reading or by computing
        line["step at least"] = span(step.seconds(*speed))
        line["prefill at least"] = span(costs.prefill_cost(config, dtype, prefix).seconds(*speed))
        line["row at least"] = span(
            sum(part.seconds(*speed) for part in costs.row_parts(config, dtype, prefix, suffix))
        )
    return line


def scaled(value: float, unit: str = "B") -> str:
    """Returns three significant digits with a decimal prefix: '29.5 GB', '14.8 G'."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            digits = value / factor
            return f"{digits:.{0 if digits >= 100 else 1 if digits >= 10 else 2}f} {letter}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def span(seconds: float) -> str:
    """Returns a time in ms, s or min."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.0f} min"


POSITIVE = FiniteRange(min=0, min_open=True)
OPTIONS = [
    click.option("--checkpoint", type=PATH, metavar="DIR", help="Plan for the config.json of this checkpoint."),
    click.option("--config", type=PATH, metavar="FILE", help="Plan for this config.json."),
    click.option("--preset", "model", type=click.Choice(list(PRESETS)), help="Plan for this public model."),
    click.option("--dtype", "dtypes", type=click.Choice(list(DTYPES)), multiple=True,
                 help="Dtype of weights and K/V; may be repeated. [default: all]"),
    click.option("--prefix", type=click.IntRange(min=1),
                 help=f"Prefix tokens per row. [default: {PREFIX}, or fewer where the context is shorter]"),
    click.option("--suffix", type=click.IntRange(min=0), default=275, show_default=True, help="Suffix tokens per arm."),
    click.option("--bandwidth", type=POSITIVE, metavar="GB/S",
                 help="Memory bandwidth of the device: adds the least time that reading takes."),
    click.option("--tflops", type=POSITIVE, metavar="N",
                 help="Speed of matrix products in the dtype, in TFLOP/s: with --bandwidth, counts computing too."),
]  # fmt: skip


@click.command(help=__doc__)
@partial(with_options, options=OPTIONS)
@as_command("experiments.plan")
def main(
    checkpoint: Path | None, config: Path | None, model: str | None, dtypes: tuple[str, ...],
    prefix: int | None, suffix: int, bandwidth: float | None, tflops: float | None,
) -> int:  # fmt: skip
    if tflops is not None and bandwidth is None:
        raise InputError("--tflops: expected --bandwidth beside it, found none")
    if sum(option is not None for option in (checkpoint, config, model)) > 1:
        raise InputError("plan: expected at most one of --checkpoint, --config and --preset, found several")
    file = config if checkpoint is None else checkpoint / CONFIG
    configs = PRESETS if model is None else {model: PRESETS[model]}
    if file is not None:
        configs = {str(checkpoint or config): read_config(read_json_object(file), str(file))}
    context = min(config.max_position_embeddings for config in configs.values())
    length = max(1, min(PREFIX, context - suffix)) if prefix is None else prefix
    if length + suffix > context:
        raise refuse("prefix and suffix", f"at most max_position_embeddings {context} tokens", length + suffix)
    lines = [
        {"model": name, "dtype": dtype, **plan_line(config, dtype, length, suffix, (bandwidth or 0, tflops))}
        for name, config in configs.items()
        for dtype in dtypes or DTYPES
    ]
    caption = f"Rows of {length} prefix and {suffix} suffix tokens, two copies; decimal units"
    click.echo(markdown_table(Table(caption, list(lines[0]), [list(line.values()) for line in lines])))
    return DONE


if __name__ == "__main__":
    main()
