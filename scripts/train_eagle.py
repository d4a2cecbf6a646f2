"""Train an EAGLE-3 draft on one or many devices.

    accelerate launch scripts/train_eagle.py recipes/gemma3/eagle3-gemma3-270m.yaml training.max_minutes=20

The same as `drafttrain train`, for recipes with method: eagle3. The CPU-sized twin of the whole road is `make demo`.
"""

from drafttrain.cli import run_training_script

if __name__ == "__main__":
    run_training_script("eagle3", "Train an EAGLE-3 draft; prepares what is missing and resumes what was begun.")
