"""A setting is declared once: document, --help, code, job and sweep have the same names; a misspelt one is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.script_helpers import BENCH, ROOT
from tools.restart_bench.cli import main
from tools.restart_bench.environment import for_display
from tools.restart_bench.errors import SettingsError
from tools.restart_bench.launcher_entries import LAUNCHERS
from tools.restart_bench.modes import command_for
from tools.restart_bench.presets import MODELS, SCRIPTED, Preset, model_names, preset_named, scripted_names
from tools.restart_bench.run import DEFAULTS, SCALED
from tools.restart_bench.settings import (
    CARRIED,
    DECLARATIONS,
    FIXED,
    REFUSED,
    SETTLED,
    Settings,
    check_names,
    check_values,
    help_text,
    misspelt,
    names,
)

PACKAGE = ROOT / "tools" / "restart_bench"
# What the scripts read of the environment that is not theirs, but of Slurm, a shell or a library.
OTHERS = re.compile(
    r"SLURM_\w+|PATH|PWD|PYTHONPATH|HOME|TMPDIR|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|GLOO_SOCKET_IFNAME|DS_ENV_FILE|"
    r"RESTART_TRACE_LAUNCH_ID"
)
OF_KILL_RESUME = {"OUT_DIR"}


def test_help_and_code_have_the_same_settings() -> None:
    assert all(re.search(rf"\b{name}\b", DECLARATIONS["LAUNCHER"].meaning) for name in LAUNCHERS)
    told = set(re.findall(r"^  ([A-Z_]+)$", help_text(), re.MULTILINE))
    together = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "settings.py")
    read = set(re.findall(r"""environ(?:\.get\(|\[)["']([A-Z_]+)""", together))
    assert {name for name in read if not OTHERS.fullmatch(name)} - OF_KILL_RESUME <= DECLARATIONS.keys()
    set_up = (ROOT / "examples_deepspeed" / "restart_bench" / "setup_env.sh").read_text()
    unread = [
        name
        for name in DECLARATIONS
        if not re.search(rf"\.{name.lower()}\b|\b{name}\b", together) and not re.search(rf"\b{name}\b", set_up)
    ]
    assert told == DECLARATIONS.keys() and unread == []
    of_set_up = set(re.findall(r"^#   ([A-Z_]+) ", set_up, re.MULTILINE))
    assert of_set_up <= DECLARATIONS.keys()


def test_a_job_carries_refuses_or_decides_each_setting() -> None:
    parts = [names(job=job) for job in (CARRIED, REFUSED, SETTLED)]
    assert sorted(name for part in parts for name in part) == sorted(DECLARATIONS)
    assert {"HOSTFILE", "NNODES", "NODE_RANK", "MEET_TIMEOUT", "COMMAND_TO"} == set(parts[1])


def test_what_help_refers_to_exists() -> None:
    for declared in DECLARATIONS.values():
        for page, anchor in re.findall(r"\]\(([\w./]*)#?([\w-]*)\)", declared.meaning + declared.default):
            text = (ROOT / "docs" / (page or "cluster.md")).read_text()
            headings = {line.lstrip("# ") for line in text.splitlines() if line.startswith("#")}
            made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert not anchor or anchor in made, f"{declared.name}: {page}#{anchor}"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SAVE_INTERVALL", "SAVE_INTERVAL"), ("SAVE_INTERVL", "SAVE_INTERVAL"), ("SAVE_INTREVAL", "SAVE_INTERVAL"),
        ("SAVEINTERVAL", "SAVE_INTERVAL"), ("save_interval", "SAVE_INTERVAL"), ("GPU_PER_NODE", "GPUS_PER_NODE"),
        ("GLOBALBATCH", "GLOBAL_BATCH"), ("MAX_RESTART", "MAX_RESTARTS"),
        # of other programs
        ("RANK", None), ("NODES", None), ("HOSTNAME", None), ("PYTHONPATH", None), ("LOCAL_RANK", None),
        ("MASTER_PORTAL", None), ("SAVE_INTERVAL", None), ("MODES", None), ("WORKDIR", None),
    ],
)  # fmt: skip
def test_a_misspelt_setting_is_refused_with_what_was_meant(name: str, meant: str | None) -> None:
    assert misspelt(name) == meant
    if meant is None:
        check_names({name: "3"})
        return
    with pytest.raises(SettingsError, match=f"^{name}: there is no such setting; did you mean {meant}?"):
        check_names({name: "3"})
    check_names({name: "3", meant: "3"})  # the name is another program's


def test_no_setting_is_a_misspelling_of_another() -> None:
    for name in (*DECLARATIONS, *FIXED):
        assert misspelt(name) is None


def test_an_empty_value_is_not_given() -> None:
    assert Settings.read({"DP": "", "MODE": "scaled"}, {"DP": "2", "MODE": "train"}) == Settings(dp="2", mode="scaled")


WHOLE = ["0", "-1", "two", "1.5", "08"]
# What the document says cannot be given; a setting that is not here takes any text.
WRONG = {
    "MODE": ["Train", "drill"], "SAVE_INTERVAL": WHOLE, "DP": WHOLE, "ITERS": WHOLE, "MICRO_BATCH": WHOLE,
    "GLOBAL_BATCH": WHOLE, "SEQ_LENGTH": WHOLE, "SEQUENCE_PARALLEL": ["yes", "2"], "DTYPE": ["fp8", "BF16"],
    "RECOMPUTE": ["some"], "DEVICE_GB": WHOLE, "LAUNCHER": ["mpirun"], "MAX_RESTARTS": ["-1", "1.5", "many"],
    "SPARES": ["-1", "all"], "STANDBY": ["0", "yes"], "IN_PROCESS_RESTART": ["0", "yes"], "ALLOW_SHRINK": ["0", "yes"],
    "HEARTBEAT_TIMEOUT": ["0", "0.05", "2s"], "COORDINATOR_PORT": ["0", "65536", "any"], "HOST_GRACE": ["-1", "1.5"],
    "NNODES": WHOLE, "MEET_TIMEOUT": WHOLE, "GPUS_PER_NODE": WHOLE, "MASTER_PORT": ["0", "65536", "any"],
    "DEVICE": ["gpu", "CPU"], "DRY_RUN": ["0", "yes"], "KILL_AT": [*WHOLE, "never"],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(DECLARATIONS))
def test_a_value_of_wrong_form_is_refused_by_name(name: str) -> None:
    for value in WRONG.get(name, []):
        with pytest.raises(SettingsError, match=f"^{name}={re.escape(value)}: "):
            check_values(Settings.read({name: value}))
    if name not in WRONG:
        check_values(Settings.read({name: "[$(touch x)]"}))


def test_the_defaults_that_are_told_are_those_that_are_taken() -> None:
    for of_whom, defaults in (("", DEFAULTS), ("tiny: ", MODELS["tiny"].defaults), ("scaled: ", SCALED)):
        for name, value in defaults.items():
            label = of_whom if value != DEFAULTS.get(name) else ""
            assert f"{label}{value}" in DECLARATIONS[name].default.replace("`", ""), name


def test_help_is_plain_text() -> None:
    told = help_text()
    assert "see docs/engines.md (default: torch (replay: all))" in told
    assert "with MAX_RESTARTS on one node" in told and "failure (docs/launch.md)" in " ".join(told.split())
    assert not re.search(r"\]\(|`|\(default: \(|-$", told, re.MULTILINE)


def test_settings_are_shown_but_for_the_secret() -> None:
    shown = ["TOKENIZER_TYPE=GPT2BPETokenizer", "TOKENIZER_MODEL=/m", "HF_HOME=/h"]
    assert for_display(shown) == shown
    secret = ["MEGATRON_LAUNCH_SECRET=a", "HF_TOKEN=b", "SAVE_DIR=s3://user:c@host/d", "AWS_CREDENTIALS=e"]
    assert for_display(secret) == [f"{variable.partition('=')[0]}=***" for variable in secret]


@pytest.mark.parametrize(("name", "script"), [("7b_tp4_pp2", "run_7b_tp4_pp2.sh"), ("3b_tp2_pp2", "run.sh 3b_tp2_pp2")])
def test_what_is_advised_can_be_typed(
    name: str, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a drill, which knows the preset's name alone, and by the script itself."""
    preset = preset_named(name)
    assert preset is not None
    with pytest.raises(SettingsError, match=re.escape(f"'MODE=replay DP=1 bash {BENCH}/{script}' does the I/O")):
        command_for(preset, {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "WORK_DIR": str(tmp_path)})
    assert main(["run", name, "DP=2"], {}) == 2
    assert f"settings are environment variables: DP=... bash {BENCH}/{script}\n" in capsys.readouterr().err


def test_presets_are_named_by_model_and_layout() -> None:
    assert [preset_named(name) for name in scripted_names()] == sorted(SCRIPTED, key=lambda preset: preset.name)
    assert preset_named("405b_tp8_pp32") == Preset("405b", 8, 32)
    assert preset_named("9b_tp1_pp1") is None and preset_named("70b") is None and preset_named("70b_tp0_pp1") is None
    assert set(model_names()) == set(MODELS)
    scripts = re.findall(r"^\| `run_(\w+)\.sh` \|", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE)
    assert sorted(scripts) == scripted_names()
