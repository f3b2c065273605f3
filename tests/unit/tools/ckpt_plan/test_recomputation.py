"""Which activations are recomputed: as few as fit, by the memory that the plan finds for the fullest rank."""

from __future__ import annotations

import json

import pytest

from tests.unit.tools.ckpt_plan.test_activations import GPT, LLAMA
from tools.ckpt_plan.cli import main
from tools.ckpt_plan.plan import make_plan
from tools.ckpt_plan.presets import Planned, config_from_flags
from tools.ckpt_plan.recomputation import FLAGS, MODES, choose, fullest_device_bytes, preset_for, with_mode

RUN = f"--bf16 {GPT} {LLAMA} --hidden-dropout 0 --pipeline-model-parallel-size 2 --micro-batch-size 64"


def needed(planned: Planned, mode: str) -> int:
    return fullest_device_bytes((with_mode(planned[0], mode), *planned[1:]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given", MODES)
def test_each_mode_takes_what_a_plan_with_its_flags_says(mode: str, given: str) -> None:
    planned = config_from_flags(f"{RUN} {' '.join(FLAGS[given])}".split(), 2, 100)
    plan = make_plan(config_from_flags(f"{RUN} {' '.join(FLAGS[mode])}".split(), 2, 100), "torch")
    assert needed(planned, mode) == max(rank.device_bytes for rank in plan.ranks)


def test_a_preset_recomputes_what_its_script_would() -> None:
    def mode(*flags: str, recompute: str = "auto") -> tuple[bool, bool]:
        model = preset_for("1b", 1, 1, 1, None, flags=flags, recompute=recompute)[0].model
        return model.recomputes_selectively, model.checkpoint_activations

    assert mode() == (True, False) and mode("--micro-batch-size", "8") == (False, False)
    assert mode("--checkpoint-activations") == mode(recompute="full") == (False, True)


def test_the_first_mode_that_fits_is_chosen_and_the_last_one_if_none_does() -> None:
    planned = config_from_flags(RUN.split(), 1, 100)
    needs = {mode: needed(planned, mode) for mode in MODES}
    assert needs["none"] > needs["selective"] > needs["full"]
    for mode in MODES:  # 80 % may be used, so a device that is a quarter larger
        assert choose(planned, needs[mode] * 5 // 4 + 1).mode == mode
    assert choose(planned, needs["selective"] * 5 // 4 - 4).mode == "full"
    assert "more than 80% of 1 kB even so" in choose(planned, 1000).reason


def test_the_command_prints_mode_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recompute-on", "80", "--", *RUN.split()]) == 0
    assert capsys.readouterr().out.startswith("none: ")
    assert main(["--recompute-on", "80", "--format", "json", "--", *RUN.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mode"] == "none" and list(found["bytes_by_mode"]) == ["none"]
    for flags, message in (["0"], "must be at least 1"), (["80", "--files"], "not printed with --recompute-on"):
        assert main(["--recompute-on", *flags, "--", *RUN.split()]) == 2
        assert message in capsys.readouterr().err
