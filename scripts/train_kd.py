"""Distil a small draft from the target on one or many devices.

    accelerate launch scripts/train_kd.py recipes/gemma3/kd-gemma3-270m.yaml training.max_minutes=20

The same as `drafttrain train`, for recipes with method: kd.
"""

import typer

from drafttrain.cli import AsJson, Fresh, Output, Overrides, RecipeArgument, run_command, run_training


def train_kd(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    output: Output = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Distil a small draft; prepares what is missing and resumes what was begun."""
    run_training(recipe, overrides, output, fresh, as_json, method="kd")


if __name__ == "__main__":
    run_command(lambda: typer.run(train_kd))
