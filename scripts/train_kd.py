"""Distil a small draft from the target on one or many devices.

    accelerate launch scripts/train_kd.py recipes/gemma3/kd-gemma3-270m.yaml training.max_minutes=20

The same as `drafttrain train`, for recipes with method: kd.
"""

from drafttrain.cli import run_training_script

if __name__ == "__main__":
    run_training_script("kd", "Distil a small draft; prepares what is missing and resumes what was begun.")
