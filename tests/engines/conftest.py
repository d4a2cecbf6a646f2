"""Targets and trained drafts that the engines are given: Gemma 3 270M, and two tiny targets that were taught a language
of 99 words. One set of the target's answers for all drafts of Gemma.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from drafttrain.data.run_folder import RunFolder
from drafttrain.demo_prompts import prompt_ids, write_prompts
from drafttrain.export.folder import export_draft, save_draft
from drafttrain.nn.sampling import Sampling
from drafttrain.recipe import parse_recipe
from drafttrain.specdec.decode import generate
from drafttrain.target import load_target
from drafttrain.training.run import train as train_run
from tests.load_script import load_script
from tests.tiny_drafts import LAYERS, features_of, make_batch, train
from tests.tiny_drafts import make_draft as random_draft
from tests.tiny_models import V, make_model, make_tokenizer, save

ANSWERS, NEW_TOKENS = 400, 96
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 256}


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the engines' environment."""
    path = Path(os.environ.get("ENGINES_PYTHON", ".venv-engines/bin/python")).absolute()
    assert path.exists(), f"{path} is not there; make engine-venv sets it up"
    return path


@pytest.fixture(scope="module")
def gemma_prompts(gemma) -> list[list[int]]:
    return [list(ids) for ids in prompt_ids(gemma.tokenizer, 8, 1)]


class Trained:
    """Exports of short trainings on Gemma 3 270M, made when first asked for."""

    METHODS = {
        "eagle3": (
            {"num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 64, "intermediate_size": 2048},
            {"learning_rate": 1e-3, "ttt_steps": 3, "max_minutes": 4.0},
        ),
        "medusa": ({"num_heads": 3}, {"learning_rate": 1e-3, "max_minutes": 2.0}),
        "kd": ({"num_hidden_layers": 6}, {"learning_rate": 3e-4, "max_minutes": 3.0}),
    }

    def __init__(self, folder: Path, target):
        self.folder, self.target, self.first = folder, target, None
        write_prompts(folder / "prompts", self.target.tokenizer, {"train": ANSWERS})

    def export(self, method: str) -> Path:
        """The draft's vLLM folder in float32."""
        run, out = RunFolder(self.folder / method), self.folder / method / "export" / "vllm"
        if not out.exists():
            recipe = self.recipe(method)
            run.claim(recipe)
            if self.first is not None:
                load_script("bench_kd").share_answers(self.first, run, "online")
            with run.lock():
                train_run(recipe, run, self.target)
            self.first = self.first or run
            export_draft(run.draft, self.target, out, torch.float32, None if method == "medusa" else 3)
        return out

    def recipe(self, method: str):
        draft, training = self.METHODS[method]
        common = {"num_train_epochs": 1000, "max_tokens_per_batch": 1024, "warmup_steps": 20, "eval_steps": 10_000}
        common["bf16"] = self.target.dtype == torch.bfloat16
        return parse_recipe(
            {
                "method": method,
                "target": {"name_or_path": self.target.name},
                "data": {
                    "train": [{"path": str(self.folder / "prompts" / "train.jsonl")}],
                    "regenerate": {"max_new_tokens": NEW_TOKENS, "temperature": [0.0, 0.8], "top_k": 50},
                    "draft_vocab": None if method == "kd" else 8192,
                },
                "draft": draft,
                "features": {"source": "store"},
                "training": {**common, "save_steps": 10_000, **training},
            }
        )


@pytest.fixture(scope="module")
def trained(gemma, tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("gemma"), gemma)


def language(rows: int, length: int, seed: int) -> torch.Tensor:
    """int64 [rows, length]: each word is followed by one of three, with .6, .3 and .1."""
    table = torch.randint(3, V, (V, 3), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    out = torch.randint(3, V, (rows, length), generator=generator)
    for t in range(1, length):
        which = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), rows, replacement=True, generator=generator)
        out[:, t] = table[out[:, t - 1], which]
    return out


@pytest.fixture(scope="session", params=["Llama", "Qwen3"])
def tiny(request, tmp_path_factory):
    """A tiny target that has learned the language, an EAGLE-3 draft trained on its answers, and prompts."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param, **SHAPE)
    teach(model)
    target = load_target(str(save(folder / "target", model, make_tokenizer())), dtype="float32")
    prompts = language(24, 8, 5).tolist()
    options = {"max_new_tokens": 56, "stop_ids": (), "sampling": Sampling(temperature=1.0)}
    texts = torch.tensor(
        [p + g.tokens for p, g in zip(prompts, generate(target, prompts, **options).generations, strict=True)]
    )
    mask = torch.ones_like(texts, dtype=torch.bool)
    mask[:, :8] = False
    draft = random_draft(target)
    rms = features_of(target, texts[:, 1:]).square().mean((0, 1)).sqrt()
    final = target.head().normed(target.hidden_states(texts, None, [target.num_layers])[target.num_layers])
    draft.initialise(rms, final.square().mean((0, 1)).sqrt())
    batch = make_batch(target, texts, mask, LAYERS)
    draft.calibrate(batch)
    losses = train(draft, batch, 80)
    assert losses[-1] < 0.7 * losses[0]
    save_draft(draft, target, folder / "draft", torch.float32)
    export_draft(folder / "draft", target, folder / "export", torch.float32, k=3)
    return SimpleNamespace(target=target, export=folder / "export", prompts=language(8, 8, 6).tolist())


def teach(model, updates: int = 200) -> None:
    """Next-word training on the language."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(updates):
        ids = language(16, 32, 100 + step)
        loss = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 2.5, f"the tiny target has not learned its language: {loss:.2f} nats"
    model.eval()
