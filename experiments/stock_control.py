"""One copy against two copies of one input on a stock checkpoint (paper: the diagnostic on the public backbone).

Ten tasks, evenly spaced over prompt length, are put into a plain chat template and generated greedily three times: as a
singleton, as a pair of identical copies, and as that pair again. There is no role term, no block structure and no
delimiter: the whole output head is eligible, and an end-of-sequence token or 512 tokens end a generation. The repeated
pair is the floor and the gate; singleton against pair is the comparison, in tokens and log-probabilities.

    python -m experiments.stock_control --checkpoint DIR --dtype bf16
"""

from pathlib import Path

import click

from decode.record import causal_sha256
from decode.text import CHAT_TEMPLATE, Chat, TextCodec
from experiments.run.control import Control, Input, chat_steps, select
from experiments.run.inputs import Models, Session
from experiments.run.loop import run
from experiments.run.options import PATH, RunOptions, common_options, dtype_option
from experiments.run.tasks import Task, load_tasks, of_each_task
from minimodel.checkpoint import open_checkpoint
from minimodel.decoder import Decoder
from minimodel.errors import InputError, refuse
from minimodel.files import inside, read_bytes
from minimodel.selfcheck import require_usable

LIMIT = 512  # tokens of a generation, its end-of-sequence token included
EOS = ("<|im_end|>", "<|endoftext|>")  # what Qwen2.5-Instruct's own generation settings stop at
MAX_TEMPLATE_BYTES = 1 << 20


def chat_input(model: Decoder, row: str, prompt: list[int], stop: tuple[int, ...]) -> Input:
    """Returns a task's chat prompt, to be generated to an end-of-sequence token or the limit."""
    return Input(
        row,
        tuple(prompt),
        lambda copies: chat_steps(model, prompt, copies, stop, LIMIT),
        lambda tokens: causal_sha256([*prompt, *tokens[:-1]]),  # the last token never enters the decoder
    )


def template_text(file: Path) -> str:
    """Returns a template file's text as it is, its last line end included. InputError unless it is UTF-8."""
    try:
        return read_bytes(file, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: expected UTF-8 text, found another byte at {error.start}") from None


@click.command(help=__doc__)
@dtype_option
@click.option(
    "--template",
    "file",
    type=PATH,
    default=None,
    metavar="FILE",
    help="Chat template as text: special tokens by name, {question} once, {choices} at most once. "
    "[default: Qwen2.5-Instruct's, with its own system line]",
)
@click.option(
    "--eos", multiple=True, default=EOS, show_default=True, metavar="TOKEN", help="Ends a generation; may be repeated."
)
@common_options("stock_control")
def main(options: RunOptions, dtype: str, file: Path | None, eos: tuple[str, ...]) -> int:
    template = CHAT_TEMPLATE if file is None else template_text(file)
    numeric, checkpoint = options.numeric(dtype), open_checkpoint(options.checkpoint)
    if checkpoint.contract is not None:
        raise InputError(
            f"{options.checkpoint}: expected a stock checkpoint, found contract.json and a role table; "
            "for an adapted checkpoint use python -m experiments.batch_control"
        )
    chat = Chat.of(TextCodec.load(inside(options.checkpoint, "tokenizer.json"), template), template, eos)
    if max(chat.stop) >= checkpoint.config.vocab_size:
        raise refuse("--eos", f"ids below vocab_size {checkpoint.config.vocab_size}", max(chat.stop))
    assert options.tasks is not None, "this experiment reads tasks"
    tasks, data = load_tasks(options.tasks, None)
    context = checkpoint.config.max_position_embeddings

    def prompt(task: Task) -> list[int]:
        ids = chat.encode(task.question, task.choices)
        if len(ids) + LIMIT > context:
            raise InputError(f"prompt of {len(ids)} tokens may reach {len(ids) + LIMIT}, context {context}")
        return ids

    prompts = of_each_task(tasks, prompt, options.tasks)
    require_usable(numeric, checkpoint.config)
    session = Session("stock_control", options, None, Models(checkpoint, {dtype: numeric}))
    model = session.models.at(dtype)
    inputs = [chat_input(model, task.id, ids, chat.stop) for task, ids in zip(tasks, prompts)]
    chosen, panel = select(inputs, options.limit)
    manifest = session.manifest([one.id for one in chosen], panel, data)
    manifest["stock"] = {"template": template, "eos_ids": list(chat.stop), "cap": LIMIT}
    control = Control("stock_control", model, chosen, panel, max(len(ids) for ids in prompts) + LIMIT)
    return run(control, manifest, options, options.directory(f"stock_control-{dtype}"))


if __name__ == "__main__":
    main()
