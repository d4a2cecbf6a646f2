"""Settings that contradict the method or each other end in one line that names the key."""

import pytest

from drafttrain.recipe import RecipeError, load_recipe, parse_recipe, save_recipe

DATA = {"train": [{"path": "a.jsonl"}]}


def lines_of(method: str, **sections) -> list[str]:
    data = {**DATA, **sections.pop("data", {})}
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"method": method, "target": "x/y", "data": data, **sections})
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("method", "sections", "key"),
    [
        ("eagle3", {"draft": {"head_dim": 7}}, "draft.head_dim"),
        ("eagle3", {"draft": {"student": "pruned"}}, "draft.student"),
        (
            "eagle3",
            {"draft": {"norm_before_residual": True}, "export": {"engine": "sglang"}},
            "draft.norm_before_residual",
        ),
        ("eagle3", {"draft": {"num_hidden_layers": 2}, "export": {"engine": "sglang"}}, "draft.num_hidden_layers"),
        ("eagle3", {"draft": {"sliding_window": 64}, "export": {"engine": "tensorrt-llm"}}, "draft.sliding_window"),
        ("eagle3", {"draft": {"train_embeddings": True}, "export": {"engine": "sglang"}}, "draft.train_embeddings"),
        ("eagle3", {"draft": {"fc_norm": True}, "export": {"engine": "llama.cpp"}}, "draft.fc_norm"),
        ("eagle3", {"draft": {"norm_output": True}, "export": {"engine": "llama.cpp"}}, "draft.norm_output"),
        ("eagle3", {"features": {"layers": [2, 5]}, "export": {"engine": "llama.cpp"}}, "features.layers"),
        ("eagle3", {"features": {"layers": [0, 2, 5]}, "export": {"engine": "sglang"}}, "features.layers"),
        ("eagle3", {"draft": {"lora": {}}}, "draft.lora"),
        ("eagle3", {"training": {"temperature": 2.0}}, "training.temperature"),
        ("eagle3", {"training": {"on_policy": {}}}, "training.on_policy"),
        ("eagle3", {"training": {"loss": "next_token"}}, "training.loss"),
        ("eagle3", {"training": {"loss": {"forward_kl": 0.5, "next_token": 0.5}}}, "training.loss"),
        ("eagle3", {"features": {"source": "topk"}}, "features.source"),
        ("eagle3", {"evaluation": {"quantize": "int8"}}, "evaluation.quantize"),
        ("eagle3", {"draft": {"num_heads": 4}}, "draft.num_heads"),
        ("eagle3", {"draft": {"own_heads": True}}, "draft.own_heads"),
        ("eagle3", {"draft": {"sequential": True}}, "draft.sequential"),
        ("medusa", {"draft": {"hidden_size": 64}}, "draft.hidden_size"),
        ("medusa", {"draft": {"head_dim": 8}}, "draft.head_dim"),
        ("medusa", {"draft": {"norm_before_residual": True}}, "draft.norm_before_residual"),
        ("medusa", {"draft": {"init_from": "a/b"}}, "draft.init_from"),
        ("medusa", {"draft": {"fc_norm": True}}, "draft.fc_norm"),
        ("medusa", {"draft": {"train_embeddings": True}}, "draft.train_embeddings"),
        ("kd", {"draft": {"norm_output": True}}, "draft.norm_output"),
        ("kd", {"draft": {"sliding_window": 64}}, "draft.sliding_window"),
        ("medusa", {"draft": {"student": "pruned"}}, "draft.student"),
        ("medusa", {"draft": {"own_heads": True}, "data": {"draft_vocab": 4096}}, "draft.own_heads"),
        ("medusa", {"training": {"ttt_steps": 3}}, "training.ttt_steps"),
        ("medusa", {"training": {"temperature": 2.0}}, "training.temperature"),
        ("medusa", {"training": {"on_policy": {}}}, "training.on_policy"),
        ("medusa", {"training": {"loss": "next_token"}}, "training.loss"),
        ("medusa", {"features": {"layers": [2, 4, 5]}}, "features.layers"),
        ("medusa", {"features": {"source": "topk"}}, "features.source"),
        ("medusa", {"evaluation": {"tree": {}}}, "evaluation.tree"),
        ("medusa", {"evaluation": {"quantize": "int8"}}, "evaluation.quantize"),
        ("medusa", {"export": {"engine": "sglang"}}, "export.engine"),
        ("medusa", {"export": {"engine": "llama.cpp"}}, "export.engine"),
        ("medusa", {"export": {"engine": "tensorrt-llm"}}, "export.engine"),
        (
            "medusa",
            {"export": {"engine": "tensorrt-llm"}, "data": {"draft_vocab": None}, "draft": {"sequential": True}},
            "export.engine",
        ),
        ("kd", {"draft": {"num_heads": 4}}, "draft.num_heads"),
        ("kd", {"draft": {"own_heads": True}}, "draft.own_heads"),
        ("kd", {"draft": {"sequential": True}}, "draft.sequential"),
        ("kd", {"features": {"layers": [2, 4, 5]}}, "features.layers"),
        ("kd", {"training": {"ttt_steps": 3}}, "training.ttt_steps"),
        ("kd", {"training": {"step_decay": 0.5}}, "training.step_decay"),
        ("kd", {"draft": {"norm_before_residual": True}}, "draft.norm_before_residual"),
        ("kd", {"evaluation": {"tree": {}}}, "evaluation.tree"),
        ("kd", {"training": {"temperature": 2.0}, "data": {"draft_vocab": 8000}}, "training.temperature"),
        ("kd", {"training": {"temperature": 2.0}, "features": {"source": "topk"}}, "training.temperature"),
        ("kd", {"training": {"on_policy": {}, "loss": "next_token"}}, "training.on_policy"),
        ("kd", {"draft": {"student": "sibling"}}, "draft.init_from"),
        ("kd", {"draft": {"student": "pruned", "init_from": "a/b"}}, "draft.init_from"),
        ("kd", {"draft": {"keep_layers": [0, 5], "num_hidden_layers": 2}}, "draft.keep_layers"),
        ("kd", {"draft": {"student": "fresh"}}, "draft.hidden_size"),
        ("kd", {"draft": {"student": "fresh", "hidden_size": 64, "keep_layers": [0, 1]}}, "draft.keep_layers"),
        ("kd", {"draft": {"student": "fresh", "hidden_size": 64, "lora": {}}}, "draft.lora"),
        ("kd", {"draft": {"hidden_size": 64}}, "draft.hidden_size"),
        ("kd", {"draft": {"student": "fresh", "hidden_size": 64, "choose_layers": "even"}}, "draft.choose_layers"),
        ("kd", {"draft": {"init_from": "a/b", "num_hidden_layers": 2}}, "draft.num_hidden_layers"),
        ("kd", {"draft": {"init_from": "a/b", "keep_layers": [0, 5]}}, "draft.keep_layers"),
        ("kd", {"draft": {"keep_layers": [0, 5], "choose_layers": "even"}}, "draft.choose_layers"),
        ("kd", {"features": {"top_k": 8}}, "features.top_k"),
        ("kd", {"export": {"engine": "tensorrt-llm"}}, "export.engine"),
        ("eagle3", {"export": {"engine": "transformers"}}, "export.engine"),
        ("kd", {"draft": {"init_from": "a/b", "lora": {}, "train_embeddings": True}}, "draft.train_embeddings"),
    ],
)
def test_a_contradiction_is_one_line_with_its_key(method, sections, key) -> None:
    (line,) = lines_of(method, **sections)
    assert line.startswith(f"{key}: ")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"draft": {"num_heads": 5, "num_hidden_layers": 2, "sequential": True}},
        {"draft": {"own_heads": True}, "data": {"draft_vocab": None}},
        {"training": {"step_decay": 0.7, "loss": "cross_entropy"}},
        {"evaluation": {"tree": {"paths": [[0], [1], [0, 0]]}}},
        {"export": {"engine": "tensorrt-llm"}, "data": {"draft_vocab": None}},
    ],
)
def test_what_medusa_heads_may_be(sections) -> None:
    data = {**DATA, **sections.pop("data", {})}
    assert parse_recipe({"method": "medusa", "target": "x/y", "data": data, **sections}).method == "medusa"


@pytest.mark.parametrize(
    "sections",
    [
        {"draft": {"num_hidden_layers": 3, "sliding_window": 8, "fc_norm": True, "norm_output": True}},
        {"draft": {"hidden_size": 64, "train_embeddings": True}, "export": {"engine": "sglang"}},
        {"draft": {"fc_norm": True, "norm_output": True}, "export": {"engine": "sglang"}},
        {"draft": {"norm_before_residual": True}, "export": {"engine": "llama.cpp"}},
        {"draft": {"init_from": "a/b", "train_embeddings": False}, "features": {"layers": [5]}},
        {"features": {"layers": [1, 2, 3, 5]}, "export": {"engine": "tensorrt-llm"}},
    ],
)
def test_what_an_eagle3_draft_may_be(sections) -> None:
    assert parse_recipe({"method": "eagle3", "target": "x/y", "data": DATA, **sections}).method == "eagle3"


@pytest.mark.parametrize(("key", "value"), [("sliding_window", 0), ("num_hidden_layers", 0), ("fc_norm", 3)])
def test_a_value_that_is_none_of_an_eagle3_draft(key, value) -> None:
    (line,) = lines_of("eagle3", draft={key: value})
    assert line.startswith(f"draft.{key}: ")


def test_all_contradictions_are_told_at_once() -> None:
    lines = lines_of("kd", draft={"student": "fresh", "init_from": "a/b"}, training={"ttt_steps": 3})
    assert [line.split(":")[0] for line in lines] == ["training.ttt_steps", "draft.init_from", "draft.hidden_size"]


def test_a_saved_recipe_of_each_method_loads_again(tmp_path) -> None:
    for method in ("eagle3", "medusa", "kd"):
        recipe = parse_recipe({"method": method, "target": "x/y", "data": DATA})
        save_recipe(recipe, tmp_path / "recipe.yaml")
        assert load_recipe(tmp_path / "recipe.yaml").model_dump()["draft"] == recipe.model_dump()["draft"]


def test_small_models_keep_the_whole_vocabulary_unless_asked() -> None:
    def size(method, **data):
        return parse_recipe({"method": method, "target": "x/y", "data": {**DATA, **data}}).data.draft_vocab

    assert size("kd") is None
    assert size("kd", draft_vocab=4096) == 4096
    assert size("eagle3") == size("medusa") == 32000
    own = {"method": "medusa", "target": "x/y", "data": DATA, "draft": {"own_heads": True}}
    assert parse_recipe(own).data.draft_vocab is None
