"""The report: figures that must appear, groups and headline, warnings, a self-contained page, and errors on writing."""

import copy
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from drafttrain.evaluate import report_summary, report_words
from drafttrain.evaluate.report import EvaluationError, check_writable, print_table, render_html, write_report
from tests.evaluate.report_examples import Page, make_log, make_report, make_run


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
    assert page.tags.count("svg") == page.tags.count("figure") == 5 + 4 + 3 + 3


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
    assert "Passed all 4 checks" in text and "2.91" in text and "none: no CUDA device" in text


def test_a_tuned_target_is_told_with_its_drift():
    report = make_report()
    assert "tuned together" not in render_html(report, None)
    report["target"] |= {"tuned_from": "some/model"}
    assert "tuned together with the draft" in Page(render_html(report, None)).text
    report["target"] |= {"drift": 0.01234, "same_choice": 0.9876}
    text = Page(render_html(report, None)).text
    assert "0.0123 nats from the unchanged target, the same choice at 98.8% of positions" in text


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
    assert [note["title"] for note in report_words.warnings(report, [])] == ["The text repeats itself"]
    report["prompts"] |= {"repeated_8gram_share": 0.2, "train_overlap": 0.03}
    assert [note["title"] for note in report_words.warnings(report, [])] == ["Prompts overlap with the training data"]


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


def test_a_folder_is_tried_before_an_evaluation(tmp_path: Path):
    folder = tmp_path / "evaluation" / "test"
    check_writable(folder)
    assert not any(tmp_path.iterdir())  # The probe and the folders made for it are gone again.
    folder.mkdir(parents=True)
    check_writable(folder)
    assert folder.is_dir() and not list(folder.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match=r"cannot write the report into .*file/test: Not a directory.*--output"):
        check_writable(tmp_path / "file" / "test")
    (folder / "report.json").mkdir()
    with pytest.raises(EvaluationError, match="Is a directory"):
        check_writable(folder)


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
