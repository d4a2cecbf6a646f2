"""The one trainer of every draft: transformers.Trainer with a draft whose forward is its loss, on features of a
frozen target.
"""

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from drafttrain.data.batching import Rows, TokenBudgetSampler, collate
from drafttrain.data.features import FeatureSource
from drafttrain.data.read_ahead import ReadAhead, Screen, batch_of
from drafttrain.data.run_folder import RunFolder
from drafttrain.drafts.base import Batch, Draft, DraftLoss, ParameterGroup
from drafttrain.nn.fused_losses import StepFigures
from drafttrain.recipe import TrainingConfig
from drafttrain.training.callbacks import Bar, Budget, JsonLog, check_trackers, cut_log
from drafttrain.training.figures import added, flops_per_token, parts, peak_flops, peak_memory, rates
from drafttrain.training.guard import Guard, GuardedTrainer, StepRecord
from drafttrain.training.on_policy import OnPolicy
from drafttrain.training.schedule import learning_rate_factor
from drafttrain.training.selection import LENGTH, LOSS, Acceptance, gains, waited
from drafttrain.training.signals import Stop

OWN = "own"
"""The source of features for batches that the draft continued itself."""
FIRST_STEP = "first_step"
"""Key of an optimizer's group: the step from which on it learns."""


class DraftTrainer(GuardedTrainer):
    """Trains a Draft on rows {"index", "input_ids", "loss_mask"}; features come from a FeatureSource for each split,
    and for batches that the draft continued itself (`own`) from sources[OWN].

    What it adds to Trainer: batches under a token budget, the objective divided by the step-0 rows of all ranks and
    accumulation steps, step_acceptance in the logs, whole-or-nothing checkpoints, bad steps that are left out or stop
    the run, a budget in minutes, and selection by acceptance as served (`acceptance`; None: by validation loss). stop:
    what signals ask of it. together: the target's own, where it is more than one process's.
    """

    def __init__(
        self,
        draft: Draft,
        config: TrainingConfig,
        run: RunFolder,
        rows: dict[str, list[dict]],
        sources: dict[str, FeatureSource],
        on_best=None,
        own: OnPolicy | None = None,
        acceptance: Acceptance | None = None,
        stop: Stop | None = None,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.config, self.run, self.rows, self.sources, self.on_best = config, run, rows, sources, on_best
        self.own, self.acceptance, self.together = own, acceptance, together
        self.criterion = LOSS if acceptance is None else LENGTH
        self.budget, self.guard, self.stop = Budget(config.max_minutes), Guard(config), stop or Stop()
        self.flops = flops_per_token(draft)
        self.record, self.sums, self.asked = StepRecord(), None, 0
        self.steps_logged = self.steps_skipped = 0
        self._tokens, self._logged_at, self._note = 0, 0.0, ""
        check_trackers(config.report_to)
        args = _arguments(config, run.path, draft, "validation" in rows)
        self.bar = Bar(self.budget, lambda: self._note)
        self.ahead = ReadAhead(lambda: self.sources["train"])
        self.screens = {split: Screen(rows[split]) for split in rows}
        super().__init__(
            model=draft,
            args=args,
            train_dataset=rows["train"],
            eval_dataset=rows.get("validation"),
            data_collator=collate,
            callbacks=[self.budget, self.guard, JsonLog(run.log, self.budget), self.bar, _Epochs(self)],
        )
        self.set_engine()
        self.remove_callback(PrinterCallback)  # Standard output belongs to --json.
        self.model_accepts_loss_kwargs = True
        self.sampler: TokenBudgetSampler | None = None
        self.best = _read_best(run, self.criterion)
        self.validation_batches = self._sampler("validation", 1).batches() if "validation" in rows else []

    # --- data

    def get_train_dataloader(self) -> DataLoader:
        self.sampler = self._sampler("train", self.accelerator.num_processes)
        loader = DataLoader(
            Rows(self.train_dataset),
            batch_sampler=self.sampler,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
        )
        return self.accelerator.prepare(loader)

    def _sampler(self, split: str, world_size: int) -> TokenBudgetSampler:
        lengths = [len(row["input_ids"]) for row in self.rows[split]]
        return TokenBudgetSampler(lengths, self.config.max_tokens_per_batch, world_size, self.config.seed)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Trainer's, with stored features read ahead and a share of the batches continued by the draft itself; the
        rows are counted after that.
        """
        epoch_iterator = self.ahead.over(epoch_iterator)
        if self.own is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        step = self.state.global_step
        progress = self.budget.progress(step, self.state.max_steps)
        samples = list(islice(epoch_iterator, num_batches))
        with self.whole() as draft:
            rank, processes = self.accelerator.process_index, self.accelerator.num_processes
            samples = self.own.replace(samples, draft, progress, step, rank, processes)
        return super().get_batch_samples(iter(samples), len(samples), device)

    # --- loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch = batch_of(inputs)
        with self.together():
            batch = self.sources[OWN if int(batch.index[0]) < 0 else "train"].attach(batch)
        batch = self.screens["train"].pass_on(batch)
        with self.autocast():  # accelerate and DeepSpeed do so within the model, FSDP2 does not.
            output: DraftLoss = model(batch_on(batch, self.args.device))
        self._tokens += int(batch.lengths.sum())
        loss = output.objective / num_items_in_batch.clamp_min(1) * self.accelerator.num_processes
        self.record.add(batch, loss, output.figures)
        return (loss, output) if return_outputs else loss

    def log(self, logs: dict, start_time: float | None = None) -> None:
        """Trainer's log, with the figures of each unroll step since the last one, throughput and peak memory. Skipped
        steps are in none of them.
        """
        if "loss" in logs:
            good = self.steps_logged - self.steps_skipped
            logs["loss"] *= self.steps_logged / max(good, 1)
            if self.sums is None:
                del logs["loss"]
            else:
                logs |= rates(self._reduce(self.sums), "")
            logs |= self._usage()
            if self.screens["train"].broken:
                logs["skipped_samples"] = len(self.screens["train"].broken)
            if self.guard.skipped:
                logs["skipped_steps"] = self.guard.skipped
            self.sums, self.steps_logged, self.steps_skipped = None, 0, 0
            if "loss" in logs:
                self._note = f"loss {logs['loss']:.3f}  acceptance {logs['step_acceptance/0']:.3f}  "
                self._note += f"{logs['tokens_per_second']:.0f} tokens/s"
        super().log(logs, start_time)

    def _usage(self) -> dict[str, float]:
        """tokens_per_second and flops_per_second of all ranks (`flops_per_token`), mfu where the GPU's peak is known;
        peak GiB of the largest process and GPU; data_wait, the share of time that training waited for stored features.
        """
        spent, device = self.budget.seconds(), self.args.device
        seconds = max(spent - self._logged_at, 1e-9)
        here = torch.tensor([self._tokens, *peak_memory(device)], device=device)
        ranks = self.accelerator.gather(here).view(-1, 3)
        tokens, (process, gpu) = float(ranks[:, 0].sum()) / seconds, ranks[:, 1:].amax(0).tolist()
        usage = {"tokens_per_second": tokens, "flops_per_second": tokens * self.flops, "memory_gib": process}
        peak = peak_flops(device)
        if peak is not None:
            usage["mfu"] = usage["flops_per_second"] / (peak * len(ranks))
        if gpu:
            usage["device_memory_gib"] = gpu
        if self.sources["train"].reads_ahead:
            usage["data_wait"] = self.ahead.waited / seconds
            self.ahead.waited = 0.0
        self._logged_at, self._tokens = spent, 0
        return usage

    def _reduce(self, figures: StepFigures) -> StepFigures:
        return StepFigures(*(self.accelerator.reduce(part.to(self.args.device), "sum") for part in parts(figures)))

    # --- validation

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Teacher-forced figures on the validation rows and, where it is due, the acceptance length of the loop; a
        better one than before hands the draft to on_best, too many without gain end the training.
        """
        if not self.eval_dataset:
            return {}
        started = self.budget.seconds()
        metrics = self.validate()
        due = self.acceptance is not None and self.acceptance.due(self.state.global_step)
        if due or (self.acceptance is not None and self.control.should_training_stop):
            metrics |= self.measure()
        if self.cut_short():
            self.end_with_a_checkpoint()
            return {}
        self.log(dict(metrics))
        found = metrics.get(self.criterion)
        if found is not None and gains(self.criterion, found, self.best):
            self.best = found
            with self.whole() as draft:
                if self.on_best is not None and self.is_world_process_zero():
                    self.on_best(draft, {"step": self.state.global_step, **metrics})
        # Marks the validation as done: Trainer would repeat it where the epoch ends with this step.
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.control.should_training_stop |= self.impatient()
        self._logged_at += self.budget.seconds() - started  # tokens_per_second is of training alone.
        return metrics

    def evaluated(self) -> bool:
        """Whether the current step has been measured, also by the run that wrote the checkpoint."""
        history = self.state.log_history
        return any(row["step"] == self.state.global_step and self.criterion in row for row in history)

    def impatient(self) -> bool:
        """Whether early_stopping_patience measurements in a row have brought no gain, earlier sessions included."""
        patience = self.config.early_stopping_patience
        return patience is not None and waited(self.state.log_history, self.criterion) >= patience

    def measure(self) -> dict[str, float]:
        """eval_acceptance_length, tau of the evaluator's loop, and the seconds that it took."""
        assert self.acceptance is not None
        started, accelerator = time.monotonic(), self.accelerator
        with self.whole() as draft, self.together():
            ranks = accelerator.process_index, accelerator.num_processes
            counts = self.acceptance.measure(draft, *ranks, ends=lambda: self.stop.number > 0)
        sums = torch.tensor([counts.accepted, counts.iterations], device=self.args.device)
        accepted, iterations = accelerator.reduce(sums, "sum").tolist()
        seconds = time.monotonic() - started
        return {LENGTH: 1 + accepted / max(iterations, 1), "eval_acceptance_seconds": round(seconds, 3)}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """eval_loss, eval_step_acceptance/k and eval_teacher_forced_length = 1 + the joint teacher-forced acceptances,
        summed.
        """
        sums = None
        with self.whole() as draft, self.together():
            was_training = draft.training
            draft.eval()
            for indices in self.validation_batches[self.accelerator.process_index :: self.accelerator.num_processes]:
                if self.stop.number:  # `evaluate` drops what is found.
                    break
                batch = Batch(**collate([self.eval_dataset[i] for i in indices]))
                batch = self.screens["validation"].pass_on(self.sources["validation"].attach(batch))
                with self.autocast():
                    output = draft(batch_on(batch, self.args.device))
                sums = added(sums, output.figures)
            draft.train(was_training)
            if sums is None:
                sums = StepFigures(*(torch.zeros(draft.steps) for _ in range(5)))
        return rates(self._reduce(sums), "eval_")

    # --- optimisation

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """Trainer's, with the draft's own groups split off those with and without weight decay; they come last."""
        if self.optimizer is None:
            optimizer = super().create_optimizer(model)
            for own in self.accelerator.unwrap_model(self.model).parameter_groups():
                split_off(optimizer, own)
            if self.zero:
                self.groups = [list(group["params"]) for group in optimizer.param_groups]
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            c, optimizer = self.config, optimizer or self.optimizer

            def factor(first: int, step: int) -> float:
                if step < first:
                    return 0.0
                progress = self.budget.progress(step, num_training_steps)
                return learning_rate_factor(
                    c.lr_scheduler_type, step - first, progress, c.warmup_steps, c.decay_fraction, c.min_lr_ratio
                )

            factors = [partial(factor, group.get(FIRST_STEP, 0)) for group in optimizer.param_groups]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # --- the run

    def fit(self) -> None:
        """Train from the last whole checkpoint, or from the start. A run that is done stays as it is."""
        self.check_engine()
        checkpoints = self.run.checkpoints()
        if self.run.log.exists() and self.is_world_process_zero():
            cut_log(self.run.log, int(checkpoints[-1].name.split("-")[1]) if checkpoints else 0)
        try:
            self.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
        finally:
            self.ahead.close()
            self.bar.close()

    def _run_epoch(self, **kwargs) -> None:
        """Nothing when the last step is already done: Trainer would resume a finished run with one step more. A
        validation that a signal cut off is made first.
        """
        step = self.state.global_step
        due = step > 0 and self.eval_dataset and step % self.config.eval_steps == 0
        if due and not any(row["step"] == step and LOSS in row for row in self.state.log_history):
            self.evaluate()
        if self.asked or self.state.global_step >= self.state.max_steps or self.budget.spent() or self.impatient():
            self.control.should_training_stop = True
        else:
            super()._run_epoch(**kwargs)


class _Epochs(TrainerCallback):
    """Starts the clock with the first step and gives the sampler its epoch, on one process and on many alike."""

    def __init__(self, trainer: DraftTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        # After a resume the clock runs on from the checkpoint's minutes.
        self.trainer.budget.start(state.stateful_callbacks["Budget"]["args"]["elapsed"])
        self.trainer.guard.restore(state.stateful_callbacks.setdefault("Guard", None))
        self.trainer._logged_at = self.trainer.budget.seconds()

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.loss_before = self.trainer._tr_loss.clone()

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.asked:
            self.trainer.end_with_a_checkpoint()

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.sampler.set_epoch(math.floor((state.epoch or 0) + 1e-6))


def _arguments(config: TrainingConfig, folder: Path, draft: Draft, validated: bool) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=config.num_train_epochs,
        max_steps=config.max_steps,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        max_grad_norm=config.max_grad_norm,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        bf16=config.bf16,
        activation_checkpointing=config.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False},  # Its input needs no gradient.
        use_cpu=next(draft.parameters()).device.type == "cpu",
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if validated else "no",
        eval_steps=config.eval_steps,
        save_strategy="steps",
        save_steps=config.save_steps,
        seed=config.seed,
        report_to=config.report_to or "none",
        dataloader_num_workers=config.dataloader_num_workers,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        accelerator_config={"even_batches": False},
    )


def split_off(optimizer: torch.optim.Optimizer, own: ParameterGroup) -> None:
    """Move parameters of a fresh optimizer into groups of their own, one for each weight decay that they have."""
    chosen = {id(parameter) for parameter in own.parameters}
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if id(p) in chosen]
        if moved:
            group["params"] = [p for p in group["params"] if id(p) not in chosen]
            apart = {**group, "params": moved, "lr": group["lr"] * own.scale, FIRST_STEP: own.first_step}
            optimizer.param_groups.append(apart)


def batch_on(batch: Batch, device: torch.device) -> Batch:
    """The batch with all its tensors on the device."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return Batch(**{name: None if value is None else value.to(device) for name, value in values.items()})


def _read_best(run: RunFolder, criterion: str) -> float | None:
    path = run.draft / "drafttrain.json"
    return json.loads(path.read_text()).get("validation", {}).get(criterion) if path.exists() else None
