"""The report: figures that must appear, groups and headline, warnings, a self-contained page, and errors on writing.

The figures are those of a small EAGLE-3 draft on two CPU cores, with the speedup's bounds and the sampled runs made up.
"""

import copy
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from drafttrain.evaluate import report_summary
from drafttrain.evaluate.report import EvaluationError, print_table, render_html, write_report

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
        "categories": {}, "identical_to_plain": None if plain else True, "divergences": [],
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
        "device": {"name": "2 x86 cores", "dtype": "bfloat16", "threads": 2},
        "prompts": prompts,
        "runs": runs,
        "certificate": {"exact_enumeration": {"largest_error": 2.2e-16, "passed": True}, "chi_squared": {"p": 0.41}},
        "provenance": {
            "command": "drafttrain evaluate checkpoints/gemma3-270m --k 1,3,5",
            "versions": {"drafttrain": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
            "recipe": {"method": "eagle3", "training": {"learning_rate": 0.001}},
        },
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


def test_page_is_well_formed_and_loads_nothing():
    html = render_html(make_report(), make_log())
    page = Page(html)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert all(address.startswith("#") and address[1:] in page.ids for address in page.addresses)
    assert all(reference in page.ids for reference in re.findall(r"url\(#([^)]+)\)", html))
    assert "http" not in html and "@import" not in html
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "#0a0b" not in html  # every colour of the plots became a CSS variable
    assert page.tags.count("svg") == page.tags.count("figure") == 4 + 4 + 3 + 3


def test_headline_and_figures_appear():
    text = Page(render_html(make_report(), make_log())).text
    assert "2.14 × speedup over plain decoding, 95% interval 1.99 to 2.31" in text  # 46.8 / 21.9
    assert "With eagle3 k=3, google/gemma-3-270m decodes 2.14× as fast as without a draft" in text
    assert "46.8 against 21.9 tokens/s (greedy decoding)" in text
    assert "The fastest of 6 trained configurations" in text
    assert "n-gram lookup (K=3) 1.81×" in text  # 39.6 / 21.9; its interval ends at 1.95, below 1.99
    assert "the trained draft is 1.18× as fast" in text  # 46.8 / 39.6
    assert "the trained draft is 2.41× as fast" in text  # 46.8 / 19.4, the untrained draft
    for figure in (
        "2.67",
        "55.6%",
        "0.046",
        "50.7%",
        "stdlib-heldout",
        "8f2a91c07d5e",
        "2 diverge",
        "0.0625",
        "236743",
    ):
        assert figure in text
    for line in (
        "drafttrain evaluate checkpoints/gemma3-270m --k 1,3,5",
        "transformers 5.24.0",
        "learning_rate: 0.001",
    ):
        assert line in text
    assert "exact enumeration, passed" in text and "2.91" in text


def test_groups_have_their_baseline_first_and_trained_drafts_before_the_others():
    groups = report_summary.group_runs(make_report()["runs"])
    assert [group.title for group in groups] == [
        "Greedy decoding",
        "Sampled at temperature 0.8, one-hot drafts",
        "Sampled at temperature 0.8, probabilistic drafts",
    ]
    assert [run["label"] for run in groups[0].rows] == [
        *("plain", "eagle3 k=1", "eagle3 k=3", "eagle3 k=5", "medusa k=4"),
        *("ngram k=3", "ngram k=5", "untrained eagle3 k=3"),
    ]
    assert [group.rows[0]["id"] for group in groups] == ["plain", "plain-t", "plain-t"]


def test_series_keep_one_colour_for_a_draft_and_dash_the_untrained_one():
    series = report_summary.series_of(make_report()["runs"])
    assert series["eagle3-k=1"] == series["eagle3-k=5"] == series["eagle3-k=3-one-hot"]
    assert series["untrained-eagle3-k=3"].color == series["eagle3-k=3"].color
    assert series["untrained-eagle3-k=3"].dashed and not series["eagle3-k=3"].dashed
    assert len({series[name].color for name in ("eagle3-k=3", "medusa-k=4", "ngram-k=3")}) == 3
    assert series["ngram-k=3"].label == "ngram" and "plain" not in series


def test_two_checkpoints_of_one_kind_get_two_colours():
    runs = [make_run(f"eagle3 {name} k=3", "eagle3", 3, [0.7], 40.0, 0.04, 1.1, checkpoint=name) for name in "ab"]
    series = report_summary.series_of(runs)
    assert series["eagle3-a-k=3"].color != series["eagle3-b-k=3"].color


@pytest.mark.parametrize(
    ("ngram_speedup", "interval", "words", "status"),
    [
        (2.4, [2.32, 2.5], "faster than the trained draft, 1.12×", "bad"),  # 2.4 / (46.8 / 21.9)
        (1.7, [1.6, 1.8], "the trained draft is 1.26× as fast", "good"),  # (46.8 / 21.9) / 1.7
        (2.0, [1.9, 2.1], "intervals overlap: not told apart by this run", "open"),
    ],
)
def test_comparison_with_ngram_is_said_in_words(ngram_speedup, interval, words, status):
    report = make_report()
    lookup = next(run for run in report["runs"] if run["id"] == "ngram-k=5")
    lookup |= {"speedup": ngram_speedup, "intervals": {"speedup": interval}}
    others = [run for run in report["runs"] if run["id"] != "ngram-k=3"]
    best = report_summary.headline(report, report_summary.group_runs(others))
    assert best["run"]["id"] == "eagle3-k=3"
    assert (best["comparisons"][0]["verdict"], best["comparisons"][0]["status"]) == (words, status)


def test_cost_model_of_the_headline():
    report = make_report()
    cost = report_summary.headline(report, report_summary.group_runs(report["runs"]))["cost"]
    assert cost["total"] == pytest.approx(1.09 + 3 * 0.046 + 0.02)
    assert cost["speedup"] == pytest.approx(2.667 / 1.248)


def test_speedup_above_tau_is_flagged_and_never_the_headline():
    report = make_report()
    medusa = next(run for run in report["runs"] if run["draft"] == "medusa")
    medusa["speedup"] = 2.5  # tau is 2.12
    html = render_html(report, None)
    assert "Impossible speedup" in html and "medusa k=4: the speedup is above tau" in html
    best = report_summary.headline(report, report_summary.group_runs(report["runs"]))
    assert best["run"]["id"] == "eagle3-k=3"
    assert "Impossible" not in render_html(make_report(), None)


def test_impossible_ngram_figure_is_not_a_verdict():
    report = make_report()
    for run in report["runs"]:
        if run["draft"] == "ngram":
            run["speedup"] = 4.0
    best = report_summary.headline(report, report_summary.group_runs(report["runs"]))
    assert best["comparisons"][0]["verdict"] == "above tau, so not to be believed"


def test_many_runs_get_a_bar_for_each_draft_at_its_fastest_k():
    runs = [make_run("plain", "none", 0, [], 21.9)]
    for draft in ("eagle3", "medusa"):
        runs += [make_run(f"{draft} k={k}", draft, k, [0.7] * k, 30.0 + k, 0.04, 1.1) for k in range(1, 8)]
    html = render_html({"runs": runs}, None)
    assert html.count("Each draft at its fastest K.") == 2
    assert "eagle3 k=7</text>" in html and "eagle3 k=6</text>" not in html and "medusa k=7</text>" in html


def test_repetition_and_overlap_notes_only_above_their_thresholds():
    report = make_report()
    assert [note["title"] for note in report_summary.warnings(report, [])] == ["The text repeats itself"]
    report["prompts"] |= {"repeated_8gram_share": 0.2, "train_overlap": 0.03}
    assert [note["title"] for note in report_summary.warnings(report, [])] == ["Prompts overlap with the training data"]


def test_missing_keys_and_a_report_without_drafts():
    runs = [
        {"id": "p", "label": "plain", "draft": "none", "tokens_per_second": {"median": 20.0}, "sampling": None},
        {"id": "d", "label": "kd <small> k=2", "draft": "kd", "baseline": "p", "k": 2, "speedup": None},
    ]
    page = Page(render_html({"runs": runs}, None))
    assert page.open == [] and "Plain decoding only" in page.text and "kd <small> k=2" in page.text
    assert "Plain decoding only" in Page(render_html({"runs": runs[:1]}, [])).text
    runs[1] |= {"speedup": 1.2, "trained": True}
    page = Page(render_html({"runs": runs}, [{"step": 1, "loss": None}, {"step": 2}]))
    assert "1.20 × speedup over plain decoding" in page.text and "Training" not in page.words


def test_files_are_written_whole_and_replaced(tmp_path: Path):
    folder = tmp_path / "evaluation" / "test"
    report = make_report()
    report["runs"][1]["v"] = float("nan")
    untouched = copy.deepcopy(report["runs"][2])
    json_path, html_path = write_report(report, folder, make_log())
    assert (json_path, html_path) == (folder / "report.json", folder / "report.html")
    written = json.loads(json_path.read_text())
    assert written["schema"] == 1 and written["runs"][2] == untouched and written["runs"][1]["v"] is None
    assert html_path.read_text().lower().lstrip().startswith("<!doctype html>")
    first = html_path.read_text()
    write_report(report, folder, make_log())
    assert html_path.read_text() == first  # the same report gives the same page
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json"]


def test_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match=r"cannot write the report into .*file/test: Not a directory.*--output"):
        write_report(make_report(), tmp_path / "file" / "test", None)
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    with pytest.raises(EvaluationError, match="Is a directory"):
        write_report(make_report(), tmp_path / "run", None)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["report.html", "report.json"]


def test_terminal_table():
    console = Console(width=110, file=io.StringIO())
    print_table(make_report(), console)
    lines = console.file.getvalue().splitlines()
    row = next(line for line in lines if line.startswith("eagle3 k=3"))
    figures = re.sub(r" +", " ", row).strip()
    assert figures == "eagle3 k=3 2.67 55.6% 46.8 (44.0-49.1) 2.14x [1.99, 2.31] 0.046 1.09 2 diverge"
    assert next(line for line in lines if line.startswith("plain")).split()[:3] == ["plain", "1.00", "–"]
    titles = [index for index, line in enumerate(lines) if line.startswith(("Greedy", "Sampled at temperature"))]
    assert len(titles) == 3 and any("The text repeats itself" in line for line in lines)
