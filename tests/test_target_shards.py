"""A target whose layers are spread over processes gives the whole one's numbers, whatever each process asks of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafttrain.recipe import RecipeError, parse_recipe
from drafttrain.target import TargetError, check_plain, load_target
from drafttrain.target_files import read_config
from tests.training.tiny_run import write_target

ROOT = Path(__file__).parent.parent


def test_two_processes_hold_half_each_and_each_goes_its_own_way(tmp_path):
    write_target(tmp_path / "target")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "tests.shard_worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1] and found[0]["held"] > 0


def test_one_process_holds_it_all(tmp_path):
    target = load_target(str(write_target(tmp_path / "target")), shard=True)
    assert target.shards is None
    with target.together():
        pass


def test_quantised_weights_are_refused(tmp_path):
    config = read_config(str(write_target(tmp_path / "target")), False)
    check_plain(config)
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(TargetError, match=r"quantised\. Expected bf16, fp16 or fp32\. Mend: features\.source vllm"):
        check_plain(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "kd", "draft": {"num_hidden_layers": 3}}, "a pruned student shares whole layers"),
        ({"method": "medusa", "draft": {"lora": {}}}, "draft.lora tunes the whole target"),
        ({"device": {"device_map": "auto"}}, "device_map is 'auto'; expected one of them"),
        ({"device": {"gguf_file": "a.gguf"}}, "gguf_file is given"),
    ],
)
def test_what_it_does_not_go_with(changes, said):
    values = {"method": "eagle3", "data": {"train": [{"path": "a.jsonl"}]}, **changes}
    values["target"] = {"name_or_path": "org/model", "shard": True, **values.pop("device", {})}
    with pytest.raises(RecipeError, match=f"target.shard: .*{said}"):
        parse_recipe(values)
    values["target"]["shard"] = False
    parse_recipe(values)
