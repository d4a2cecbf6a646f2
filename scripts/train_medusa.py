"""Train Medusa heads on one or many devices.

    accelerate launch scripts/train_medusa.py recipes/gemma3/medusa-gemma3-270m.yaml training.max_minutes=20

The same as `drafttrain train`, for recipes with method: medusa.
"""

from drafttrain.cli import run_training_script

if __name__ == "__main__":
    run_training_script("medusa", "Train Medusa heads; prepares what is missing and resumes what was begun.")
