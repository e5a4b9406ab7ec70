"""Speed and memory of our kernels, of another implementation, and of the least that the machine could need for it.

One process, the arms taken in turn after a warm-up, medians with quartiles, ratios from pairs of one round. Columns:
our kernels by name and, with --reference, another implementation, such as transformers with DynamicCache and SDPA:

    python -m experiments.benchmark --dtype bf16 --reference tests.hf.bench_arm

Each arm stands over its floor (its linear and SDPA calls alone, back to back) and over the time in which its bytes can
be read at the bandwidth measured beside it. What is timed is compared, too: logits and K/V in raw bits. A column that
promises another one's bits and has others ends the benchmark with code 3. Loading and peak memory are measured in
fresh processes. Written are benchmark.json, report.md, report.html and, with --growth, drawings.
"""

from typing import Any

import click

from experiments.benchmark.options import BenchOptions, bench_options
from experiments.benchmark.output import check, printed, write
from experiments.benchmark.session import benchmark
from experiments.run.exits import DONE, GATE_FAILED, run_command


@click.command(help=__doc__)
@bench_options
def main(**given: Any) -> None:
    options = BenchOptions(**given)

    def body() -> int:
        check(options.directory, options.fresh)
        document = benchmark(options)
        write(document, options.directory)
        click.echo(printed(document))
        click.echo(f"\nbenchmark: {options.directory}")
        return GATE_FAILED if document["broken_promises"] else DONE

    run_command(body, "experiments.benchmark", resumes=False)


if __name__ == "__main__":
    main()
