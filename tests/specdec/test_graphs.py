"""Static steps, as they are captured under CUDA, run eagerly: equal to the dynamic ones, in the loop too."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drafttrain.drafts.eagle3_static import StaticDraft
from drafttrain.evaluate.runner import evaluate
from drafttrain.nn.cache import RaggedCache
from drafttrain.nn.graphs import Captured, Pool, padded, rounded
from drafttrain.nn.sampling import Sampling
from drafttrain.nn.tree import DynamicTree, StaticTree
from drafttrain.specdec.decode import generate
from drafttrain.specdec.graphs import KEPT, StaticSteps, capture_note
from drafttrain.specdec.policy import Confidence
from drafttrain.target import Target
from tests.specdec.test_trees import WIDE, random_parents
from tests.tiny_drafts import LONG, agreeable_draft, make_draft, make_target
from tests.tiny_models import make_model, tokens

CPU = torch.device("cpu")
PROMPT = tokens(1, 9)[0].tolist()
RAGGED = [PROMPT, tokens(1, 17)[0].tolist(), PROMPT[:2], tokens(1, 5)[0].tolist()]


def steps_of(target, batch=3, smallest=8) -> StaticSteps:
    """Small sizes, so that a short text passes through several."""
    target.captured[batch] = StaticSteps(target, batch, smallest)
    return target.captured[batch]


def test_sizes_by_hand():
    assert [rounded(n, 8) for n in (0, 8, 9, 12, 13, 17, 25, 33, 49)] == [8, 8, 12, 12, 16, 24, 32, 48, 64]
    assert [rounded(n) for n in (1, 257, 400, 600)] == [256, 384, 512, 768]
    assert padded(torch.tensor([[1, 2]]), 4, -1).tolist() == [[1, 2, -1, -1]]


def test_outputs_are_static_and_rows_may_leave():
    double = Captured(lambda x, y: (2 * x, None, x + y), rows=3)
    first, nothing, total = double(CPU, torch.tensor([1.0, 2, 3]), torch.tensor([1, 1, 1]))
    kept = first.clone()
    again, *_ = double(CPU, torch.tensor([5.0, 6]), torch.tensor([1, 1]))
    assert nothing is None and kept.tolist() == [2, 4, 6] and again.tolist() == [10, 12]
    # The first outputs were overwritten; the row that left kept its last inputs.
    assert first.tolist() == [10, 12, 6] and total.tolist() == [6, 7, 4]


def test_a_shared_pool_spoils_what_is_read_too_late():
    pool = Pool(CPU)
    one, two = Captured(lambda x: (x + 1,), 1, pool), Captured(lambda x: (x + 2,), 1, pool)
    (early,) = one(CPU, torch.zeros(1))
    (late,) = two(CPU, torch.zeros(1))
    assert early.isnan().all() and late.tolist() == [2]


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GptOss"])
@pytest.mark.parametrize("tree", [False, True])
def test_static_steps_equal_dynamic_ones(family, tree):
    """Ragged rows, refused tails, a row that leaves, growth: logits, features, hs[n] and positions in fp32."""
    target = make_target(family)
    static, caches = steps_of(target), (None, RaggedCache(3))
    caches = static.begin(10), caches[1]
    lengths = torch.tensor([9, 3, 6])
    for cache in caches:
        target.step(tokens(3, 9), cache, lengths)
        cache.lengths = lengths.clone()
    generator = torch.Generator().manual_seed(5)
    for number in range(6):
        rows = len(caches[0].lengths)
        chunk = torch.randint(3, 99, (rows, 5), generator=generator)
        parents = random_parents(rows, 4, number) if tree else None
        real = torch.full((rows,), 5) if tree else torch.randint(1, 6, (rows,), generator=generator)
        mine = static.step(chunk, caches[0], real, [1, 4], parents, width=8 if tree else None)
        theirs = target.step(chunk, caches[1], real, [1, 4], parents=parents)
        assert torch.equal(mine.positions, theirs.positions) and torch.equal(mine.lengths, theirs.lengths)
        for name in ("logits", "features", "last_hidden"):
            torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-4, atol=1e-4)
        path = torch.tensor([[0, 2, -1], [0, 1, 4], [0, -1, -1]])[:rows]
        if tree:
            static.gather(path)
            caches[1].gather(path)
        for cache in caches:
            cache.lengths = cache.lengths + ((path >= 0).sum(1) if tree else (real + 1) // 2)
        if number == 3:
            for cache in caches:
                cache.keep([2, 0])
    assert static.cache.capacity > 12, "the steps were to outgrow the cache"
    for layer in range(target.num_layers):
        for row in range(2):
            for mine, theirs in zip(caches[0].entries(layer, row), caches[1].entries(layer, row), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.parametrize("tree", [None, WIDE, DynamicTree(3, 9)], ids=str)
def test_decoding_with_static_steps_is_the_same(family, tree):
    """Tokens, finishes, counts and deliveries; rows end at different times; one set of steps serves all runs."""
    target = make_target(family)
    steps_of(target, batch=4)
    proposer = agreeable_draft(target).proposer(target, tree)
    modes = [Sampling(), Sampling(temperature=1.0, top_k=20)]
    if not isinstance(tree, DynamicTree):
        modes.append(Sampling(temperature=1.0, draft_mode="probabilistic"))
    for sampling in modes:
        for hold in (False, True):
            options = {"k": 4, "max_new_tokens": 20, "stop_ids": range(60, 66), "sampling": sampling, "hold": hold}
            for drafting in (proposer, None):
                done = generate(target, RAGGED, drafting, **options)
                static = generate(target, RAGGED, drafting, capture=True, **options)
                assert static.generations == done.generations and static.rounds == done.rounds


def test_policies_that_draft_less_use_narrower_steps():
    target = make_target()
    static, draft = steps_of(target, batch=4), agreeable_draft(target)
    options = {"k": 4, "max_new_tokens": 20, "stop_ids": ()}
    done, again = (
        generate(target, RAGGED, draft.proposer(target), policy=Confidence(0.3), capture=capture, **options)
        for capture in (False, True)
    )
    assert again.generations == done.generations
    assert len({key[0] for key in static._steps}) > 1


@pytest.mark.parametrize("tree", [None, WIDE], ids=str)
def test_nan_from_a_former_request_is_gone(tree):
    """A masked NaN spoils a matrix product: buffers that are used again must not hold any."""
    target = make_target()
    static, proposer = steps_of(target, batch=4), agreeable_draft(target).proposer(target, tree)
    options = {"k": 3, "max_new_tokens": 12, "stop_ids": (), "capture": True}
    before = generate(target, RAGGED, proposer, **options)
    caches = [static.cache, proposer._kept[4].cache]
    for cache in caches:
        for buffer in (*cache._keys.values(), *cache._values.values()):
            buffer.fill_(torch.nan)
    assert generate(target, RAGGED, proposer, **options).generations == before.generations
    # The masks alone do not save a step.
    static.cache._values[0][:, :, static._key(4, (), False)[-1] - 1] = torch.nan
    assert static.step(tokens(4, 4), static.cache).logits.isnan().any()


def test_capturing_is_no_decoding_time_and_happens_once(monkeypatch):
    target = make_target()
    static = steps_of(target, batch=1)
    slow = static._function

    def make(*key):
        torch.ones(300, 300).matrix_exp()  # Whatever capturing costs.
        made.append(key)
        return slow(*key)

    made = []
    monkeypatch.setattr(static, "_function", make)
    options = {"max_new_tokens": 8, "stop_ids": (), "capture": True}
    first = generate(target, [PROMPT], **options)
    assert made == [(1, (), False, 12), (1, (), False, 16), (1, (), False, 24)][: len(made)] and len(made) >= 2
    made.clear()
    generate(target, [PROMPT], **options)
    assert not made and set(vars(first.seconds)) == {"prefill", "begin", "draft", "verify", "rest"}


def test_the_draft_is_ready_before_its_first_round():
    """`reserve` takes every step a request needs, so that none is captured while time is taken."""
    target = make_target()
    draft = agreeable_draft(target)
    for tree in (None, WIDE, DynamicTree(3, 9)):
        proposer = draft.proposer(target, tree)
        proposer._kept[2] = StaticDraft(draft, 2, smallest=64)
        proposer.reserve(2, 100, 4)
        ready = set(proposer._kept[2]._graphs)
        generate(target, RAGGED[:2], proposer, k=4, max_new_tokens=60, stop_ids=(), capture=True)
        used = set(proposer._kept[2]._graphs)
        assert used == ready and {key[-1] for key in used if key[0] != "head"} == {64, 96, 128}


def test_graphs_go_with_the_buffers_whose_addresses_they_hold():
    target = make_target()
    draft = make_draft(target)
    proposer = draft.proposer(target)
    static = steps_of(target, batch=4)
    generate(target, RAGGED, proposer, k=3, max_new_tokens=20, stop_ids=(), capture=True)
    steps, graphs = dict(static._steps), dict(proposer._kept[4]._graphs)
    caches = [static.cache, proposer._kept[4].cache]
    places = [[buffer.data_ptr() for buffer in cache._keys.values()] for cache in caches]
    generate(target, RAGGED, proposer, k=3, max_new_tokens=20, stop_ids=(), capture=True)
    assert [[buffer.data_ptr() for buffer in cache._keys.values()] for cache in caches] == places
    assert static._steps == steps and proposer._kept[4]._graphs == graphs
    static.begin(static.cache.capacity + 1)
    proposer.reserve(4, caches[1].capacity + 1, 3)
    assert not static._steps and not set(graphs.values()) & set(proposer._kept[4]._graphs.values())


def test_a_target_keeps_the_latest_batch_sizes():
    target = make_target()
    for batch in (1, 2, 3, 4, 1, 5):
        StaticSteps.of(target, batch)
    assert list(target.captured) == [3, 4, 1, 5] and KEPT == 4


def test_where_there_are_no_graphs_the_report_says_why():
    target = make_target()
    assert capture_note(target) == "none: cpu"
    report = evaluate(target, [], [PROMPT], ngram=False, max_new_tokens=2, certificate=False)
    assert report["device"]["capture"] == "none: cpu"
    report = evaluate(target, [], [PROMPT], ngram=False, max_new_tokens=2, certificate=False, capture=False)
    assert report["device"]["capture"] == "none: switched off"


class Strict(TorchDispatchMode):
    """Refuses what a capture refuses: whatever waits for the device, and copies between devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), str(func)
        assert not any(word in name for word in ("nonzero", "_local_scalar", "masked_select", "unique")), name
        if name.startswith("aten.index"):
            assert not any(part is not None and part.dtype == torch.bool for part in args[1]), name
        if "copy" in name:
            devices = {part.device for part in (*args, out) if isinstance(part, torch.Tensor)}
            assert len(devices) == 1, f"{name} between {devices}"
        return out


class Unchecked(Target):
    """A target without numbers: nothing to compare its head with."""

    def check_head(self):
        pass


FAMILIES = ["Llama", "Qwen3", "Mistral", "Phi3", "Gemma2", "Gemma3", "Cohere2", "Granite", "Qwen3Moe", "GptOss"]


def on_meta(*shape, dtype=torch.long):
    return torch.zeros(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_targets_steps_never_wait_for_the_device(family):
    """On tensors without numbers, whose values cannot be asked for."""
    target = Unchecked.from_model(make_model(family, **LONG).to("meta", torch.bfloat16))
    static = StaticSteps(target, 3)
    static.cache.capacity = 256
    for tree in (False, True):
        inputs = [on_meta(3, 4), on_meta(3)]
        inputs += [on_meta(3, 4, 4, dtype=torch.bool), on_meta(3, 4)] if tree else []
        function = static._function(4, (1, 4), tree, 256)
        with torch.no_grad(), Strict():
            logits, features, _ = function(*inputs)
        assert logits.shape == (3, 4, target.vocab_size) and features.shape == (3, 4, 2 * target.hidden_size)
    with Strict():
        static._moved(on_meta(3, 8), on_meta(3, 8))


def test_the_drafts_steps_never_wait_for_the_device():
    target = make_target()
    draft = make_draft(target).to("meta")
    draft.embed_weight = draft.embed_weight.to("meta")
    static = StaticDraft(draft, 3)
    static.cache.capacity = 256
    features = on_meta(3, 4, draft.fc.in_features, dtype=torch.float32)
    hidden = on_meta(3, 4, target.hidden_size, dtype=torch.float32)
    for kind, given, rest in (
        (("commit", 4), features, []),
        (("chain", 4), hidden, []),
        (("tree", 4, 6), hidden, [on_meta(3, 4, 6, dtype=torch.bool)]),
    ):
        function = static._function(*kind, 256)
        with torch.no_grad(), Strict():
            (out,) = function(on_meta(3, 4), given, on_meta(3), on_meta(3, 4), *rest)
            assert out.shape == hidden.shape and draft.head(out).shape == (3, 4, 99)


def test_the_strict_mode_sees_what_a_capture_refuses():
    x = torch.arange(3)
    for wrong in (lambda: x.sum().item(), lambda: x[x > 1], lambda: torch.arange(3).to("meta")):
        with pytest.raises(AssertionError), Strict():
            wrong()


def test_trees_say_how_many_nodes_a_depth_holds():
    assert [WIDE.count(k) for k in (1, 2, 3, 9)] == [3, 6, 8, 9]
    assert [DynamicTree(3, 20).count(k) for k in (1, 2, 3)] == [3, 12, 20] and StaticTree((-1,)).count(4) == 1
