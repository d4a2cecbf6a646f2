"""Tiny runs of each kind of draft that are in good health: chat data, answered by the target itself, trained for
seconds until most drafts are accepted.
"""

import atexit
import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import datasets
from safetensors.torch import load_file, save_file

from drafttrain.data.files import replace_folder
from drafttrain.data.prepare import prepared_rows
from drafttrain.data.run_folder import RunFolder
from drafttrain.doctor import diagnose
from drafttrain.doctor_case import Result
from drafttrain.recipe import Recipe, parse_recipe
from drafttrain.target import Target
from drafttrain.training.run import train
from tests.tiny_models import make_model, make_tokenizer, save
from tests.training.tiny_run import make_target, open_run, prompt_rows, settings, write_rows

SPECIALS = ("<pad>", "<bos>", "<eos>", "<|im_end|>", "<|im_start|>", "user", "assistant", "<think>", "</think>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|> ' + m.role + ' ' + m.content + ' <|im_end|> ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
)
POSITIONS = 256
METHODS = {
    "eagle3": {"max_steps": 90, "learning_rate": 1e-2, "ttt_steps": 4},
    "medusa": {"max_steps": 90, "learning_rate": 2e-2},
    "kd": {"max_steps": 90, "learning_rate": 5e-3},
}


def chat_tokenizer(template: str = TEMPLATE):
    tokenizer = make_tokenizer(85, SPECIALS)
    tokenizer.chat_template = template
    return tokenizer


def write_chat_target(folder: Path, template: str = TEMPLATE, family: str = "Llama", **changes) -> Path:
    model = make_model(family, **{"max_position_embeddings": POSITIONS} | changes)
    return save(folder, model, chat_tokenizer(template))


def chat_recipe(folder: Path, method: str = "eagle3", **changes) -> Recipe:
    """A recipe on answers of the target to twelve prompts, which the other splits repeat: what was learned by heart is
    accepted, the first choices above all (cross_entropy: the tiny target is sure of nothing). changes: of the
    training settings.
    """
    if not (folder / "target").exists():
        write_chat_target(folder / "target")
        for split, count in (("train", 12), ("validation", 6), ("test", 8)):
            write_rows(folder / f"{split}.jsonl", prompt_rows(count, seed=1))
    values = settings(
        folder,
        select_by="loss",
        **{"max_tokens_per_batch": 1024, "eval_steps": 1000, "save_steps": 1000, "logging_steps": 50},
    )
    values["training"] |= {"num_train_epochs": 1000, "loss": "cross_entropy"} | METHODS[method] | changes
    if method != "eagle3":
        values["training"].pop("ttt_steps")
    values["method"] = method
    values["data"]["regenerate"] = {"max_new_tokens": 40}
    values["data"]["draft_vocab"] = 90 if method == "eagle3" else None
    values["evaluation"] = {"k": [3], "max_new_tokens": 24}
    values["features"]["source"] = "store"
    draft = {
        "eagle3": {},
        "medusa": {"num_heads": 3, "own_heads": True, "tree_nodes": 0},
        "kd": {"num_hidden_layers": 4},
    }[method]
    return parse_recipe(values | {"draft": draft}, folder)


def healthy(folder: Path, method: str = "eagle3", **changes) -> RunFolder:
    """A trained run in folder/run."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = chat_recipe(folder, method, **changes)
    run = open_run(folder / "run", recipe)
    train(recipe, run, make_target(recipe), say=lambda message: None)
    return run


@lru_cache(maxsize=4)
def healthy_run(method: str = "eagle3") -> Path:
    """The folder that holds a healthy run, made once in a process and not to be changed: copy it (`copied`)."""
    folder = Path(tempfile.mkdtemp(prefix=f"doctor-{method}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    healthy(folder, method)
    return folder


def copied(folder: Path, method: str = "eagle3") -> RunFolder:
    """A copy of a healthy run to plant a fault in; its target and data stay where they are."""
    shutil.copytree(healthy_run(method) / "run", folder / "run")
    return RunFolder(folder / "run")


def examine(run: RunFolder, only: str, target: Target | None = None, samples: int = 4) -> Result:
    """The result of one check."""
    recipe = run.recipe()
    found = diagnose(run.path, target or make_target(recipe), recipe, only=[only], samples=samples, say=quiet)
    return found.results[only]


def fails(result: Result, *parts: str) -> Result:
    """It failed, has a mend, and its first line of evidence holds all parts."""
    assert result.status == "FAIL", result
    assert result.mend
    for part in parts:
        assert part in result.evidence[0], result.evidence
    return result


def quiet(message: str) -> None:
    pass


def edit(path: Path, **changes) -> None:
    """Change values of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def rewrite(run: RunFolder, split: str, change) -> None:
    """Prepared rows of a split, each changed in place."""
    rows = [dict(row) for row in prepared_rows(run, split)]
    for row in rows:
        change(row)
    names = ("input_ids", "loss_mask", "source", "domain")
    whole = datasets.Dataset.from_list([{name: row[name] for name in names} for row in rows])
    replace_folder(run.prepared / split, lambda path: whole.save_to_disk(path))


def retensor(path: Path, change) -> None:
    """A safetensors file with its tensors changed in place by `change` of the dict."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
