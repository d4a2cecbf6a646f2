"""A tuned table {concurrency: best K} in the serving engines' own settings: vLLM's speculative_config, SGLang's flags.

Read from vLLM 0.32 (config/speculative.py) and SGLang 0.5.23 (arg_groups, adaptive_spec_params.py).
"""

import json
import math
import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from drafttrain.data.files import write_beside
from drafttrain.errors import UserError

VLLM_METHODS = {"eagle3": "eagle3", "medusa": "medusa", "kd": "draft_model", "ngram": "ngram"}
SGLANG_ALGORITHMS = {"eagle3": "EAGLE3", "kd": "STANDALONE", "ngram": "NGRAM"}
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
ADAPTIVE_FILE = "sglang-adaptive.json"


class SettingsError(UserError):
    """A table or kind of draft that no engine settings can be written from."""


def ranges(best: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """{concurrency: K} -> [(first batch size, last, K)], neighbours of one K merged; the last K holds on beyond.

    A batch size between two measured ones takes the K of the nearer in log: the border is their geometric mean.
    Raises SettingsError for an empty table, a concurrency below 1 or a K below 0.
    """
    if not best or min(best) < 1 or min(best.values()) < 0:
        raise SettingsError(f"the table of K is {dict(best)}; expected {{concurrency from 1: K from 0}}")
    points = sorted(best.items())
    starts = [1, *(math.ceil(math.sqrt(before * after)) for (before, _), (after, _) in pairwise(points))]
    rows: list[tuple[int, int, int]] = []
    ends = [*(start - 1 for start in starts[1:]), points[-1][0]]
    for first, last, (_, k) in zip(starts, ends, points, strict=True):
        if rows and rows[-1][2] == k:
            first = rows.pop()[0]
        rows.append((first, max(first, last), k))
    return rows


def vllm_config(kind: str, draft: str | None, best: Mapping[int, int]) -> dict[str, Any] | None:
    """vLLM's speculative_config; None where plain decoding is best throughout (leave it out).

    One K: num_speculative_tokens. Several: that is the largest, and `num_speculative_tokens_per_batch_size` lists
    [first, last, K], inclusive, K = 0 drafting nothing. Medusa heads take the K of the smallest concurrency that
    drafts: vLLM's own proposer of theirs refuses any other than num_speculative_tokens. Raises SettingsError for a kind
    that vLLM does not serve.
    """
    rows = ranges(best)
    _check_kind(kind, VLLM_METHODS, "vLLM", draft)
    if not max(best.values()):
        return None
    table = len(rows) > 1 and kind != "medusa"
    k = max(best.values()) if table else next(k for _, _, k in rows if k)
    config: dict[str, Any] = {"method": VLLM_METHODS[kind], "num_speculative_tokens": k}
    config |= LOOKUP if kind == "ngram" else {"model": draft}
    if table:
        config["num_speculative_tokens_per_batch_size"] = [list(row) for row in rows]
    return config


def sglang_flags(kind: str, draft: str | None, best: Mapping[int, int]) -> dict[str, Any] | None:
    """{"flags": [..], "adaptive_config": {..} | None}; None where plain decoding is best throughout.

    Chains: top-k 1 and steps + 1 draft tokens. Several K exist for EAGLE-3 only: the adaptive config with a single
    candidate for each batch size, from which on it holds (0: no drafting); its file is named in the flags. Other
    kinds take the K of the smallest concurrency that drafts. Raises SettingsError for a kind SGLang does not serve.
    """
    rows = ranges(best)
    _check_kind(kind, SGLANG_ALGORITHMS, "SGLang", draft)
    if not max(best.values()):
        return None
    table = len(rows) > 1 and kind == "eagle3"
    k = max(best.values()) if table else next(k for _, _, k in rows if k)
    flags = ["--speculative-algorithm", SGLANG_ALGORITHMS[kind]]
    if kind == "ngram":
        flags += ["--speculative-ngram-max-bfs-breadth", "1"]
    else:
        flags += ["--speculative-draft-model-path", str(draft), "--speculative-num-steps", str(k)]
        flags += ["--speculative-eagle-topk", "1"]
    flags += ["--speculative-num-draft-tokens", str(k + 1)]
    if table:
        flags += ["--speculative-adaptive", "--speculative-adaptive-config", ADAPTIVE_FILE]
    adaptive = {str(first): {"candidate_steps": [steps]} for first, _, steps in rows} if table else None
    return {"flags": flags, "adaptive_config": adaptive}


def _check_kind(kind: str, known: Mapping[str, str], engine: str, draft: str | None) -> None:
    if kind not in known:
        raise SettingsError(f"{engine} serves no draft of kind {kind!r}; expected one of {', '.join(known)}")
    if draft is None and kind != "ngram":
        raise SettingsError(f"settings for a draft of kind {kind!r} need its folder or hub id")


def engine_settings(kind: str, draft: str | None, best: Mapping[int, int]) -> dict[str, Any]:
    """{"best_k": {concurrency: K}, "vllm": speculative_config | None, "sglang": {"flags", "adaptive_config"} | None,
    "notes": [..]} for the engines that serve this kind of draft; the notes say what the engines make of it.
    """
    settings: dict[str, Any] = {"best_k": {str(rows): k for rows, k in sorted(best.items())}}
    several = len(ranges(best)) > 1
    notes = []
    if not max(best.values()):
        notes.append("Plain decoding is best at every measured concurrency: serve without a draft.")
    if kind in VLLM_METHODS:
        settings["vllm"] = vllm_config(kind, draft, best)
        if settings["vllm"] and kind == "medusa":
            notes.append(
                "vLLM: heads over a smaller vocabulary start with --model-loader-extra-config "
                "'{\"enable_weights_track\": false}' only."
            )
        if several and kind == "medusa":
            notes.append("vLLM: one K for every batch size, Medusa heads take no table.")
        elif several:
            notes.append(
                "vLLM: the table by batch size is ignored under data parallelism, and its first model runner gives up "
                "full CUDA graphs for it (VLLM_USE_V2_MODEL_RUNNER=1 keeps them): measure against one fixed K."
            )
    if kind in SGLANG_ALGORITHMS:
        settings["sglang"] = sglang_flags(kind, draft, best)
        if several and kind == "eagle3":
            notes.append(f"SGLang: write adaptive_config to {ADAPTIVE_FILE}; it is ignored under attention DP.")
        elif several:
            notes.append("SGLang: one K for every batch size, its adaptive table is for EAGLE drafts.")
    return {**settings, "notes": notes}


def write_settings(settings: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write vllm-speculative.json, sglang-flags.txt and sglang-adaptive.json, those there is something for, into an
    existing folder; returns their paths. The flags name the adaptive file where it was written.
    """
    texts: dict[str, str] = {}
    if settings.get("vllm"):
        texts["vllm-speculative.json"] = json.dumps(settings["vllm"], indent=1)
    if settings.get("sglang"):
        adaptive = settings["sglang"]["adaptive_config"]
        if adaptive:
            texts[ADAPTIVE_FILE] = json.dumps(adaptive, indent=1)
        place = {ADAPTIVE_FILE: str(folder / ADAPTIVE_FILE)}
        texts["sglang-flags.txt"] = shlex.join(place.get(flag, flag) for flag in settings["sglang"]["flags"])
    paths = []
    for name, text in texts.items():
        write_beside(folder / name, lambda beside, text=text: beside.write_text(text + "\n", encoding="utf-8"))
        paths.append(folder / name)
    return paths
