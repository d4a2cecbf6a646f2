"""Whether a real engine accepts an exported draft's tokens as our own loop does, and if not, where they part.

Both sides decode the same token ids greedily and ignore stop tokens; evaluate/agreement.py has the rule.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafttrain.data.progress import progress_bar
from drafttrain.drafts.base import Proposer
from drafttrain.drafts.loading import draft_method, find_draft
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.evaluate.agreement import agreement, columns, decode_one, proposer_as_served
from drafttrain.evaluate.engine_settings import VLLM_METHODS
from drafttrain.evaluate.engines import EngineDraft, EngineError, evaluate_server, evaluate_vllm
from drafttrain.export.medusa import check_heads, check_target
from drafttrain.export.serve import check_engine, lacks_hooks
from drafttrain.target import Target

Say = Callable[[str], None]
Prompts = Sequence[Sequence[int]]


def measure_ours(target: Target, prompts: Prompts, proposer: Proposer | None, k: int, count: int, label: str) -> dict:
    """Columns of `decode_one`, one prompt at a time, after a warm-up on the first."""
    rows = []
    with progress_bar("ours", len(prompts)) as update:
        decode_one(target, prompts[0], proposer, k, 8)
        for index, prompt in enumerate(prompts):
            update(index, label)
            rows.append(decode_one(target, prompt, proposer, k, count))
        update(len(prompts), label)
    return columns(rows)


def measure_vllm(
    python: Path, target: Target, draft: Path, prompts: Prompts, k: int, count: int, plain_tokens: Prompts | None
) -> dict[str, Any]:
    """vLLM's report on the same prompts: its plain run where our plain tokens are given, then the draft's. EngineError
    where it ends early.
    """
    method = draft_method(draft)
    with progress_bar("vLLM", (2 if plain_tokens else 1) * len(prompts)) as update:
        report = evaluate_vllm(
            python,
            target.folder,
            [EngineDraft(VLLM_METHODS[method], draft.resolve())],
            prompts,
            k=[k],
            max_new_tokens=count,
            dtype=str(target.dtype).removeprefix("torch."),
            plain=plain_tokens is not None,
            model_impl="transformers" if lacks_hooks(method, target.config.model_type) else "auto",
            target_name=target.title,
            fingerprint=target.fingerprint,
            plain_tokens=plain_tokens,
            progress=update,
        )
    return _whole(report, "vLLM")


def measure_server(url: str, method: str, target: Target, prompts: Prompts, k: int, count: int) -> dict[str, Any]:
    """The same from a running server. EngineError where it drafts another number than k, ends early, or does not tell
    what each request accepted.
    """
    with progress_bar("asking", len(prompts)) as update:
        report = evaluate_server(url, prompts, draft=method, max_new_tokens=count, progress=update)
    run = _whole(report, url)["runs"][0]
    if None in run["per_prompt"]["draft_rounds"]:
        raise EngineError(f"{url} does not tell what it accepted. Mend: start it with its metrics on")
    if run["k"] != k:
        raise EngineError(
            f"{url} drafts {run['k']} tokens a round, {k} are compared. Expected the same. Mend: --k {run['k']}, or "
            f"start it with {k}"
        )
    return report


def _whole(report: dict[str, Any], who: str) -> dict[str, Any]:
    if report["interrupted"]:
        raise EngineError(f"{who} ended early, nothing is compared: {report['interruption']}")
    return report


def serve_check(
    source: str | Path,
    target: Target,
    prompts: Prompts,
    *,
    k: int | None = None,
    max_new_tokens: int = 32,
    python: Path | None = None,
    url: str | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """What `agreement` gives for vLLM (started by the interpreter `python`) or the server at `url`, with "k" and the
    list "parted": which prompts went otherwise, and how (`parted`).

    prompts: token ids. k None: 3, or all Medusa heads. The target decides the dtype of both sides; in bfloat16 texts
    part at ties. Raises ExportError for drafts that the engine does not serve, EngineError where it fails.
    """
    folder = find_draft(source)
    method = draft_method(folder)
    check_engine("vllm", method, folder)
    if method == "medusa":
        check_target(target)
        k = check_heads(MedusaConfig.load(folder), k)
    k = 3 if k is None else k
    say(f"our loop: {len(prompts)} prompts x {max_new_tokens} tokens, K = {k}, {target.dtype}")
    ours = measure_ours(target, prompts, proposer_as_served(folder, target), k, max_new_tokens, f"{method} k={k}")
    if url is not None:
        report = measure_server(url, method, target, prompts, k, max_new_tokens)
    else:
        assert python is not None
        say("vLLM: the same prompts")
        report = measure_vllm(python, target, folder, prompts, k, max_new_tokens, None)
    theirs = report["runs"][-1]["per_prompt"]
    return {
        **agreement(ours, theirs, k),
        "k": k,
        "parted": parted(ours, theirs),
        "engine": report["engine"],
        "max_new_tokens": max_new_tokens,
    }


def parted(ours: Mapping[str, Sequence], theirs: Mapping[str, Sequence]) -> list[dict[str, Any]]:
    """The prompts that went otherwise: {"prompt", "position" of the first other token or None, "accepted": [ours,
    theirs], "reached": [ours, theirs]}. With the same text and other acceptance it is the draft that is read otherwise.
    """
    out = []
    for index, (a, b) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        position = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        reached = [list(side["reached"][index]) for side in (ours, theirs)]
        if position is not None or reached[0] != reached[1]:
            accepted = [side["accepted"][index] for side in (ours, theirs)]
            out.append({"prompt": index, "position": position, "accepted": accepted, "reached": reached})
    return out


def parting_words(result: Mapping[str, Any]) -> list[str]:
    """`parted` for a reader."""
    rows = result["parted"]
    if not rows:
        return ["every text and every prompt's accepted drafts are the same on both sides"]
    texts = [row for row in rows if row["position"] is not None]
    lines = []
    if texts:
        first = texts[0]
        lines.append(
            f"{len(texts)} texts part, the first one (prompt {first['prompt']}) at token {first['position']}: ties in "
            "bfloat16, or another target"
        )
    drafts = [row for row in rows if row["position"] is None]
    if drafts:
        first = drafts[0]
        lines.append(
            f"{len(drafts)} prompts have the same text and other accepted drafts, the first one (prompt "
            f"{first['prompt']}) {first['accepted'][0]} ours and {first['accepted'][1]} theirs: the engine reads the "
            "draft otherwise; drafttrain check names what it does silently"
        )
    return lines
