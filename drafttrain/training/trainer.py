"""The one trainer of every draft: transformers.Trainer with a draft whose forward is its loss, on features of a
frozen target.
"""

import json
import math
import shutil
import time
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from drafttrain.data.batching import TokenBudgetSampler, collate
from drafttrain.data.features import FeatureSource
from drafttrain.data.read_ahead import ReadAhead, Screen, batch_of
from drafttrain.data.run_folder import RunError, RunFolder
from drafttrain.drafts.base import Batch, Draft, DraftLoss, ParameterGroup
from drafttrain.nn.fused_losses import StepFigures
from drafttrain.recipe import TrainingConfig
from drafttrain.training.callbacks import Bar, Budget, JsonLog, cut_log
from drafttrain.training.on_policy import OnPolicy
from drafttrain.training.schedule import learning_rate_factor
from drafttrain.training.selection import LENGTH, LOSS, Acceptance, gains, waited

OWN = "own"
"""The source of features for batches that the draft continued itself."""
FIRST_STEP = "first_step"
"""Key of an optimizer's group: the step from which on it learns."""


class DraftTrainer(Trainer):
    """Trains a Draft on rows {"index", "input_ids", "loss_mask"}; features come from a FeatureSource for each split,
    and for batches that the draft continued itself (`own`) from sources[OWN].

    What it adds to Trainer: batches under a token budget, the objective divided by the step-0 rows of all ranks and
    accumulation steps, step_acceptance in the logs, whole-or-nothing checkpoints, a budget in minutes, and selection by
    acceptance as served (`acceptance`; None: by validation loss).
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
    ):
        self.config, self.run, self.rows, self.sources, self.on_best = config, run, rows, sources, on_best
        self.own, self.acceptance = own, acceptance
        self.criterion = LOSS if acceptance is None else LENGTH
        self.budget = Budget(config.max_minutes)
        self._sums: StepFigures | None = None
        self._tokens, self._logged_at, self._note = 0, 0.0, ""
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
            callbacks=[self.budget, JsonLog(run.log, self.budget), self.bar, _Epochs(self)],
        )
        self.remove_callback(PrinterCallback)  # Standard output belongs to --json.
        self.model_accepts_loss_kwargs = True
        self.sampler: TokenBudgetSampler | None = None
        self.best = _read_best(run, self.criterion)
        self.validation_batches = self._sampler("validation", 1).batches() if "validation" in rows else []

    # --- data

    def get_train_dataloader(self) -> DataLoader:
        self.sampler = self._sampler("train", self.accelerator.num_processes)
        loader = DataLoader(
            self.train_dataset,
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
        draft, rank = self.accelerator.unwrap_model(self.model), self.accelerator.process_index
        samples = self.own.replace(list(islice(epoch_iterator, num_batches)), draft, progress, step, rank)
        return super().get_batch_samples(iter(samples), len(samples), device)

    # --- loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch = batch_of(inputs)
        batch = self.sources[OWN if int(batch.index[0]) < 0 else "train"].attach(batch)
        batch = self.screens["train"].pass_on(batch)
        output: DraftLoss = model(batch_on(batch, self.args.device))
        if not torch.isfinite(output.objective):
            own = int(batch.index[0]) < 0
            rows = "what the draft wrote itself" if own else f"rows {batch.index.tolist()[:8]} of the training data"
            raise RunError(
                f"The loss is {output.objective.item()} at step {self.state.global_step} on {rows}. The last "
                "checkpoint is intact. Mend: look at these rows, lower training.learning_rate, then run the same "
                "command to resume."
            )
        self._sums = _add(self._sums, output.figures)
        self._tokens += int(batch.lengths.sum())
        loss = output.objective / num_items_in_batch.clamp_min(1) * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss

    def log(self, logs: dict, start_time: float | None = None) -> None:
        """Trainer's log, with the figures of each unroll step since the last one and the tokens per second."""
        if self._sums is not None and "loss" in logs:
            sums = self._reduce(self._sums)
            logs |= rates(sums, "")
            spent = self.budget.seconds()
            tokens = int(self.accelerator.reduce(torch.tensor(self._tokens, device=self.args.device), "sum"))
            logs["tokens_per_second"] = tokens / max(spent - self._logged_at, 1e-9)
            if self.sources["train"].reads_ahead:
                logs["data_wait"] = self.ahead.waited / max(spent - self._logged_at, 1e-9)
                self.ahead.waited = 0.0
            if self.screens["train"].broken:
                logs["skipped_samples"] = len(self.screens["train"].broken)
            self._logged_at, self._sums, self._tokens = spent, None, 0
            self._note = f"loss {logs['loss']:.3f}  acceptance {logs['step_acceptance/0']:.3f}  "
            self._note += f"{logs['tokens_per_second']:.0f} tokens/s"
        super().log(logs, start_time)

    def _reduce(self, figures: StepFigures) -> StepFigures:
        return StepFigures(*(self.accelerator.reduce(part.to(self.args.device), "sum") for part in _parts(figures)))

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
        self.log(dict(metrics))
        found = metrics.get(self.criterion)
        if found is not None and gains(self.criterion, found, self.best) and self.is_world_process_zero():
            self.best = found
            if self.on_best is not None:
                self.on_best(self.model, {"step": self.state.global_step, **metrics})
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
        draft = accelerator.unwrap_model(self.model)
        counts = self.acceptance.measure(draft, accelerator.process_index, accelerator.num_processes)
        sums = torch.tensor([counts.accepted, counts.iterations], device=self.args.device)
        accepted, iterations = accelerator.reduce(sums, "sum").tolist()
        seconds = time.monotonic() - started
        return {LENGTH: 1 + accepted / max(iterations, 1), "eval_acceptance_seconds": round(seconds, 3)}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """eval_loss, eval_step_acceptance/k and eval_teacher_forced_length = 1 + the joint teacher-forced acceptances,
        summed.
        """
        draft = self.accelerator.unwrap_model(self.model)
        was_training = draft.training
        draft.eval()
        sums = None
        for indices in self.validation_batches[self.accelerator.process_index :: self.accelerator.num_processes]:
            batch = Batch(**collate([self.eval_dataset[i] for i in indices]))
            with self.accelerator.autocast():
                batch = self.screens["validation"].pass_on(self.sources["validation"].attach(batch))
                output = draft(batch_on(batch, self.args.device))
            sums = _add(sums, output.figures)
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

    # --- checkpoints

    def _save(self, output_dir=None, state_dict=None) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        draft = self.accelerator.unwrap_model(self.model)
        tensors = draft.trained_state() if state_dict is None else state_dict
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        self.model.load_trained_state(load_file(Path(resume_from_checkpoint) / "model.safetensors"))

    def _get_output_dir(self, trial) -> str:
        return str(self.run.path / ".saving")

    def _save_checkpoint(self, model, trial) -> None:
        """Written in a folder of its own and renamed when whole; a failure keeps the last checkpoint and says so."""
        staging = self.run.path / ".saving"
        name = f"checkpoint-{self.state.global_step}"
        try:
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                shutil.rmtree(self.run.path / name, ignore_errors=True)
                (staging / name).rename(self.run.path / name)
                self.run.rotate(self.config.save_total_limit)
        except (OSError, SafetensorError, RuntimeError) as error:
            intact = self.run.checkpoints()
            kept = f"{intact[-1].name} is intact" if intact else "there is no earlier checkpoint"
            raise RunError(
                f"{name} could not be saved ({error}); {kept}. Mend: free some space, then run the same command to "
                "resume."
            ) from error
        finally:
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)

    def fit(self) -> None:
        """Train from the last whole checkpoint, or from the start. A run that is done stays as it is."""
        checkpoints = self.run.checkpoints()
        if checkpoints and self.is_world_process_zero():
            cut_log(self.run.log, int(checkpoints[-1].name.split("-")[1]))
        try:
            self.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
        finally:
            self.ahead.close()
            self.bar.close()

    def _run_epoch(self, **kwargs) -> None:
        """Nothing when the last step is already done: Trainer would resume a finished run with one step more."""
        if self.state.global_step >= self.state.max_steps or self.budget.spent() or self.impatient():
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
        self.trainer._logged_at = self.trainer.budget.seconds()

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


def _parts(figures: StepFigures) -> tuple[Tensor, ...]:
    return figures.rows, figures.loss, figures.hits, figures.alpha, figures.joint, figures.drift


def _add(sums: StepFigures | None, figures: StepFigures) -> StepFigures:
    if sums is None:
        return figures
    return StepFigures(*(a + b for a, b in zip(_parts(sums), _parts(figures), strict=True)))


def rates(sums: StepFigures, prefix: str) -> dict[str, float]:
    """Means of summed figures: step_loss/k, step_acceptance/k (top-1 hits, teacher-forced, unconditional),
    step_alpha/k, and, with the prefix eval_, loss and teacher_forced_length. Of a tuned target (Medusa-2) also
    target_drift, KL(unchanged || tuned) in nats, and target_same_choice, the share of positions with the same choice.
    """
    rows = sums.rows.clamp_min(1).tolist()
    out: dict[str, float] = {}
    for k, count in enumerate(rows):
        out[f"{prefix}step_acceptance/{k}"] = sums.hits[k].item() / count
        out[f"{prefix}step_alpha/{k}"] = sums.alpha[k].item() / count
        out[f"{prefix}step_loss/{k}"] = sums.loss[k].item() / count
    compared, divergence, same = sums.drift.tolist()
    if compared:
        out[f"{prefix}target_drift"], out[f"{prefix}target_same_choice"] = divergence / compared, same / compared
    if prefix:
        out[f"{prefix}loss"] = sums.loss[0].item() / rows[0]
        out[f"{prefix}teacher_forced_length"] = 1 + sum(j / n for j, n in zip(sums.joint.tolist(), rows, strict=True))
    return out


def _read_best(run: RunFolder, criterion: str) -> float | None:
    path = run.draft / "drafttrain.json"
    return json.loads(path.read_text()).get("validation", {}).get(criterion) if path.exists() else None
