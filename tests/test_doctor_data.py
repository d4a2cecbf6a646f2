"""Faults planted in what a draft learned from, or in where it is used: each is named by its check."""

import shutil

import yaml
from safetensors.torch import load_file

from drafttrain.data.chat_template import Chat
from drafttrain.data.prepare import prepared_rows
from drafttrain.doctor_data import header_ids
from drafttrain.target import load_target
from tests.tiny_doctor import TEMPLATE, copied, edit, examine, fails, healthy_run, retensor, rewrite
from tests.tiny_models import V
from tests.training.tiny_run import make_target, write_rows

BOS, HEADER = 1, "<|im_end|><|im_start|>assistant"


def settings_of(run, **changes) -> None:
    """Change dotted keys of the run's recipe."""
    values = yaml.safe_load(run.recipe_file.read_text())
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = values
        for section in sections:
            place = place[section]
        place[key] = value
    run.recipe_file.write_text(yaml.safe_dump(values))


def other_template(folder, template: str):
    """The run's target with another chat template."""
    shutil.copytree(healthy_run() / "target", folder / "other")
    (folder / "other" / "chat_template.jinja").write_text(template)
    return load_target(str(folder / "other"))


# template


def test_a_doubled_bos_is_named_with_its_row(tmp_path):
    run = copied(tmp_path)

    def double(row):
        row["input_ids"], row["loss_mask"] = [BOS, *row["input_ids"]], [0, *row["loss_mask"]]

    rewrite(run, "train", double)
    result = fails(examine(run, "template"), "BOS doubled in 12 of 18 rows", "train.jsonl:1", "'<bos>' twice")
    assert any("come out otherwise" in line for line in result.evidence)


def test_a_supervised_header_is_named_with_its_position(tmp_path):
    run = copied(tmp_path)
    tokenizer = make_target(run.recipe()).tokenizer
    header = header_ids(tokenizer, Chat())
    assert tokenizer.decode(header) == HEADER

    def supervise(row):
        start = row["loss_mask"].index(1) - 2
        assert row["input_ids"][start : start + 2] == header[1:]
        row["loss_mask"][start : start + 2] = [1, 1]

    rewrite(run, "train", supervise)
    result = fails(examine(run, "template"), HEADER, "is supervised in 12 of 18 rows")
    assert "'<|im_start|>assistant'" in result.evidence[0]


def test_supervised_prompts_are_named_with_their_text(tmp_path):
    run = copied(tmp_path)

    def supervise(row):
        row["loss_mask"] = [1] * len(row["loss_mask"])

    rewrite(run, "train", supervise)
    lines = fails(examine(run, "template"), "is supervised").evidence
    assert any(
        "the user's text is supervised in 12 of 18 rows" in line and "<|im_start|>user" in line for line in lines
    )
    result = fails(examine(run, "mask"), "the prompts too", "100.0%")
    assert result.numbers["shares"]["train"] == 1.0


def test_another_template_than_at_preparing_is_named_with_the_first_difference(tmp_path):
    run = copied(tmp_path)
    target = other_template(tmp_path, TEMPLATE.replace("' + m.role + '", "w7 ' + m.role + '"))
    result = fails(examine(run, "template", target), "template is another than at training")
    assert any("train.jsonl:1 position 2: prepared 'user', now 'w7'" in line for line in result.evidence)


def test_rows_without_the_template_of_evaluation_are_named(tmp_path):
    run = copied(tmp_path)

    def bare(row):
        first = row["loss_mask"].index(1)
        keep = [i for i in range(len(row["input_ids"])) if i == 0 or 2 < i < first - 3 or i >= first]
        for name in ("input_ids", "loss_mask"):
            row[name] = [row[name][i] for i in keep]

    rewrite(run, "train", bare)
    rewrite(run, "validation", bare)
    lines = fails(examine(run, "template")).evidence
    assert any(
        "two templates" in line and "100.0% of the evaluation" in line and "0.0% of the tr" in line for line in lines
    )


# mask


def test_too_few_and_unlike_supervised_shares_are_named(tmp_path):
    run = copied(tmp_path)

    def thin(row):
        row["loss_mask"] = [0] * (len(row["loss_mask"]) - 1) + [1]

    rewrite(run, "train", thin)
    result = fails(examine(run, "mask"), "train: only", "supervised")
    assert any("far apart" in line and "in validation" in line for line in result.evidence)


def test_dropped_conversations_are_named_with_the_reason(tmp_path):
    run = copied(tmp_path)
    audit = {"conversations": 20, "dropped": {"no supervised token within max_length": 8}, "unsupervised_stop": 0}
    edit(run.prepared / "manifest.json", audit={"train": audit})
    fails(examine(run, "mask"), "8 of 20 conversations were dropped", "within max_length")


# thinking


def test_a_target_that_thinks_now_and_did_not_in_training_is_named(tmp_path):
    run = copied(tmp_path)
    target = other_template(tmp_path, TEMPLATE.replace("assistant '", "assistant <think> '"))
    result = fails(examine(run, "thinking", target), "missing from the training data")
    assert result.numbers["now"] == 1.0 and result.numbers["training"] < 0.5
    assert "the template has thinking switch" in result.evidence[-1]


def test_reasoning_in_training_alone_is_named(tmp_path):
    run = copied(tmp_path)

    def think(row):
        first = row["loss_mask"].index(1)
        row["input_ids"][first : first + 3] = [7, 20, 8]  # <think> w11 </think>

    rewrite(run, "train", think)
    fails(examine(run, "thinking"), "does not think now")


def test_other_switches_of_the_template_are_named(tmp_path):
    run = copied(tmp_path)
    edit(run.draft / "drafttrain.json", chat_template_kwargs={"enable_thinking": False})
    fails(examine(run, "thinking"), "enable_thinking", "asked with none")


# drift, context, vocabulary


def test_evaluation_prompts_of_another_kind_are_named(tmp_path):
    run = copied(tmp_path)
    rows = [{"prompt": f"w{i} w{i + 1} " * 12} for i in range(40, 80, 6)]
    settings_of(run, data__test=[{"path": str(write_rows(tmp_path / "other.jsonl", rows))}])
    result = fails(examine(run, "drift"), "of another kind", "on validation rows")
    numbers = result.numbers
    assert numbers["divergence"] > numbers["chance"] + 0.05
    assert numbers["acceptance"]["evaluation"] < 0.8 * numbers["acceptance"]["validation"]


def test_positions_behind_the_trained_length_are_named(tmp_path):
    run = copied(tmp_path)
    settings_of(run, evaluation__max_new_tokens=200)
    result = fails(examine(run, "context"), "behind position", "before it")
    longest = max(map(len, (row["input_ids"] for row in prepared_rows(run, "train"))))
    assert result.numbers["trained"] == longest < result.numbers["served"]
    settings_of(run, evaluation__max_new_tokens=8)
    assert examine(run, "context").status == "PASS"


def test_a_small_model_with_too_few_positions_is_named(tmp_path):
    run = copied(tmp_path, "kd")
    edit(run.draft / "config.json", max_position_embeddings=36)
    fails(examine(run, "context"), "the small model has 36 positions, evaluation reaches 40")


def test_a_draft_vocabulary_that_lacks_what_the_target_writes_is_named(tmp_path):
    run = copied(tmp_path)
    ids = cut_vocabulary(run, lambda token: token < 9 or token % 2)
    result = fails(examine(run, "vocabulary"), "lacks")
    assert any(line.startswith(f"{len(ids)} of {V} words") for line in result.evidence)
    assert any(line.startswith("missing: 'w") for line in result.evidence)
    assert result.numbers["length"] < 0.9 * 5


def cut_vocabulary(run, keep) -> list[int]:
    """Leave only some words in the written draft's vocabulary; returns their ids."""
    path = run.draft / "model.safetensors"
    map_ = load_file(path)["d2t"].long()
    ids = (map_ + map_.new_tensor(range(len(map_)))).tolist()
    kept = [place for place, token in enumerate(ids) if keep(token)]

    def cut(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]
        tensors["d2t"] = map_.new_tensor([ids[place] - i for i, place in enumerate(kept)])
        tensors.pop("t2d", None)

    retensor(path, cut)
    edit(run.draft / "config.json", draft_vocab_size=len(kept))
    return [ids[place] for place in kept]
