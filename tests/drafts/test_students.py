"""Students cut from a target: the layers chosen, what they compute, what trains and what is shared, and that they load
again; siblings from a folder.
"""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

from drafttrain.drafts.adapters import add_adapters
from drafttrain.drafts.base import DraftError
from drafttrain.drafts.kd import KdDraft
from drafttrain.drafts.student_parts import body_names, set_trained
from drafttrain.drafts.students import (
    build_student,
    check_kept,
    check_student,
    choose_layers,
    kept_layers,
    layer_influence,
    merged,
    run_student,
    student_kind,
)
from drafttrain.recipe import DraftConfig, LoraConfig
from drafttrain.target import Target, find_decoder, load_target
from tests.tiny_drafts import make_target
from tests.tiny_models import FAMILIES, N, V, make_model, make_tokenizer, save, tokens

KEPT = [0, 2, 5, 7]
ROWS = [tokens(1, 9)[0].tolist(), tokens(1, 30)[0].tolist(), [5]]
ATTENTION = {"Llama": {"attn_implementation": "sdpa"}, "Gemma3": {"attn_implementation": "sdpa"}}
SOME = ["Llama", "Qwen3", "Gemma2", "Gemma3"]


def pruned(target, **settings):
    chosen = DraftConfig(student="pruned", **{"keep_layers": KEPT} | settings)
    return build_student(chosen, target, chosen.keep_layers)


def by_hand(target, input_ids, layers):
    """Logits of the target run layer by layer, the others passed over: their output is replaced by their input."""
    handles = [
        layer.register_forward_hook(
            lambda module, args, kwargs, output: args[0] if args else kwargs["hidden_states"], with_kwargs=True
        )
        for i, layer in enumerate(target.layers)
        if i not in layers
    ]
    with torch.no_grad():
        logits = target.model(input_ids=input_ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def is_body(name):
    return ".layers." in name or name.endswith("model.norm.weight")


@pytest.mark.parametrize(
    ("count", "expected"), [(2, [0, 7]), (3, [0, 4, 7]), (4, [0, 2, 5, 7]), (6, [0, 1, 3, 4, 6, 7]), (8, [*range(8)])]
)
def test_even_layers_are_spread_from_the_first_to_the_last(count, expected):
    assert choose_layers(make_target(), count, "even") == expected


def test_influence_is_one_minus_the_mean_cosine_of_all_tokens_but_the_first():
    target = make_target("Gemma3")
    cosines = torch.zeros(N)
    count = 0
    for row in ROWS[:2]:
        with torch.no_grad(), target.capture(range(N + 1)) as states:
            target.model(torch.tensor([row]))
        for i in range(N):
            a, b = states[i][0, 1:], states[i + 1][0, 1:]
            cosines[i] += ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).sum()
        count += len(row) - 1
    assert torch.allclose(torch.tensor(layer_influence(target, ROWS)), 1 - cosines / count, atol=1e-5)


def test_importance_keeps_both_ends_and_leaves_out_a_layer_that_does_nothing():
    target = make_target()
    with torch.no_grad():
        for i in (0, 3, 4, 7):
            target.layers[i].self_attn.o_proj.weight.zero_()
            target.layers[i].mlp.down_proj.weight.zero_()
    assert layer_influence(target, ROWS)[3] == pytest.approx(0, abs=1e-6)
    assert choose_layers(target, 6, "importance", ROWS) == [0, 1, 2, 5, 6, 7]
    influence = layer_influence(target, ROWS)
    best = max((1, 2, 5, 6), key=lambda i: influence[i])
    assert choose_layers(target, 3, "importance", ROWS) == [0, best, 7]
    assert choose_layers(target, 2, "importance", ROWS) == [0, 7]


def test_influence_takes_rows_from_all_over_up_to_its_budget(monkeypatch):
    target = make_target()
    seen = []
    rows = [[i % V, 7, 8] for i in range(50)]
    real = Target.hidden_states
    monkeypatch.setattr(Target, "hidden_states", lambda *a: (seen.append(int(a[1][0, 0])), real(*a))[1])
    monkeypatch.setattr("drafttrain.drafts.students.PROBE_TOKENS", 10)
    layer_influence(target, rows)
    assert seen == [0, 12, 24, 37, 49]  # 5 rows of 2 tokens beyond the first.


@pytest.mark.parametrize(
    ("count", "words"), [(0, "pruning away all layers.*2..8"), (1, "keeps 1 layers.*first and the last"), (9, "2..8")]
)
def test_counts_that_cannot_be_are_refused(count, words):
    with pytest.raises(DraftError, match=words):
        choose_layers(make_target(), count, "even")


def test_a_target_of_one_layer_keeps_it():
    assert choose_layers(make_target(num_hidden_layers=1), 1, "even") == [0]


@pytest.mark.parametrize("rows", [(), [[3]]])
def test_importance_without_tokens_is_refused(rows):
    with pytest.raises(DraftError, match="choose_layers: even"):
        choose_layers(make_target(), 4, "importance", rows)


@pytest.mark.parametrize("layers", [[], [0], [7, 0], [0, 3, 3, 7], [1, 7], [0, 6], [0, 8], [-1, 0, 7]])
def test_layers_to_keep_are_checked(layers):
    with pytest.raises(DraftError, match=r"keep_layers: \[0, .*7\]"):
        check_kept(layers, N)
    assert check_kept((0, 3, 7), N) == [0, 3, 7]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_student_is_the_target_without_the_other_layers_and_loads_again(family, tmp_path):
    target = make_target(family)
    before = by_hand(target, tokens(), range(N))
    student = pruned(target)
    expected = by_hand(target, tokens(), KEPT)
    with torch.no_grad():
        assert torch.allclose(student(input_ids=tokens()).logits, expected, atol=1e-4)
        head = student.get_output_embeddings()
        normed = run_student(student, tokens())
        wanted = target.head().logits(normed)
    assert torch.allclose(wanted, expected, atol=1e-4)
    assert head.in_features == normed.shape[-1]
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(again) is type(target.model)
    assert again.config.num_hidden_layers == 4
    with torch.no_grad():
        assert torch.allclose(again(input_ids=tokens()).logits, expected, atol=1e-4)
    assert torch.equal(by_hand(target, tokens(), range(N)), before)


@pytest.mark.parametrize("family", SOME)
def test_the_layers_train_and_the_tables_are_the_targets_own(family):
    target = make_target(family)
    student = pruned(target)
    head, embedding = student.get_output_embeddings(), student.get_input_embeddings()
    assert embedding.weight.data_ptr() == target.embed_weight.data_ptr()
    assert head.weight.data_ptr() == target.lm_head_weight.data_ptr()
    assert embedding.weight is not target.embed_weight  # Casting or training one leaves the other alone.
    assert (head.weight is embedding.weight) == (target.lm_head_weight is target.embed_weight)
    assert trained(student) == {name for name, _ in student.named_parameters() if is_body(name)}
    theirs = {p.data_ptr() for p in target.model.parameters()}
    for parameter in student.parameters():
        assert parameter.dtype == torch.float32
        assert (parameter.data_ptr() in theirs) != parameter.requires_grad
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_tables_train_as_fp32_copies_when_asked_for(family):
    target = make_target(family)
    student = pruned(target, train_embeddings=True)
    assert trained(student) == {name for name, _ in student.named_parameters()}
    embedding, head = student.get_input_embeddings().weight, student.get_output_embeddings().weight
    assert embedding.data_ptr() != target.embed_weight.data_ptr()
    assert (head is embedding) == (family == "Qwen3")
    run_student(student, tokens()).sum().backward()
    assert embedding.grad.abs().sum() > 0


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("autocast", [False, True])
def test_frozen_bf16_tables_under_fp32_layers_run_and_train(family, autocast):
    target = Target.from_model(make_model(family, **ATTENTION.get(family, {})).to(torch.bfloat16))
    student = pruned(target)
    assert {p.dtype for p in student.parameters() if p.requires_grad} == {torch.float32}
    assert student.get_input_embeddings().weight.data_ptr() == target.embed_weight.data_ptr()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        states = run_student(student, tokens())
    states.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in student.parameters() if p.requires_grad)
    wide = make_model(family, **ATTENTION.get(family, {})).to(torch.bfloat16).float()
    embedded = target.decoder.embed_tokens(tokens()).float()
    exact = pruned(Target.from_model(wide)).model(inputs_embeds=embedded).last_hidden_state.detach()
    assert F.cosine_similarity(states.detach().float(), exact, dim=-1).min() > (0.99 if autocast else 0.999999)


def test_what_to_keep_may_be_given_in_three_ways():
    target = make_target()
    explicit = build_student(DraftConfig(), target, [0, 1, 7])
    assert torch.equal(explicit.model.layers[1].mlp.up_proj.weight, target.layers[1].mlp.up_proj.weight)
    assert kept_layers(DraftConfig(keep_layers=[0, 1, 7]), target) == [0, 1, 7]
    assert kept_layers(DraftConfig(num_hidden_layers=3, choose_layers="even"), target) == [0, 4, 7]
    assert kept_layers(DraftConfig(num_hidden_layers=3), target, ROWS) == choose_layers(target, 3, "importance", ROWS)
    assert kept_layers(DraftConfig(), target, ROWS) == [0, 7]
    with pytest.raises(DraftError, match="pruning away all layers"):
        build_student(DraftConfig(), target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 9}, "keeps 9 layers"),
        ({"keep_layers": [1, 2]}, "first and the"),
        ({"lora": {"target_modules": ["c_attn"]}}, "names c_attn"),
        ({"student": "fresh", "hidden_size": 64}, "the target's 32"),
    ],
)
def test_a_student_that_cannot_be_is_known_before_it_is_built(settings, message):
    with pytest.raises(DraftError, match=message):
        check_student(DraftConfig(**settings), make_target())


def test_a_wrappers_own_word_on_tied_tables_does_not_count(tmp_path):
    """transformers ties by the wrapper's entry; the text model's may say the opposite."""
    target = wrapper()
    head = target.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * 0.5)
    target.model.config.tie_word_embeddings = False
    target = Target.from_model(target.model)
    assert target.config.tie_word_embeddings
    for student in (pruned(target), build_student(DraftConfig(student="fresh", hidden_size=16), target)):
        assert not student.config.tie_word_embeddings
        student.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert torch.equal(again.get_output_embeddings().weight, student.get_output_embeddings().weight)
        assert not torch.equal(again.get_output_embeddings().weight, again.get_input_embeddings().weight)


def test_quantised_weights_are_not_trained():
    model = make_model("Llama")
    layer = model.model.layers[2].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(DraftError, match=r"layers.2.mlp.up_proj.weight is stored as float8_e4m3fn"):
        set_trained(model, body_names(model))
    with pytest.raises(DraftError, match=r"layers.2.mlp.up_proj.weight is stored as float8_e4m3fn"):
        merged(model, torch.bfloat16)  # Its codes would be taken for weights.
    adapted = add_adapters(model, LoraConfig(r=2, target_modules=["up_proj"]))
    with pytest.raises(DraftError, match="stored as float8_e4m3fn"):
        merged(adapted)


def test_a_quantised_targets_settings_do_not_stick_to_plain_students(tmp_path):
    target = make_target()
    target.model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    target = Target.from_model(target.model, make_tokenizer(), "quantised")
    for settings, layers in (({}, KEPT), ({"student": "fresh", "hidden_size": 16}, None)):
        student = build_student(DraftConfig(**settings), target, layers)
        plain = KdDraft(student, name="small").attach(target).plain_model(torch.float32)
        plain.save_pretrained(tmp_path)
        assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert target.model.config.quantization_config  # The target's own stays.


def test_layers_of_several_makes_are_refused():
    target = make_target("Qwen3Moe", mlp_only_layers=[1])
    with pytest.raises(DraftError, match="several makes"):
        pruned(target, keep_layers=[0, 2, 7])


def wrapper():
    torch.manual_seed(0)
    text = make_model("Gemma3").config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    return Target.from_model(transformers.Gemma3ForConditionalGeneration(config))


def test_a_multimodal_wrapper_yields_a_text_model(tmp_path):
    target = wrapper()
    student = pruned(target)
    assert type(student).__name__ == "Gemma3ForCausalLM"
    expected = by_hand(target, tokens(), KEPT)
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(student(input_ids=tokens()).logits, expected, atol=1e-4)
        assert torch.allclose(again(input_ids=tokens()).logits, expected, atol=1e-4)
    assert student.get_input_embeddings().weight.data_ptr() == target.embed_weight.data_ptr()


@pytest.fixture(scope="module")
def sibling(tmp_path_factory):
    """A smaller model of 120 rows and the tokenizer of the tiny targets, in a folder."""
    model = make_model("Qwen3", hidden_size=16, num_hidden_layers=4, vocab_size=120)
    return save(tmp_path_factory.mktemp("sibling"), model)


def test_a_sibling_trains_whole_with_the_targets_vocabulary(sibling):
    target = make_target("Llama", make_tokenizer())
    student = build_student(DraftConfig(init_from=str(sibling)), target)
    assert student.config.vocab_size == V == len(student.get_input_embeddings().weight)
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight
    assert trained(student) == {name for name, _ in student.named_parameters()}
    expected = load_target(str(sibling), dtype="float32").model(tokens()).logits[..., :V]
    assert torch.allclose(student(tokens()).logits, expected, atol=1e-5)


def test_a_sibling_can_keep_its_tables_frozen(sibling):
    target = make_target("Llama", make_tokenizer())
    student = build_student(DraftConfig(init_from=str(sibling), train_embeddings=False), target)
    assert trained(student) == {name for name, _ in student.named_parameters() if is_body(name)}


def test_a_sibling_of_another_tokenizer_or_none_is_refused(sibling, tmp_path):
    other = make_target("Llama", make_tokenizer(specials=("<pad>", "<bos>", "<eos>", "<end>")))
    with pytest.raises(DraftError, match=r"id 3 is '<\|im_end\|>' in the draft and '<end>' in the target"):
        build_student(DraftConfig(init_from=str(sibling)), other)
    with pytest.raises(DraftError, match="another tokenizer"):
        check_student(DraftConfig(init_from=str(sibling)), other)
    with pytest.raises(DraftError, match="draft.init_from is not given"):
        build_student(DraftConfig(student="sibling"), other)


def test_the_kind_follows_from_what_is_given():
    assert student_kind(DraftConfig()) == "pruned"
    assert student_kind(DraftConfig(init_from="x")) == "sibling"
    assert student_kind(DraftConfig(student="fresh")) == "fresh"


@pytest.mark.parametrize("family", SOME)
def test_adapters_on_a_pruned_student_leave_all_else_the_targets(family):
    target = make_target(family)
    student = pruned(target, lora=LoraConfig(r=2))
    theirs = {p.data_ptr() for p in target.model.parameters()}
    for name, parameter in student.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        assert (parameter.data_ptr() in theirs) != parameter.requires_grad
    assert trained(student)
    with torch.no_grad():
        assert torch.allclose(student(tokens()).logits, by_hand(target, tokens(), KEPT), atol=1e-4)
    decoder, _ = find_decoder(student)
    assert len(decoder.layers) == 4
