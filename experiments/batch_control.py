"""One copy against two copies of one input: does the physical batch of two move tokens or log-probabilities?

Ten tasks, evenly spaced over prompt length, are each generated whole (branches, merge and answer) three times: as a
singleton, as a pair of identical copies, and as that pair again. The repeated pair is the floor and the gate; singleton
against pair is the comparison. A chosen token's log-probability is the log-softmax, in float64 over the whole
vocabulary, of the model-dtype logits that chose it; a forced token has none.

    python -m experiments.batch_control --dtype bf16
"""

import click

from decode.record import derived_sha256
from decode.state import State
from experiments.run.control import Control, Input, select, whole_steps
from experiments.run.inputs import open_session
from experiments.run.loop import run
from experiments.run.options import RunOptions, common_options, dtype_option
from experiments.run.tasks import longest_row
from minimodel.decoder import Decoder


def whole_input(model: Decoder, row: str, prompt: State) -> Input:
    """Returns a task's prompt block, to be generated to the end of the answer."""
    return Input(
        row,
        prompt.tokens,
        lambda copies: whole_steps(model, prompt, copies),
        lambda tokens: derived_sha256(prompt.contract, (*prompt.tokens, *tokens)),
    )


@click.command(help=__doc__)
@dtype_option
@common_options("batch_control")
def main(options: RunOptions, dtype: str) -> int:
    session = open_session("batch_control", options, {dtype: options.numeric(dtype)})
    tasks, prompts, data = session.tasks(None)
    model = session.models.at(dtype)
    inputs = [whole_input(model, task.id, prompt) for task, prompt in zip(tasks, prompts)]
    chosen, panel = select(inputs, options.limit)
    control = Control("batch_control", model, chosen, panel, longest_row(prompts))
    manifest = session.manifest([one.id for one in chosen], panel, data)
    return run(control, manifest, options, options.directory(f"batch_control-{dtype}"))


if __name__ == "__main__":
    main()
