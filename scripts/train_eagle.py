"""Train an EAGLE-3 draft on one or many devices.

    accelerate launch scripts/train_eagle.py recipes/gemma3/eagle3-gemma3-270m.yaml training.max_minutes=20

The same as `drafttrain train`, for recipes with method: eagle3. The CPU-sized twin of the whole road is `make demo`.
"""

import typer

from drafttrain.cli import AsJson, Fresh, Output, Overrides, RecipeArgument, run_command, run_training


def train_eagle(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    output: Output = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Train an EAGLE-3 draft; prepares what is missing and resumes what was begun."""
    run_training(recipe, overrides, output, fresh, as_json, method="eagle3")


if __name__ == "__main__":
    run_command(lambda: typer.run(train_eagle))
