"""A frozen target whose layers are spread over the processes of a machine, each of which runs its own batches (FSDP2).

Every process holds a part of each decoder layer, and whole embeddings, norms and head. A forward gathers one layer
after the other, which takes all processes at once, however different the batches are and how many each has: so whatever
runs the target does so within `together`, where a process that has nothing left runs on with the others.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Made = TypeVar("Made")


class Shards:
    """The layers of a decoder, each a part in every process of `mesh` (one dimension), and its processes in step."""

    def __init__(self, decoder: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh):
        self.decoder, self.group, self.device = decoder, mesh.get_group(), torch.device(mesh.device_type)
        self.processes = mesh.size()
        self._open, self._idle = 0, False
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        # The root of them all holds nothing itself; it lets a layer be gathered while the one before it runs.
        whole = {parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor)}
        fully_shard(decoder, mesh=mesh, ignored_params=whole)
        decoder.register_forward_pre_hook(self._announce, prepend=True)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within the block forwards of the target find the other processes; it ends when it has ended in all of them.

        All processes enter the same blocks in the same order. After an error the others are not waited for.
        """
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
        if self._open:
            return
        self._open, self._idle = 1, True
        try:
            while self._running(False):
                with torch.no_grad():
                    self.decoder(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
        finally:
            self._open, self._idle = 0, False

    def _announce(self, module: nn.Module, args: tuple) -> None:
        if not self._open:
            raise RuntimeError("a target that is spread over processes was run outside of Target.together")
        if not self._idle:
            self._running(True)

    def _running(self, this: bool) -> bool:
        """Whether any process runs the target now; all of them ask it at once."""
        count = torch.tensor([int(this)], device=self.device)
        distributed.all_reduce(count, group=self.group)
        return bool(count.item())


def processes_here() -> int:
    """Processes of this launch on this machine, over which layers can be spread; 1 without a launch."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    world = distributed.get_world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return world if world % here else here


def mesh_here(device: torch.device) -> DeviceMesh:
    """The processes of this machine, of one dimension; every process of the launch asks for it at once."""
    here = processes_here()
    shape = (distributed.get_world_size() // here, here)
    if shape[0] == 1:  # The launch's own group: another one's threads were seen to abort a process that ends.
        return init_device_mesh(device.type, (here,))
    return init_device_mesh(device.type, shape, mesh_dim_names=("machines", "here"))["here"]


def in_turns(work: Callable[[], Made], mesh: DeviceMesh) -> Made:
    """work() of one process of the mesh after the other."""
    for turn in range(mesh.size()):
        if turn == mesh.get_local_rank():
            made = work()
        distributed.barrier(mesh.get_group())
    return made
