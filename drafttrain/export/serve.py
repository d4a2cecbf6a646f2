"""The command lines that serve a target with an exported draft, engine by engine."""

from pathlib import Path

from drafttrain.export.base import ExportError
from drafttrain.target import Target

ENGINES = {
    "eagle3": ("vllm", "sglang", "tensorrt-llm", "llama.cpp"),
    "kd": ("vllm", "sglang", "transformers", "llama.cpp"),
}
"""Which engines serve each kind of draft."""
VLLM_METHODS = {"eagle3": "eagle3", "kd": "draft_model"}
SGLANG_ALGORITHMS = {"eagle3": "EAGLE3", "kd": "STANDALONE"}
VLLM_WITHOUT_HOOKS = ("gemma", "gemma2", "gemma3", "gemma3_text", "mixtral", "glm4", "exaone4")
"""Targets whose native vLLM implementation has no EAGLE-3 hooks; the transformers backend has them (vLLM 0.32)."""


def check_engine(engine: str, method: str) -> None:
    """ExportError where the engine does not serve this kind of draft."""
    if engine not in ENGINES[method]:
        raise ExportError(f"--engine is {engine!r}, expected one of {', '.join(ENGINES[method])} for a {method} draft")


def serve_command(engine: str, target: Target, folder: Path, k: int, method: str = "eagle3") -> str | None:
    """The command line that serves the target with this draft; None for engines whose command is not known here."""
    # Of a GGUF file the converted folder is served.
    model = target.folder if Path(target.name).expanduser().exists() else target.name
    if engine == "vllm":
        hooks = method == "eagle3" and target.config.model_type in VLLM_WITHOUT_HOOKS
        backend = " --model-impl transformers" if hooks else ""
        spec = f'{{"method": "{VLLM_METHODS[method]}", "model": "{folder}", "num_speculative_tokens": {k}}}'
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
    if method == "kd" and engine == "llama.cpp":
        return (
            f"python convert_hf_to_gguf.py {folder} --outfile draft.gguf && "
            f"llama-server -m TARGET.gguf -md draft.gguf --draft-max {k}"
        )
    return None
