"""The Triton kernel under Triton's interpreter against the torch path and by hand; and that it compiles for CUDA."""

import math
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import drafttrain.nn
from drafttrain.nn import fused_losses
from drafttrain.nn.fused_losses import DraftHead, fused_draft_loss
from drafttrain.nn.objective import Objective
from drafttrain.nn.teacher import DenseChunk, DenseTeacher, TopKTeacher
from tests.load_script import load_script

FILE = Path(drafttrain.nn.__file__).parent / "fused_triton.py"
SOFT = ("forward_kl", "reverse_kl", "jsd", "total_variation", "neg_log_alpha", "lk_hybrid")
LABELS = ("cross_entropy", "next_token")
ALL = {name: 0.2 + 0.15 * place for place, name in enumerate((*SOFT, *LABELS))}
NAN = float("nan")


@pytest.fixture(scope="module")
def interpreted():
    """The module under TRITON_INTERPRET=1, in blocks of 8 words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        module = load_script(FILE)
    module.MOST_WORDS = 8
    return module


@pytest.fixture
def on_cpus(monkeypatch):
    """Calls a function with CPUs as kernel devices, their kernel from the given module."""

    def call(module, function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(fused_losses, "KERNEL_DEVICES", ("cpu",))
            patch.setattr(drafttrain.nn, "fused_triton", module, raising=False)
            return function(*arguments)

    return call


class Case:
    """Two unroll steps over 5 positions and 13 words; `full`: of the teacher's too, else it has 19 and p a mass below
    1. A row between others does not count; a target and a token are outside the draft vocabulary.
    """

    def __init__(self, dtype=torch.float32, full=False, shape=(), H=6, Vd=13, T=5):
        g = torch.Generator().manual_seed(37)
        rand = lambda *size: torch.randn(*size, generator=g)  # noqa: E731
        hidden, weight = rand(1, T, H), rand(Vd if full else 19, H)
        logits = hidden.to(dtype).float() @ weight.to(dtype).float().t()
        teacher_weight = weight.to(dtype)
        # A slice of wider rows: the stride is not the number of words.
        head = lambda h: (h @ teacher_weight.t())[:, :Vd]  # noqa: E731
        self.teacher = DenseTeacher(head, hidden.to(dtype), None if full else logits.logsumexp(-1))
        self.target, self.token = logits[..., :Vd].argmax(-1), torch.randint(0, Vd, (1, T), generator=g)
        self.target[0, 2] = self.token[0, 3] = -1
        self.states = [
            (hidden.roll(-1 - k, 1) + 0.6 * rand(1, T, H)).to(dtype).requires_grad_() for k in range(2)
        ]  # Near the teacher's: some hits.
        self.weight = (weight[:Vd] + 0.3 * rand(Vd, H)).to(dtype).requires_grad_()
        given = {"bias": rand(Vd), "scale": 0.7, "softcap": 2.5}
        self.head = DraftHead(self.weight, **{name: given[name] for name in shape})
        self.valid = torch.tensor([[[1, 0, 1, 1, 0]], [[1, 1, 0, 0, 0]]]).bool()

    def run(self, objective, asked=False):
        """Loss, figures, hits of the rows that count, gradients."""
        target = None if asked else self.target
        arguments = (self.states, self.head, self.valid, [1.0, 0.8], self.teacher, objective, target, self.token)
        loss, figures, hit = fused_draft_loss(*arguments)
        grads = torch.autograd.grad(loss, [self.weight, *self.states])
        return [figures.hits, hit & self.valid.flatten(1), loss, figures.loss, figures.alpha, *grads]


@pytest.fixture
def compare(interpreted, on_cpus):
    """Kernel against torch: everything that `Case.run` gives."""

    def check(case, objective, asked=False, tolerance=2e-5):
        expected = case.run(objective, asked)
        assert 0 < expected[0].sum() < case.valid.sum()
        for mine, wanted in zip(on_cpus(interpreted, case.run, objective, asked), expected, strict=True):
            assert wanted.any()
            torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)

    return check


@pytest.mark.parametrize("name", [*SOFT, *LABELS])
def test_each_loss_over_a_part_of_the_vocabulary(name, compare):
    compare(Case(), Objective.of(name, jsd_beta=0.3, lk_eta=2.0))


@pytest.mark.parametrize("full", [True, False], ids=["full", "part"])
def test_a_weighted_sum_in_bfloat16(full, compare):
    """The same bf16 logits in fp32 arithmetic on both sides; the interpreter cuts to bf16, torch rounds."""
    compare(Case(torch.bfloat16, full), Objective.of(ALL), tolerance=3e-2)


@pytest.mark.parametrize("loss", [ALL, "total_variation"], ids=["all", "total_variation"])
def test_a_temperature(loss, compare):
    compare(Case(full=True), Objective.of(loss, temperature=2.5))


@pytest.mark.parametrize("shape", [["bias"], ["scale"], ["softcap"], ["bias", "scale", "softcap"]])
def test_a_shaped_head(shape, compare):
    compare(Case(shape=shape), Objective.of(ALL))


def test_everything_at_once(compare):
    """The teacher's own choice as target, a temperature and a head with a bias, a scale and a cap."""
    compare(Case(full=True, shape=["bias", "scale", "softcap"]), Objective.of(ALL, temperature=0.7), asked=True)


def call(module, logits, teacher, lse, loss, *, counts=None, learns=True, target=None):
    """`rows` of logits [n, V]: loss, overlap, hits and what is left in the place of the logits."""
    n = len(logits)
    left, hit = logits.clone(), torch.zeros(n, dtype=torch.bool)
    source = torch.arange(n).flip(0)
    counts = torch.ones(n, dtype=torch.bool) if counts is None else counts
    rows = module.TeacherRows(DenseChunk(teacher, lse), 1.0)
    target = rows.argmax() if target is None else target
    loss, overlap = module.rows(
        left, rows, Objective.of(loss), target, None, source, counts, hit, 0.5, learns, None, None, None
    )
    return loss, overlap, hit.flip(0), left


def test_by_hand(interpreted):
    """p = (1/2, 1/4), q = (1/4, 3/4), step weight 1/2; TV's gradient is q (sum of q where q < p - [q < p])."""
    p, q = torch.tensor([[0.5, 0.25]]), torch.tensor([[0.25, 0.75]])
    target = torch.tensor([1])
    found = call(interpreted, q.log() + 3, p.log() + 1.7, torch.tensor([1.7]), "total_variation", target=target)
    for mine, wanted in zip(found, ([0.5], [0.5], [True], [[-0.09375, 0.09375]]), strict=True):
        torch.testing.assert_close(mine, torch.tensor(wanted))
    loss, _, _, gradient = call(interpreted, q.log(), p.log(), torch.zeros(1), "forward_kl", target=target)
    assert loss.item() == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(1 / 3), rel=1e-5)
    torch.testing.assert_close(gradient, torch.tensor([[0.1875 - 0.5, 0.5625 - 0.25]]) / 2)


def test_rows_that_do_not_count_are_not_read(interpreted):
    """NaN in them; their place is cleared, their neighbours are as alone."""
    g = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(3, 20, generator=g), torch.randn(3, 20, generator=g)
    counts = torch.tensor([True, False, True])
    alone = call(interpreted, logits[counts], teacher[counts], None, "jsd")
    logits[1] = teacher[1] = NAN
    loss, overlap, hit, left = call(interpreted, logits, teacher, None, "jsd", counts=counts)
    for mine, wanted in zip((loss, overlap, hit, left), alone, strict=True):
        assert torch.equal(mine[counts], wanted) and not mine[1].any()


def test_evaluation_leaves_the_logits(interpreted):
    logits, teacher = torch.arange(20.0).view(1, 20), torch.arange(20.0).flip(0).view(1, 20)
    learning, evaluating = (call(interpreted, logits, teacher, None, "jsd", learns=learns) for learns in (True, False))
    assert evaluating[0] == learning[0] > 0
    assert torch.equal(evaluating[3], logits) and not torch.equal(learning[3], logits)


def test_the_first_of_equal_logits_is_the_choice(interpreted):
    """Equals in one block, in two, and on another lane of a later block."""
    logits = torch.zeros(3, 40)
    for row, words in enumerate(([3, 5], [20, 4], [17, 34])):
        logits[row, words] = 1.0
    rows = interpreted.TeacherRows(DenseChunk(logits, None), 1.0)
    assert rows.argmax().tolist() == [3, 4, 17]
    torch.testing.assert_close(rows.lse, logits.logsumexp(-1))


@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize(
    ("teacher", "draft"),
    [([300.0, 0.0, -300.0], [0.0, 0.0, 250.0]), ([-math.inf, 0.0, 1.0], [1.0, 0.0, 0.5])],
    ids=["underflow", "masked"],
)
def test_extremes_are_finite_and_as_in_torch(name, teacher, draft, interpreted, on_cpus):
    states = torch.tensor([[draft] * 2]).requires_grad_()
    head, rows = DraftHead(torch.eye(3)), DenseTeacher(lambda h: h, torch.tensor([[teacher] * 2]))
    arguments = ([states], head, torch.tensor([[[True, False]]]), [1.0], rows, Objective.of(name))
    for_kernel, plain = on_cpus(interpreted, fused_draft_loss, *arguments)[0], fused_draft_loss(*arguments)[0]
    assert plain.isfinite()
    torch.testing.assert_close(for_kernel, plain)
    mine, wanted = (torch.autograd.grad(loss, states)[0] for loss in (for_kernel, plain))
    torch.testing.assert_close(mine, wanted)


def test_what_the_kernel_refuses(interpreted):
    logits = torch.zeros(1, 5)
    with pytest.raises(AssertionError, match="full vocabulary"):
        interpreted.TeacherRows(DenseChunk(logits, torch.zeros(1)), 2.0)
    with pytest.raises(AssertionError, match="target_index"):
        interpreted.TeacherRows(DenseChunk(logits, torch.zeros(1)), 1.0).argmax()


def test_what_stays_with_torch(on_cpus):
    """fp64, top-k teachers, and every device but CUDA: no kernel is asked for (there is none here: None)."""
    objective, case = Objective.of("forward_kl"), Case()
    assert fused_losses.KERNEL_DEVICES == ("cuda",)
    with pytest.raises(AttributeError):
        on_cpus(None, case.run, objective)
    assert on_cpus(None, Case(torch.float64).run, objective)[2].isfinite()
    case.teacher = TopKTeacher(case.target[..., None], torch.full((1, 5, 1), -0.3))
    assert on_cpus(None, case.run, objective)[2].isfinite()


def test_without_triton_there_is_no_kernel(on_cpus, monkeypatch):
    case, objective = Case(), Objective.of("jsd")
    monkeypatch.setitem(sys.modules, "triton", None)
    module = load_script(FILE)  # It can be imported all the same.
    assert torch.equal(on_cpus(module, case.run, objective)[2], case.run(objective)[2])


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("objective", "dtype", "bias"),
    [(Objective.of(ALL, temperature=2.0), "bf16", "*fp32"), (Objective.of("lk_hybrid"), "fp32", None)],
    ids=["all", "lk_hybrid"],
)
def test_it_compiles_for_cuda(objective, dtype, bias, tmp_path, monkeypatch):
    """To machine code of compute capability 9.0: what the interpreter takes, a compiler may refuse."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    module = load_script(FILE)
    shape = {"scale": 0.5, "softcap": 30.0} if bias else {"scale": None, "softcap": None}
    constants = {**module.constants(objective, learns=True, **shape), "BLOCK": 512}
    constants |= {} if bias else {"bias": None, "token": None}
    types = dict.fromkeys(("product", "teacher"), f"*{dtype}") | {"bias": bias, "step_weight": "fp32"}
    types |= dict.fromkeys(("lse", "soft_lse", "figures"), "*fp32") | dict.fromkeys(("counts", "hit"), "*u8")
    types |= dict.fromkeys(("target", "token", "source"), "*i64")
    types |= dict.fromkeys(("words", "product_stride", "teacher_stride"), "i32")
    signature = {name: "constexpr" if name in constants else types[name] for name in module._row.arg_names}
    source = ASTSource(module._row, signature, constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    assert len(kernel.asm["cubin"]) > 1000 and kernel.metadata.num_warps == 2
