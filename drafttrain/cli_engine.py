"""`drafttrain evaluate` in a serving engine: argument handling alone."""

from pathlib import Path

from drafttrain.cli_common import OptionError, again, find_source, finish, say_for, served_target, training_rows


def check_engine_options(given: dict, lossy: bool, engine, url, baseline_url) -> None:
    """What an engine does not do is refused, not passed over."""
    if baseline_url is not None and url is None:
        raise OptionError(
            "--baseline-url is for a running server; expected --url too. Mend: add --url, or leave it out"
        )
    if engine not in (None, "vllm", "sglang") or (url is None and engine != "vllm"):
        raise OptionError(
            f"--engine is {engine!r} with the url {url}; expected vllm, or vllm or sglang with --url http://host:port"
        )
    fixed = ("tree", "policy", "repeats", "quantize", *(("k", "draft_mode") if url else ()))
    unread = [name for name in fixed if given[name] is not None]
    unread += ["typical or --synthetic"] if lossy else []
    if unread:
        raise OptionError(
            f"--{unread[0].replace('_', '-')} is not for a running engine: it drafts as it was started. Mend: leave it "
            "out"
        )
    several = [name for name in ("temperature", "concurrency") if "," in (given[name] or "")]
    if several:
        raise OptionError(
            f"--{several[0]} is {given[several[0]]!r}; expected one value for an engine. Mend: one a call"
        )


def evaluate_engine(
    source, target, settings_of, given, engine, url, baseline_url, python, model, api_key, output, as_json
) -> None:
    """`drafttrain evaluate --engine` and `--url`. settings_of: (recipe or None, **given) -> EvaluationConfig."""
    from drafttrain.drafts.loading import draft_method, find_draft
    from drafttrain.evaluate.engine_run import evaluate_in_vllm, evaluate_served
    from drafttrain.evaluate.report import check_writable, print_table, write_report
    from drafttrain.export.medusa import check_target
    from drafttrain.export.serve import check_engine, lacks_hooks

    say = say_for(as_json)
    run, recipe = find_source(source, target)
    folder = output or (run.path / "evaluation" / (engine or "server") if recipe else Path("evaluation"))
    check_writable(folder)
    settings = settings_of(recipe, **given)
    settings = settings.model_copy(update={"temperature": settings.temperature[:1], "tree": None, "policy": None})
    settings = settings.model_copy(update={"concurrency": settings.concurrency[:1]})
    say(f"temperature {settings.temperature[0]:g}, {settings.concurrency[0]} at a time")
    if url is not None:
        name = target or recipe.target.name_or_path
        options = {"baseline_url": baseline_url, "engine": engine, "model": model, "api_key": api_key}
        report = evaluate_served(url, source, name, settings, recipe=recipe, say=say, **options)
    else:
        loaded = served_target(run, recipe, target)
        draft = find_draft(source)
        method = draft_method(draft)
        check_engine("vllm", method, draft)
        if method == "medusa":
            check_target(loaded)
        impl = "transformers" if lacks_hooks(method, loaded.config.model_type) else "auto"
        rows = training_rows(recipe, run, loaded, say)
        options = {"python": python, "model_impl": impl, "recipe": recipe, "training_rows": rows, "say": say}
        report = evaluate_in_vllm(source, loaded, settings, **options)
    _, html = write_report(report, folder)
    finish(report, print_table, as_json, f"report in {html}. Next: drafttrain evaluate {again(source, target)}")
