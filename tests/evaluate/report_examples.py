"""Reports to render: one like those of a small EAGLE-3 draft on two CPU cores, its bounds and sampled
runs made up; one over several concurrencies; and a reader of the page.
"""

import math
import re
from html.parser import HTMLParser

PLAIN_STEP = 0.0447  # seconds
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


def make_run(label, draft, k, positions, speed, c=None, v=None, **extra):
    """One run of 12 prompts with 112 new tokens, its counts following from the per-position acceptance."""
    tau = 1 + sum(positions)
    iterations = round(12 * 111 / tau)
    plain = draft == "none"
    parts = {"prefill": 1.9, "draft": 0.0 if plain else iterations * k * c * PLAIN_STEP}
    parts |= {"verify": iterations * (1.0 if plain else v) * PLAIN_STEP, "rest": iterations * 0.02 * PLAIN_STEP}
    run = {
        "id": label.replace(" ", "-"), "label": label, "draft": draft, "checkpoint": None, "trained": draft != "none",
        "baseline": None if plain else "plain", "mode": "greedy", "k": k, "tree": None, "concurrency": 1,
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}, "iterations": iterations,
        "draft_rounds": 0 if plain else iterations, "drafted_tokens": iterations * k,
        "accepted_tokens": round(iterations * sum(positions)), "emitted_tokens": 12 * 112,
        "acceptance_rate": None if plain else sum(positions) / k, "mean_acceptance_length": tau,
        "per_position_acceptance": positions,
        "conditional_acceptance": [b / a for a, b in zip([1.0, *positions], positions, strict=False)],
        "intervals": {"mean_acceptance_length": [tau * 0.92, tau * 1.09]},
        "tokens_per_second": {"median": speed, "min": speed * 0.94, "max": speed * 1.05},
        "end_to_end_tokens_per_second": speed * 0.9, "ttft": 0.158, "speedup": speed / 21.9,
        "ideal_speedup": None if plain else tau / (1 + k * c), "c": c, "v": v, "o": 0.02, "seconds": parts,
        "categories": {}, "identical_to_plain": None if plain else True, "divergences": [], "rounds": iterations,
        "policy": None, "lossy": False, "synthetic": False, "itl": {"p50": 0.041, "p95": 0.0625},
        "draft_lengths": [0] * k + [iterations], "peak_memory_bytes": 3 * 2**29, "prompts": 12,
    }  # fmt: skip
    if not plain:
        run["intervals"]["speedup"] = [speed / 21.9 * 0.93, speed / 21.9 * 1.08]
    return run | extra


def make_report():
    """Plain, EAGLE-3 at four K, Medusa, n-gram and an untrained draft: greedy; two modes at temperature 0.8."""
    eagle = {"checkpoint": "checkpoints/gemma3-270m/draft"}
    ties = [
        {"prompt": 3, "position": 41, "token": 1018, "plain_token": 236743, "margin": 0.0625},
        {"prompt": 7, "position": 12, "token": 107, "plain_token": 108, "margin": 0.0},
    ]
    runs = [
        make_run("plain", "none", 0, [], 21.9, trained=False),
        make_run("untrained eagle3 k=3", "eagle3", 3, [0.031, 0.001, 0.0], 19.4, 0.05, 1.09, trained=False),
        make_run("ngram k=3", "ngram", 3, [0.45, 0.39, 0.337], 39.6, 0.001, 1.1),
        make_run("ngram k=5", "ngram", 5, [0.45, 0.39, 0.34, 0.29, 0.26], 37.9, 0.001, 1.3),
        make_run("eagle3 k=1", "eagle3", 1, [0.73], 33.6, 0.046, 1.06, **eagle),
        make_run("eagle3 k=3", "eagle3", 3, [0.727, 0.546, 0.394], 46.8, 0.046, 1.09, **eagle),
        make_run("eagle3 k=5", "eagle3", 5, [0.735, 0.557, 0.392, 0.282, 0.192], 43.7, 0.046, 1.3, **eagle),
        make_run("medusa k=4", "medusa", 4, [0.61, 0.31, 0.14, 0.06], 34.7, 0.03, 1.14, checkpoint="m"),
    ]
    runs[5] |= {"identical_to_plain": False, "divergences": ties}
    runs[5]["categories"] = {"code": {"speedup": 2.31, "mean_acceptance_length": 2.91}, "prose": {"speedup": 1.77}}
    sampled = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "seed": 0}
    common = {"sampling": sampled, "identical_to_plain": None}
    runs.append(make_run("plain", "none", 0, [], 21.7, trained=False, **common) | {"id": "plain-t", "mode": "one_hot"})
    for mode, first in (("one_hot", 0.619), ("probabilistic", 0.655)):
        name = mode.replace("_", "-")
        lookup = make_run("ngram k=3", "ngram", 3, [0.21, 0.14, 0.1], 27.9, 0.001, 1.09, **common)
        draft = make_run("eagle3 k=3", "eagle3", 3, [first, 0.4, 0.26], 39.0, 0.046, 1.09, **common, **eagle)
        runs += [run | {"id": f"{run['id']}-{name}", "baseline": "plain-t", "mode": mode} for run in (lookup, draft)]
    prompts = {"name": "stdlib-heldout", "count": 12, "max_new_tokens": 112}
    prompts |= {"train_overlap": 0.0, "repeated_8gram_share": 0.507}
    return {
        "schema": 1,
        "target": {"name": "google/gemma-3-270m", "fingerprint": "8f2a91c07d5e44b1"},
        "device": {"name": "2 x86 cores", "dtype": "bfloat16", "threads": 2, "capture": "none: no CUDA device"},
        "prompts": prompts,
        "runs": runs,
        "certificate": make_certificate(),
        "provenance": {
            "command": "drafttrain evaluate checkpoints/gemma3-270m --k 1,3,5",
            "versions": {"drafttrain": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
            "recipe": {"method": "eagle3", "training": {"learning_rate": 0.001}},
        },
    }


def make_certificate(**changes):
    """One check of each kind, all passed, and a control that was found out."""
    checks = {
        "greedy": {"passed": True, "largest_error": 0.0},
        "exact_chain_one_hot": {"passed": True, "largest_error": 2.2e-16, "tolerance": 1e-6},
        "fixed_tree_probabilistic_joint": {"passed": True, "p_value": 0.41, "degrees": 8},
        "recorded_chain_one_hot_first": {"passed": True, "p_value": 0.07, "degrees": 512},
    }
    control = {"passed": True, "p_value": 0.0, "first_token": [0.352, 0.39, 0.258, 0.0, 0.0]}
    common = {"passed": True, "seconds": 2.5, "significance": 1e-4, "draws": 20_000}
    return common | {"checks": checks, "control": control} | changes


def make_sweep():
    """Greedy decoding at 1, 4 and 16 requests at a time, where one draft falls below plain decoding and one does not;
    categories, predictions and a break-even table."""
    runs = []
    for rows, eagle, lookup in ((1, 44.0, 33.0), (4, 33.0, 30.8), (16, 17.6, 26.4)):
        plain = make_run("plain", "none", 0, [], 22.0) | {"id": f"plain-c{rows}"}
        drafts = [
            make_run("eagle3 k=3", "eagle3", 3, [0.727, 0.546, 0.394], eagle, 0.046, 1.09, checkpoint="draft"),
            make_run("n-gram k=3", "ngram", 3, [0.45, 0.39, 0.337], lookup, 0.001, 1.1, trained=False),
        ]
        for run in (plain, *drafts):
            run["tokens_per_second"]["total"] = rows * run["tokens_per_second"]["median"]
            run |= {"concurrency": rows, "speedup": None if run is plain else run["tokens_per_second"]["median"] / 22}
        for run in drafts:
            speedup = run["speedup"]
            run |= {"id": f"{run['id']}-c{rows}", "baseline": plain["id"]}
            run["intervals"] = {"mean_acceptance_length": None, "speedup": [speedup - 0.1, speedup + 0.1]}
            run["predicted"] = {"speedup": 1.1 * speedup, "tau": 2.5, "error": 0.1}
            figures = {"prompts": 6, "speedup": speedup + 0.25, "mean_acceptance_length": 2.9, "acceptance_rate": 0.6}
            figures["intervals"] = {"speedup": [speedup + 0.13, speedup + 0.38], "mean_acceptance_length": None}
            run["categories"] = {"code": figures, "chat": figures | {"speedup": speedup - 0.25}}
        runs += [plain, *drafts]
    drafts[1]["predicted"] = {"speedup": 1.2 * 0.98, "tau": 2.2, "error": -0.02}
    return {
        "schema": 1,
        "target": {"name": "toy"},
        "prompts": {"name": "p", "count": 12, "max_new_tokens": 112},
        "runs": runs,
        "break_even": [
            {"label": "eagle3 k=3", "k": 3, "concurrency": 9.67},
            {"label": "n-gram k=3", "k": 3, "concurrency": None},
        ],
    }


def make_log(steps=900):
    """Rows as the trainer writes them: losses every 10 steps, a validation row every 150."""
    rows = []
    for step in range(10, steps + 1, 10):
        grown = 1 - math.exp(-step / 350)
        row = {"step": step, "minutes": step / 45, "loss": 9.2 - 6.4 * grown, "learning_rate": 1e-3 * min(1, step / 40)}
        row |= {f"step_acceptance/{k}": (0.78 - 0.03 * k) * grown for k in range(5)}
        rows.append(row)
        if step % 150 == 0:
            rows.append({"step": step, "minutes": step / 45, "eval_loss": 9.3 - 6 * grown} | {})
            rows[-1]["eval_acceptance_length"] = 1 + 2.5 * grown
    return rows


class Page(HTMLParser):
    """Checks that tags nest, and collects ids, addresses and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.addresses, self.words, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.collect(attributes)

    def handle_startendtag(self, tag, attributes):
        self.collect(attributes)

    def collect(self, attributes):
        self.ids += [value for name, value in attributes if name == "id"]
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))
