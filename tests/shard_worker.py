"""What each of two processes does for tests/test_target_shards.py: python -m torch.distributed.run .. FOLDER."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from drafttrain.specdec.decode import generate
from drafttrain.specdec.graphs import capture_note
from drafttrain.target import Target, load_target


def main(folder: Path) -> None:
    """Processes with different work, then one with none, then one that is refused."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    whole = load_target(str(folder / "target"), shard=False)
    parts = load_target(str(folder / "target"), shard=True)
    assert whole.shards is None and parts.shards.processes == 2
    held = dict(parts.model.named_parameters())
    spread = {name for name, p in held.items() if isinstance(p, DTensor)}
    assert spread == {name for name in held if ".layers." in name}
    local = sum(held[name].to_local().numel() for name in spread)
    assert 2 * local == sum(held[name].numel() for name in spread)
    assert parts.fingerprint == whole.fingerprint and parts.device.type == "cpu"
    assert capture_note(parts).startswith("none")

    generator = torch.Generator().manual_seed(rank)
    with parts.together():
        for width in range(3, 6 if rank else 11, 2):
            ids = torch.randint(0, 80, (2, width), generator=generator)
            compare(parts, whole, ids)
        prompts = [ids[0].tolist(), ids[1, :2].tolist()]
        with parts.together():
            texts = [generate(one, prompts, max_new_tokens=4 + 5 * rank, stop_ids=()) for one in (parts, whole)]
    assert [g.tokens for g in texts[0].generations] == [g.tokens for g in texts[1].generations]
    with parts.together():
        if rank == 0:
            compare(parts, whole, torch.arange(7)[None])
    with pytest.raises(RuntimeError, match="outside of Target.together"):
        parts.hidden_states(torch.arange(7)[None], None, [1])
    (folder / f"rank-{rank}.json").write_text(json.dumps({"held": local, "layers": len(spread)}))
    distributed.destroy_process_group()


def compare(parts: Target, whole: Target, ids: torch.Tensor) -> None:
    layers = [0, 2, whole.num_layers]
    a, b = (one.hidden_states(ids, None, layers) for one in (parts, whole))
    assert all(torch.equal(a[k], b[k]) for k in layers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
