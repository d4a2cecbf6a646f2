"""Speed and memory of EAGLE-3 training against speculators 0.9.0's module: same shapes, same kind of data, in pairs.

    make peer                                              # once: the other side's environment
    python scripts/bench_train.py --json train.json        # 2 CPU cores: about an hour; a GPU: --device cuda
    python scripts/bench_train.py --hidden 640 --tokens 1024 --shapes 8192x5 --parts step    # some of it, minutes

A timed step is forward, backward and optimizer under bf16 autocast on one text of random tokens and states, the head
trained on both sides, the teacher's logits of the draft vocabulary formed within it on both. The full vocabulary's
log-sum-exp and argmax, which only ours wants, are inputs, and what they cost is given beside it. Every measurement is a
process of its own; the two sides take turns, in an order that turns round, and each pair gives one ratio. Memory is the
peak above the state before the first step: activations, gradients and the optimizer's moments. Attention: forward and
backward of all unroll steps against scaled-dot-product attention over a dense mask. `of rate`: the floating-point
operations that the step needs over its seconds, as a share of a matrix product's rate measured right after it.

What is in the JSON file is not measured again, so an interrupted run goes on. Exits with 1 where a goal is missed.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from drafttrain.cli import run_command
from drafttrain.data.files import write_json
from drafttrain.errors import UserError

HERE = Path(__file__).parent
OURS, PEER = HERE / "train_step.py", HERE / "peer_speculators.py"
PEER_PYTHON = HERE.parent / ".venv-peer" / "bin" / "python"
SIDES = {"step": ("ours", "peer"), "attention": ("ours", "dense")}
SHAPE = {"heads": 4, "kv_heads": 1, "head_dim": 256, "intermediate": 2048}
MIB = 2**20
STEP_GOALS = {32_000: 3.0, 8192: 2.0}
"""Times the peer's speed, by draft vocabulary; bf16."""
ATTENTION_GOAL, ATTENTION_TOKENS, MEMORY_GOAL, RATE_GOAL = 5.0, 2048, 0.5, 0.6
LINEAR = 1.2
"""The most that memory may grow beyond the tokens' ratio, as an exponent, to count as linear."""


def step_flops(case: dict) -> int:
    """Floating-point operations of the matrix products that a step needs, none of them done twice.

    Forward 2, backward 4 for each weight and row; the projection of the features has no gradient to hand on (2 and 2),
    the teacher none at all (2). Step k has T - 2 - k rows with a teacher, which sits at T - 2 positions. Attention over
    a causal block: T^2 / 2 pairs, two products forward and four backward; later steps' own keys count as nothing.
    """
    T, H, K, words = case["tokens"], case["hidden"], case["unroll"], case["words"]
    width, kv_width = case["heads"] * case["head_dim"], case["kv_heads"] * case["head_dim"]
    layer = 2 * H * (width + 2 * kv_width) + width * H + 3 * H * case["intermediate"]
    rows = sum(T - 2 - k for k in range(K))
    fused = 4 * T * 3 * H * H
    attention = K * 6 * T * T * width
    return fused + 6 * K * T * layer + attention + 6 * rows * H * words + 2 * (T - 2) * H * words


def numbers(text: str, option: str) -> list[int]:
    """Positive numbers with commas; UserError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise UserError(f"{option} is {text!r}. Expected positive numbers with commas. Mend: correct the option.")
    return [int(part) for part in parts]


def cases(parts: str, shapes: str, hidden: str, tokens: str, dtypes: str, **common: Any) -> list[dict[str, Any]]:
    """Every case that is asked for: of a step for each dtype, shape, width and length, of attention for each length.

    common: what all have alike: device, vocab, steps, warmup.
    """
    common = {**SHAPE, **common}
    wanted = [part.strip() for part in parts.split(",")]
    kinds = [dtype.strip() for dtype in dtypes.split(",")]
    if not set(wanted) <= {"step", "attention"} or not set(kinds) <= {"bfloat16", "float32"}:
        raise UserError(f"--parts {parts} --dtypes {dtypes}. Expected step, attention; bfloat16, float32.")
    pairs = []
    for shape in shapes.split(","):
        found = numbers(shape.strip().replace("x", ","), "--shapes")
        if len(found) != 2:
            raise UserError(f"--shapes {shapes}. Expected words x unroll steps, with commas: 32000x7,8192x5.")
        pairs.append(found)
    widths, lengths = numbers(hidden, "--hidden"), numbers(tokens, "--tokens")
    out = []
    for kind in kinds if "step" in wanted else ():
        for words, unroll in pairs:
            sizes = [(H, T) for H in widths for T in lengths]
            out += [
                {**common, "part": "step", "dtype": kind, "words": words, "unroll": unroll, "hidden": H, "tokens": T}
                for H, T in sizes
            ]
    if "attention" in wanted:
        unroll = max(unroll for _, unroll in pairs)
        more = {**common, "part": "attention", "dtype": "bfloat16", "words": 0, "unroll": unroll, "hidden": 0}
        out += [{**more, "tokens": T} for T in lengths]
        out.append({**more, "tokens": 2 * max(lengths), "alone": True})  # For how memory grows.
    return out


def name_of(case: dict) -> str:
    """What a case is called in the results."""
    size = f"{case['words']}x{case['unroll']} H{case['hidden']} " if case["part"] == "step" else f"x{case['unroll']} "
    return f"{case['part']} {size}T{case['tokens']} {case['dtype']} {case['device']}"


def plan(chosen: list[dict], repeats: int, with_peer: bool) -> Iterator[tuple[dict, int, str]]:
    """(case, repeat, side) in the order in which they run: both sides of a pair after each other, the first one in
    turns.
    """
    for repeat in range(repeats):
        for case in chosen:
            sides = SIDES[case["part"]][:: 1 if repeat % 2 == 0 else -1]
            for side in sides:
                if side == "ours" or (not case.get("alone") and (side != "peer" or with_peer)):
                    yield case, repeat, side


def run_side(case: dict, side: str, peer_python: Path) -> dict[str, Any]:
    """One process; what it answers. UserError where it fails."""
    python, script = (peer_python, PEER) if side == "peer" else (Path(sys.executable), OURS)
    if not python.exists():
        raise UserError(f"{python} is not there. Mend: make peer, or --no-peer to measure ours alone.")
    asked = {**case, "part": "dense attention"} if side == "dense" else case
    done = subprocess.run([python, script, json.dumps(asked)], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{side} on {name_of(case)} ended with {done.returncode}:\n{done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, least and largest."""
    return statistics.median(values), min(values), max(values)


def summary(case: dict, found: list[dict]) -> dict[str, Any]:
    """The figures of one case from its measurements {"side", "repeat", "seconds", "bytes", ..}.

    seconds: {side: median, least, largest over all timed steps}; ratio: of the other side's to our seconds, pair by
    pair, the median of each process; bytes: {side: largest}; of_rate: see the module.
    """
    out: dict[str, Any] = {"name": name_of(case), "case": case, "seconds": {}, "bytes": {}}
    by_side: dict[str, dict[int, dict]] = {}
    for one in found:
        by_side.setdefault(one["side"], {})[one["repeat"]] = one
    for side, runs in by_side.items():
        out["seconds"][side] = spread([second for run in runs.values() for second in run["seconds"]])
        out["bytes"][side] = max(run["bytes"] for run in runs.values())
    ours = by_side.get("ours", {})
    for side in by_side.keys() - {"ours"}:
        pairs = [
            statistics.median(by_side[side][repeat]["seconds"]) / statistics.median(ours[repeat]["seconds"])
            for repeat in ours.keys() & by_side[side].keys()
        ]
        if pairs:
            out["ratio"], out["memory_ratio"] = spread(pairs), out["bytes"]["ours"] / out["bytes"][side]
    if case["part"] == "step" and ours:
        shares = [step_flops(case) / statistics.median(run["seconds"]) / run["rate"] for run in ours.values()]
        out["of_rate"] = spread(shares)
        out["rate"] = statistics.median(run["rate"] for run in ours.values())
        out["statistics_seconds"] = statistics.median(run["statistics_seconds"] for run in ours.values())
    return out


def table(summaries: list[dict]) -> Table:
    """A row for each case."""
    columns = (
        "case",
        "ours tok/s",
        "other tok/s",
        "times as fast",
        "pairs",
        "ours MiB",
        "other MiB",
        "share",
        "of rate",
    )
    out = Table(*columns, "statistics s")
    for one in summaries:
        other = next((side for side in one["seconds"] if side != "ours"), None)
        T = one["case"]["tokens"]
        speed = {side: f"{T / seconds[0]:.1f}" for side, seconds in one["seconds"].items()}
        memory = {side: f"{amount / MIB:.0f}" for side, amount in one["bytes"].items()}
        ratio, share = one.get("ratio"), one.get("of_rate")
        out.add_row(
            one["name"],
            speed.get("ours", ""),
            speed.get(other, ""),
            f"{ratio[0]:.2f}" if ratio else "",
            f"{ratio[1]:.2f}-{ratio[2]:.2f}" if ratio else "",
            memory.get("ours", ""),
            memory.get(other, ""),
            f"{one['memory_ratio']:.2f}" if ratio else "",
            f"{share[0]:.0%} ({share[1]:.0%}-{share[2]:.0%})" if share else "",
            f"{one['statistics_seconds']:.2f}" if "statistics_seconds" in one else "",
        )
    return out


def verdicts(summaries: list[dict]) -> Iterator[tuple[bool, str]]:
    """(reached, words) for every goal that was measured."""
    for one in summaries:
        case = one["case"]
        if case["part"] == "step" and "ratio" in one and case["dtype"] == "bfloat16" and case["words"] in STEP_GOALS:
            goal = STEP_GOALS[case["words"]]
            words = f"{one['ratio'][0]:.2f} times as fast, goal {goal:g}"
            yield one["ratio"][0] >= goal, f"{one['name']}: {words}"
            words = f"{one['memory_ratio']:.2f} of the memory, goal {MEMORY_GOAL:g}"
            yield one["memory_ratio"] <= MEMORY_GOAL, f"{one['name']}: {words}"
        if case["part"] == "step" and case["dtype"] == "bfloat16":
            words = f"{one['of_rate'][0]:.0%} of the matrix-product rate {one['rate'] / 1e9:.0f} GFLOP/s"
            yield one["of_rate"][0] >= RATE_GOAL, f"{one['name']}: {words}, goal {RATE_GOAL:.0%}"
        if case["part"] == "attention" and "ratio" in one and case["tokens"] == ATTENTION_TOKENS:
            words = f"{one['ratio'][0]:.2f} times as fast as a dense mask, goal {ATTENTION_GOAL:g}"
            yield one["ratio"][0] >= ATTENTION_GOAL, f"{one['name']}: {words}"
    grown = [one for one in summaries if one["case"]["part"] == "attention" and "ours" in one["bytes"]]
    if len(grown) > 1:
        first, last = (f(grown, key=lambda one: one["case"]["tokens"]) for f in (min, max))
        exponent = growth(first, last)
        yield exponent <= LINEAR, f"attention: memory grows as T^{exponent:.2f}, goal at most T^{LINEAR:g}"


def growth(first: dict, last: dict) -> float:
    """The exponent with which our peak grows with the tokens between two cases."""
    amount = last["bytes"]["ours"] / first["bytes"]["ours"]
    return math.log(amount) / math.log(last["case"]["tokens"] / first["case"]["tokens"])


def measure(
    chosen: list[dict], repeats: int, peer_python: Path | None, file: Path | None, say: Callable[[str], None]
) -> list[dict]:
    """All measurements, those in the file not again; it is written after each."""
    found = json.loads(file.read_text())["measurements"] if file is not None and file.exists() else []
    there = {(one["name"], one["case"]["steps"], one["repeat"], one["side"]) for one in found}
    for case, repeat, side in plan(chosen, repeats, peer_python is not None):
        if (name_of(case), case["steps"], repeat, side) in there:
            continue
        answer = run_side(case, side, peer_python or PEER_PYTHON)
        found.append({"name": name_of(case), "side": side, "repeat": repeat, "case": case, **answer})
        seconds = statistics.median(answer["seconds"])
        say(f"{name_of(case)}, {side}: {seconds:.2f} s a step, {answer['bytes'] / MIB:.0f} MiB ({repeat + 1})")
        if file is not None:
            write_json(file, {"measurements": found})
    names = {name_of(case) for case in chosen}
    return [one for one in found if one["name"] in names]


def main(
    parts: Annotated[str, typer.Option(help="Some of step, attention.")] = "step,attention",
    shapes: Annotated[str, typer.Option(help="Draft words x unroll steps.")] = "32000x7,8192x5",
    hidden: Annotated[str, typer.Option(help="Widths of target and draft.")] = "640,1024",
    tokens: Annotated[str, typer.Option(help="Tokens of the text.")] = "1024,2048",
    dtypes: Annotated[str, typer.Option(help="bfloat16 (autocast), float32.")] = "bfloat16",
    vocab: Annotated[int, typer.Option(help="Words of the target.", min=2)] = 262_144,
    steps: Annotated[int, typer.Option(help="Timed steps of each process.", min=1)] = 2,
    warmup: Annotated[int, typer.Option(help="Steps before them.", min=1)] = 1,
    repeats: Annotated[int, typer.Option(help="Pairs of processes.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    peer: Annotated[bool, typer.Option(help="Measure the other side too.")] = True,
    peer_python: Annotated[Path, typer.Option(help="Python of the other side's environment.")] = PEER_PYTHON,
    json_file: Annotated[Path | None, typer.Option("--json", help="Keep the measurements there, and go on.")] = None,
) -> None:
    """Measure, print a table and a line for each goal."""
    console = Console(width=170)
    say = lambda line: console.print(line, highlight=False, soft_wrap=True)  # noqa: E731
    common = {"device": device, "vocab": vocab, "steps": steps, "warmup": warmup}
    chosen = cases(parts, shapes, hidden, tokens, dtypes, **common)
    found = measure(chosen, repeats, peer_python if peer else None, json_file, say)
    summaries = [summary(case, [one for one in found if one["name"] == name_of(case)]) for case in chosen]
    console.print(table(summaries))
    settings = {(one["threads"], one["torch"]) for one in found}
    say(f"threads and torch of the processes: {sorted(settings)}; memory: peak above the state before the first step")
    reached = []
    for passed, words in verdicts(summaries):
        reached.append(passed)
        say(f"{'PASS' if passed else 'FAIL'} {words}")
    if json_file is not None:
        write_json(json_file, {"measurements": found, "summaries": summaries})
    if not all(reached):
        sys.exit(1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
