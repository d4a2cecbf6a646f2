"""What a draft's forward keeps for its backward, in bytes a token, and the working space of the chunked loss.

Counted from the operations of the drafts' own modules; tests/test_plan_memory.py compares each formula with what
autograd's saved-tensor hooks see. Letters: H width, I feed-forward width, q and kv widths of all query and key heads, c
bytes of a computed value (2 under bf16 autocast, else 4).
"""

from dataclasses import dataclass

from drafttrain.nn.fused_losses import BLOCK_ELEMENTS, BLOCK_ELEMENTS_ELSEWHERE, CHUNK_ELEMENTS, LEAST_ROWS
from drafttrain.plan_shapes import FP32, DraftOutline
from drafttrain.plan_target import LayerShape, TargetOutline

WIDE_MATRICES = 8
"""fp32 [rows, Vd] matrices of a block at once: draft logits, q, log q, log p, p, dz and two of the loss itself."""
ADAM = 2 * FP32
"""exp_avg and exp_avg_sq, fp32."""
MOST_CHUNK = 512


@dataclass(frozen=True)
class Setting:
    """tokens: padded tokens of a batch; length: of its rows; c: bytes of a computed value; device: cuda or cpu;
    d: bytes of the target's weights and activations; f: of a stored or attached feature.
    """

    tokens: int
    length: int
    c: int
    device: str
    d: int
    f: int

    @property
    def dense_attention(self) -> bool:
        """Whether an unroll's attention has no flash kernel (nn/ttt_attention.py)."""
        return self.device == "cuda" and self.c == FP32


def flash(shape: LayerShape, c: int) -> int:
    """Attention by a flash kernel: rotated q, the output (the output projection's input), k, v, log-sum-exp fp32."""
    return 2 * c * shape.q + 2 * c * shape.kv + FP32 * shape.nh


def feed_forward(shape: LayerShape, c: int) -> int:
    """gate (read by silu), silu(gate) and up (by the product), the product (by the down projection)."""
    return 4 * c * shape.I


def eagle3_saved(draft: DraftOutline, setting: Setting, fuse_norms: int = 0) -> float:
    """Bytes a token of the whole unroll.

    A step of the first layer: the fp32 input of three norms (hidden, behind attention, final) 3 x 4 H; what four norms
    multiply with their weights 4 c H; [embedding ; hidden] 2 c H; the feed-forward's input c H; the loss's gradient of
    the step's state c H; attention, whose keys of later steps add a share each; feed-forward. In fp32 the norms' inputs
    are the residual stream itself, which the next step shares. Deeper layers are Llama's: two norms, two inputs.
    fuse_norms: how many times the features are normed in fp32 before fc reads them.
    """
    shape, c, K, H = draft.shape, setting.c, draft.steps, draft.shape.H
    wide = 3 * FP32 * H if c < FP32 else 2 * FP32 * H
    shares = FP32 * shape.nh * (K - 1) / 2
    attention = flash(shape, c) + shares
    if setting.dense_attention:
        attention += FP32 * (shape.nh * (setting.length + K / 2) + shape.q + 2 * shape.q)
    first = wide + 8 * c * H + attention + feed_forward(shape, c) + 3 * FP32
    deeper = 2 * (FP32 + 2 * c) * H + attention + feed_forward(shape, c) + 2 * FP32
    if draft.learns_table:
        first += FP32 * H  # The input norm keeps what it reads: the embedding has a gradient now.
    start = FP32 * H if c == FP32 else 0  # fc's output, which nothing before has kept.
    return start + K * (first + (draft.depth - 1) * deeper) + (c + fuse_norms * FP32) * draft.fused


def medusa_saved(draft: DraftOutline, setting: Setting) -> float:
    """Bytes a token: each residual layer keeps its scaled input and what silu reads, 2 c H; the loss a gradient of each
    head's state, which is in the target's dtype, d H; sequential heads also the embeddings between, c H each.
    """
    c, H, K = setting.c, draft.head_width, draft.steps
    return K * (2 * c * draft.depth + setting.d) * H + c * H * draft.between


def tuned_target_layer(target: TargetOutline, setting: Setting) -> float:
    """Bytes a token of a layer of the target itself with adapters (Medusa-2), run in its own dtype d: each frozen norm
    keeps its fp32 input, each adapter an fp32 copy of what it reads; attention and feed-forward as ever, the product of
    gate and up only as the adapter's copy.
    """
    shape, d = target.model.shape, setting.d
    copies = FP32 * (5 * shape.H + shape.q + shape.I)
    return shape.norms * FP32 * shape.H + copies + flash(shape, d) + 3 * d * shape.I


def student_layer(draft: DraftOutline, setting: Setting) -> float:
    """Bytes a token of a layer of a small model of transformers', fp32 under autocast.

    Each norm keeps its input and what it multiplies with its weight, both fp32, 8 H; autocast makes a copy of each
    projection's input, 5 c H (q, k, v; gate, up), in fp32 they share two; attention; feed-forward; normed heads keep an
    fp32 copy and, Gemma's in fp32 again, what is multiplied. With adapters the norms are frozen and keep 4 H.
    """
    shape, c, H = draft.shape, setting.c, draft.shape.H
    adapted = any(part.name == "adapters" for part in draft.parts)
    inputs = 5 * c * H if c < FP32 else 2 * c * H
    layer = shape.norms * (1 if adapted else 2) * FP32 * H + inputs + flash(shape, c) + feed_forward(shape, c)
    if shape.head_norms:
        layer += (FP32 + (FP32 if shape.gemma else c)) * (shape.q + shape.kv) + FP32 * (shape.nh + shape.nkv)
    return layer


def student_saved(draft: DraftOutline, setting: Setting, layer: float) -> float:
    """Bytes a token of a small model whose layers keep `layer` each: at the end the final norm 8 H and the loss's
    gradient c H. A frozen embedding has no gradient: the first norm keeps 4 H less.
    """
    H = draft.shape.H
    frozen = 0 if draft.learns_table else FP32 * H
    return draft.depth * layer + 2 * FP32 * H + setting.c * H - frozen


def cast_weights(draft: DraftOutline, setting: Setting, kept: bool = False) -> int:
    """Autocast's copies of the trained matrices, c bytes each, while a forward runs; the head's is the loss's own.

    kept: those that the backward needs. What reads the target's states alone is not among them, for these have no
    gradient: fc, and the first layer of each Medusa head.
    """
    if setting.c == FP32:
        return 0
    apart = ["head", "heads", "embeddings", "adapters", *(["fusion"] if kept else ())]
    copied = sum(part.parameters for part in draft.parts if part.trained and part.name not in apart)
    if kept and draft.method == "medusa":
        H, K = draft.head_width, draft.steps
        copied -= K * (H * H + H) + draft.between * H * H
    return setting.c * copied


def loss_gradients(draft: DraftOutline) -> int:
    """The head's gradient, fp32, made in the forward and kept for the backward."""
    return FP32 * draft.heads * draft.head_rows * draft.head_width if draft.learns_head else 0


def loss_chunk(rows: int, steps: int) -> int:
    """Teacher positions at once (nn/fused_losses.py)."""
    return min(max(CHUNK_ELEMENTS // (rows * (steps + 1)), LEAST_ROWS), MOST_CHUNK)


def loss_workspace(draft: DraftOutline, setting: Setting) -> int:
    """What the loss needs while it runs: the states of all steps (c), products of a chunk for each step (c) and the
    teacher's (d), the wide matrices of a block, and for a trained head its cast copy and the product that is added to
    its gradient.
    """
    V, K, c = draft.head_rows, draft.steps, setting.c
    chunk = min(loss_chunk(V, K), setting.tokens)
    block = min(max(BLOCK_ELEMENTS.get(setting.device, BLOCK_ELEMENTS_ELSEWHERE) // V, LEAST_ROWS), chunk)
    states = K * setting.tokens * draft.head_width * c
    products = chunk * V * (K * c + setting.d)
    wide = WIDE_MATRICES * FP32 * block * V
    head = 0
    if draft.learns_head and c < FP32:
        head = c * V * draft.head_width * (draft.heads + 1)
    return states + products + wide + head
