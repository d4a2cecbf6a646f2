"""What this CUDA device does with drafttrain: kernels and graph replays against references, then speed at 8B shape.

    scripts/gpu_check.sh [--tiny]

Under 8 minutes on one device of 48 GB or more, without downloads: all weights are random. --tiny runs the whole road on
the CPU; what needs CUDA is then reported as not run. Exit status 1 when a correctness check fails; a speed that misses
its mark is only reported (SLOW).
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from drafttrain.cli import run_command
from drafttrain.drafts.base import Batch
from drafttrain.drafts.eagle3 import Eagle3Draft
from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.errors import UserError
from drafttrain.evaluate.roofline import Device, Roofline, measure_cpu, shape_of
from drafttrain.evaluate.runner import Candidate, evaluate
from drafttrain.nn import losses
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.fused_losses import DraftHead, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseTeacher
from drafttrain.nn.tree import DynamicTree
from drafttrain.nn.ttt_attention import ttt_attention, ttt_attention_dense
from drafttrain.recipe import DraftConfig, LossName
from drafttrain.specdec.decode import generate
from drafttrain.specdec.graphs import CAPTURED, StaticSteps, capture_note
from drafttrain.specdec.verify import Synthetic
from drafttrain.target import Target

RATES = (0.75, 0.55, 0.4, 0.3, 0.2)
LEAST_BOUND, LEAST_IDEAL = 0.70, 0.95
LEAST_MEMORY = 44 * 2**30
SMALL = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}
LLAMA_8B |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


@dataclass(frozen=True)
class Scale:
    """Sizes of the speed sections. rows, length: of a training batch."""

    config: dict
    draft_vocabulary: int
    prompts: int
    prompt_length: int
    new_tokens: int
    batches: tuple[int, ...]
    repeats: int
    rows: int
    length: int


FULL = Scale(LLAMA_8B, 32000, 8, 128, 128, (1, 8, 32), 3, 4, 2048)
TINY = Scale(SMALL, 250, 2, 8, 10, (1, 2), 1, 2, 32)


class Checks:
    """Collects (name, status, detail): PASS, FAIL, SLOW (a speed below its mark), "-" (a figure) or "not run"."""

    def __init__(self, console: Console, marks: bool):
        self.console, self.marks, self.rows = console, marks, []

    def add(self, name: str, status: str, detail: str) -> None:
        self.rows.append((name, status, detail))
        self.console.print(f"  {name}: {status} ({detail})", highlight=False)

    def close(self, name: str, found: Tensor, expected: Tensor, most: float) -> None:
        """PASS when the relative error (norms) is small."""
        found, expected = found.detach().double(), expected.detach().double()
        error = float((found - expected).norm() / expected.norm())
        self.add(name, "PASS" if error <= most else "FAIL", f"relative error {error:.1e}, at most {most:.0e}")

    def mark(self, name: str, value: float, least: float) -> None:
        """A speed against what is asked of a GPU at 8B shape; elsewhere only the figure."""
        status = "-" if not self.marks else "PASS" if value >= least else "SLOW"
        self.add(name, status, f"{value:.3f}; asked of a GPU: {least}")

    def section(self, title: str, work: Callable[[], None]) -> None:
        """Errors of the device fail the section; the next ones still run."""
        self.console.print(title)
        start = time.perf_counter()
        try:
            work()
        except (RuntimeError, UserError) as error:
            self.add(title, "FAIL", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        self.console.print(f"  {time.perf_counter() - start:.1f} s")
        gc.collect()

    def table(self) -> Table:
        table = Table("check", "status", "detail", box=None)
        for name, status, detail in self.rows:
            table.add_row(name, status, detail)
        return table


def random_model(values: dict, dtype: torch.dtype, device: torch.device) -> Target:
    """A Llama of this shape, built on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**values), dtype=dtype, attn_implementation="sdpa")
    return Target.from_model(model, name="random Llama")


def random_draft(target: Target, vocabulary: int, dtype: torch.dtype) -> Eagle3Draft:
    ids = torch.arange(vocabulary) * (target.vocab_size // vocabulary)
    n = target.num_layers
    config = Eagle3Config.for_target(target, DraftConfig(), [2, n // 2, n - 3], vocabulary)
    draft = Eagle3Draft(config, ids).to(target.device, dtype)
    draft.feature_rms = torch.ones_like(draft.feature_rms, dtype=torch.float32)
    return draft.attach(target)


def random_prompts(target: Target, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, target.vocab_size, (count, length), generator=generator).tolist()


def check_attention(checks: Checks, device: torch.device) -> None:
    """Merged flash attention in bf16 against the dense twin in fp32, outputs and gradients."""
    torch.manual_seed(0)
    sizes = [(2, 8, 257, 64), *[(2, 2, 257, 64)] * 8]  # Query, block key and value, three own keys and values.
    inputs = [torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_() for size in sizes]
    twins = [x.detach().float().requires_grad_() for x in inputs]
    out = ttt_attention(*inputs[:3], inputs[3:6], inputs[6:])
    expected = ttt_attention_dense(*twins[:3], twins[3:6], twins[6:])
    weight = torch.randn_like(expected)
    found = torch.autograd.grad(out, inputs, weight.to(out.dtype))
    wanted = torch.autograd.grad(expected, twins, weight)
    checks.close("attention, forward", out, expected, 2e-2)
    gradients = [torch.cat([grad.flatten() for grad in grads]) for grads in (found, wanted)]
    checks.close("attention, backward", *gradients, 3e-2)


def check_losses(checks: Checks, device: torch.device) -> None:
    """The chunked loss and its gradients against whole logits, in fp32."""
    torch.manual_seed(0)
    B, T, H, V, K = 2, 150, 64, 3000, 3
    states = [torch.randn(B, T, H, device=device, requires_grad=True) for _ in range(K)]
    head = (torch.randn(V, H, device=device) * 0.3).requires_grad_()
    teacher_head, hidden = torch.randn(V, H, device=device) * 0.3, torch.randn(B, T, H, device=device)
    logits = hidden @ teacher_head.t()
    lse, argmax = logits.logsumexp(-1) + 0.1, logits.argmax(-1)
    rows = torch.arange(T, device=device)
    valid = torch.stack([(rows < T - 2 - k).expand(B, T) for k in range(K)])
    weights = [0.8**k for k in range(K)]
    teacher = DenseTeacher(lambda x: x @ teacher_head.t(), hidden, lse)
    found, *_ = fused_draft_loss(states, DraftHead(head), valid, weights, teacher, Objective.of("forward_kl"), argmax)
    expected = torch.zeros((), device=device)
    for k, weight in enumerate(weights):
        count = T - 2 - k
        teacher = slice(1 + k, 1 + k + count)
        p = losses.teacher_probabilities(logits[:, teacher].flatten(0, 1), lse[:, teacher].flatten())
        expected = expected + weight * losses.forward_kl(p, states[k][:, :count].flatten(0, 1) @ head.t()).sum()
    checks.close("losses, value", found, expected, 1e-4)
    gradients = [
        torch.cat([grad.flatten() for grad in torch.autograd.grad(value, [head, *states])])
        for value in (found, expected)
    ]
    checks.close("losses, gradients", *gradients, 1e-3)


def check_loss_kernel(checks: Checks, device: torch.device) -> None:
    """Every loss as the device computes it (under CUDA the Triton kernel) against torch in fp64: the worst of all."""
    if device.type == "cuda":
        found = find_spec("triton") is not None
        checks.add("loss kernel", "-" if found else "not run", "Triton" if found else "no triton: rows in torch")
    names, shape = get_args(LossName), {"scale": 0.7, "softcap": 8.0}
    mix = {name: 0.5 + place for place, name in enumerate(names)}
    cases = [(name, Objective.of(name), torch.float32, True, {}) for name in names]
    cases.append(("all, temperature, shaped head", Objective.of(mix, temperature=2.0), torch.float32, False, shape))
    cases.append(("all, bf16", Objective.of(mix), torch.bfloat16, True, {}))
    worst = {(part, dtype): (0.0, "") for part in ("figures", "gradients") for dtype in ("fp32", "bf16")}
    for name, objective, dtype, part, shaped in cases:
        mine, exact = (loss_results(device, dtype, wide, objective, part, shaped) for wide in (dtype, torch.float64))
        for kind, found, expected in zip(("figures", "gradients"), mine, exact, strict=True):
            key = kind, "fp32" if dtype == torch.float32 else "bf16"
            error = ((found - expected).norm() / expected.norm()).nan_to_num(float("inf"))
            worst[key] = max(worst[key], (error.item(), name))
    for (kind, dtype), (error, name) in worst.items():
        most = 1e-4 if dtype == "fp32" else 3e-2
        detail = f"relative error at most {error:.1e} ({name}), allowed {most:.0e}"
        checks.add(f"each loss, {kind}, {dtype}", "PASS" if error <= most else "FAIL", detail)


def loss_results(
    device: torch.device, dtype: torch.dtype, wide: torch.dtype, objective: Objective, part: bool, shape: dict
) -> list[Tensor]:
    """Figures and gradients of random rows in fp64, computed in `wide` from numbers in dtype; part: p of mass < 1."""
    g = torch.Generator().manual_seed(0)
    rand = lambda *size: torch.randn(*size, generator=g).to(device, dtype).to(wide)  # noqa: E731
    T, H, V = 24, 64, 9001
    hidden, teacher_head, head = rand(1, T, H), 0.3 * rand(V, H), (0.3 * rand(V, H)).requires_grad_()
    states = [rand(1, T, H).requires_grad_() for _ in range(2)]
    logits = hidden @ teacher_head.t()
    teacher = DenseTeacher(lambda x: x @ teacher_head.t(), hidden, logits.logsumexp(-1) + 0.1 if part else None)
    rows, bias = torch.arange(T, device=device), 0.1 * rand(V) if shape else None
    valid = torch.stack([((rows < T - 2 - k) & (rows != 5)).expand(1, T) for k in range(2)])
    target, token = logits.argmax(-1), torch.randint(0, V, (1, T), generator=g).to(device)
    arguments = DraftHead(head, bias, **shape), valid, [1.0, 0.8], teacher, objective, target, token
    loss, figures, _ = fused_draft_loss(states, *arguments)
    gradients = torch.autograd.grad(loss, [head, *states])
    return [
        torch.cat([x.detach().double().flatten() for x in group])
        for group in ((loss, figures.loss, figures.alpha, figures.hits), gradients)
    ]


def check_steps(checks: Checks, device: torch.device) -> None:
    """Static steps (graph replays under CUDA) against eager ones, then whole requests, in fp32."""
    target = random_model(SMALL, torch.float32, device)
    kind = "replays" if capture_note(target) == CAPTURED else "static steps, eager"
    prompts = random_prompts(target, 3, 40)
    tokens = torch.tensor(random_prompts(target, 3, 6))
    for name, parents in (("chain", None), ("tree", torch.tensor([[-1, -1, 0, 0, 1]]).expand(3, 5))):
        static, eager = StaticSteps(target, 3), RaggedCache(3)
        fixed = static.begin(64)
        for cache in (fixed, eager):
            target.step(torch.tensor(prompts), cache)
            cache.lengths = torch.tensor([40, 31, 17])
        for _ in range(2):  # The first one captures.
            mine = static.step(tokens, fixed, None, [2, 4, 5], parents).logits
        checks.close(f"{kind}, {name}", mine, target.step(tokens, eager, None, [2, 4, 5], parents=parents).logits, 1e-4)
    draft = random_draft(target, 250, torch.float32)
    options = {"max_new_tokens": 48, "stop_ids": ()}
    plain = [one.tokens for one in generate(target, prompts, capture=False, **options).generations]
    for name, tree in (("none", None), ("chain", None), ("tree", DynamicTree(4, 12))):
        proposer = None if name == "none" else draft.proposer(target, tree)
        for capture in (False, True):
            done = generate(target, prompts, proposer, k=4, capture=capture, **options)
            same = sum(one.tokens == text for one, text in zip(done.generations, plain, strict=True))
            label = f"greedy text, draft {name}, {kind if capture else 'eager'}"
            checks.add(label, "PASS" if same == 3 else "FAIL", f"{same} of 3 as plain and eager")


def bandwidth(device: torch.device) -> float:
    """Bytes/s of the best of some big copies, read and written."""
    if device.type != "cuda":
        return measure_cpu(64, 256, 3).bandwidth
    source = torch.ones(2**30, dtype=torch.uint8, device=device)
    goal, best = torch.empty_like(source), 0.0
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        goal.copy_(source)
        end.record()
        end.synchronize()
        best = max(best, 2 * source.numel() / (start.elapsed_time(end) / 1000))
    return best


def measure_decoding(checks: Checks, target: Target, scale: Scale) -> None:
    """Plain decoding and an EAGLE-3 draft under synthetic acceptance, at each batch size."""
    draft = random_draft(target, scale.draft_vocabulary, target.dtype)
    candidate = Candidate("eagle3", "eagle3", lambda: draft.proposer(target), acceptance=Synthetic(RATES))
    rate = bandwidth(target.device)
    checks.add("memory bandwidth", "-", f"{rate / 1e9:.0f} GB/s, copy")
    report = evaluate(
        target,
        [candidate],
        random_prompts(target, scale.prompts, scale.prompt_length),
        k=(3, 5),
        concurrency=scale.batches,
        repeats=scale.repeats,
        max_new_tokens=scale.new_tokens,
        ngram=False,
        stop_ids=(),
        certificate=False,
        capture=None if target.device.type == "cuda" else True,
    )
    checks.add("decoding steps", "-", f"capture: {report['device']['capture']}")
    context = scale.prompt_length + scale.new_tokens / 2
    bound = 1 / Roofline(Device("here", rate, 1e18)).seconds(shape_of(target.config), 1, 1, context)
    for run in report["runs"]:
        speed = run["tokens_per_second"]["total"]
        name = f"batch {run['concurrency']}, {run['label']}"
        if run["draft"] == "none":
            checks.add(name, "-", f"{speed:.1f} tokens/s")
            if run["concurrency"] == 1:
                checks.mark("batch 1, plain / memory bound", speed / bound, LEAST_BOUND)
            continue
        figures = ", ".join(f"{key} {run[key]:.3f}" for key in ("c", "v", "o"))
        tau = run["mean_acceptance_length"]
        detail = f"{speed:.1f} tokens/s, speedup {run['speedup']:.2f}, ideal {run['ideal_speedup']:.2f}, tau {tau:.2f}"
        checks.add(name, "-", f"{detail}, {figures}")
        checks.mark(f"{name}, speedup / ideal", run["speedup"] / run["ideal_speedup"], LEAST_IDEAL)


def training_batch(target: Target, rows: int, length: int, layers: int) -> Batch:
    """Random tokens and features, with the figures that the teacher's own head gives."""
    device, width = target.device, target.hidden_size
    ids = torch.randint(3, target.vocab_size, (rows, length), device=device)
    last = torch.randn(rows, length, width, device=device, dtype=target.dtype)
    lse, argmax = [], []
    for chunk in last.flatten(0, 1).split(512):
        logits = target.head()(chunk).float()
        lse.append(logits.logsumexp(-1))
        argmax.append(logits.argmax(-1))
    return Batch(
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        torch.full((rows,), length),
        labels=torch.full_like(ids, -100),
        index=torch.arange(rows),
        features=torch.randn(rows, length, layers * width, device=device, dtype=target.dtype),
        last_hidden=last,
        target_lse=torch.cat(lse).view(rows, length),
        target_argmax=torch.cat(argmax).view(rows, length),
    )


def measure_training(checks: Checks, target: Target, scale: Scale) -> None:
    """Updates of an fp32 draft under bf16 autocast, as the trainer makes them."""
    device = target.device
    draft = random_draft(target, scale.draft_vocabulary, torch.float32).train()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-5)
    batch = training_batch(target, scale.rows, scale.length, len(draft.feature_layers))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, values = [], []
    for _ in range(5):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = draft(batch)
        (loss.objective / loss.figures.rows[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.objective.item())  # Waits for the device.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    falls = values[-1] < values[0]  # NaN fails too.
    checks.add("training loss falls", "PASS" if falls else "FAIL", f"{values[0]:.4g} to {values[-1]:.4g} in 5 updates")
    best = min(seconds[1:])
    detail = f"{scale.rows * scale.length / best:.0f} tokens/s, {draft.ttt_steps} unroll steps"
    if device.type == "cuda":
        detail += f", peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB with the target"
    checks.add(f"training step, {scale.rows} x {scale.length} tokens", "-", detail)


def measure(checks: Checks, device: torch.device, scale: Scale) -> None:
    """Sections that share the big target."""
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < LEAST_MEMORY:
        checks.add("8B shape", "not run", f"the device has less than {LEAST_MEMORY / 2**30:.0f} GiB")
        return
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = random_model(scale.config, dtype, device)
    checks.section("decoding", lambda: measure_decoding(checks, target, scale))
    target.captured.clear()
    checks.section("training", lambda: measure_training(checks, target, scale))


def main(
    tiny: Annotated[bool, typer.Option("--tiny", help="The whole road on the CPU with a tiny model.")] = False,
) -> None:
    """Check, measure, print a table."""
    console = Console(width=150)
    if not tiny and not torch.cuda.is_available():
        console.print("error: torch sees no CUDA device. Mend: a CUDA build of torch and a device, or --tiny")
        raise typer.Exit(2)
    device = torch.device("cpu") if tiny else torch.device("cuda", torch.cuda.current_device())
    checks, start = Checks(console, marks=not tiny), time.perf_counter()
    if tiny:
        for name in ("CUDA attention kernels", "CUDA losses", "CUDA graph replays", "8B shape"):
            checks.add(name, "not run", "no CUDA device")
    checks.section("attention", lambda: check_attention(checks, device))
    checks.section("losses", lambda: check_losses(checks, device))
    checks.section("each loss", lambda: check_loss_kernel(checks, device))
    checks.section("steps", lambda: check_steps(checks, device))
    checks.section("target", lambda: measure(checks, device, TINY if tiny else FULL))
    name = "cpu, tiny model" if tiny else torch.cuda.get_device_name(device)
    console.print(checks.table())
    failed, slow, idle = (sum(row[1] == status for row in checks.rows) for status in ("FAIL", "SLOW", "not run"))
    counts = f"{failed} failed, {slow} slow, {idle} not run"
    console.print(f"{name}, torch {torch.__version__}: {counts}; {time.perf_counter() - start:.0f} s")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
