"""What published drafts reached, each line with its source: for orientation before a training, never a promise. Other
targets, prompts and engines give other figures; where none is published for a method, the plan says so.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """One published measurement. tau: lowest and highest acceptance length (tokens a target forward) over its prompt
    sets, None where only a speedup is given; chain: whether chains were drafted, of k tokens where that is said.
    """

    method: str
    target: str
    how: str
    source: str
    tau: tuple[float, float] | None = None
    chain: bool = True
    k: int | None = None
    speedup: str | None = None


EAGLE3_PAPER = "EAGLE-3 paper, arXiv 2503.01840, comparison of methods at temperature 0"
MEDUSA_PAPER = "Medusa paper, arXiv 2401.10774"
PUBLISHED = (
    Published(
        "eagle3", "Llama-3.1-8B-Instruct", "tree, mean of five tasks", EAGLE3_PAPER, (6.23, 6.23), False, None, "4.44x"
    ),
    Published("eagle3", "Vicuna-13B", "tree, mean of five tasks", EAGLE3_PAPER, (6.62, 6.62), False, None, "5.51x"),
    Published(
        "eagle3",
        "Llama-3.1-8B-Instruct",
        "chain in SGLang, H200, batch 1: GSM8K, MT-bench, HumanEval, MATH",
        "SpecForge's benchmark of its own drafts",
        (2.55, 3.48),
        True,
        3,
        "1.77x to 2.58x",
    ),
    Published(
        "eagle3",
        "Qwen3-8B",
        "chain in vLLM",
        "AngelSlim's benchmark of its own drafts (Qwen3-1.7B and 8B)",
        (2.0, 2.2),
        True,
        2,
        "1.70x",
    ),
    Published(
        "eagle3",
        "Llama-3.3-70B-Instruct",
        "chain, temperature 0: mean of MT-bench, HumanEval, GSM8K; KL, and LK losses",
        "model card of nebius/EAGLE3-Llama-3.3-70B-Instruct",
        (4.78, 4.81),
        True,
        7,
    ),
    Published(
        "eagle3",
        "Llama-4-Maverick-17B-128E-Instruct",
        "chain in SGLang",
        "model card of lmsys/sglang-EAGLE3-Llama-4-Maverick-17B-128E-Instruct-v1",
        (2.45, 2.45),
        True,
        3,
    ),
    Published(
        "eagle3",
        "Qwen3.5-397B-A17B",
        "batch 1: MT-bench, GSM8K, HumanEval, Math500",
        "model card of AQ-MedAI/Qwen3.5-397B-A17B-eagle3",
        (3.03, 3.53),
    ),
    Published(
        "eagle3",
        "Qwen3.6-27B",
        "chain in SGLang, one request: the target's tuned sibling, and itself",
        "model card of Ex0bit/Qwen3.6-27B-PRISM-EAGLE3",
        (2.2, 2.4),
        speedup="1.84x to 1.97x",
    ),
    Published("medusa", "Vicuna-7B", "Medusa-1, heads alone; tree, typical acceptance", MEDUSA_PAPER, speedup="2.18x"),
    Published("medusa-2", "Vicuna-7B", "heads and target; tree, typical acceptance", MEDUSA_PAPER, speedup="2.83x"),
    Published("medusa-2", "Vicuna-13B", "heads and target; tree, typical acceptance", MEDUSA_PAPER, speedup="2.83x"),
    Published("medusa-2", "Vicuna-33B", "heads and target; tree, typical acceptance", MEDUSA_PAPER, speedup="2.35x"),
    Published("medusa", "Vicuna-13B", "tree, mean of five tasks", EAGLE3_PAPER, chain=False, speedup="2.12x"),
    Published("kd", "Vicuna-13B", "a small draft, not distilled, mean of five tasks", EAGLE3_PAPER, speedup="1.92x"),
    Published(
        "kd",
        "several",
        "a distilled small draft against the same one undistilled, on several benchmarks",
        "DistillSpec paper, arXiv 2310.08461, abstract",
        speedup="10% to 45% faster than undistilled",
    ),
)
"""Trees and chains are kept apart: a tree's length is that of its best path."""


def method_of(method: str, tuned: bool) -> str:
    """eagle3, medusa, medusa-2 or kd."""
    return "medusa-2" if method == "medusa" and tuned else method


def family_of(name: str) -> str:
    """The letters that a model's name begins with, in lower case: llama, qwen, gemma, .."""
    found = re.match(r"[a-z]+", name.rsplit("/", 1)[-1].lower())
    return found[0] if found else ""


def facts(run: Published) -> dict[str, Any]:
    """Json-able."""
    return {**asdict(run), "tau": None if run.tau is None else list(run.tau)}


def band(method: str, target: str) -> dict[str, Any]:
    """{"method", "low", "high", "of", "runs"}: the range of tau over the published chains of a method (of the target's
    own family where there are some), and every published run of it.

    low and high are None where no chain's tau is published: the plan then says so and names the speedups.
    """
    runs = [run for run in PUBLISHED if run.method == method]
    chains = [run for run in runs if run.tau is not None and run.chain]
    own = [run for run in chains if family_of(run.target) == family_of(target)]
    chosen: Sequence[Published] = own or chains
    of = f"{family_of(target)} targets" if own else "targets of other families" if chains else "none"
    low = min((run.tau[0] for run in chosen), default=None)
    high = max((run.tau[1] for run in chosen), default=None)
    return {"method": method, "low": low, "high": high, "of": of, "runs": [facts(run) for run in runs]}
