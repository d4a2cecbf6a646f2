"""Peak memory of the distillation loss over a whole vocabulary, without weights and their gradients: in chunks against
plain logits.

    python scripts/bench_loss_memory.py                       # CPU, or a GPU with --device cuda; two minutes
    python scripts/bench_loss_memory.py --words 4096 --rows 64 --plain-rows 8,16,32    # a small twin, seconds

A draft of width 640 with a frozen head of 262,144 words, a teacher of the same size, all bf16, one unroll step, 2,048
rows, forward and backward. Each case is a process of its own: on a CPU the rise of its peak resident set over what it
held with the weights and states in place (libraries' scratch space included), on a GPU what torch allocated at most.
Plain logits grow with the rows; they are measured at few and carried on in a straight line, or measured whole with
--measure-plain.
"""

import json
import multiprocessing
import re
import resource
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from drafttrain.cli import run_command
from drafttrain.errors import UserError
from drafttrain.nn import losses
from drafttrain.nn.fused_losses import DraftHead, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseTeacher

MIB = 2**20
LOSSES = ("forward_kl", "reverse_kl", "jsd", "total_variation")
REST = (("seconds", 1), ("loss", 4), ("gradient", 4))


class Peak:
    """Bytes above those held when it was made."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            self.before = self._resident()

    @staticmethod
    def _resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.before


def plain_loss(states, weight, teacher_states, teacher_weight, name):
    """The loss from whole logits, as autograd would have it."""
    log_p = (teacher_states @ teacher_weight.t()).float().log_softmax(-1)
    logits = (states @ weight.t()).float()
    if name == "forward_kl":
        return torch.nn.functional.kl_div(logits.log_softmax(-1), log_p, log_target=True, reduction="sum")
    if name == "reverse_kl":
        return losses.reverse_kl(log_p, logits).sum()
    return {"jsd": losses.jsd, "total_variation": losses.total_variation}[name](log_p.exp(), logits).sum()


def measure(way: str, rows: int, words: int, width: int, name: str, device: str, answer) -> None:
    """One case in a process of its own: puts (bytes, seconds, loss a row, norm of the states' gradient)."""
    torch.manual_seed(0)
    device = torch.device(device)
    # Drawn in bf16, so that no wide matrix raises the peak beforehand.
    draw = lambda *size: torch.empty(*size, dtype=torch.bfloat16, device=device).normal_()  # noqa: E731
    weight, teacher_weight = draw(words, width).mul_(0.04), draw(words, width).mul_(0.04)
    states, teacher_states = draw(1, rows, width).requires_grad_(), draw(1, rows, width)
    peak, start = Peak(device), time.perf_counter()
    if way == "plain":
        loss = plain_loss(states[0], weight, teacher_states[0], teacher_weight, name)
    else:
        # Row p's teacher sits at p + 1: give row p that of plain's row p.
        shifted = torch.cat([teacher_states[:, :1], teacher_states], 1)
        padded = torch.nn.functional.pad(states, (0, 0, 0, 1))
        valid = torch.arange(rows + 1, device=device).lt(rows)[None, None]
        teacher = DenseTeacher(lambda h: h @ teacher_weight.t(), shifted)
        loss, *_ = fused_draft_loss([padded], DraftHead(weight), valid, [1.0], teacher, Objective.of(name))
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    norm = states.grad.float().norm().item()
    answer.put((peak.read(), time.perf_counter() - start, loss.item() / rows, norm))


def run(way: str, rows: int, *settings) -> dict:
    """Start the process of one case (settings: words, width, loss, device) and wait for it."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=measure, args=(way, rows, *settings, answer))
    child.start()
    child.join()
    if child.exitcode:
        raise UserError(f"{way} logits at {rows} rows ended with {child.exitcode}. Mend: fewer rows, or more memory")
    bytes_, seconds, loss, norm = answer.get()
    return {"way": way, "rows": rows, "bytes": bytes_, "seconds": seconds, "loss": loss, "gradient": norm}


def line(cases: list[dict], rows: int) -> int:
    """Bytes at so many rows by least squares through the measured ones."""
    n = len(cases)
    mean_x, mean_y = sum(case["rows"] for case in cases) / n, sum(case["bytes"] for case in cases) / n
    slope = sum((case["rows"] - mean_x) * (case["bytes"] - mean_y) for case in cases)
    slope /= sum((case["rows"] - mean_x) ** 2 for case in cases)
    return round(mean_y + slope * (rows - mean_x))


def main(
    words: int = 262_144,
    width: int = 640,
    rows: int = 2048,
    plain_rows: Annotated[str, typer.Option(help="Row counts, two or more, with commas.")] = "64,128,256",
    measure_plain: Annotated[bool, typer.Option("--measure-plain", help="Plain logits at --rows too.")] = False,
    loss: Annotated[str, typer.Option(help=f"One of {', '.join(LOSSES)}.")] = "forward_kl",
    device: str = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    """Measure, print a table."""
    counts = sorted({int(count) for count in plain_rows.split(",") if count.strip().isdigit()})
    if len(counts) < 2 or loss not in LOSSES:
        raise UserError(
            f"--plain-rows {plain_rows} --loss {loss}. Expected two or more row counts with commas, as a line goes "
            f"through them, and one of {', '.join(LOSSES)}. Mend: correct the option."
        )
    console, settings = Console(width=110), (words, width, loss, device)
    cases = [run("plain", count, *settings) for count in counts]
    computed = {"way": "plain, computed", "rows": rows, "bytes": line(cases, rows)}
    if measure_plain:
        cases.append(run("plain", rows, *settings))
    chunked = [run("chunked", count, *settings) for count in (counts[-1], rows)]
    cases = [*cases, computed, *chunked]
    table = Table("way", "rows", "peak, MiB", "seconds", "loss a row", "norm of the gradient")
    for case in cases:
        rest = [f"{case[key]:.{digits}f}" if key in case else "-" for key, digits in REST]
        table.add_row(case["way"], str(case["rows"]), f"{case['bytes'] / MIB:.0f}", *rest)
    console.print(table)
    found, plain = chunked[-1]["bytes"], computed["bytes"]
    console.print(
        f"{loss}, {words} words, width {width}, {device}, torch {torch.__version__}: {rows} rows take "
        f"{found / 1e9:.2f} GB in chunks, {plain / 1e9:.2f} GB with plain logits, {plain / found:.1f} times as much"
    )
    if json_file:
        asked = {"words": words, "width": width, "loss": loss, "device": device, "torch": torch.__version__}
        json_file.write_text(json.dumps({"settings": asked, "cases": cases}, indent=2) + "\n")
        console.print(f"written: {json_file}")


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
