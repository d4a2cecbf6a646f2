"""The report's sections on concurrency, categories, predictions, comparisons, the certificate, and lossy runs."""

import io
import re

import pytest
from rich.console import Console

from drafttrain.evaluate import report_summary, report_sweeps, report_tables, report_words
from drafttrain.evaluate.report import print_table, render_html
from drafttrain.specdec.certificate import certificate
from tests.evaluate.report_examples import Page, make_certificate, make_report, make_run, make_sweep


def completed(report):
    full = report_summary.complete(report)
    return full, report_summary.group_runs(full["runs"])


def page_of(report):
    page = Page(render_html(report))
    assert page.open == [] and len(page.ids) == len(set(page.ids))
    return page


def printed(report, width=120):
    console = Console(width=width, file=io.StringIO())
    print_table(report, console)
    return console.file.getvalue()


def variants():
    """An EAGLE-3 draft as a chain, as a tree, with a policy, with typical and with synthetic acceptance."""
    draft = {"checkpoint": "draft"}
    tree = {"tree": {"kind": "dynamic", "topk": 4, "nodes": 16}, "acceptance_rate": None}
    return [
        make_run("plain", "none", 0, [], 21.9),
        make_run("eagle3 synthetic k=3", "eagle3", 3, [0.9] * 3, 70.0, 0.046, 1.1, lossy=True, synthetic=True, **draft),
        make_run("eagle3 typical k=3", "eagle3", 3, [0.9] * 3, 65.0, 0.046, 1.1, lossy=True, **draft),
        make_run("eagle3 tree 4x16 k=3", "eagle3", 3, [0.8, 0.7, 0.6], 48.0, 0.08, 1.4, **tree, **draft),
        make_run("eagle3 confidence>=0.4 k=3", "eagle3", 3, [0.7, 0.5, 0.4], 45.0, 0.03, 1.1, policy="c", **draft),
        make_run("eagle3 k=3", "eagle3", 3, [0.7, 0.5, 0.4], 44.0, 0.046, 1.1, **draft),
        make_run("n-gram k=3", "ngram", 3, [0.4, 0.3, 0.2], 30.0, 0.001, 1.1, trained=False),
    ]


def test_lossy_and_synthetic_runs_are_marked_and_never_the_headline():
    _, groups = completed({"runs": variants()})
    assert [run["label"] for run in groups[0].runs][-2:] == ["eagle3 synthetic k=3", "eagle3 typical k=3"]
    best = report_summary.headline({}, groups)
    assert best["run"]["label"] == "eagle3 tree 4x16 k=3" and best["candidates"] == 3
    text = page_of({"runs": variants()}).text
    assert "2.19 × speedup" in text  # 48 / 21.9; the synthetic run is at 3.20
    assert "Lossy acceptance. eagle3 typical:" in text and "Synthetic acceptance. eagle3 synthetic:" in text
    assert text.count("not lossless") == 2
    lines = printed({"runs": variants()}).splitlines()
    row = next(line for line in lines if line.startswith("eagle3 typical"))
    assert row.split()[-1] == "lossy" and "identical" not in row
    assert next(line for line in lines if line.startswith("eagle3 synthetic")).split()[-1] == "synthetic"


def test_only_lossy_runs_make_no_headline():
    text = page_of({"runs": variants()[:3]}).text
    assert "No lossless draft was measured" in text and "speedup over plain decoding" not in text


def test_trees_policies_and_lossy_runs_are_series_of_their_own_in_the_draft_s_colour():
    runs = variants()[1:]
    series = report_summary.series_of(runs)
    eagle = [series[run["id"]] for run in runs if run["draft"] == "eagle3"]
    assert len({one.color for one in eagle}) == 1 and sorted(one.style for one in eagle) == [0, 1, 2, 3, 4]
    assert series["eagle3-k=3"].style == 0 and series["eagle3-typical-k=3"].label == "eagle3 typical (lossy)"
    assert series["eagle3-synthetic-k=3"].label == "eagle3 synthetic"  # the label says it already
    assert series["n-gram-k=3"].style == 0 and series["n-gram-k=3"].color != eagle[0].color


def test_drafts_without_a_checkpoint_are_told_apart_by_label():
    runs = [make_run(f"{name} k=3", "eagle3", 3, [0.7], 40.0, 0.04, 1.1) for name in ("old", "new")]
    tree = {"tree": {"kind": "static", "parents": [-1, -1]}}
    runs.append(make_run("new static tree of 2 k=1", "eagle3", 1, [0.7], 40.0, 0.04, 1.1, **tree))
    series = report_summary.series_of(runs)
    assert series["old-k=3"].color != series["new-k=3"].color
    assert series["new-static-tree-of-2-k=1"].color == series["new-k=3"].color


def test_concurrency_has_a_plot_and_a_table_with_break_even():
    full, groups = completed(make_sweep())
    assert [group.title for group in groups] == [
        "Greedy decoding, 1 request at a time",
        "Greedy decoding, 4 requests at a time",
        "Greedy decoding, 16 requests at a time",
    ]
    (section,) = report_tables.concurrency_sections(full, groups)
    assert section["columns"] == [1, 4, 16]
    assert [(row["label"], row["break_even"]) for row in section["rows"]] == [
        ("eagle3 k=3", "9.67"),
        ("n-gram k=3", "beyond 16"),
    ]
    assert [cell["speedup"] for cell in section["rows"][0]["cells"]] == pytest.approx([2.0, 1.5, 0.8])
    assert section["best"] == ["eagle3-k=3-c1", "eagle3-k=3-c4", "n-gram-k=3-c16"]
    series = report_summary.series_of(full["runs"])
    plots = report_sweeps.concurrency_plots(section["title"], section["groups"], series)
    assert [plot.title for plot in plots] == ["Speedup by concurrency", "Throughput by concurrency"]
    assert ">10.8</text>" in plots[0].svg  # 4 * 4 ** (.5 / .7): log-linear from 1.5 at 4 to .8 at 16
    text = page_of(make_sweep()).text
    assert "Against concurrency: greedy decoding" in text
    assert "Slower than plain decoding. At every measured K: eagle3 0.80× (greedy decoding, 16 requests" in text
    assert "Greedy decoding, 16 requests at a time" in printed(make_sweep())


def test_one_concurrency_has_no_such_section():
    report = make_sweep()
    report["runs"] = report["runs"][:3]
    assert "Against concurrency" not in page_of(report).text
    assert "at a time" not in report_summary.group_runs(report["runs"])[0].title


def test_break_even_of_a_draft_that_never_pays_and_of_another_sampling():
    report = make_sweep()
    for run in report["runs"]:
        if run["draft"] == "eagle3":
            run["speedup"] = 0.9
    report["break_even"] = [
        {"label": "eagle3", "k": 3, "concurrency": 1.0},
        {"label": "n-gram k=3", "k": 3, "mode": "one_hot", "sampling": {"temperature": 0.8}, "concurrency": 2.0},
    ]
    (section,) = report_tables.concurrency_sections(*completed(report))
    assert [row["break_even"] for row in section["rows"]] == ["never pays", report_summary.MISSING]


def test_break_even_that_names_no_sampling_is_about_the_first():
    report = make_sweep()
    other = {"mode": "one_hot", "sampling": {"temperature": 0.8}}
    for run in list(report["runs"]):
        report["runs"].append(run | other | {"id": f"{run['id']}-t", "baseline": run["baseline"] and "plain-t"})
    first, second = report_tables.concurrency_sections(*completed(report))
    assert [row["break_even"] for row in first["rows"]] == ["9.67", "beyond 16"]
    assert {row["break_even"] for row in second["rows"]} == {report_summary.MISSING}


def test_categories_have_bars_with_intervals_and_a_table():
    full, groups = completed(make_sweep())
    series = report_summary.series_of(full["runs"])
    plot = report_sweeps.category_plot(groups[0], series)
    assert plot.title == "Speedup by kind of prompt" and "eagle3 (K=3)" in plot.svg and "n-gram (K=3)" in plot.svg
    bare = [{**run, "categories": {name: {"speedup": 2.0} for name in ("code", "chat")}} for run in groups[0].runs]
    without = report_sweeps.category_plot(report_summary.Group("g", "g", None, tuple(bare)), series)
    assert plot.svg.count("LineCollection") == 4 and without.svg.count("LineCollection") == 0  # 2 drafts x 2 kinds
    table = report_tables.categories(groups[0])
    assert table["names"] == [{"name": "code", "prompts": 6}, {"name": "chat", "prompts": 6}]
    assert [cell["speedup"] for cell in table["rows"][0]["cells"]] == pytest.approx([2.25, 1.75])
    text = page_of(make_sweep()).text
    assert "code 6 prompts" in text and "2.25× 2.13 to 2.38 tau 2.90" in text


def test_categories_without_speedups_show_tau():
    full, groups = completed(make_sweep())
    for run in groups[0].runs:
        for figures in run["categories"].values():
            figures["speedup"] = None
    plot = report_sweeps.category_plot(groups[0], report_summary.series_of(full["runs"]))
    assert plot.title == "Mean acceptance length by kind of prompt"


def test_predictions_are_held_against_what_was_measured():
    _, groups = completed(make_sweep())
    found = report_tables.predictions(groups)
    assert (found["median_error"], found["worst"], found["count"]) == (pytest.approx(0.1), pytest.approx(0.1), 6)
    last = next(row for row in found["rows"] if row["run"]["id"] == "n-gram-k=3-c16")
    assert (last["predicted"], last["measured"], last["error"]) == (1.2 * 0.98, pytest.approx(1.2), -0.02)
    text = page_of(make_sweep()).text
    assert "Median error of the predicted speedup: 10.0% , at most 10.0%, over 6 runs" in text
    assert "2.20× 2.00× 1.90 to 2.10 +10.0% 2.50" in text
    assert "Predicted against measured" not in page_of(make_report()).text


def test_an_error_left_out_is_computed():
    report = make_sweep()
    report["runs"][1]["predicted"] = {"speedup": 1.8, "tau": None}
    found = report_tables.predictions(completed(report)[1])
    assert found["rows"][0]["error"] == pytest.approx(-0.1)  # 1.8 / 2 - 1


def test_the_k_that_tuning_chose_is_shown():
    row = {"k": 0, "predicted": 1.0, "measured": 1.0, "measured_k": 3, "measured_best": 1.04}
    report = make_sweep() | {"tune": {"best": {"16": {"eagle3": row}}}}
    assert "eagle3 16 plain predicted 1.00×, measured 1.00× 3 1.04×" in page_of(report).text


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ([0.1, 0.4], "told apart: left gains more tokens"),
        ([-0.4, -0.1], "told apart: right gains more tokens"),
        ([-0.1, 0.4], "not told apart by this run"),
        (None, "no interval"),
    ],
)
def test_paired_differences_have_a_verdict(interval, words):
    entry = {"a": "left", "b": "right", "k": 3, "sampling": {"temperature": 0.8}, "concurrency": 4}
    entry |= {"tau_difference": {"value": 0.2, "interval": interval}}
    entry |= {"speedup_ratio": {"value": 1.02, "interval": [0.97, 1.05]}}
    report = make_report() | {"comparisons": [entry]}
    (row,) = report_tables.comparisons(report)
    assert row["tau_verdict"][0] == words and row["ratio_verdict"][0] == "not told apart by this run"
    assert row["setting"] == "Sampled at temperature 0.8, K=3, 4 requests at a time"
    text = page_of(report).text
    assert words in text and "left against right" in text


def test_paired_differences_may_name_runs():
    report = {"runs": variants()}
    pair = {"a": "eagle3-k=3", "b": "eagle3-typical-k=3", "labels": ["eagle3 k=3", "eagle3 typical k=3"]}
    pair |= {
        "tau_difference": {"value": -0.4, "interval": None},
        "speedup_ratio": {"value": 0.6, "interval": [0.5, 0.7]},
    }
    report["comparisons"] = [pair]
    (row,) = report_tables.comparisons(report)
    assert (row["a"], row["b"], row["setting"]) == ("eagle3", "eagle3 typical", "Greedy decoding, K=3")
    assert row["marks"] == ["", "lossy"] and row["ratio_verdict"] == ("told apart: eagle3 typical is faster", "bad")
    assert "told apart: eagle3 typical is faster" in page_of(report).text


def test_the_certificate_in_words():
    text = page_of(make_report()).text
    assert "Passed all 4 checks, and the control failed as it must" in text
    for words in (
        "no difference",
        "chain, one-hot drafts largest error 2.2e-16, allowed 1e-06",
        "tree, probabilistic drafts, two tokens p = 0.41",
        "chain, one-hot drafts, first token p = 0.07",
        "20,000 texts are decoded",
        "(p < 1e-300): its first tokens came with frequencies 0.352, 0.390, 0.258 instead of 0.500, 0.300, 0.200",
        "a p-value under 0.0001 is a failure",
    ):
        assert words in text
    assert "certificate: passed (4 checks, control failed as it must)" in printed(make_report())


def test_a_failed_certificate_is_loud():
    checks = make_certificate()["checks"] | {"exact_chain_one_hot": {"passed": False, "largest_error": 0.031}}
    report = make_report() | {"certificate": make_certificate(passed=False, checks=checks)}
    assert "certificate: FAILED (exact_chain_one_hot of 4 checks)" in printed(report)
    text = page_of(report).text
    assert "The losslessness certificate failed. FAILED (exact_chain_one_hot of 4 checks)" in text
    assert "largest error 3.1e-02" in text and "Passed all" not in text


def test_a_control_that_passes_fails_the_certificate():
    report = make_report() | {"certificate": make_certificate(passed=False, control={"passed": False, "p_value": 0.3})}
    assert "certificate: FAILED (the control, a wrong sampler, was not found out)" in printed(report)
    assert "was NOT found out (p = 0.3)" in page_of(report).text


def test_every_check_of_the_real_certificate_has_its_words():
    words = report_words.certificate_words(certificate())
    assert words["passed"] and [section["title"] for section in words["sections"]] == [
        "Greedy decoding",
        "Every case of a small language",
        "Draws from known distributions",
    ]
    rows = [row for section in words["sections"] for row in section["rows"]]
    assert len(rows) == words["count"] and all(row["result"] for row in rows)


def test_no_certificate_claims_nothing():
    report = make_report() | {"certificate": {}}
    text = page_of(report).text
    assert "This report holds no certificate" in text and "Passed all" not in text
    assert "certificate" not in printed(report)


def test_an_interrupted_report_says_so_at_the_top():
    report = make_report() | {"interrupted": True, "interruption": "the server died"}
    text = page_of(report).text
    notice = "Interrupted. 12 of the prompts are in these figures (the server died)"
    assert 0 < text.index(notice) < text.index("speedup over plain decoding")
    assert "Interrupted: 12 of the prompts" in printed(report)
    report["prompts"]["requested"] = 64
    assert "12 of the 64 prompts" in page_of(report).text
    assert "Interrupted" not in page_of(make_report()).text


def test_details_show_latency_and_memory():
    text = page_of(make_report()).text
    assert "eagle3 k=3 41.0 ms 62.5 ms 158.0 ms 42.1 1.50 GiB 2.34×" in text  # .9 x 46.8; tau 2.667 / (1 + 3 x .046)
    assert "ITL p50 ITL p95 TTFT End-to-end tokens/s Peak memory" in text


def test_an_engine_s_report_survives_what_it_does_not_tell():
    untold = dict.fromkeys(("iterations", "draft_rounds", "drafted_tokens", "accepted_tokens", "acceptance_rate"))
    untold |= dict.fromkeys(
        ("mean_acceptance_length", "per_position_acceptance", "conditional_acceptance", "c", "v", "o")
    )
    untold |= dict.fromkeys(("rounds", "peak_memory_bytes", "ideal_speedup", "itl", "ttft", "intervals", "checkpoint"))
    untold |= {"seconds": {"prefill": 1.0, "decode": 2.0, "draft": None, "verify": None, "rest": None}}
    untold |= {"categories": {"chat": {"prompts": 4, "speedup": None, "intervals": None}}, "draft_lengths": []}
    runs = [make_run("vllm plain", "none", 0, [], 20.0) | untold | {"id": "plain", "speedup": None}]
    runs.append(make_run("vllm eagle3 k=3", "eagle3", 3, [0.7, 0.5, 0.4], 40.0, 0.1, 1.1) | untold)
    gone = {"prompt": 0, "position": 3, "token": None, "plain_token": 7, "margin": None, "ulps": None}
    runs[1] |= {"identical_to_plain": False, "divergences": [gone | {"unit": "character"}], "notes": ["too few"]}
    runs.append(runs[1] | {"id": "none", "label": "vllm ngram k=3", "draft": "ngram", "speedup": None, "k": None})
    runs[2]["tokens_per_second"] = {"median": None, "min": None, "max": None, "pooled": None}
    report = {"runs": runs, "certificate": {}, "interrupted": True, "notes": ["not interleaved"], "interruption": None}
    report |= {"engine": {"name": "vllm", "version": None}, "device": {"name": None}, "prompts": {"count": 4}}
    text = page_of(report).text
    assert "vllm version not told" in text and "Note. not interleaved" in text and "an engine's own sampler" in text
    assert "Note. vllm eagle3 k=3: too few" in text and "None" not in text
    assert re.search(r"vllm eagle3 k=3 .*1\.83x", printed(report, 80))  # 40 / 21.9, as make_run has it


def test_the_page_prints_in_the_light_with_everything_open():
    style = render_html(make_report()).split("<style>")[1].split("</style>")[0]
    dark, printing = style.index("prefers-color-scheme: dark"), style.index("@media print")
    assert "@media screen and (prefers-color-scheme: dark)" in style and dark < printing
    assert "details::details-content { content-visibility: visible" in style[printing:]
    assert ".part { break-before: page; }" in style[printing:]


def test_a_draft_that_never_pays_is_told_what_an_iteration_costs():
    report = make_sweep()
    (run,) = [run for run in report["runs"] if run["draft"] == "eagle3" and run["concurrency"] == 16]
    run |= {"k": 3, "c": 0.2, "v": 1.5, "o": 0.1, "mean_acceptance_length": 1.76, "speedup": 0.8}
    text = " ".join(page_of(report).text.split())
    assert "at K = 3 an iteration brings 1.76 tokens and costs 2.20 plain steps, 0.60 of them drafting" in text
    run["c"] = None
    assert "an iteration brings" not in page_of(report).text
