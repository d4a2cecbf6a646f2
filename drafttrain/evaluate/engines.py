"""The evaluator's report from serving engines: a running vLLM or SGLang server, or vLLM in its own environment.

Names and counting are translated (engine_report.py). The stop token is ignored on both sides, so that every prompt
yields the same number of tokens.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drafttrain.data.engine_process import VllmWorker
from drafttrain.data.http_client import EngineError, Server
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.evaluate.engine_report import (
    Answer,
    EngineCounts,
    EnginePrompt,
    EngineRun,
    Group,
    engine_report,
    iterations_of,
)
from drafttrain.evaluate.engine_server import EngineServer
from drafttrain.evaluate.runner import Prompt
from drafttrain.nn.sampling import Sampling

Progress = Callable[[int, str], None]
WITHOUT_FOLDER = ("ngram", "suffix")
KINDS = {"draft_model": "kd"}
"""The report's name of a method, where it is not vLLM's."""
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
FIXED = {"enable_prefix_caching": False, "disable_log_stats": False}
"""Every prompt pays its own prefill, and counters are kept."""
ONE_CACHE = {"disable_hybrid_kv_cache_manager": True}
"""vLLM 0.32 keeps all layers of a small model in one group of its cache or does not start. Where sliding and full
layers mix (Gemma 3), it makes several groups unless told not to; the windows stay, and cost their whole length."""
UNTRACKED = {"model_loader_extra_config": {"enable_weights_track": False}}
"""vLLM 0.32 loads the word list of Medusa heads over a smaller vocabulary, then counts it as missing and does not start
unless it is told not to look for missing weights (the target's neither)."""
ENGINES_OWN = "the engine's own"
IN_TURN = "configurations ran one after the other, not interleaved: drift of the machine is in the speedups"
ROOM = 8  # positions beyond the last token, for drafts that are thrown away


@dataclass(frozen=True)
class EngineDraft:
    """What vLLM drafts with. method: vLLM's name (eagle3, medusa, draft_model, ngram, suffix); folder: its checkpoint;
    options: more keys of vLLM's speculative_config."""

    method: str
    folder: Path | None = None
    label: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def config(self, k: int, sampling: Sampling) -> dict[str, Any]:
        """vLLM's speculative_config at k drafts a round."""
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": k}
        if self.folder is not None:
            config["model"] = str(self.folder)
        if self.method == "ngram":
            config |= LOOKUP
        if sampling.draws_drafts:
            config["draft_sample_method"] = "probabilistic"
        return config | dict(self.options)


def evaluate_server(
    url: str,
    prompts: Sequence[str | Sequence[int] | Prompt | EnginePrompt],
    *,
    baseline_url: str | None = None,
    draft: str = "draft",
    label: str | None = None,
    checkpoint: str | None = None,
    engine: str | None = None,
    model: str | None = None,
    max_new_tokens: int = 128,
    concurrency: int = 1,
    sampling: Sampling | None = None,
    name: str = "prompts",
    plain_tokens: Sequence[Sequence[int]] | None = None,
    training_rows: Sequence[Sequence[int]] = (),
    api_key: str | None = None,
    timeout: float = 600.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """report.json's contents from a running server; baseline_url: the same model served without a draft, asked for the
    same prompts in turn (without it there is no speedup).

    draft: its kind, for the report. engine and model are found out when None. plain_tokens: our own plain outputs, to
    be compared with. At concurrency 1 every prompt has its counts; above, prompts run in groups of twice the
    concurrency and, unless the server reports each request, are counted as a pool. A server that dies on the way, or
    Ctrl-C, leaves a report of the groups that are whole, with "interrupted" and "interruption". Raises EngineError
    when there is nothing to report, timeout: seconds without a byte.
    """
    sampling = sampling or Sampling()
    chosen = _prompts(prompts, max_new_tokens, concurrency)
    servers = _find_servers(url, baseline_url, engine, model, api_key, timeout)
    runs = [_server_run(servers[0], draft, label, checkpoint)]
    if baseline_url is not None:
        runs.append(EngineRun("plain", f"{servers[1].engine} plain", "none", 0))
    interruption = _alternate(servers, runs, chosen, sampling, max_new_tokens, concurrency, progress)
    for one, run in zip(servers, runs, strict=True):
        _note(one, run)
    first = servers[0]
    return engine_report(
        runs,
        chosen,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
        target={"name": first.model, "fingerprint": None},
        device={
            "name": f"{first.engine} server at {url}",
            "dtype": None,
            "threads": None,
            "capture": "the engine's own",
        },
        engine={"name": first.engine, "version": first.version, "url": url, "baseline_url": baseline_url},
        name=name,
        plain_tokens=plain_tokens,
        training_rows=training_rows,
        interruption=interruption,
    )


def _find_servers(url, baseline_url, engine, model, api_key, timeout) -> list[EngineServer]:
    servers = [EngineServer.find(Server(url, api_key, timeout), engine, model)]
    if baseline_url is None:
        return servers
    servers.append(EngineServer.find(Server(baseline_url, api_key, timeout)))
    if servers[0].k == 0:
        raise EngineError(
            f"{url} decodes without a draft, as its baseline does. Mend: start it with a speculative configuration, or "
            "leave the baseline out"
        )
    if servers[1].k:
        raise EngineError(
            f"the baseline {baseline_url} drafts {servers[1].k} tokens a round; expected plain decoding. Mend: start it"
            " without a speculative configuration"
        )
    return servers


def _prompts(prompts, max_new_tokens: int, concurrency: int) -> list[EnginePrompt]:
    if not prompts:
        raise EngineError("no prompts to evaluate on; expected at least one. Mend: give --prompts or data.test")
    if max_new_tokens < 2 or concurrency < 1:
        raise EngineError(
            f"max_new_tokens is {max_new_tokens} and concurrency {concurrency}; expected at least 2 tokens (only what "
            "follows the prefill's token is timed) and at least 1 prompt at a time"
        )
    out = []
    for index, prompt in enumerate(prompts):
        match prompt:
            case EnginePrompt():
                out.append(prompt)
            case Prompt():
                out.append(EnginePrompt(tuple(prompt.ids), prompt.category, prompt.unit))
            case str():
                out.append(EnginePrompt(prompt))
            case _:
                out.append(EnginePrompt(tuple(int(token) for token in prompt)))
        if not out[-1].content:
            raise EngineError(f"prompt {index} is empty, expected at least one token (the BOS, say)")
    return out


def _server_run(server: EngineServer, draft: str, label: str | None, checkpoint: str | None) -> EngineRun:
    if server.k == 0:
        return EngineRun("plain", label or f"{server.engine} plain", "none", 0)
    k = server.k or 0
    text = label or f"{server.engine} {draft}"
    name = f"{server.engine}-{draft}"
    if not k:
        return EngineRun(name, text, draft, k, checkpoint)
    return EngineRun(f"{name}-k{k}", f"{text} k={k}", draft, k, checkpoint, server.tree)


def _note(server: EngineServer, run: EngineRun) -> None:
    """What is known of the run only afterwards."""
    run.k = server.k or max((len(answer.counts.reached or ()) for answer in run.answers if answer.counts), default=0)
    run.notes += sorted(server.notes)
    if run.counts() is None:
        run.notes.append("the server does not tell what it accepted: no acceptance")


def _alternate(servers, runs, prompts, sampling, max_new_tokens, concurrency, progress) -> str | None:
    """Runs group after group on every server, in an order shuffled anew; returns why it ended early, or None."""
    size = 1 if concurrency == 1 else 2 * concurrency
    rng = random.Random(0)
    for server in servers:  # Not counted. Reversed, so that no prefix cache holds a prompt that is measured.
        warm_up = EnginePrompt(prompts[0].content[::-1])
        notes = set(server.notes)
        server.run_group([warm_up], [0], sampling, min(8, max_new_tokens), 1)
        server.notes = notes
    try:
        for first in range(0, len(prompts), size):
            group = prompts[first : first + size]
            seeds = [sampling.seed + first + i for i in range(len(group))]
            done = {}
            for index in rng.sample(range(len(servers)), len(servers)):
                if progress is not None:
                    progress(first * len(servers) + len(done) * len(group), runs[index].label)
                done[index] = servers[index].run_group(group, seeds, sampling, max_new_tokens, concurrency)
            for index, run in enumerate(runs):
                run.groups.append(done[index])
    except (EngineError, KeyboardInterrupt) as error:
        if not runs[0].groups:
            raise
        return str(error) or "Ctrl-C"
    if progress is not None:
        progress(len(prompts) * len(servers), "done")
    return None


def evaluate_vllm(
    python: Path,
    target: str | Path,
    drafts: Sequence[EngineDraft],
    prompts: Sequence[Sequence[int] | Prompt | EnginePrompt],
    *,
    k: Sequence[int] = (3,),
    max_new_tokens: int = 128,
    concurrency: int = 1,
    sampling: Sampling | None = None,
    model_impl: str = "auto",
    dtype: str = "bfloat16",
    enforce_eager: bool | None = None,
    engine_options: Mapping[str, Any] | None = None,
    plain: bool = True,
    name: str = "prompts",
    target_name: str | None = None,
    fingerprint: str | None = None,
    plain_tokens: Sequence[Sequence[int]] | None = None,
    training_rows: Sequence[Sequence[int]] = (),
    patience: float = 900.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """report.json's contents from vLLM 0.32 run by another Python: plain decoding, then every draft at every k, each
    in a process of its own, one after the other (engines do not share a memory).

    python: the interpreter of vLLM's environment. prompts: token ids. model_impl: "transformers" for targets without
    native EAGLE-3 hooks. enforce_eager None: on a CPU. engine_options: more arguments of vllm.LLM. plain False: no
    baseline, no speedup. A worker that dies, or Ctrl-C, leaves the prompts that every started configuration finished.
    Raises EngineError when nothing with a draft can be reported, or after `patience` seconds without a sign of life.
    """
    sampling = sampling or Sampling()
    chosen = _prompts(prompts, max_new_tokens, concurrency)
    _check_vllm(chosen, drafts, k)
    options = {"model": str(target), "dtype": dtype, "model_impl": model_impl, "max_num_seqs": concurrency, **FIXED}
    options["enforce_eager"] = not torch.cuda.is_available() if enforce_eager is None else enforce_eager
    options["max_model_len"] = max(len(prompt.content) for prompt in chosen) + max_new_tokens + max(k) + ROOM
    if any(draft.method == "draft_model" for draft in drafts):
        options |= ONE_CACHE
    if any(draft.method == "medusa" and not MedusaConfig.load(draft.folder).whole_vocabulary for draft in drafts):
        options |= UNTRACKED
    options |= engine_options or {}
    plan = [(EngineRun("plain", "vllm plain", "none", 0), None)] if plain else []
    plan += [_vllm_run(draft, one, sampling) for draft in drafts for one in sorted(set(k))]
    job = {"llm": options, "group": concurrency, **_job(chosen, sampling, max_new_tokens)}
    facts, interruption = _run_workers(python, plan, job, patience, progress)
    runs = _trim([run for run, _ in plan if run.groups])
    capture = "none: enforce_eager" if options["enforce_eager"] else ENGINES_OWN
    return engine_report(
        runs,
        chosen,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        concurrency=concurrency,
        target={"name": target_name or Path(target).name, "fingerprint": fingerprint},
        device={"name": facts["device"], "dtype": dtype, "threads": facts["threads"], "capture": capture},
        engine={"name": "vllm", "options": options, **{key: facts[key] for key in ("version", "torch", "python")}},
        name=name,
        plain_tokens=plain_tokens,
        training_rows=training_rows,
        interruption=interruption,
        notes=[IN_TURN],
    )


def _check_vllm(prompts: Sequence[EnginePrompt], drafts: Sequence[EngineDraft], k: Sequence[int]) -> None:
    """Before an engine is started: token ids, draft folders, K."""
    if any(isinstance(prompt.content, str) for prompt in prompts):
        raise EngineError("a prompt is text; expected token ids for vLLM in-process. Mend: tokenize it first")
    if not k or min(k) < 1:
        raise EngineError(f"k is {list(k)}; expected numbers from 1 on (the plain baseline is always run)")
    names = [draft.label or draft.method for draft in drafts]
    if len(set(names)) < len(names):
        raise EngineError(f"several drafts are named alike in {', '.join(names)}. Mend: give each a label of its own")
    for draft in drafts:
        found = draft.folder is not None and (draft.folder / "config.json").exists()
        if draft.method not in WITHOUT_FOLDER and not found:
            raise EngineError(
                f"{draft.folder} holds no config.json; expected the folder of a {draft.method} draft. Mend: drafttrain "
                "export RUN --engine vllm"
            )


def _vllm_run(draft: EngineDraft, k: int, sampling: Sampling) -> tuple[EngineRun, dict[str, Any]]:
    kind = KINDS.get(draft.method, draft.method)
    label = draft.label or f"vllm {draft.method}"
    checkpoint = None if draft.folder is None else str(draft.folder)
    run = EngineRun(f"{label.replace(' ', '-')}-k{k}", f"{label} k={k}", kind, k, checkpoint)
    return run, draft.config(k, sampling)


def _job(prompts: Sequence[EnginePrompt], sampling: Sampling, max_new_tokens: int) -> dict[str, Any]:
    return {
        "sampling": {
            **{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")},
            **{"max_tokens": max_new_tokens, "ignore_eos": True, "detokenize": False},
        },
        "seeds": [None if sampling.greedy else sampling.seed + i for i in range(len(prompts))],
        "prompts": [list(prompt.content) for prompt in prompts],
        "warm_up": list(prompts[0].content),
    }


def _run_workers(python, plan, job, patience, progress) -> tuple[dict[str, Any], str | None]:
    """Fills the runs' groups; returns the engine's facts and why it ended early, or None."""
    facts: dict[str, Any] = {}
    done = 0
    try:
        for run, config in plan:
            llm = job["llm"] if config is None else {**job["llm"], "speculative_config": config}
            if progress is not None:
                progress(done, f"{run.label}: starting")
            with VllmWorker(python, {**job, "llm": llm}, patience) as worker:
                for line in worker.lines():
                    if line["kind"] == "engine":
                        facts = line
                    elif line["kind"] == "group":
                        run.groups.append(_group(line, run.k))
                        done += len(line["prompts"])
                        if progress is not None:
                            progress(done, run.label)
    except (EngineError, KeyboardInterrupt) as error:
        if not any(run.groups for run, config in plan if config is not None):
            raise
        return facts, str(error) or "Ctrl-C"
    return facts, None


def _group(line: Mapping[str, Any], k: int) -> Group:
    """A worker's line in our terms. A prompt that ran alone has the counts itself."""
    rows, rise = line["prompts"], line["counters"]
    single = len(rows) == 1
    steps = rise["iterations"] or None if single else None
    iterations = iterations_of(steps, len(rows[0]["tokens"]), rise["accepted"], k)
    reached = tuple(rise["per_position"])
    counts = EngineCounts(rise["draft_rounds"], rise["drafted"], rise["accepted"], reached, iterations)
    answers = []
    for row in rows:
        emitted = len(row["tokens"])
        own = EngineCounts(0, 0, 0, (), emitted - 1) if not k else counts if single else None
        answers.append(Answer(tuple(row["tokens"]), None, emitted, row["ttft"], row["seconds"], counts=own))
    return Group(tuple(answers), counts)


def _trim(runs: list[EngineRun]) -> list[EngineRun]:
    """The same prompts for every run: those that all of them finished."""
    whole = min(len(run.groups) for run in runs)
    for run in runs:
        del run.groups[whole:]
    return runs
