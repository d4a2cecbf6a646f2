"""The trainer under accelerate's engines: DDP, FSDP2, DeepSpeed ZeRO-1 to 3. Only the draft is wrapped.

Whatever shards it, weights and optimizer states are gathered when they are measured or saved, so that a checkpoint is
the same under every engine and for every number of processes, and any of them resumes it.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Trainer, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from drafttrain.data.run_folder import RunError
from drafttrain.drafts.base import Draft
from drafttrain.recipe import TrainingConfig
from drafttrain.training import BUCKET

OPTIMIZER, SCHEDULER, POSITION = "optimizer.pt", "scheduler.pt", "position.json"
"""Files of a checkpoint: of torch's own layout, whole; how many global batches it has seen, and in what steps."""
ADAM = ("exp_avg", "exp_avg_sq")
MODULE_OWN = frozenset(vars(nn.Module()))


class DistributedTrainer(Trainer):
    """Trainer that hands out the whole draft (`whole`) and whole optimizer states under every engine.

    The draft's parameters stay the fp32 masters and travel so; bf16 is autocast. FSDP2 gathers the draft as one unit
    for a forward and its backward: drafts are small, and the layers of one run several times in a forward. ZeRO-3
    gathers layer by layer.
    """

    config: TrainingConfig

    def set_engine(self) -> None:
        """To be called once, behind Trainer's own start. RunError for a configuration that is not one of `engine`'s."""
        self.engine = engine_name(self.accelerator)
        self.groups: list[list[Tensor]] = []
        self._replica: Draft | None = None
        if self.engine == "fsdp2":
            # Autocast computes in bf16; a policy would cast the masters' gradients too.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = None
        if self.zero:
            self._set_zero()

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed runs the steps."""
        return self.engine.startswith("zero")

    @property
    def sharded(self) -> bool:
        """Whether a process holds a part of the draft's weights only."""
        return self.engine in ("fsdp2", "zero3")

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of one optimizer step, over all processes."""
        return self.accelerator.num_processes * self.args.gradient_accumulation_steps

    def _set_zero(self) -> None:
        plugin = self.accelerator.state.deepspeed_plugin
        # DeepSpeed's own bf16 would make the parameters bf16, the masters its own; its autocast leaves them fp32. No
        # module is listed: gradients travel in fp32.
        plugin.deepspeed_config |= {name: {"enabled": False} for name in ("bf16", "fp16")}
        autocast = {"enabled": self.config.bf16, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        plugin.deepspeed_config["torch_autocast"] = autocast
        for buffer in ("reduce_bucket_size", "allgather_bucket_size"):
            plugin.deepspeed_config["zero_optimization"].setdefault(buffer, BUCKET)
        # Else transformers would shard every model that is loaded from now on, targets among them.
        unset_hf_deepspeed_config()

    # --- the whole draft

    @contextmanager
    def whole(self) -> Iterator[Draft]:
        """The draft with its weights of now, no engine around it: to be entered by all processes, read, never trained.

        Itself where each process holds all of it; else a twin that shares all but the trained parameters, which exist
        while the context is open.
        """
        draft = self.accelerator.unwrap_model(self.model)
        if self._replica is None:
            yield draft
            return
        sharded = dict(draft.named_parameters())
        twins = {name: p for name, p in self._replica.named_parameters() if name in sharded}
        self._replica.train(draft.training)
        try:
            for name, twin in twins.items():
                replace(self._replica, name, nn.Parameter(gathered(sharded[name]), requires_grad=twin.requires_grad))
            for name, buffer in draft.named_buffers():
                self._replica.get_buffer(name).copy_(buffer)
            yield self._replica
        finally:
            for name, twin in twins.items():
                replace(self._replica, name, twin)

    def autocast(self):
        """What a forward of the whole draft runs in. The target runs outside, as it serves."""
        if self.zero:
            return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.config.bf16)
        return self.accelerator.autocast()

    def _prepare_input(self, data):
        # Trainer's casts features to the engine's dtype under DeepSpeed.
        if isinstance(data, dict):
            return {name: self._prepare_input(value) for name, value in data.items()}
        return data.to(self.args.device) if isinstance(data, Tensor) else data

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """Trainer's; a checkpoint's weights are loaded before an engine takes the draft, its optimizer after that."""
        draft = self.model
        if resume_from_checkpoint is not None:
            self.check_position(Path(resume_from_checkpoint))
            if self.zero or self.sharded:
                self._load_from_checkpoint(resume_from_checkpoint)
        if self.sharded:
            if any(".lora_" in name for name, _ in draft.named_parameters()):
                raise RunError(
                    f"The draft trains adapters (draft.lora) and {self.engine} would shard them. Expected the draft "
                    "whole on every process: adapters are small. Mend: launch with recipes/accelerate/ddp.yaml."
                )
            self._replica = twin_of(draft)
            hide_frozen(draft)
            draft.base_model_prefix = "none"  # accelerate would shard a norm of the draft's apart.
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if self.zero:
            self._set_zero_states(torch.zeros(()))
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    # --- what a checkpoint holds

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        with self.whole() as draft:
            if self.args.should_save:
                self._save(output_dir, draft.trained_state())

    def _save_optimizer_and_scheduler(self, output_dir) -> None:
        state, folder = self.optimizer_state(), Path(output_dir)
        if self.args.should_save:
            torch.save(state, folder / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)
            (folder / POSITION).write_text(json.dumps(self.position()))

    def position(self) -> dict[str, int]:
        """Of the data, in micro-batches of all processes."""
        per_step = self.batches_per_step
        return {
            "batches": self.state.global_step * per_step,
            "batches_per_step": per_step,
            "processes": self.accelerator.num_processes,
        }

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        self.load_optimizer_state(torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))

    def check_position(self, checkpoint: Path) -> None:
        """RunError unless a step has as many micro-batches as in the checkpoint, whatever processes share them."""
        path = checkpoint / POSITION
        if not path.exists():
            return
        saved = json.loads(path.read_text())
        per_step, processes = saved["batches_per_step"], self.accelerator.num_processes
        if per_step == self.batches_per_step:
            return
        mend = f"training.gradient_accumulation_steps={per_step // processes}"
        if per_step % processes:
            mend = f"a number of processes that divides {per_step}, with training.gradient_accumulation_steps to match"
        raise RunError(
            f"{checkpoint.name} was trained on {per_step} batches a step ({saved['processes']} processes x "
            f"{per_step // saved['processes']}); here are {processes} processes x "
            f"{self.args.gradient_accumulation_steps}. Expected the same product, so that the same samples come in the "
            f"same steps. Mend: {mend}."
        )

    def _load_rng_state(self, checkpoint) -> None:
        """Trainer's; with another number of processes the states are drawn anew, from the seed, the step and the rank:
        those of the checkpoint belong to other processes.
        """
        if checkpoint is None:
            return
        path = Path(checkpoint) / POSITION
        if path.exists() and json.loads(path.read_text())["processes"] != self.accelerator.num_processes:
            step, rank = self.state.global_step, self.accelerator.process_index
            set_seed((self.config.seed + 1_000_003 * step + 7_919 * rank) % 2**32)
        else:
            super()._load_rng_state(checkpoint)

    def optimizer_state(self) -> dict:
        """The optimizer's state in torch's own layout, every tensor whole, on the CPU. All processes call it, the one
        that saves keeps it: the others' `state` is empty.
        """
        keep = self.args.should_save
        if self.zero:
            return self._zero_state(keep)
        found = self.optimizer.state_dict()
        state = {}
        for index, values in found["state"].items():
            whole = {name: whole_tensor(value) for name, value in values.items()}
            if keep:
                state[index] = {n: v.detach().cpu() if isinstance(v, Tensor) else v for n, v in whole.items()}
        return {"state": state, "param_groups": found["param_groups"]}

    def load_optimizer_state(self, saved: dict) -> None:
        """The inverse of `optimizer_state`, under any engine."""
        if self.zero:
            self._load_zero_state(saved)
            return
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {
            index: {name: sharded_as(value, parameters[index]) for name, value in values.items()}
            for index, values in saved["state"].items()
        }
        self.optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})

    # --- DeepSpeed keeps the states of flat partitions, one for each group of parameters

    def _flat(self) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        """torch's optimizer inside of DeepSpeed's, and the flat fp32 partitions that are its parameters."""
        zero = self.optimizer.optimizer
        if self.engine == "zero3":
            return zero.optimizer, list(zero.fp32_partitioned_groups_flat)
        return zero.optimizer, list(zero.single_partition_of_fp32_groups)

    def _set_zero_states(self, step: Tensor) -> None:
        """Adam's states at a step, its moments zero: DeepSpeed itself would link those of the first group alone."""
        inner, flat = self._flat()
        for partition in flat:
            home = partition.device if inner.defaults["fused"] else "cpu"
            zeros = {name: torch.zeros_like(partition) for name in ADAM}
            inner.state[partition] = {"step": step.to(home, torch.float32, copy=True), **zeros}
        if self.engine != "zero3":
            self.optimizer.optimizer._hp_optimizer_states_linked = False
            self.optimizer.optimizer._lazy_init_hp_params_optimizer_state()

    def _zero_state(self, keep: bool) -> dict:
        from deepspeed.utils import safe_get_full_optimizer_state

        inner, flat = self._flat()
        state, groups, index = {}, [], 0
        for group, parameters in zip(inner.param_groups, self.groups, strict=True):
            places = range(index, index + len(parameters))
            groups.append({**group, "params": list(places)})
            for place, parameter in zip(places, parameters, strict=True):
                whole = {name: safe_get_full_optimizer_state(parameter, name) for name in ADAM}
                if keep:
                    step = inner.state[flat[0]]["step"].cpu().clone()  # A tensor each: torch counts them up in place.
                    state[place] = {"step": step, **{name: value.cpu() for name, value in whole.items()}}
            index = places.stop
        return {"state": state, "param_groups": groups}

    def _load_zero_state(self, saved: dict) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        self._set_zero_states(next(iter(saved["state"].values()))["step"])
        inner, _ = self._flat()
        for group, values in zip(inner.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in values.items() if name != "params"})
        parameters = [p for group in self.groups for p in group]
        for index, parameter in enumerate(parameters):
            for name in ADAM:
                value = saved["state"][index][name].to(self.args.device)
                safe_set_full_optimizer_state(parameter, value, name)


def engine_name(accelerator) -> str:
    """single, ddp, fsdp2, zero1, zero2 or zero3. RunError for FSDP's first version and for ZeRO-0."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        stage = accelerator.state.deepspeed_plugin.zero_stage
        if stage not in (1, 2, 3):
            raise RunError(
                f"The accelerate configuration asks for ZeRO stage {stage}. Expected 1, 2 or 3. Mend: launch with "
                "recipes/accelerate/ddp.yaml, where nothing is to be sharded."
            )
        return f"zero{stage}"
    if kind == DistributedType.FSDP:
        if accelerator.state.fsdp_plugin.fsdp_version != 2:
            raise RunError(
                "The accelerate configuration asks for FSDP version 1. Expected fsdp_version: 2. Mend: launch with "
                "recipes/accelerate/fsdp2.yaml."
            )
        return "fsdp2"
    return "ddp" if accelerator.num_processes > 1 else "single"


def whole_tensor(value):
    """A DTensor's whole tensor, gathered on all processes; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def sharded_as(value, like: Tensor):
    """A whole tensor sharded as the DTensor `like` is; as it is where that is none, or it has another shape (steps)."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


def gathered(parameter: Tensor) -> Tensor:
    """The whole tensor of a parameter that FSDP2 or ZeRO-3 shards, a copy of its own."""
    if isinstance(parameter, DTensor):
        return parameter.detach().full_tensor()
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set a parameter by its full name, wherever it is shared."""
    old = module.get_parameter(name)
    for owner in module.modules():
        for own, value in owner._parameters.items():
            if value is old:
                owner._parameters[own] = parameter


def twin_of(draft: Draft) -> Draft:
    """A copy of the draft's modules around the same frozen tensors and the same objects, the trained parameters on
    the meta device; buffers are its own.
    """
    memo: dict[int, object] = {}
    for module in draft.modules():
        memo |= {id(value): value for name, value in vars(module).items() if name not in MODULE_OWN}
    for parameter in draft.parameters():
        trained = nn.Parameter(torch.empty_like(parameter, device="meta"))
        memo[id(parameter)] = trained if parameter.requires_grad else parameter
    return copy.deepcopy(draft, memo)


def hide_frozen(draft: Draft) -> None:
    """Frozen parameters become plain attributes, which no engine sees: they are the target's, or stay as they are."""
    for module in draft.modules():
        frozen = [name for name, p in module._parameters.items() if p is not None and not p.requires_grad]
        for name in frozen:
            tensor = module._parameters.pop(name)
            vars(module)[name] = tensor
