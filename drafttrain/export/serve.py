"""The command lines that serve a target with an exported draft, engine by engine."""

import json
from collections.abc import Iterator
from pathlib import Path

from transformers import PretrainedConfig

from drafttrain.drafts.eagle3_config import Eagle3Config
from drafttrain.drafts.medusa_config import MedusaConfig
from drafttrain.evaluate.engine_settings import SGLANG_ALGORITHMS, VLLM_METHODS
from drafttrain.evaluate.engines import UNTRACKED
from drafttrain.export import eagle3, gguf
from drafttrain.export.base import ExportError
from drafttrain.export.medusa import ORIGINAL
from drafttrain.recipe_rules import ENGINES
from drafttrain.target import Target

LLAMA_CPP_TYPES = {"eagle3": "draft-eagle3", "kd": "draft-simple"}
VLLM_WITHOUT_HOOKS = ("gemma", "gemma2", "gemma3", "gemma3_text", "mixtral", "glm4", "exaone4")
"""Targets whose native vLLM implementation has no EAGLE-3 hooks; the transformers backend has them (vLLM 0.32)."""


LLAMA_CPP_PERIODS = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "llama4_text": 4, "gemma3": 6, "gemma3_text": 6}
"""llama.cpp takes every nth layer of these families for full attention, whatever the config says (b11434)."""


def lacks_hooks(method: str, model_type: str) -> bool:
    """Whether vLLM serves such a draft of such a target through its transformers backend alone."""
    return method == "eagle3" and model_type in VLLM_WITHOUT_HOOKS


def check_engine(engine: str, method: str, folder: Path) -> None:
    """ExportError where the engine does not serve this kind of draft, or would run the model in `folder` otherwise
    than it was trained.
    """
    if engine not in ENGINES[method]:
        raise ExportError(f"--engine is {engine!r}, expected one of {', '.join(ENGINES[method])} for method {method}")
    if method == "medusa" and MedusaConfig.load(folder).sequential:
        raise ExportError(
            f"{folder} holds sequential heads. Expected plain ones: no engine serves heads that read drafted tokens. "
            "Mend: measure them with drafttrain evaluate; for serving train with draft.sequential: false."
        )
    if method == "kd" and engine == "llama.cpp":
        gguf.family(json.loads((folder / "config.json").read_text(encoding="utf-8")), str(folder))


def check_layers(engine: str, config: PretrainedConfig | dict, name: str) -> None:
    """ExportError where the engine's own converter gives a small model full attention in other layers than its config
    says; draft.gguf as `export` writes it says which ones.
    """
    values = config if isinstance(config, dict) else config.to_dict()
    period, kinds = LLAMA_CPP_PERIODS.get(values.get("model_type")), values.get("layer_types")
    if engine != "llama.cpp" or period is None or kinds is None:
        return
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    expected = list(range(period - 1, len(kinds), period))
    if full != expected:
        raise ExportError(
            f"{name}: layers {full} of {len(kinds)} have full attention. llama.cpp gives it to every "
            f"{period}th layer of this family, here {expected or 'none'}, and would serve another model than was "
            "trained. Mend: keep_layers of that pattern, or another engine."
        )


def serve_lines(
    target: Target, files: Path, folder: Path, k: int, method: str
) -> Iterator[tuple[str, str | None, str | None]]:
    """(engine, command or None, why there is none) for each engine of the method: of the export that is in `files` and
    will lie at `folder`.
    """
    original = (files / ORIGINAL).exists()
    for engine in ENGINES[method]:
        why = _why_not(engine, target, files, method)
        if why is None and method == "medusa" and (engine == "tensorrt-llm") != original:
            why = f"reads another layout; drafttrain export --engine {engine} writes it"
        if why is None and engine == "llama.cpp" and not (files / gguf.FILE).exists():
            why = f"reads {gguf.FILE}, which drafttrain export --engine llama.cpp writes"
        command = None if why else serve_command(engine, target, folder, k, method, files)
        yield engine, command, why or (None if command else "give it this folder as its draft")


def _why_not(engine: str, target: Target, files: Path, method: str) -> str | None:
    """What keeps the engine from serving this draft as it was trained."""
    try:
        if method == "eagle3":
            eagle3.check_engine(engine, Eagle3Config.load(files, target.num_layers))
            if engine == "llama.cpp":
                gguf.check_hooks(target)
        elif not (files / ORIGINAL).exists():
            check_engine(engine, method, files)
    except ExportError as error:
        return "not served (" + str(error).split(". Mend")[0].split(". Expected")[0] + ")"
    return None


def serve_command(
    engine: str, target: Target, folder: Path, k: int, method: str = "eagle3", files: Path | None = None
) -> str | None:
    """The command line that serves the target with this draft; None for engines whose command is not known here. files:
    where the export lies now, if not in `folder`.
    """
    # Of a GGUF file the converted folder is served.
    model = target.folder if Path(target.name).expanduser().exists() else target.name
    if engine == "vllm":
        backend = " --model-impl transformers" if lacks_hooks(method, target.config.model_type) else ""
        if method == "kd" and target.config.to_dict().get("sliding_window"):
            # vLLM 0.32 wants all layers of such a draft in one cache group.
            backend = " --disable-hybrid-kv-cache-manager"
        spec = f'{{"method": "{VLLM_METHODS[method]}", "model": "{folder}", "num_speculative_tokens": {k}}}'
        if method == "medusa" and not MedusaConfig.load(files or folder).whole_vocabulary:
            backend = f" --model-loader-extra-config '{json.dumps(UNTRACKED['model_loader_extra_config'])}'"
        return f"vllm serve {model}{backend} --speculative-config '{spec}'"
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {model} --speculative-algorithm {SGLANG_ALGORITHMS[method]} "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {k} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {k + 1}"
        )
    if engine == "transformers":
        return (
            f'python -c \'from transformers import pipeline; print(pipeline("text-generation", "{model}", '
            f'assistant_model="{folder}")("def main():", max_new_tokens=64)[0]["generated_text"])\''
        )
    if engine == "llama.cpp":
        own = target.name if target.name.endswith(".gguf") else "TARGET.gguf"
        return (
            f"llama-server -m {own} -md {folder}/{gguf.FILE} --spec-type {LLAMA_CPP_TYPES[method]} "
            f"--spec-draft-n-max {k} --spec-draft-p-min 0"
        )
    return None
