"""Memory, work and time of a matrix row, from a checkpoint's config alone: nothing is loaded or run.

Without a model the table has all public Qwen2.5 sizes. Bytes and operations are counted from the shapes
(`experiments/run/costs.py`); with --bandwidth, and --tflops beside it, also the least time a row can take:
for every part the longer of reading and computing. Launches, transfers and rounding up come on top.

    python -m experiments.plan --preset qwen2.5-14b --bandwidth 4800 --tflops 900
"""

from pathlib import Path
from typing import Any

import click

from experiments.report.blocks import Table, table
from experiments.report.plain import markdown_table
from experiments.run.costs import (
    cache_bytes,
    parameters,
    prefill_cost,
    row_cache_bytes,
    row_cost,
    row_parts,
    step_bytes,
    steps_cost,
    weight_bytes,
)
from experiments.run.exits import DONE, run_command
from minimodel.checkpoint import CONFIG
from minimodel.config import ModelConfig
from minimodel.errors import InputError, refuse
from minimodel.files import read_json_object
from minimodel.numerics import DTYPES

PREFIX = 3000
# from each model's config.json: hidden_size, intermediate_size, layers, heads, K/V heads, vocab_size, tied
PRESETS = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, 152064, False),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152064, False),
    "qwen2.5-72b": (8192, 29568, 80, 64, 8, 152064, False),
}


def preset(name: str) -> ModelConfig:
    """Returns the config of a public Qwen2.5 model."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = PRESETS[name]
    raw: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
    }
    return ModelConfig.from_dict(raw, name)


def plan_table(
    configs: dict[str, ModelConfig],
    dtypes: tuple[str, ...],
    prefix: int,
    suffix: int,
    bandwidth: float | None,
    tflops: float | None,
) -> Table:
    """Returns the table, one line per model and dtype."""
    header = ["model", "dtype", "parameters", "weights", "K/V a token, both copies", "K/V of a row", "in all"]
    header += ["a step reads", "step FLOP", "a row reads", "row FLOP"]
    if bandwidth is not None:
        header += ["step at least", "prefill at least", "row at least"]
    lines = []
    for name, config in configs.items():
        for dtype in dtypes:
            weights, caches = weight_bytes(config, dtype), row_cache_bytes(config, dtype, prefix, suffix)
            step, row = steps_cost(config, dtype, prefix - 1, prefix, True), row_cost(config, dtype, prefix, suffix)
            line = [name, dtype, scaled(parameters(config), ""), scaled(weights), scaled(cache_bytes(config, dtype, 1))]
            line += [scaled(caches), scaled(weights + caches), scaled(step_bytes(config, dtype, prefix))]
            line += [scaled(step.flops, ""), scaled(row.bytes), scaled(row.flops, "")]
            if bandwidth is not None:
                prefill = prefill_cost(config, dtype, prefix).seconds(bandwidth, tflops)
                line += [span(step.seconds(bandwidth, tflops)), span(prefill)]
                line.append(span(row_seconds(config, dtype, prefix, suffix, bandwidth, tflops)))
            lines.append(line)
    caption = f"Rows of {prefix} prefix and {suffix} suffix tokens, two copies; decimal units"
    return table(caption, header, lines)


def row_seconds(
    config: ModelConfig, dtype: str, prefix: int, suffix: int, bandwidth: float, tflops: float | None
) -> float:
    """Returns the least time of a row: its parts one after another, each bound by reading or by computing."""
    return sum(part.seconds(bandwidth, tflops) for part in row_parts(config, dtype, prefix, suffix))


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


def chosen(checkpoint: Path | None, config: Path | None, preset_name: str | None) -> dict[str, ModelConfig]:
    """Returns the models to plan for, by name. InputError where more than one of the three options is given."""
    given = [option for option in (checkpoint, config, preset_name) if option is not None]
    if len(given) > 1:
        raise InputError("plan: expected at most one of --checkpoint, --config and --preset, found several")
    file = config if checkpoint is None else checkpoint / CONFIG
    if file is not None:
        return {str(checkpoint or config): ModelConfig.from_dict(read_json_object(file), str(file))}
    return {name: preset(name) for name in (PRESETS if preset_name is None else [preset_name])}


@click.command(help=__doc__)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    default=None,
    metavar="DIR",
    help="Plan for the config.json of this checkpoint.",
)
@click.option(
    "--config", type=click.Path(path_type=Path), default=None, metavar="FILE", help="Plan for this config.json."
)
@click.option(
    "--preset", "preset_name", type=click.Choice(list(PRESETS)), default=None, help="Plan for this public model."
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(DTYPES)),
    multiple=True,
    help="Dtype of weights and K/V; may be repeated. [default: all]",
)
@click.option(
    "--prefix",
    type=click.IntRange(min=1),
    default=None,
    help=f"Prefix tokens of a row. [default: {PREFIX}, or what the context leaves room for]",
)
@click.option("--suffix", type=click.IntRange(min=0), default=275, show_default=True, help="Suffix tokens per arm.")
@click.option(
    "--bandwidth",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    metavar="GB/S",
    help="Memory bandwidth of the device: adds the least time that reading takes.",
)
@click.option(
    "--tflops",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    metavar="N",
    help="Matrix products per second in the dtype, in TFLOP/s: counts computing too, beside --bandwidth.",
)
def main(
    checkpoint: Path | None,
    config: Path | None,
    preset_name: str | None,
    dtypes: tuple[str, ...],
    prefix: int | None,
    suffix: int,
    bandwidth: float | None,
    tflops: float | None,
) -> None:
    def body() -> int:
        if tflops is not None and bandwidth is None:
            raise InputError("--tflops: expected --bandwidth beside it, found none")
        configs = chosen(checkpoint, config, preset_name)
        context = min(config.max_position_embeddings for config in configs.values())
        length = max(1, min(PREFIX, context - suffix)) if prefix is None else prefix
        if length + suffix > context:
            raise refuse("prefix and suffix", f"at most max_position_embeddings {context} tokens", length + suffix)
        found = plan_table(configs, dtypes or tuple(DTYPES), length, suffix, bandwidth, tflops)
        click.echo(markdown_table(found))
        return DONE

    run_command(body, "experiments.plan", resumes=False)


if __name__ == "__main__":
    main()
