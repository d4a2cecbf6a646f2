"""`drafttrain train`: a recipe's draft from prepared data to the run's draft folder; the same command resumes."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch import distributed

from drafttrain.data.batching import TokenBudgetSampler, collate
from drafttrain.data.features import DTYPES
from drafttrain.data.prepare import Prepared, prepare
from drafttrain.data.read_ahead import Screen
from drafttrain.data.run_folder import RunError, RunFolder
from drafttrain.data.sources import online_source
from drafttrain.drafts.base import Batch, Draft, tuned_target, tuned_words
from drafttrain.drafts.loading import load_served, new_draft
from drafttrain.evaluate import tree_calibration
from drafttrain.evaluate.cpu_speed import bf16_note
from drafttrain.export.folder import MASTER, save_draft
from drafttrain.export.serve import check_layers
from drafttrain.recipe import Recipe
from drafttrain.target import Target, load_target
from drafttrain.training.callbacks import unwritten
from drafttrain.training.checkpoints import settle
from drafttrain.training.on_policy import OnPolicy
from drafttrain.training.selection import LENGTH, Acceptance
from drafttrain.training.signals import Stop, interrupted
from drafttrain.training.trainer import OWN, DraftTrainer, batch_on


def train(
    recipe: Recipe,
    run: RunFolder,
    target: Target | None = None,
    say: Callable[[str], None] = print,
    prepared: Prepared | None = None,
) -> None:
    """Prepare what is missing (unless `prepared` is given), then train. Raises RunError, DataError, TargetError or
    DraftError with the mend, Interrupted where a signal ended it.

    Leaves run/draft (best on validation; the last one without validation data), run/untrained, checkpoints and
    log.jsonl.
    """
    state, stop = processes(), Stop()
    say = say if state.is_main_process else (lambda message: None)
    with stop.listening(run.path, state.is_main_process):
        _train(recipe, run, target, say, prepared, state, stop)


def _train(recipe: Recipe, run: RunFolder, target, say, prepared, state: PartialState, stop: Stop) -> None:
    target = target or load_target(**recipe.target.model_dump())
    if note := bf16_note(target.device, target.dtype, recipe.training.bf16):
        say(f"note: {note}")
    if prepared is None:
        prepared = main_first(state, target, lambda: prepare(recipe, run, target, say))
    draft = new_draft(recipe, target, prepared.layers, prepared.vocab.ids, prepared.statistics, prepared.kept_layers)
    if draft.method == "kd":
        check_layers(recipe.export.engine, draft.shape, f"the student ({draft.name})")
    sources = {split: prepared.source(recipe, target, split) for split in prepared.rows}
    own = None
    if recipe.training.on_policy is not None:
        sources[OWN] = online_source(recipe, target, prepared.layers)
        own = OnPolicy(recipe.training.on_policy, recipe.training.seed, target.stop_ids, target.max_positions)
    dtype = DTYPES[recipe.export.dtype]

    def keep_best(best: Draft, validation: dict) -> None:
        _save(best, target, run.draft, dtype, validation=validation, **_switches(recipe))

    acceptance = Acceptance.of(recipe.training, target, prepared.rows)
    with state.main_process_first():
        if state.is_main_process:
            settle(run, say)
    trainer = DraftTrainer(
        draft, recipe.training, run, prepared.rows, sources, keep_best, own, acceptance, stop, target.together
    )
    if not run.checkpoints():
        with target.together():
            start_up_gate(draft, recipe, prepared, sources["train"], say)
        if state.is_main_process:
            _save(draft, target, run.untrained, dtype)
    else:
        say(f"resuming from {run.checkpoints()[-1].name}")
    stop.hold()
    trainer.fit()
    if not trainer.asked and not trainer.evaluated():
        trainer.evaluate()
    last = f"checkpoint-{trainer.state.global_step}"
    if last not in [c.name for c in run.checkpoints()]:
        trainer._save_checkpoint(trainer.model_wrapped, None)
    cut_short = trainer.cut_short()
    stop.release()
    if cut_short:
        raise interrupted(trainer.asked, run.path, f"{last} is saved", state.is_main_process)
    if not trainer.eval_dataset:
        with trainer.whole() as whole:
            if state.is_main_process:
                _save(whole, target, run.draft, dtype, **_switches(recipe))
    with target.together():
        if recipe.method == "medusa" and state.is_main_process:
            _calibrate_tree(recipe, run, target, prepared, trainer, say)
    minutes = trainer.budget.seconds() / 60
    best = ""
    if trainer.best is not None:
        what = "acceptance length" if trainer.criterion == LENGTH else "loss"
        best = f"; best validation {what} {trainer.best:.2f}"
    if trainer.impatient():
        best += f"; {recipe.training.early_stopping_patience} measurements without gain"
    tuned = tuned_words(run.draft) if recipe.draft.lora is not None and state.is_main_process else ""
    where = f"draft in {run.draft}" + (f", {tuned}" if tuned else "")
    say(f"trained {trainer.state.global_step} steps in {minutes:.1f} minutes{best}; {where}")


def processes() -> PartialState:
    """accelerate's view of the processes of this launch; told of a CPU, where it would take them for unrelated ones."""
    return PartialState(cpu=not torch.accelerator.is_available())


def leave_processes() -> None:
    """Leave the launch's process group, after the last training that ended well: a process whose threads still talk
    through it when the interpreter ends may abort. After an error nothing is waited for; the launcher ends the others.
    """
    if distributed.is_available() and distributed.is_initialized():
        PartialState().wait_for_everyone()
        distributed.destroy_process_group()


def main_first(state: PartialState, target: Target, work: Callable[[], Prepared]) -> Prepared:
    """work() of the main process and then of the others, which find done what it did."""
    with target.together():
        done = work() if state.is_main_process else None
    state.wait_for_everyone()
    with target.together():
        return work() if done is None else done


def _switches(recipe: Recipe) -> dict:
    """What a draft's folder says of the chat template's switches, where there are some."""
    switches = recipe.data.chat_template_kwargs
    return {"chat_template_kwargs": switches} if switches else {}


def _save(draft: Draft, target: Target, folder: Path, dtype: torch.dtype, **provenance) -> None:
    try:
        save_draft(draft, target, folder, dtype, **provenance)
    except (OSError, SafetensorError) as error:
        raise unwritten(folder, error) from error


def _calibrate_tree(recipe: Recipe, run: RunFolder, target: Target, prepared: Prepared, trainer, say) -> None:
    """The best draft's tree, into its folder and the masters', unless that is done or not wanted."""
    rows = prepared.rows.get("validation", [])
    if not rows or recipe.draft.tree_nodes == 0 or tree_calibration.calibrated(run.draft):
        return
    source = trainer.sources["validation"]
    if tuned_target(run.draft) is not None:
        target = load_served(recipe.target, run.draft)
        source = online_source(recipe, target, [])
    batches = (
        batch_on(source.attach(Batch(**collate([rows[i] for i in indices]))), target.device)
        for indices in trainer.validation_batches
    )
    texts = [row["input_ids"] for row in rows]
    # The draft's own folder last: a tree in it says that the masters have theirs.
    folders = (run.draft / MASTER, run.draft)
    try:
        tree_calibration.calibrate_folders(folders, target, batches, texts, recipe.draft.tree_nodes, say)
    except OSError as error:
        raise unwritten(run.draft, error) from error


def start_up_gate(draft: Draft, recipe: Recipe, prepared: Prepared, source, say: Callable[[str], None]) -> None:
    """Let the draft set what one batch can set, and refuse to train from a start that says that something is wrong."""
    rows = prepared.rows["train"]
    sampler = TokenBudgetSampler([len(row["input_ids"]) for row in rows], recipe.training.max_tokens_per_batch, 1, 0)
    screen = Screen(rows)
    for indices in sampler.batches():
        batch = screen.pass_on(source.attach(Batch(**collate([rows[i] for i in indices]))))
        if batch.loss_mask.any():
            break
    loss = draft.calibrate(batch_on(batch, next(draft.parameters()).device))
    guessing = math.log(draft.draft_vocab_size)
    say(f"start-up gate: step-0 loss {loss:.2f} nats, uniform guessing {guessing:.2f}")
    if not loss <= draft.start_limit or not math.isfinite(loss):
        raise RunError(
            f"The untrained draft starts at {loss:.2f} nats a row, worse than uniform guessing over "
            f"{draft.draft_vocab_size} words ({guessing:.2f}). Expected at most {draft.start_limit:.2f}: "
            "features, feature layers or the target's head do not fit. Mend: check features.layers (of a small model: "
            "draft.init_from), then prepare again with --fresh."
        )
